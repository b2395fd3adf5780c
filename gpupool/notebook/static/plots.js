// Draws the plots of a monitor on canvases, and lets a reader read values off, zoom, switch and smooth. It
// stands first in the module of live HTML (gpupool/notebook/page/live_html.py) and in the script of the
// picture that stays (gpupool/notebook/monitor/picture.py).
//
// A course is {view, lines}: the looks of plots and lines, the ends of the axis of steps, the best of each
// plot; and the points. Axes fit what is shown, by the rules of gpupool/notebook/monitor/plots.py, which says
// why they are so. What the reader chose lies in `chosen`, and outlasts every redraw.

const NUMBER = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const MARGIN = { left: 46, right: 24, top: 20, bottom: 36 };
const SHARE = 0.02;  // of the drawn steps: the half-life of the smooth line
const LESS = ["Setup", "Options"];  // tables that are folded where a window is not high
const PLOTS = `
  <div class="gpm-figures"></div>
  <div class="gpm-readout" role="status" aria-live="polite"></div>
  <div class="gpm-foot"><div class="gpm-legend"></div><div class="gpm-tools">
    <label class="gpm-log" title="Logarithmic axes of all but percents"><input type="checkbox"> Log</label>
    <label class="gpm-smooth" title="Width of the smoothing, as a share of the drawn steps"
      >Smoothing <input type="range" min="0" max="20" step="0.5"> <span></span></label>
    <button type="button" class="gpm-reset">Reset zoom</button>
  </div></div>`;

function niceStep(span, count) {
  const power = 10 ** Math.floor(Math.log10(span / count));
  return [1, 2, 2.5, 5, 10, 20].map((m) => m * power).find((s) => span <= count * s * (1 + 1e-9));
}

function tickLabel(tick) {
  const size = Math.abs(tick);
  if (size >= 1000 && size < 1e5) return NUMBER.format(tick);
  return size && (size < 1e-4 || size >= 1e6) ? tick.toExponential().replace("+", "") : String(tick);
}

// The multiples of a step from one to another, without the noise of 3 * 0.1.
function multiples(step, first, last) {
  const count = Math.max(0, last - first + 1);
  return Array.from({ length: count }, (_, index) => Number(((first + index) * step).toPrecision(12)));
}

function stepAxis(low, high) {
  const step = Math.ceil(niceStep(high - low, 6));  // no half steps
  return { low, high, ticks: multiples(step, Math.ceil(low / step), Math.floor(high / step)) };
}

function niceAxis(low, high) {
  if (high <= low) high = low + (Math.abs(low) / 5 || 1);
  const step = niceStep(high - low, 5);
  const ticks = multiples(step, Math.floor(low / step + 1e-9), Math.ceil(high / step - 1e-9));
  return { low: ticks[0], high: ticks.at(-1), ticks };
}

function logAxis(low, high) {
  if (high < 3 * low) return { ...niceAxis(low, high), log: true };
  const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
  const every = Math.ceil((last - first) / 6), marks = last - first > 2 ? [1] : [1, 2, 5];
  const powers = multiples(every, Math.ceil(first / every), Math.floor(last / every));
  const ticks = powers.flatMap((power) => marks.map((mark) => Number(`${mark}e${power}`)));
  const [start, stop] = [low / 1.1, high * 1.1];
  return { low: start, high: stop, ticks: ticks.filter((one) => one >= start && one <= stop), log: true };
}

// Sorted values without up to three at each end that are far from all others.
function near(values, least, ends = 2) {
  if (!ends) return values;
  let kept = values.length;
  for (let n = Math.min(3, Math.floor(kept / 20)); n > 0 && kept === values.length; n--) {
    const last = values.at(-n - 1);
    if (values.at(-n) - last > 3 * Math.max(last - values[0], least)) kept -= n;
  }
  return near(values.slice(0, kept).reverse().map((value) => -value), least, ends - 1);
}

