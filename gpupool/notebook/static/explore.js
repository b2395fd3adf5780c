// What a reader does with the plots: read values off, zoom, switch, smooth. It stands after plots.js
// and axes.js, in the live monitor and in the picture that stays.
//
// The kernel's axes are shown until the reader has zoomed, switched "Log", or chosen "Whole plan";
// then axes are made here. What the reader chose lies in `chosen`, and outlasts every redraw.

const NUMBER = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const NAMES = { raw: "", mean: "smooth" };
const MIN_DRAG = 5;  // pixels: less is a click
const LESS = ["Validation", "Data", "Other"];  // tables that are folded where a window is not high
const HIGH_PX = 800;
const PLOTS = `
  <div class="gpm-figures"></div>
  <div class="gpm-readout" role="status" aria-live="polite"></div>
  <div class="gpm-foot"><div class="gpm-legend"></div><div class="gpm-tools">
    <label class="gpm-log" title="Loss on a logarithmic axis"><input type="checkbox"> Log</label>
    <label class="gpm-whole" title="All planned steps"><input type="checkbox"> Whole plan</label>
    <label class="gpm-smooth" title="Width of the smoothing, as a share of the drawn steps"
      >Smoothing <input type="range" min="0" max="20" step="0.5"> <span></span></label>
    <button type="button" class="gpm-reset">Reset zoom</button>
  </div></div>`;

// Elements are filled with textContent: nothing from the kernel is taken for HTML.
function element(tag, className = "", words = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.textContent = words;
  return made;
}

// The line of an entry of the legend; styles come from the kernel's tables, and no words of users.
function sample({ colors, width, alpha, dash, ring, ...style }) {
  const ink = (color) =>
    color === "text" ? "currentColor" : THEMED.includes(color) ? `var(--gpm-${color})` : color;
  const lines = ring ? [] : colors.map((color, index) => {
    const [from, to] = [index, index + 1].map((end) => (24 * end) / colors.length);
    return `<line x1="${from}" x2="${to}" y1="7" y2="7" stroke="${ink(color)}"
      stroke-width="${width}" stroke-opacity="${alpha}" stroke-dasharray="${dash.join(" ")}"/>`;
  });
  if (ring) lines.push('<circle class="gpm-ring" cx="12" cy="7" r="5.5"/>');
  if (hasDot({ ring, ...style })) lines.push('<circle cx="12" cy="7" r="3"/>');
  return `<svg width="24" height="14" aria-hidden="true">${lines.join("")}</svg>`;
}

function drawLegendOf(parent, entries) {
  parent.replaceChildren(...entries.map((entry) => {
    const made = element("span");
    made.innerHTML = sample(entry);
    made.append(` ${entry.label}`);
    return made;
  }));
}

function drawFigures(parent, plots) {
  const titles = JSON.stringify(plots.map((plot) => plot.title));
  if (parent.dataset.titles === titles) return;  // a canvas that is replaced would flicker
  parent.dataset.titles = titles;
  parent.classList.toggle("gpm-many", plots.length > 2);
  parent.replaceChildren(...plots.map((plot) => {
    const figure = element("figure", plot.small ? "gpm-small" : ""), canvas = element("canvas");
    canvas.setAttribute("role", "img");
    const caption = element("figcaption", "", plot.title);
    caption.title = plot.title;
    canvas.tabIndex = 0;
    figure.append(caption, canvas, element("i"), element("b"));
    return figure;
  }));
}

// The point of a line that is nearest to a step.
function nearest(points, step) {
  const after = countBefore(points, step), [one, other] = [points[after - 1], points[after]];
  if (!one || !other) return one ?? other;
  return step - one[0] <= other[0] - step ? one : other;
}

// "3" of the band "Epoch 3", "21–40" of one that several epochs share.
function epochAt({ bands, steps }, step) {
  if (steps.per_epoch) return `epoch ${Math.max(1, Math.ceil(step / steps.per_epoch))}`;
  const band = bands.find(([first, last]) => step > first && step <= last);
  if (!band) return "";
  const words = band[2].replace(/^\D+/, "");
  return `${/^\d+$/.test(words) ? "epoch" : "epochs"} ${words}`;
}

// The words of a plot's lines; the only line has the plot's.
function namesOf(plot) {
  if (plot.lines.length === 1) return [""];
  return plot.lines.map(({ label, name }) => label ?? NAMES[name] ?? name);
}

