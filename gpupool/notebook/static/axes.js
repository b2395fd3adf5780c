// Axes of what a reader has chosen: a part of the steps, a logarithmic loss, the whole plan. They are those
// of gpupool/notebook/drawing/axes.py, which says why they are so. It stands before explore.js.

function isShare(plot) {
  return plot.unit === "%" || plot.title.endsWith("(%)");
}

function isLoss(plot) {
  return /loss/i.test(`${plot.name} ${plot.title}`);
}

function niceStep(span, count) {
  const power = 10 ** Math.floor(Math.log10(span / count));
  return [1, 2, 2.5, 5, 10, 20].map((m) => m * power).find((s) => span <= count * s * (1 + 1e-9));
}

function tickLabel(tick) {
  const label = Math.abs(tick) >= 1000 ? NUMBER.format(tick) : String(Number(tick.toPrecision(6)));
  if (label.length <= 6 && !label.includes("e")) return label;
  const [digits, power] = tick.toExponential(3).split("e");
  return `${Number(digits)}e${Number(power)}`;
}

function labelled(ticks) {
  return ticks.map((tick) => [tick, tickLabel(tick)]);
}

// The multiples of a step from one to another, without the noise of 3 * 0.1.
function multiples(step, first, last) {
  const count = Math.max(0, last - first + 1);
  return Array.from({ length: count }, (_, index) => Number(((first + index) * step).toPrecision(12)));
}

function stepAxis(low, high) {
  const step = Math.ceil(niceStep(high - low, 6));  // no half steps
  const ticks = multiples(step, Math.ceil(low / step), Math.floor(high / step));
  return { low, high, ticks: ticks.map((tick) => [tick, NUMBER.format(tick)]) };
}

function niceAxis(low, high) {
  if (high <= low) high = low + (Math.abs(low) / 5 || 1);
  const step = niceStep(high - low, 5);
  const ticks = multiples(step, Math.floor(low / step + 1e-9), Math.ceil(high / step - 1e-9));
  return { low: ticks[0], high: ticks.at(-1), ticks: labelled(ticks), log: false };
}

function shareAxis(low, high) {
  const span = Math.max(high - low, 5), start = (low + high - span) / 2;
  const from = Math.min(Math.max(start, low >= 0 ? 0 : start), high <= 100 ? 100 - span : Infinity);
  return niceAxis(from, from + span);
}

function logAxis(low, high) {
  const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
  const powers = Array.from({ length: last - first + 1 }, (_, index) => first + index);
  let ends = [...powers, last + 1].flatMap((power) => [1, 2, 5].map((m) => Number(`${m}e${power}`)));
  const start = ends.findLast((end) => end <= low * (1 + 1e-9));
  const stop = ends.find((end) => end >= high * (1 - 1e-9) && end > start);
  if (stop / start > 100) {
    const every = Math.ceil((last - first) / 6);
    ends = powers.filter((_, index) => index % every === 0).map((power) => Number(`1e${power}`));
  }
  const ticks = ends.filter((end) => end >= start && end <= stop);
  return { low: start, high: stop, ticks: labelled(ticks), log: true };
}

// The first and the last of sorted values that are no outliers: those are far from all others.
function bulkOf(values, log) {
  const isSure = log || values.length >= 20, far = log ? 3 : isSure ? 2 : 50;
  const few = Math.max(Math.floor(values.length / 100), Math.min(3, Math.floor(values.length / 3)));
  const least = log ? 1 : isSure ? 0 : Math.abs(values[values.length >> 1]);
  let first = 0, last = values.length - 1;
  for (let top = last; top > values.length - 1 - few; top--) {
    const reach = values[top - 1] + far * Math.max(values[top - 1] - values[0], least);
    if (values[top] > reach && reach > values[top - 1]) last = top - 1;
  }
  for (let bottom = 0; bottom < few; bottom++) {
    const reach = values[bottom + 1] - far * Math.max(values[last] - values[bottom + 1], least);
    if (values[bottom] < reach && reach < values[bottom + 1]) first = bottom + 1;
  }
  return [first, last];
}

// An axis for what of the lines lies on an axis of steps; null where that is nothing. The whole of a
// curve begins at 0, where that hides nothing; a part that was zoomed to fills the plot.
function fittedAxis(plot, lines, steps, log, isPart) {
  const inside = plot.lines.flatMap((line) => {
    const points = lines?.[line.name] ?? [];
    return points.slice(countBefore(points, steps.low), countBefore(points, steps.high + 1e-9));
  }).filter((point) => !log || point[1] > 0);
  if (!inside.length) return null;
  const values = inside.map((point) => point[1]).sort((one, other) => one - other);
  if (isShare(plot)) return shareAxis(values[0], values.at(-1));
  const bulk = bulkOf(log ? values.map(Math.log10) : values, log);
  const [low, high] = bulk.map((index) => values[index]);
  const from = isPart || (low < high && high - low < high / 4) ? low : Math.min(0, low);
  const axis = log ? logAxis(low, high) : niceAxis(from, high);
  return { ...axis, clipped: inside.filter(([, value]) => value < axis.low || value > axis.high) };
}

// The epochs within an axis of steps, at most a dozen bands: many epochs share one.
function bandsOf({ low, high, per_epoch: size }) {
  const first = Math.floor(low / size), last = Math.ceil(high / size);
  const every = last - first <= 12 ? 1 : Math.ceil(niceStep(last - first, 8));
  const bands = [];
  for (let epoch = Math.floor(first / every) * every; epoch < last; epoch += every) {
    const words = every === 1 ? `${epoch + 1}` : `${epoch + 1}–${epoch + every}`;
    const head = bands.length ? "" : every === 1 ? "Epoch " : "Epochs ";
    bands.push([epoch * size, (epoch + every) * size, head + words]);
  }
  return bands;
}

// What is shown: the kernel's axes, or those of the reader's choice.
function shownAxes(view, lines, { range, whole, log }) {
  const { axes } = view;
  if (!range && !whole && log === null) return axes;
  const full = whole && axes.steps.plan ? stepAxis(0, axes.steps.plan) : axes.steps;
  const steps = range ? stepAxis(...range) : full, y = { ...axes.y };
  for (const plot of view.plots) {
    const own = y[plot.name], isLog = isLoss(plot) && log !== null ? log : Boolean(own.log);
    if (!range && isLog === Boolean(own.log)) continue;
    y[plot.name] = fittedAxis(plot, lines[plot.name], steps, isLog, Boolean(range)) ?? own;
  }
  const all = { ...axes.steps, ...steps };
  return { ...axes, steps: all, y, bands: all.per_epoch ? bandsOf(all) : axes.bands };
}