// The axis of these points; of a part that was zoomed to it does not begin at 0.
function valueAxis(points, chosenLog, isPart) {
  let values = points.map(([, value]) => value).sort((one, other) => one - other);
  const log = chosenLog ?? (values[0] > 0 && values.at(-1) / 50 > values[values.length >> 1]);
  if (log) values = values.filter((value) => value > 0).map(Math.log10);
  if (!values.length) return niceAxis(0, 1);
  values = near(values, log ? 1 : 0);
  const [low, high] = [values[0], values.at(-1)];
  if (log) return logAxis(10 ** low, 10 ** high);
  const hides = low < high && high - low < high / 2;
  return niceAxis(isPart || hides ? low : Math.min(0, low), high);
}

// The axes of what is shown: all, or the part that the reader has zoomed to.
function axesOf({ view, lines }, { range, log }) {
  const { steps, best } = view.axes;
  const shown = { ...steps, ...stepAxis(...(range ?? [steps.low, steps.high])) };
  const y = view.plots.map((plot) => {
    const points = plot.lines.flatMap((line) => within(lineOf(lines, plot, line), shown));
    return valueAxis(points, plot.unit ? null : log, Boolean(range));
  });
  return { steps: shown, y, best };
}

// From a value on the axis to a pixel between `start` and `end`.
function scale(axis, start, end) {
  // What is not positive has no place on an axis of powers: it lies at its lower end.
  const at = axis.log ? (value) => Math.log(Math.max(value, axis.low)) : (value) => value;
  const low = at(axis.low), span = at(axis.high) - low;
  return (value) => start + ((end - start) * (at(value) - low)) / span;
}

function lineOf(lines, plot, line) {
  return lines[plot.name]?.[line?.name] ?? [];
}

// How many points lie before a step: points are in the order of steps.
function countBefore(points, step) {
  const first = points.findIndex(([one]) => one >= step);
  return first < 0 ? points.length : first;
}

// The points on an axis of steps; with one more at each side lines reach the edge.
function within(points, { low, high }, more = 0) {
  return points.slice(Math.max(0, countBefore(points, low) - more), countBefore(points, high + 1) + more);
}

// The point of a line that is nearest to a step.
function nearest(points, step) {
  const after = countBefore(points, step), [one, other] = [points[after - 1], points[after]];
  if (!one || !other) return one ?? other;
  return step - one[0] <= other[0] - step ? one : other;
}

// The points of a line as they are drawn. Means, [step, mean, number of steps], become the smooth line:
// weighted means of all so far, the weight halved every `halfLife` steps. It is free of bias, as the
// weights of what is there are all that counts. An outlier counts as much as the edge of the axis.
function drawnPoints(points, steps, share, { low, high }) {
  if (points[0]?.length !== 3) return points;
  const halfLife = share * (steps.high - steps.low);
  let sum = 0, weight = 0, before = 0;
  return points.map(([step, mean, count]) => {
    const kept = halfLife > 0 ? 0.5 ** ((step - before) / halfLife) : 0;
    sum = sum * kept + Math.min(Math.max(mean, low), high) * count;
    weight = weight * kept + count;
    before = step;
    return [step, sum / weight];
  });
}

function text(context, words, x, y, align, alpha = 1) {
  context.globalAlpha = alpha;
  context.textAlign = align;
  context.fillText(words, x, y);
  context.globalAlpha = 1;
}

function drawCircle(context, x, y, radius) {
  context.beginPath();
  context.arc(x, y, radius, 0, 2 * Math.PI);
}

// Bands of one or more epochs, every second shaded, labelled above, where no curve goes.
function drawEpochs(context, { low, high, per_epoch: size }, x, height) {
  if (!size) return;
  const first = Math.floor(low / size), last = Math.ceil(high / size);
  const every = Math.ceil(niceStep(last - first, 12)), start = Math.floor(first / every) * every;
  for (let epoch = start; epoch < last; epoch += every) {
    const left = x(Math.max(epoch * size, low)), right = x(Math.min((epoch + every) * size, high));
    const label = epoch === start ? `Epoch ${epoch + 1}` : String(epoch + 1);
    context.globalAlpha = 0.07;
    if ((epoch / every) % 2 === 0) context.fillRect(left, 0, right - left, height);
    if (context.measureText(label).width > right - left) continue;
    text(context, label, (left + right) / 2, -6, "center", 0.75);
  }
}

