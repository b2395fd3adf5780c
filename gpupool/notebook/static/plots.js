// Draws the plots of a monitor on canvases. It stands first in the module of the live monitor
// (gpupool/notebook/monitor/widget.py) and in the script of the picture that stays (picture.py).
//
// Data come ready to draw (styles of lines, axes with labelled ticks, bands, the best checkpoint); here
// they are scaled to pixels, and means of buckets become smooth lines. A surface is {context, box,
// colors}: where to draw, within which plot area. A colour is that of the theme ("text", "accuracy",
// "loss") or the style's own.

const THEMED = ["accuracy", "loss"];
const MARGIN = { left: 46, right: 22, top: 20, bottom: 36 };
const RING = 6.5;
const SHARE = 0.02;  // of the drawn steps: the half-life of the smooth line

function boxWithin(width, height) {
  return {
    left: MARGIN.left, right: width - MARGIN.right,
    top: MARGIN.top, bottom: height - MARGIN.bottom,
  };
}

// What the page's style says: computed, so that each is a plain colour.
function colorsOf(element) {
  const style = getComputedStyle(element);
  const ground = style.backgroundColor;
  return {
    text: style.color,
    ground: /^rgba\(.*,\s0\)$|^transparent$/.test(ground) ? "" : ground,
    font: style.fontFamily,
    ...Object.fromEntries(
      THEMED.map((plot) => [plot, style.getPropertyValue(`--gpm-${plot}`).trim()])),
  };
}

// A surface of this size of the canvas on the screen, cleared; null while it is not visible.
function surfaceOf(canvas, width, height, colors) {
  if (!width || !height) return null;
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  return { context, box: boxWithin(width, height), colors };
}

// From a value on the axis to a pixel between `start` and `end`.
function scale(axis, start, end) {
  // What is not positive has no place on an axis of powers: it lies at its lower end.
  const at = axis.log ? (value) => Math.log(Math.max(value, axis.low)) : (value) => value;
  const low = at(axis.low), span = at(axis.high) - low;
  return (value) => start + ((end - start) * (at(value) - low)) / span;
}

// Weighted means of all points so far, the weight halved every `halfLife` steps: free of bias, as
// the weights of what is there are all that counts. Points are [step, mean, number of steps]. The same
// formula as `smoothed` in gpupool/training/history.py.
function smoothed(means, halfLife) {
  let sum = 0, weight = 0, before = 0;
  return means.map(([step, mean, count]) => {
    const kept = halfLife > 0 ? 0.5 ** ((step - before) / halfLife) : 0;
    sum = sum * kept + mean * count;
    weight = weight * kept + count;
    before = step;
    return [step, sum / weight];
  });
}

// The points of a line as they are drawn: means become the smooth line. In them an outlier counts as much
// as the edge where it is marked, or 1e31 would never be forgotten; on a logarithmic axis powers count.
function drawnPoints(points, axes, share, { low, high, log }) {
  if (points[0]?.length !== 3) return points;
  const within = (mean) => Math.min(Math.max(mean, low), high);
  const by = log ? (mean) => Math.log10(within(mean)) : within;
  const means = points.map(([step, mean, count]) => [step, by(mean), count]);
  const line = smoothed(means, share * (axes.steps.high - axes.steps.low));
  return log ? line.map(([step, power]) => [step, 10 ** power]) : line;
}

// How many points lie before a step: points are in the order of steps.
function countBefore(points, step) {
  let low = 0, high = points.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < step) low = middle + 1;
    else high = middle;
  }
  return low;
}

// The points on an axis of steps, with one more at each side: lines reach the edge.
function pointsWithin(points, { low, high }) {
  return points.slice(Math.max(0, countBefore(points, low) - 1), countBefore(points, high + 1) + 1);
}

function text(context, words, x, y, align, alpha = 1) {
  context.globalAlpha = alpha;
  context.textAlign = align;
  context.fillText(words, x, y);
  context.globalAlpha = 1;
}

// Every second band shaded; the labels stand above the plot, where no curve goes.
function drawBands({ context, box }, bands, x) {
  bands.forEach(([first, last, label], index) => {
    const left = Math.max(x(first), box.left), width = Math.min(x(last), box.right) - left;
    if (width <= 0) return;
    if (index % 2 === 0) {
      context.globalAlpha = 0.07;
      context.fillRect(left, box.top, width, box.bottom - box.top);
    }
    if (context.measureText(label).width < width) {
      text(context, label, left + width / 2, box.top - 6, "center", 0.75);
    }
  });
}

