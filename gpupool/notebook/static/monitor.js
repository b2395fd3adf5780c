// The live picture of a training or a loop: the browser's half of gpupool/notebook/monitor/widget.py. The
// plots are those of plots.js, and it lives as life.js says: these stand before it in the
// same module.
//
// `view` and `lines` are the whole picture, refreshed now and then; custom messages {view, new}
// carry what has changed since. One course a model is kept, which all its views draw: they are in
// step, and a view that is opened later is complete.

const TICK_MS = 1000;
const PATIENCE_MS = 10_000;  // a network is not stopped in the middle of a step
const PAGE = `
  <div class="gpm-header">
    <span class="gpm-status" role="status" aria-live="polite"></span>
    <progress max="1" value="0" aria-label="Share of the training done"></progress>
    <span class="gpm-remaining"></span>
    <button type="button" class="gpm-stop"><span class="gpm-square" aria-hidden="true"></span
      ><span class="gpm-stop-label">Stop</span></button>
    <span class="gpm-hint" role="alert"></span>
  </div>
  <div class="gpm-notice" role="status" aria-live="polite"></div>
  <div class="gpm-notice gpm-bottleneck"></div>
  <div class="gpm-body">
    <div class="gpm-plots"></div>
    <div class="gpm-tables"></div>
  </div>
  <details class="gpm-ranks" open>
    <summary><b class="gpm-rank-title"></b> <span class="gpm-rank-summary"></span></summary>
    <div class="gpm-scroll" role="region" tabindex="0"><table>
      <thead><tr></tr></thead><tbody></tbody></table></div>
  </details>`;

function headOf(words, scope) {
  const head = element("th", "", words);
  head.scope = scope;
  return head;
}

// A section keeps its element, so that one which the user has folded stays folded.
function sectionOf(parent, title) {
  for (const known of parent.children) if (known.dataset.title === title) return known;
  const made = element("details"), table = element("table");
  made.dataset.title = title;
  made.open = isShown(title);
  table.setAttribute("aria-label", title);
  table.createTBody();
  made.append(element("summary", "", title), table);
  return made;
}

function drawTables(parent, sections) {
  const drawn = sections.map(([title, rows]) => {
    const section = sectionOf(parent, title), body = section.querySelector("tbody");
    const labels = JSON.stringify(rows.map(([label]) => label));
    if (section.dataset.labels !== labels) {
      section.dataset.labels = labels;
      body.replaceChildren(...rows.map(([label]) => {
        const row = element("tr"), cell = element("td");
        cell.dataset.label = label;
        row.append(headOf(label, "row"), cell);
        if (label.length > 24) row.cells[0].title = label;
        return row;
      }));
    }
    rows.forEach(([, value], index) => write(body.rows[index].cells[1], value));
    return section;
  });
  // Elements that are put where they stand already would lose the focus.
  if (drawn.some((section, index) => parent.children[index] !== section)
    || parent.children.length !== drawn.length) parent.replaceChildren(...drawn);
}

// A share as a bar beside its words; words alone where nobody knows the share.
function barCell(share, words) {
  if (share === null) return element("td", "", words);
  const cell = element("td"), both = element("div"), bar = element("i"), done = element("i");
  done.style.width = `${100 * Math.min(1, share)}%`;
  bar.append(done);
  both.append(bar, words);
  cell.append(both);
  return cell;
}

function rankRow(rank) {
  const row = element("tr"), step = element("td", "", rank.step);
  if (rank.note) step.append(" ", element("span", "gpm-badge", rank.note));
  row.append(
    headOf(rank.rank, "row"), element("td", "", rank.device),
    barCell(rank.utilization, rank.utilization_text), barCell(rank.memory, rank.memory_text),
    element("td", "", rank.temperature), step);
  return row;
}

function drawRanks(details, view) {
  details.hidden = view.ranks.length === 0;
  details.querySelector(".gpm-rank-title").textContent = view.rank_title;
  details.querySelector("thead tr").replaceChildren(
    ...view.rank_columns.map((words) => headOf(words, "col")));
  details.querySelector("tbody").replaceChildren(...view.ranks.map(rankRow));
}

function paint(el, course, shown) {
  const { view } = course;
  const find = (selector) => el.querySelector(selector);
  write(find(".gpm-status"), view.headline);
  write(find(".gpm-notice"), view.notice);
  write(find(".gpm-bottleneck"), view.bottleneck ?? "");
  el.classList.toggle("gpm-failed", course.isFailed());
  find("progress").value = view.progress ?? 0;
  find("progress").hidden = view.progress === null;  // nobody knows how much there is
  if (!timesOf(view, 0).remaining) write(find(".gpm-remaining"), view.remaining);
  if (shown.table !== view.table) drawTables(find(".gpm-tables"), view.table);
  if (shown.ranks !== view.ranks) drawRanks(find(".gpm-ranks"), view);
  find(".gpm-rank-summary").textContent = view.rank_summary;
  const { table, ranks } = view;
  Object.assign(shown, { table, ranks });
  tick(el, course);
}