function drawGrid(context, steps, values, x, y, width, height) {
  for (const tick of values.ticks) {
    context.globalAlpha = 0.18;
    context.fillRect(0, Math.round(y(tick)), width, 1);
    text(context, tickLabel(tick), -6, y(tick) + 4, "right");
  }
  for (const tick of steps.ticks) text(context, NUMBER.format(tick), x(tick), height + 16, "center");
  text(context, "Step", width / 2, height + 31, "center", 0.75);
}

function drawLine(context, points, x, y, { color, width, alpha, dash, dots }) {
  context.globalAlpha = alpha;
  context.strokeStyle = context.fillStyle = color;
  context.lineWidth = width;
  context.lineJoin = "round";
  context.setLineDash(dash);
  context.beginPath();
  for (const [step, value] of points) context.lineTo(x(step), y(value));
  context.stroke();
  context.globalAlpha = 1;
  for (const [step, value] of points.length <= dots ? points : []) {
    drawCircle(context, x(step), y(value), points.length <= 40 ? 3 : 1.5);
    context.fill();
  }
}

// The ring of the best with its label beside it, as far as there is room.
function drawBest(context, label, x, y, width) {
  context.lineWidth = 1.5;
  drawCircle(context, x, y, 6.5);
  context.stroke();
  const fits = x + 10 + context.measureText(label).width < width;
  text(context, label, x + (fits ? 8 : -8), y + (y < 24 ? 20 : -12), fits ? "left" : "right");
}

// Draws a plot on its canvas of this size, with the crosshair at a step and the zone that is dragged.
function drawPlot(canvas, size, plot, lines, { steps, best }, values, { share }, step, drag) {
  const ratio = window.devicePixelRatio || 1, context = canvas.getContext("2d");
  [canvas.width, canvas.height] = size.map((length) => Math.round(length * ratio));
  context.scale(ratio, ratio);
  context.translate(MARGIN.left, MARGIN.top);
  const { color: ink, fontFamily } = getComputedStyle(canvas);
  context.font = `11px ${fontFamily}`;
  context.strokeStyle = context.fillStyle = ink;
  const width = size[0] - MARGIN.left - MARGIN.right, height = size[1] - MARGIN.top - MARGIN.bottom;
  const x = scale(steps, 0, width), y = scale(values, height, 0);
  drawEpochs(context, steps, x, height);
  drawGrid(context, steps, values, x, y, width, height);
  context.save();
  context.beginPath();  // dots at the ends of an axis are whole
  context.rect(-4, -4, width + 8, height + 8);
  context.clip();
  for (const line of plot.lines) {
    const points = drawnPoints(lineOf(lines, plot, line), steps, share, values);
    const color = line.color === "currentColor" ? ink : line.color;
    drawLine(context, within(points, steps, 1), x, y, { ...line, color });
  }
  context.restore();
  const ringed = best[plot.name];
  if (ringed && ringed.step >= steps.low && ringed.step <= steps.high) {
    drawBest(context, ringed.label, x(ringed.step), y(ringed.value), width);
  }
  context.globalAlpha = 0.6;
  if (step !== undefined) context.fillRect(Math.round(x(step)), 0, 1, height);
  context.globalAlpha = 0.15;
  if (drag) context.fillRect(x(drag.from), 0, x(drag.to) - x(drag.from), height);
}

// Elements are filled with textContent: nothing from the kernel is taken for HTML.
function element(tag, className = "", words = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.textContent = words;
  return made;
}

// Fills a parent anew where the items are others: what is replaced flickers, and is read aloud again.
function fill(parent, items, make) {
  const now = JSON.stringify(items);
  if (parent.gpupoolItems !== now) parent.replaceChildren(...items.map(make));
  parent.gpupoolItems = now;
}

function makeFigure(title) {
  const figure = element("figure"), canvas = element("canvas");
  const caption = element("figcaption", "", title);
  caption.title = title;
  canvas.setAttribute("role", "img");
  canvas.tabIndex = 0;
  figure.append(caption, canvas);
  return figure;
}