function drawTicks({ context, box }, xAxis, yAxis, x, y) {
  for (const [tick, label] of yAxis.ticks) {
    context.globalAlpha = 0.18;
    context.fillRect(box.left, Math.round(y(tick)), box.right - box.left, 1);
    text(context, label, box.left - 6, y(tick) + 4, "right");
  }
  for (const [tick, label] of xAxis.ticks) {
    // The last number is moved to the left where it would be cut.
    const end = box.right + MARGIN.right - context.measureText(label).width / 2;
    text(context, label, Math.min(x(tick), end), box.bottom + 16, "center");
  }
  text(context, xAxis.name ?? "Step", (box.left + box.right) / 2, box.bottom + 31, "center", 0.75);
}

function drawLine(context, points, x, y, { color, width, alpha, dash }) {
  context.globalAlpha = alpha;
  context.strokeStyle = color;
  context.lineWidth = width;
  context.lineJoin = "round";
  context.setLineDash(dash);
  context.beginPath();
  for (const [step, value] of points) context.lineTo(x(step), y(value));
  context.stroke();
  context.setLineDash([]);
  context.globalAlpha = 1;
}

function drawMarkers({ context }, points, x, y, color) {
  const radius = points.length <= 40 ? 3 : 1.5, ink = context.fillStyle;
  context.fillStyle = color;
  for (const [step, value] of points) {
    context.beginPath();
    context.arc(x(step), y(value), radius, 0, 2 * Math.PI);
    context.fill();
  }
  context.fillStyle = ink;
}

function drawRing(context, x, y, color) {
  context.strokeStyle = color;
  context.lineWidth = 1.5;
  context.beginPath();
  context.arc(x, y, RING, 0, 2 * Math.PI);
  context.stroke();
}

// The ring of the best with its label beside it: below the curve or above it, as far as the plot has
// room there.
function drawBest({ context, box, colors }, best, x, y) {
  const atX = x(best.step), atY = y(best.value), { label } = best;
  drawRing(context, atX, atY, colors.text);
  const fits = atX + 10 + context.measureText(label).width < box.right;
  const below = best.below ? atY + 24 < box.bottom : atY - 24 < box.top;
  const left = atX + (fits ? 8 : -8), top = atY + (below ? 20 : -12);
  context.textAlign = fits ? "left" : "right";
  if (colors.ground) {  // curves must not cross the words
    context.strokeStyle = colors.ground;
    context.lineWidth = 4;
    context.strokeText(label, left, top);
  }
  context.fillText(label, left, top);
}

function drawPlot(surface, plot, lines, axes, share) {
  const { context, box, colors } = surface;
  const x = scale(axes.steps, box.left, box.right);
  const yAxis = axes.y[plot.name], y = scale(yAxis, box.bottom, box.top);
  context.font = `11px ${colors.font}`;
  context.fillStyle = colors.text;
  drawBands(surface, axes.bands, x);
  drawTicks(surface, axes.steps, yAxis, x, y);
  context.save();
  context.beginPath();  // dots at the ends of an axis are whole
  context.rect(box.left - 4, box.top - 4, box.right - box.left + 8, box.bottom - box.top + 8);
  context.clip();
  for (const line of plot.lines) {
    const all = drawnPoints(lines?.[line.name] ?? [], axes, share, yAxis);
    const points = pointsWithin(all, axes.steps), color = colors[line.color] ?? line.color;
    drawLine(context, points, x, y, { ...line, color });
    if (points.length <= line.dots) drawMarkers(surface, points, x, y, color);
  }
  context.restore();
  drawClipped(surface, yAxis, x, colors[plot.lines[0].color] ?? plot.lines[0].color);
  const best = axes.best[plot.name], { low, high } = axes.steps;
  if (best && best.step >= low && best.step <= high) drawBest(surface, best, x, y);
}

// A small triangle at the edge for each value beyond the axis, and the number of the highest one.
function drawClipped({ context, box }, axis, x, color) {
  const ink = context.fillStyle;
  context.fillStyle = color;
  const shown = (axis.clipped ?? []).filter(([step]) => x(step) >= box.left && x(step) <= box.right);
  for (const [step, value] of shown) {
    const atX = x(step), isAbove = value > axis.high;
    const edge = isAbove ? box.top : box.bottom, base = edge + (isAbove ? 7 : -7);
    context.beginPath();
    context.moveTo(atX, edge);
    context.lineTo(atX - 4.5, base);
    context.lineTo(atX + 4.5, base);
    context.fill();
  }
  const highest = shown.filter(([, value]) => value > axis.high)
    .reduce((most, point) => (point[1] > (most?.[1] ?? 0) ? point : most), null);
  if (highest) {
    const label = tickLabel(Number(highest[1].toPrecision(3))), atX = x(highest[0]);
    const fits = atX + 10 + context.measureText(label).width < box.right;
    text(context, label, atX + (fits ? 7 : -7), box.top + 10, fits ? "left" : "right");
  }
  context.fillStyle = ink;
}

// Dots that are there unless the points are very many belong to the line's sign.
function hasDot(style) {
  return !style.ring && style.dots > 40;
}