// What the plots show at a step, a line each: "Loss 0.412 (smooth 0.398), validation 0.43".
function readOut(view, lines, axes, share, step) {
  const steps = new Set();  // of the validations: the last one holds until the next
  const all = view.plots.map((plot) => {
    const names = namesOf(plot), rest = [], ofShare = isShare(plot);
    let main = "", smooth = "";
    plot.lines.forEach((line, index) => {
      const points = drawnPoints(lines[plot.name]?.[line.name] ?? [], axes, share, axes.y[plot.name]);
      const isValidation = line.name === "validation";
      const point = isValidation ? points[countBefore(points, step + 1) - 1] : nearest(points, step);
      if (!point) return;
      if (isValidation) steps.add(point[0]);
      const value = ofShare ? `${point[1].toFixed(1)} %` : String(Number(point[1].toPrecision(4)));
      // Thinned curves lack steps: a value of another step says which.
      const isAway = point[0] !== step && !isValidation && line.name !== "mean";
      const words = isAway ? `${value} at step ${NUMBER.format(point[0])}` : value;
      if (names[index] === "smooth") smooth = ` (smooth ${value})`;
      else if (index === 0 && !names[0]) main = ` ${words}`;
      else rest.push(`${names[index]}${line.label ? ":" : ""} ${words}`);
    });
    const title = plot.title.replace(/\s\(%\)$/, "");
    return main || smooth || rest.length ? [`${title}${main}${smooth}`, ...rest].join(", ") : "";
  });
  const [last] = [...steps].sort((one, other) => other - one);
  const head = [`Step ${NUMBER.format(step)}`, epochAt(axes, step),
    last !== undefined && last !== step ? `validation of step ${NUMBER.format(last)}` : ""];
  return [head.filter(Boolean).join(" · "), ...all.filter(Boolean)];
}

// What the reader chose in a live monitor holds for the picture that takes its place too: that of the
// same training, in the same cell. Neither in the markup, nor a global of the page.
function keptOf(el, { clock }) {
  const kept = document.body.gpupoolKept?.get(clock?.started_at);
  return kept && kept.cell === el.closest(".jp-Cell") ? kept : {};
}

function keep(el, view, choice) {
  if (!view.clock?.started_at) return;
  const all = document.body.gpupoolKept ??= new Map(), cell = el.closest(".jp-Cell");
  all.set(view.clock.started_at, { ...keptOf(el, view), cell, ...choice });
}

function nameOfSection(details) {
  return details.className || details.firstChild.textContent;
}

function keepFolds(frame, course) {
  frame.addEventListener("toggle", ({ target }) => {
    const { open } = keptOf(frame, course.view), name = nameOfSection(target);
    keep(frame, course.view, { open: { ...open, [name]: target.open } });
  }, true);  // it does not bubble
}

// Calls `redraw` when the size or the theme of the page changes.
function watchPage(el, redraw) {
  const sizes = new ResizeObserver(redraw);
  sizes.observe(el);
  // A frame later: JupyterLab hides all for one when it changes the theme.
  const theme = new MutationObserver(() => requestAnimationFrame(redraw));
  theme.observe(document.body, {
    attributeFilter: ["class", "data-jp-theme-light", "data-jp-theme-name"],
  });
  const queries = ["(prefers-color-scheme: dark)", "(forced-colors: active)"].map(
    (query) => window.matchMedia(query));
  for (const query of queries) query.addEventListener("change", redraw);
  return () => {
    sizes.disconnect();
    theme.disconnect();
    for (const query of queries) query.removeEventListener("change", redraw);
  };
}

