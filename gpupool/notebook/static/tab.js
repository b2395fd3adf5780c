// The tab of a page that nobody looks at: while a training runs, its title and icon say how far it is,
// and at the end the browser shows a notification. "Notify" in the header of a monitor switches both
// on or off, for all monitors of this browser. It stands before monitor.js in the same module.

// Each monitor has a module of its own, so what they share is at the window: the courses it shows.
const TAB = (window[Symbol.for("gpupool.tab")]
  ??= { courses: new Set(), prefix: "", isOn: null });
const CHOICE = "gpupool-notify";
const ICON = "gpm-icon";
const WHAT = "Show progress in the browser's tab, and a notification at the end";
const REFUSED = "The browser allows this page no notifications. Its tab shows the progress.";

function isNotifying() {
  try {
    TAB.isOn ??= localStorage.getItem(CHOICE) === "on";
  } catch { /* some pages have no storage: then the choice lasts as long as the page */ }
  return Boolean(TAB.isOn);
}

function ring(share) {
  const circle = (color, dashes) => '<circle cx="16" cy="16" r="12" fill="none" stroke-width="7" '
    + 'transform="rotate(-90 16 16)" pathLength="100" '
    + `stroke="${color}" stroke-dasharray="${dashes} 100"/>`;
  const svg = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32">'
    + `${circle("#8886", 100)}${circle("#2e8bd6", Math.round(100 * (share ?? 0.25)))}</svg>`;
  return `data:image/svg+xml,${encodeURIComponent(svg)}`;
}

// The last icon of a page counts. Front ends change their own while a kernel is busy: it stays.
function showIcon(href) {
  let icon = document.head.querySelector(`link.${ICON}`);
  if (!href) {
    const own = document.head.querySelector(`link[rel~="icon"]:not(.${ICON})`);
    if (icon && own) icon.href = own.href;  // a browser may keep the icon of a link that is gone
    icon?.remove();
    return;
  }
  if (!icon) {
    icon = Object.assign(document.createElement("link"), { rel: "icon", className: ICON });
    document.head.append(icon);
  }
  if (icon.getAttribute("href") !== href) icon.href = href;
}

// Of several trainings the one that has the most to do counts: at 100 % all of them are over.
function refreshTab() {
  const running = [...TAB.courses].filter((course) => course.views.size && !course.isOver());
  const shares = running.map((course) => course.view.progress).filter((share) => share != null);
  const isShown = isNotifying() && running.length > 0;
  const share = shares.length ? Math.min(...shares) : null;
  // Front ends write the title too, when another document is opened: what is theirs follows ours.
  const { title } = document;
  const own = title.startsWith(TAB.prefix) ? title.slice(TAB.prefix.length) : title;
  TAB.prefix = !isShown ? "" : share === null ? "▶ " : `▶ ${Math.floor(100 * share)} % · `;
  if (title !== TAB.prefix + own) document.title = TAB.prefix + own;
  showIcon(isShown ? ring(share) : "");
}

function notify(model, course) {
  const path = contextOf(model)?.path ?? "";
  try {
    new Notification(course.view.headline, { body: path.split("/").at(-1) });
  } catch { /* none here: unencrypted pages of another machine, browsers of telephones */ }
}

// Called with all news of a course: its end is notified once.
function showInTab(model, course) {
  TAB.courses[course.views.size ? "add" : "delete"](course);
  refreshTab();
  const isOver = course.isOver();
  // after all of the last message is in the view
  if (isOver && course.isRunning && isNotifying()) queueMicrotask(() => notify(model, course));
  course.isRunning = !isOver;
}

async function toggleNotify(course) {
  TAB.isOn = !isNotifying();
  try {
    localStorage.setItem(CHOICE, TAB.isOn ? "on" : "off");
  } catch { /* as in isNotifying */ }
  TAB.courses.forEach((each) => each.redraw());
  if (!TAB.isOn) return course.say("");
  // Browsers ask the user only after a press, and where the page came over a safe connection.
  const answer = await window.Notification?.requestPermission().catch(() => "denied");
  course.say(answer === "granted" ? "" : REFUSED);
}

function connectNotify(course, el) {
  const button = el.querySelector(".gpm-notify");
  button.title = WHAT;
  button.addEventListener("click", () => toggleNotify(course));
  return () => {
    button.setAttribute("aria-pressed", String(isNotifying()));
    button.hidden = course.isOver();
  };
}