// An entry of the legend; the looks come from the kernel's tables, and are no words of users.
function makeEntry({ label, colors, width, alpha, dash, dots, ring }) {
  const size = 24 / colors.length, made = element("span");
  const signs = colors.map((color, index) => `<path d="M${index * size} 7h${size}" stroke="${color}"
    stroke-width="${width}" stroke-opacity="${alpha}" stroke-dasharray="${dash.join(" ")}"/>`);
  if (dots > 40) signs.push('<circle cx="12" cy="7" r="3"/>');  // not of a few points alone
  if (ring) signs.splice(0, 1, '<circle class="gpm-ring" cx="12" cy="7" r="5.5"/>');
  made.innerHTML = `<svg width="24" height="14" aria-hidden="true">${signs.join("")}</svg>`;
  made.append(` ${label}`);
  return made;
}

// What the plots show at a step, a line each: "Loss: 0.412, smoothed 0.398, validation 0.43".
function readOut({ view, lines }, { steps, y }, { share }, step) {
  const rows = view.plots.map((plot, index) => {
    const values = plot.lines.map((line) => {
      const point = nearest(drawnPoints(lineOf(lines, plot, line), steps, share, y[index]), step);
      const name = plot.lines.length > 1 && line.name !== "raw" ? `${line.label} ` : "";
      return point && `${name}${Number(point[1].toPrecision(4))}`;
    });
    return `${plot.title}: ${values.filter(Boolean).join(", ")}`;
  });
  const epoch = steps.per_epoch ? ` · epoch ${Math.max(1, Math.ceil(step / steps.per_epoch))}` : "";
  return [`Step ${NUMBER.format(step)}${epoch}`, ...rows];
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

// Whether a table is unfolded before the reader has said so.
function isShown(title) {
  return !LESS.includes(title) || window.innerHeight >= 800;
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
  // A frame later: JupyterLab hides all for one when it changes the theme.
  const theme = new MutationObserver(() => requestAnimationFrame(redraw));
  sizes.observe(el);
  theme.observe(document.body, { attributeFilter: ["class", "data-jp-theme-light"] });
  return () => {
    sizes.disconnect();
    theme.disconnect();
  };
}

// Fills `root` with plots, legend and switches. `course` may change; `redraw` asks for a call of `paint`
// soon; `before` is what the reader has chosen already.
function explorer(root, course, redraw, before = {}) {
  root.innerHTML = PLOTS;
  const find = (selector) => root.querySelector(selector);
  const figures = find(".gpm-figures"), read = find(".gpm-readout"), reset = find(".gpm-reset");
  const log = find(".gpm-log"), smooth = find(".gpm-smooth"), [slider, width] = smooth.children;
  const chosen = { range: null, log: null, share: SHARE, ...before };
  let axes = null, at = null, drag = null;  // `at` is {canvas, step}: where the crosshair stands

  function choose(choice) {
    Object.assign(chosen, choice);
    keep(root, course.view, { chosen: { ...chosen } });
    redraw();
  }

  const zoomOut = () => choose({ range: null });

  // Whole steps, at least two, within what there is.
  function zoomTo(from, to) {
    const { low: start, high: end } = course.view.axes.steps;
    const low = Math.max(start, Math.min(Math.floor(from), end - 2));
    choose({ range: [low, Math.min(end, Math.max(Math.ceil(to), low + 2))] });
  }

  function stepAt(canvas, clientX) {
    const { left, width: all } = canvas.getBoundingClientRect(), { low, high } = axes.steps;
    const share = (clientX - left - MARGIN.left) / (all - MARGIN.left - MARGIN.right);
    return low + Math.min(1, Math.max(0, share)) * (high - low);
  }

  // The steps at which the crosshair may stand: those of the line with most points.
  function stops() {
    const all = Object.values(course.lines).flatMap((lines) => Object.values(lines));
    const most = all.reduce((one, other) => (other.length > one.length ? other : one), []);
    return within(most, axes.steps);
  }

  function moveTo(canvas, point) {
    at = point ? { canvas, step: point[0] } : null;
    redraw();
  }

  // Before the front end hears them: JupyterLab has arrow keys for its cells.
  function onKey(event) {
    const canvas = event.target, { key } = event, way = { ArrowLeft: -1, ArrowRight: 1 }[key];
    if (canvas.tagName !== "CANVAS" || event.ctrlKey || event.metaKey || event.altKey || !axes) return;
    if (way) {
      const all = stops(), last = all.length - 1;
      const now = at ? countBefore(all, at.step) : way > 0 ? -1 : last + 1;
      moveTo(canvas, all[Math.min(last, Math.max(0, now + way * (event.shiftKey ? 10 : 1)))]);
    } else if (key === "+" || key === "-") {
      const { low, high } = axes.steps, middle = at?.step ?? (low + high) / 2;
      const half = (high - low) * (key === "+" ? 0.25 : 1);
      zoomTo(middle - half, middle + half);
    } else if (key === "Escape") {
      at = drag = null;
      zoomOut();
    } else return;
    event.preventDefault();
    event.stopImmediatePropagation();
  }
  const end = () => window.removeEventListener("keydown", onKey, true);
  figures.addEventListener("focusin", () => window.addEventListener("keydown", onKey, true));
  figures.addEventListener("focusout", () => { end(); moveTo(); });

  figures.addEventListener("pointerdown", ({ target, button, clientX, pointerId }) => {
    if (target.tagName !== "CANVAS" || button !== 0 || !axes) return;
    const from = stepAt(target, clientX);
    drag = { from, to: from, x: clientX };
    target.setPointerCapture(pointerId);
  });
  figures.addEventListener("pointermove", ({ target, clientX }) => {
    if (target.tagName !== "CANVAS" || !axes) return;
    const step = stepAt(target, clientX);
    if (drag) drag.to = step;
    moveTo(target, nearest(stops(), step));
  });
  const release = ({ type, clientX }) => {
    const done = drag, isDrag = type === "pointerup" && done && Math.abs(clientX - done.x) > 4;
    drag = null;
    if (isDrag) zoomTo(...[done.from, done.to].sort((one, other) => one - other));
    else redraw();
  };
  for (const type of ["pointerup", "pointercancel"]) figures.addEventListener(type, release);
  figures.addEventListener("pointerleave", () => moveTo());
  figures.addEventListener("dblclick", zoomOut);
  reset.addEventListener("click", zoomOut);
  log.firstChild.addEventListener("change", ({ target }) => choose({ log: target.checked }));
  slider.addEventListener("input", () => choose({ share: slider.value / 100 }));

  function showReadOut() {
    fill(read, at ? readOut(course, axes, chosen, at.step) : [], (line) => element("div", "", line));
    if (!at) return;
    const [inner, outer] = [at.canvas, root].map((one) => one.getBoundingClientRect());
    const x = inner.left - outer.left + scale(axes.steps, MARGIN.left, inner.width - MARGIN.right)(at.step);
    const left = x + 12 + read.offsetWidth < outer.width ? x + 12 : Math.max(0, x - 12 - read.offsetWidth);
    read.style.transform = `translate(${left}px, ${inner.top - outer.top + MARGIN.top + 8}px)`;
  }

  function paint() {
    const { view, lines } = course;
    if (!view.axes) return;
    fill(figures, view.plots.map(({ title }) => title), makeFigure);
    figures.classList.toggle("gpm-many", view.plots.length > 2);
    fill(find(".gpm-legend"), view.legend, makeEntry);
    axes = axesOf(course, chosen);
    log.hidden = view.plots.every((plot) => plot.unit);
    log.firstChild.checked = axes.y.some((axis) => axis.log);
    smooth.hidden = !view.plots.some((plot) => lines[plot.name]?.mean);
    slider.value = 100 * chosen.share;
    width.textContent = `${slider.value} %`;
    reset.hidden = !chosen.range;
    const { low, high } = axes.steps, canvases = [...figures.querySelectorAll("canvas")];
    if (at && !(at.canvas.isConnected && at.step >= low && at.step <= high)) at = null;
    // All sizes are read first: a canvas that is set between two looks is laid out for each.
    const sizes = canvases.map((canvas) => [canvas.clientWidth, canvas.clientHeight]);
    const zoomed = chosen.range ? `; shown: steps ${chosen.range.map(NUMBER.format).join(" to ")}` : "";
    view.plots.forEach((plot, index) => {
      const canvas = canvases[index], size = sizes[index];
      canvas.setAttribute("aria-label", view.latest[plot.name] + zoomed);
      canvas.dataset.points = lineOf(lines, plot, plot.lines[0]).length;
      // It may not be visible.
      if (size[0]) drawPlot(canvas, size, plot, lines, axes, axes.y[index], chosen, at?.step, drag);
    });
    showReadOut();
  }

  return { paint, end };
}
