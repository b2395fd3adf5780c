// Draws the plots of a training on a canvas: the first half of the module of the live monitor,
// which gpupool/notebook/monitor/widget.py puts before monitor.js.
//
// Data come ready to draw (axes with labelled ticks, bands, the best checkpoint); here they are only
// scaled to pixels. A surface is {context, box, colors}: where to draw, within which plot area.

const PLOTS = ["accuracy", "loss"];
const LINES = ["raw", "smooth", "validation"];
const TITLES = { accuracy: "Accuracy (%)", loss: "Loss" };
const MARGIN = { left: 46, right: 22, top: 20, bottom: 36 };
const RING = 6.5;
const PICTURE = { width: 900, plot: 260, edge: 20, line: 26, ratio: 2 };
const LEGEND = [
  ["training (smoothed)", { width: 2.5 }],
  ["training", { alpha: 0.5 }],
  ["validation", { isText: true, dash: [5, 4] }],
  ["best", { isText: true, isRing: true }],
];

function boxWithin(left, top, width, height) {
  return {
    left: left + MARGIN.left, right: left + width - MARGIN.right,
    top: top + MARGIN.top, bottom: top + height - MARGIN.bottom,
  };
}

// What the page's style says: computed, so that each is a plain colour.
function colorsOf(element) {
  const style = getComputedStyle(element);
  const ground = style.backgroundColor;
  return {
    text: style.color,
    ground: /^rgba\(.*, 0\)$|^transparent$/.test(ground) ? "" : ground,
    font: style.fontFamily,
    ...Object.fromEntries(
      PLOTS.map((plot) => [plot, style.getPropertyValue(`--gpm-${plot}`).trim()])),
  };
}

// A surface of the canvas's size on the screen, cleared; null while it is not visible.
function surfaceOf(canvas, colors) {
  const width = canvas.clientWidth, height = canvas.clientHeight;
  if (!width || !height) return null;
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  return { context, box: boxWithin(0, 0, width, height), colors };
}

function scale(axis, start, end) {
  return (value) => start + ((end - start) * (value - axis.low)) / (axis.high - axis.low);
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
    const left = x(first), width = x(last) - left;
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
  text(context, "Step", (box.left + box.right) / 2, box.bottom + 31, "center", 0.75);
}

function drawLine(context, points, x, y, { color, width = 1, alpha = 1, dash = [] }) {
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

function drawMarkers({ context }, points, x, y, color = context.fillStyle) {
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

// The ring of the best checkpoint with its label: to its right and below the curve of accuracy,
// above that of the loss, as far as the plot has room there.
function drawBest({ context, box, colors }, plot, best, x, y) {
  if (!best || best[plot] === null) return;
  const atX = x(best.step), atY = y(best[plot]), label = best.labels[plot];
  drawRing(context, atX, atY, colors.text);
  const fits = atX + 10 + context.measureText(label).width < box.right;
  const below = plot === "accuracy" ? atY + 24 < box.bottom : atY - 24 < box.top;
  const left = atX + (fits ? 8 : -8), top = atY + (below ? 20 : -12);
  context.textAlign = fits ? "left" : "right";
  if (colors.ground) {  // curves must not cross the words
    context.strokeStyle = colors.ground;
    context.lineWidth = 4;
    context.strokeText(label, left, top);
  }
  context.fillText(label, left, top);
}

function drawPlot(surface, plot, lines, axes) {
  const { context, box, colors } = surface;
  const x = scale(axes.steps, box.left, box.right);
  const y = scale(axes[plot], box.bottom, box.top);
  context.font = `11px ${colors.font}`;
  context.fillStyle = colors.text;
  drawBands(surface, axes.bands, x);
  drawTicks(surface, axes.steps, axes[plot], x, y);
  drawLine(context, lines.raw, x, y, { color: colors[plot], alpha: 0.35 });
  drawLine(context, lines.smooth, x, y, { color: colors[plot], width: 2 });
  drawLine(context, lines.validation, x, y, { color: colors.text, dash: [5, 4] });
  drawMarkers(surface, lines.validation, x, y);
  if (lines.raw.length === 1) drawMarkers(surface, lines.raw, x, y, colors[plot]);  // no line yet
  drawBest(surface, plot, axes.best, x, y);
}

function isEmpty(lines) {
  return LINES.every((line) => lines[line].length === 0);
}

// Without class labels there is no accuracy, and no empty plot of it.
function plotsOf(lines) {
  return PLOTS.filter((plot) => plot === "loss" || isEmpty(lines.loss) || !isEmpty(lines[plot]));
}

function drawLegend(context, plots, hasValidation, hasBest, colors, left, y) {
  const entries = LEGEND.filter(
    (_, index) => index < 2 || (index === 2 && hasValidation) || (index === 3 && hasBest));
  context.font = `13px ${colors.font}`;
  for (const [label, style] of entries) {
    const inks = style.isText ? [colors.text] : plots.map((plot) => colors[plot]);
    inks.forEach((color, index) => {
      const from = left + (24 * index) / inks.length, to = left + (24 * (index + 1)) / inks.length;
      if (style.isRing) drawRing(context, left + 12, y - 4, color);
      else drawLine(context, [[from, y - 4], [to, y - 4]], (v) => v, (v) => v, { color, ...style });
    });
    if (style.dash) drawMarkers({ context }, [[left + 12, y - 4]], (v) => v, (v) => v);
    text(context, label, left + 30, y, "left");
    left += 54 + context.measureText(label).width;
  }
}

// Both plots with title and legend on a canvas of their own, for a file.
function pictureOf(view, lines, pageColors) {
  const plots = plotsOf(lines), { width, edge, line, ratio } = PICTURE;
  const colors = pageColors.ground ? pageColors : { ...pageColors, text: "#222", ground: "#fff" };
  const canvas = document.createElement("canvas");
  const block = line + PICTURE.plot;
  canvas.width = width * ratio;
  canvas.height = (2 * edge + 2 * line + plots.length * block) * ratio;
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  context.fillStyle = colors.ground;
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.fillStyle = colors.text;
  context.font = `600 16px ${colors.font}`;
  text(context, view.headline, edge, edge + 14, "left");
  plots.forEach((plot, index) => {
    const top = edge + line + index * block;
    context.font = `600 13px ${colors.font}`;
    text(context, TITLES[plot], edge, top + 16, "left");
    const box = boxWithin(edge, top + line, width - 2 * edge, PICTURE.plot);
    drawPlot({ context, box, colors }, plot, lines[plot], view.axes);
  });
  const hasValidation = plots.some((plot) => lines[plot].validation.length);
  const bottom = edge + line + plots.length * block + 18;
  drawLegend(context, plots, hasValidation, Boolean(view.axes.best), colors, edge, bottom);
  return canvas;
}