// Where the kernel does not answer within a second, the page presses the notebook's own button: the
// first interrupt of a training is a graceful stop. All views of a course share one press, as a
// second interrupt would end the training at once.
function pressStop(model, course) {
  if (course.pressed) return;
  course.pressed = true;
  model.send({ press: "stop" });
  setTimeout(() => {
    if (course.isHeard()) return;
    course.hint = interruptCell(model, isWidget(model)) ? INTERRUPTED : BUSY;
    if (course.hint !== BUSY) {
      setTimeout(() => { if (!course.isHeard()) course.say(BUSY); }, PATIENCE_MS);
    }
    course.redraw();
  }, ANSWER_MS);
  course.redraw();
}

function connectStop(model, course, el) {
  const button = el.querySelector(".gpm-stop"), label = el.querySelector(".gpm-stop-label");
  button.addEventListener("click", () => pressStop(model, course));
  return () => {
    const isHeard = course.isHeard();
    if (isHeard) course.hint = "";
    write(el.querySelector(".gpm-hint"), course.hint);
    button.hidden = course.isOver() || !course.view.stop_label;
    button.disabled = course.pressed || isHeard;
    write(label, button.disabled ? "Stopping…" : course.view.stop_label);
  };
}

// The points of a line, a new list where there is none yet.
function pointsOf(lines, plot, line) {
  return ((lines[plot] ??= {})[line] ??= []);
}

// What all views of a model share.
function newCourse(model) {
  const course = {
    view: {}, lines: {}, views: new Set(), at: 0, pressed: false, hint: "", lost: false,
    redraw: () => course.views.forEach((redraw) => redraw()),
    isFailed: () => course.lost || model.get("status") === "failed",
    isOver: () => course.lost || OVER.includes(model.get("status")),
    isHeard: () => course.isOver() || model.get("status") === "stopping",
    say: (hint) => { course.hint = hint; course.redraw(); },
  };
  return course;
}

// The kernel has ended, and nobody else will say so: here, and in what the notebook keeps.
function lose(model, course) {
  if (course.isOver()) return;
  course.lost = true;
  const { lost } = course.view;
  course.view = { ...course.view, headline: lost, remaining: "", clock: null };
  course.redraw();
  leaveStill(model, model.get("lost"));
}

// Keeps the course of a model up to date, and redraws its views.
function follow(model, course) {
  const takeView = () => {
    course.view = model.get("view");
    course.at = performance.now();
    course.redraw();
  };
  const takeLines = () => { course.lines = JSON.parse(model.get("lines")); course.redraw(); };
  takeView();
  takeLines();
  model.on("change:view", takeView);
  model.on("change:lines", takeLines);
  model.on("change:status", () => course.redraw());
  model.on("change:still", () => leaveStill(model, model.get("still")));
  leaveStill(model, model.get("still"));
  onKernelEnd(model, () => lose(model, course));
  model.on("msg:custom", (message) => {
    if (!message.new) return;
    if (message.view.clock) course.at = performance.now();
    course.view = { ...course.view, ...message.view };
    for (const [plot, lines] of Object.entries(message.new)) {
      for (const [line, points] of Object.entries(lines)) {
        pointsOf(course.lines, plot, line).push(...points);
      }
    }
    course.redraw();
  });
}

// Writes the times of this moment over those that came with the last message.
function tick(el, course) {
  const { remaining, ...rows } = timesOf(course.view, (performance.now() - course.at) / 1000);
  if (remaining) write(el.querySelector(".gpm-remaining"), remaining);
  for (const [label, words] of Object.entries(rows)) {
    for (const cell of el.querySelectorAll(`td[data-label="${label}"]`)) write(cell, words);
  }
}

function render(model, el, course) {
  el.classList.add("gpm", "gpm-frame");
  el.innerHTML = PAGE;
  numberRegion(el, "How each rank fares");
  keepFolds(el, course);
  const showStop = connectStop(model, course, el), shown = {};
  let frame = 0;
  const soon = () => {
    frame ||= requestAnimationFrame(() => {
      frame = 0;
      showStop();
      paint(el, course, shown);
      plots.paint();
    });
  };
  const plots = explorer(el.querySelector(".gpm-plots"), course, soon);
  course.views.add(soon);
  const endWatch = watchPage(el, soon);
  const clock = setInterval(() => tick(el, course), TICK_MS);
  soon();
  return () => {
    clearInterval(clock);
    plots.end();
    endWatch();
    cancelAnimationFrame(frame);
    course.views.delete(soon);
  };
}

export default () => {
  let course;
  return {
    initialize: ({ model }) => { course = newCourse(model); follow(model, course); },
    render: ({ model, el }) => render(model, el, course),
  };
};