// Fills `root` with plots, legend and switches. `course` is {view, lines}, which may change; `redraw`
// asks for a call of `paint` soon; `before` is what the reader has chosen already.
function explorer(root, course, redraw, before = {}) {
  root.innerHTML = PLOTS;
  const find = (selector) => root.querySelector(selector);
  const figures = find(".gpm-figures"), read = find(".gpm-readout");
  const [log, whole, smooth, reset] = ["log", "whole", "smooth", "reset"].map(
    (name) => find(`.gpm-${name}`));
  const chosen = { range: null, whole: false, log: null, share: SHARE, ...before };
  const choose = (choice) => {
    Object.assign(chosen, choice);
    keep(root, course.view, { chosen: { ...chosen } });
    redraw();
  };
  const shown = {};
  let axes = null, at = null, drag = null;

  const boxOf = (canvas) => boxWithin(canvas.clientWidth, canvas.clientHeight);
  const stepAt = (canvas, clientX) => {
    const box = boxOf(canvas), { low, high } = axes.steps;
    const share = (clientX - canvas.getBoundingClientRect().left - box.left) / (box.right - box.left);
    return low + Math.min(1, Math.max(0, share)) * (high - low);
  };
  // Where the crosshair may stand: the drawn points of a plot, or of the first that has some.
  const stopsOf = (canvas) => {
    const plots = [course.view.plots[[...figures.querySelectorAll("canvas")].indexOf(canvas)],
      ...course.view.plots];
    const all = plots.map((plot) => plot && course.lines[plot.name]?.[plot.lines[0].name]);
    const points = all.find((one) => one?.length) ?? [], { low, high } = axes.steps;
    return points.slice(countBefore(points, low), countBefore(points, high + 1e-9));
  };

  function place(bar, box, from, to) {
    bar.style.left = `${from}px`;
    bar.style.width = `${Math.max(1, to - from)}px`;
    bar.style.bottom = `${MARGIN.bottom}px`;
    bar.style.height = `${box.bottom - box.top}px`;
  }

  function drawCross() {
    const isIn = Boolean(at && axes && at.step >= axes.steps.low && at.step <= axes.steps.high);
    if (!isIn && !drag && !shown.cross) return;  // the usual frame
    shown.cross = isIn || Boolean(drag);
    const canvases = [...figures.querySelectorAll("canvas")], boxes = canvases.map(boxOf);
    canvases.forEach((canvas, index) => {
      const [cross, zone] = canvas.parentElement.querySelectorAll("i, b"), box = boxes[index];
      const x = scale(axes.steps, box.left, box.right);
      cross.hidden = !isIn;
      zone.hidden = !drag;
      if (isIn) place(cross, box, x(at.step), x(at.step));
      if (drag) place(zone, box, ...[x(drag.from), x(drag.to)].sort((one, other) => one - other));
    });
    const words = isIn ? readOut(course.view, course.lines, axes, chosen.share, at.step) : [];
    if (shown.words !== words.join("\n")) {
      shown.words = words.join("\n");
      read.replaceChildren(...words.map((line) => element("div", "", line)));
    }
    if (!isIn) return;
    const [inner, outer] = [at.canvas, root].map((one) => one.getBoundingClientRect());
    const box = boxOf(at.canvas), top = inner.top - outer.top + box.top + 8;
    const x = inner.left - outer.left + scale(axes.steps, box.left, box.right)(at.step);
    const left = x + 12 + read.offsetWidth < outer.width ? x + 12 : x - 12 - read.offsetWidth;
    read.style.transform = `translate(${Math.max(0, left)}px, ${top}px)`;
  }

  function moveTo(canvas, step, byKey) {
    const point = nearest(stopsOf(canvas), step);
    at = point ? { canvas, step: point[0], byKey } : null;
    drawCross();
  }

  // The crosshair goes with what has brought it: the pointer, or the focus.
  function leave(byKey) {
    if (at?.byKey === byKey) at = null;
    drawCross();
  }

  function zoom(range) {
    choose({ range });
  }

  // Whole steps, at least two, within what there is.
  function zoomTo(from, to) {
    const { steps } = course.view.axes;
    const end = Math.max(steps.high, steps.plan ?? 0);
    const low = Math.max(0, Math.min(Math.floor(from), end - 2));
    zoom([low, Math.min(end, Math.max(Math.ceil(to), low + 2))]);
  }

  const KEYS = {
    ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity,
  };
  // Before the front end hears them: JupyterLab has arrow keys for its cells.
  function onKey(event) {
    const canvas = event.target, { key } = event;
    if (canvas.tagName !== "CANVAS" || event.ctrlKey || event.metaKey || event.altKey || !axes) return;
    if (key in KEYS) {
      const stops = stopsOf(canvas), last = stops.length - 1;
      const now = at ? countBefore(stops, at.step) : KEYS[key] > 0 ? -1 : last + 1;
      const next = now + KEYS[key] * (event.shiftKey && Math.abs(KEYS[key]) === 1 ? 10 : 1);
      if (last >= 0) moveTo(canvas, stops[Math.min(last, Math.max(0, next))][0], true);
    } else if (key === "+" || key === "-") {
      const { low, high } = axes.steps, middle = at?.step ?? (low + high) / 2;
      const half = (high - low) * (key === "+" ? 0.25 : 1);
      zoomTo(middle - half, middle + half);
    } else if (key === "Escape") {
      at = drag = null;
      zoom(null);
      drawCross();
    } else return;
    event.preventDefault();
    event.stopImmediatePropagation();
  }
  figures.addEventListener("focusin", () => window.addEventListener("keydown", onKey, true));
  figures.addEventListener("focusout", () => {
    window.removeEventListener("keydown", onKey, true);
    leave(true);
  });

  figures.addEventListener("pointerdown", (event) => {
    const canvas = event.target;
    if (canvas.tagName !== "CANVAS" || event.button !== 0 || !axes) return;
    const from = stepAt(canvas, event.clientX);
    drag = { canvas, from, to: from, x: event.clientX };
    canvas.setPointerCapture(event.pointerId);
  });
  figures.addEventListener("pointermove", (event) => {
    const canvas = event.target;
    // Where the page scrolls below it, a pointer that rests has not moved.
    const isStill = event.screenX === shown.x && event.screenY === shown.y;
    if (canvas.tagName !== "CANVAS" || !axes || isStill) return;
    [shown.x, shown.y] = [event.screenX, event.screenY];
    if (drag) drag.to = stepAt(canvas, event.clientX);
    moveTo(canvas, stepAt(canvas, event.clientX), false);
  });
  figures.addEventListener("pointerup", (event) => {
    const done = drag;
    drag = null;
    if (done && Math.abs(event.clientX - done.x) >= MIN_DRAG) {
      zoomTo(Math.min(done.from, done.to), Math.max(done.from, done.to));
    }
    drawCross();
  });
  figures.addEventListener("pointercancel", () => { drag = null; drawCross(); });
  figures.addEventListener("pointerleave", () => leave(false));
  figures.addEventListener("dblclick", () => zoom(null));
  reset.addEventListener("click", () => zoom(null));
  log.firstChild.addEventListener("change", ({ target }) => choose({ log: target.checked }));
  whole.firstChild.addEventListener("change", ({ target }) =>
    choose({ whole: target.checked, range: null }));
  smooth.querySelector("input").addEventListener("input", ({ target }) =>
    choose({ share: target.value / 100 }));

  function showSwitches({ plots, axes: { steps, y } }, lines) {
    const losses = plots.filter(isLoss);
    log.hidden = !losses.length;
    log.firstChild.checked = chosen.log ?? losses.some((plot) => y[plot.name].log);
    whole.hidden = !(steps.plan > steps.high || chosen.whole);
    whole.firstChild.checked = chosen.whole;
    smooth.hidden = !plots.some((plot) =>
      plot.lines.some((line) => lines[plot.name]?.[line.name]?.[0]?.length === 3));
    smooth.querySelector("input").value = 100 * chosen.share;
    const width = `${100 * chosen.share} %`, words = smooth.querySelector("span");
    if (words.textContent !== width) words.textContent = width;
    reset.hidden = !chosen.range;
  }

  function paint() {
    const { view, lines } = course;
    if (!view.axes) return;
    if (shown.plots !== view.plots) drawFigures(figures, view.plots);
    if (shown.legend !== view.legend) drawLegendOf(find(".gpm-legend"), view.legend);
    Object.assign(shown, { plots: view.plots, legend: view.legend });
    showSwitches(view, lines);
    axes = shownAxes(view, lines, chosen);
    const colors = colorsOf(root), canvases = [...figures.querySelectorAll("canvas")];
    // All sizes are read first: a canvas that is set between two looks is laid out for each.
    const sizes = canvases.map((canvas) => [canvas.clientWidth, canvas.clientHeight]);
    view.plots.forEach((plot, index) => {
      const canvas = canvases[index], surface = surfaceOf(canvas, ...sizes[index], colors);
      if (surface) drawPlot(surface, plot, lines[plot.name], axes, chosen.share);
      const ends = chosen.range?.map(NUMBER.format);
      const zoomed = ends ? `; shown: steps ${ends.join(" to ")}` : "";
      canvas.setAttribute("aria-label", view.latest[plot.name] + zoomed);
      canvas.dataset.points = lines[plot.name]?.[plot.lines[0]?.name]?.length ?? 0;
    });
    if (at && !at.canvas.isConnected) at = null;
    drawCross();
  }

  return { paint, end: () => window.removeEventListener("keydown", onKey, true) };
}

// Whether a table is unfolded before the reader has said so.
function isShown(title) {
  return !LESS.includes(title) || window.innerHeight >= HIGH_PX;
}

// Each region of a page has a name of its own, also where other modules have drawn some.
function numberRegion(frame, name) {
  const { dataset } = document.body, number = dataset.gpmViews = Number(dataset.gpmViews ?? 0) + 1;
  frame.querySelector(".gpm-scroll")?.setAttribute("aria-label", `${name} (${number})`);
}
