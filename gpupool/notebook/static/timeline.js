// The strips per rank under the plots: heat rows along the steps, of which
// gpupool/notebook/monitor/timeline.py says how they are made. It stands after plots.js, before explore.js.

const LEVELS = "0123456789ABCDEFGHIJKLMNOPQRSTUV";
const STRIP_HEAD = 22;  // pixels of a strip's title, in a file
const FEW_RANKS = 5;  // of more, one strip is shown at a time
const SHORT = { own: "own time", wait: "waiting", utilization: "utilization" };
const heatOf = new WeakMap();  // strip -> its picture, a pixel for each cell

function opacityOf(level) {
  return 0.1 + (0.9 * level) / (LEVELS.length - 1);
}

function heatPicture(strip, count) {
  if (heatOf.has(strip)) return heatOf.get(strip);
  const made = document.createElement("canvas");
  made.width = count;
  made.height = strip.cells.length;
  const context = made.getContext("2d"), image = context.createImageData(count, made.height);
  strip.cells.forEach((row, y) => [...row].forEach((cell, x) => {
    const level = LEVELS.indexOf(cell);
    if (level >= 0) image.data.set([...strip.color, 255 * opacityOf(level)], 4 * (y * count + x));
  }));
  context.putImageData(image, 0, 0);
  heatOf.set(strip, made);
  return made;
}

// The strips that are seen: all of few ranks, the chosen one of many.
function shownStrips(host, { ranks, strips }) {
  if (ranks.length <= FEW_RANKS) return strips;
  return [strips.find((strip) => strip.name === host.dataset.strip) ?? strips[0]];
}

// A cell in words: "78 ms", "38 %", to the shade that it is drawn in.
function cellWords({ low, high, unit }, cell) {
  const level = LEVELS.indexOf(cell ?? " ");
  if (level < 0) return "–";
  const value = low + ((high - low) * level) / (LEVELS.length - 1);
  if (unit === "%") return `${Math.round(100 * value)} %`;
  return value >= 1 ? `${value.toFixed(1)} s` : `${Number((1000 * value).toPrecision(2))} ms`;
}

function bucketAt({ width, count }, step) {
  return Math.min(count - 1, Math.max(0, Math.ceil(step / width) - 1));
}

// One line for the crosshair: the rank that takes longest at a step.
function timelineWords(timeline, step) {
  const strip = timeline?.strips?.find(({ name }) => name === "own");
  if (!strip || step > timeline.width * timeline.count) return "";
  const at = bucketAt(timeline, step), cells = strip.cells.map((row) => row[at]);
  const levels = cells.map((cell) => LEVELS.indexOf(cell)), most = Math.max(...levels);
  if (most < 0) return "";
  const longest = cellWords(strip, LEVELS[most]), all = levels.every((level) => level === most);
  if (levels.length === 1 || all) return `Own time per step ${longest}`;
  return `Own time per step up to ${longest} (rank ${timeline.ranks[levels.indexOf(most)]})`;
}

// A row in words: what all strips have of one rank at a step.
function rowWords(timeline, row, step) {
  const at = bucketAt(timeline, step), { width } = timeline;
  const steps = width > 1 ? `steps ${at * width + 1}–${(at + 1) * width}` : `step ${at + 1}`;
  const parts = timeline.strips.map(
    (strip) => `${SHORT[strip.name]} ${cellWords(strip, strip.cells[row][at])}`);
  return [`Rank ${timeline.ranks[row]}`, steps, ...parts].join(" · ");
}

// Title or choice, scale, and the words of the pointer, above a canvas for the rows.
function stripElement(host, timeline, strip, redraw) {
  const figure = document.createElement("figure"), head = document.createElement("figcaption");
  const canvas = document.createElement("canvas"), scaleWords = document.createElement("small");
  if (timeline.ranks.length > FEW_RANKS) {
    const choice = document.createElement("select");
    choice.setAttribute("aria-label", "Shown of each rank");
    choice.append(...timeline.strips.map((one) =>
      new Option(one.title, one.name, false, one.name === strip.name)));
    choice.addEventListener("change", () => { host.dataset.strip = choice.value; redraw(); });
    head.append(choice);
  } else head.append(strip.title);
  head.append(" by rank ", scaleWords, document.createElement("span"));
  canvas.setAttribute("role", "img");
  figure.append(head, canvas);
  return figure;
}

function buildStrips(host, timeline, strips, redraw) {
  const key = JSON.stringify([timeline.ranks.length, timeline.strips.map((one) => one.name),
    strips.map((one) => one.name)]);
  if (host.dataset.key === key) return;
  host.dataset.key = key;
  host.replaceChildren(...strips.map((strip) => stripElement(host, timeline, strip, redraw)));
}

function drawRows(surface, timeline, strip, steps) {
  const { context, box, colors } = surface, { row, ranks, width, count, gaps } = timeline;
  const x = scale(steps, box.left, box.right), height = row * ranks.length;
  context.save();
  context.beginPath();
  context.rect(box.left, 0, box.right - box.left, height);
  context.clip();
  context.imageSmoothingEnabled = false;
  context.drawImage(heatPicture(strip, count), x(0), 0, x(width * count) - x(0), height);
  // A validation takes no step: it is a cut through all rows.
  for (const step of gaps) context.clearRect(x(step) - 0.75, 0, 1.5, height);
  if (row >= 6) ranks.forEach((_, index) => context.clearRect(box.left, row * index, box.right, 1));
  context.restore();
  context.fillStyle = colors.text;
  context.font = `9px ${colors.font}`;
  const every = Math.ceil(10 / row);
  ranks.forEach((name, index) => {
    if (index % every === 0) text(context, name, box.left - 6, row * (index + 0.5) + 3.5, "right");
  });
}

// Draws strips on the canvas of a file; returns how high they are, which is all it does without a canvas.
function paintStrips(context, timeline, strips, steps, colors, { left, top, width, ratio }) {
  const height = strips.length ? timeline.row * timeline.ranks.length : 0;
  strips.forEach((strip, index) => {
    if (!context) return;
    // On one of its own: what is cut out of the rows must not be cut out of the file.
    const canvas = document.createElement("canvas"), y = top + index * (height + STRIP_HEAD);
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    const surface = { context: canvas.getContext("2d"), box: boxWithin(0, 0, width, height), colors };
    surface.context.scale(ratio, ratio);
    drawRows(surface, timeline, strip, steps);
    context.drawImage(canvas, left, y + STRIP_HEAD, width, height);
    context.font = `600 13px ${colors.font}`;
    text(context, `${strip.title} by rank, ${strip.ends.join(" to ")}`, left, y + 14, "left");
  });
  return strips.length * (height + STRIP_HEAD);
}

// Draws the strips of `timeline` into `host`, on the plots' axis of steps.
function drawTimeline(host, timeline, steps, colors, redraw) {
  host.hidden = !timeline?.strips?.length;
  if (host.hidden) return;
  const strips = shownStrips(host, timeline);
  buildStrips(host, timeline, strips, redraw);
  const height = timeline.row * timeline.ranks.length, canvases = host.querySelectorAll("canvas");
  const widths = [...canvases].map((canvas) => canvas.clientWidth);
  strips.forEach((strip, index) => {
    const canvas = canvases[index], words = canvas.parentElement.querySelector("small");
    const range = strip.ends.join(" to ");
    if (words.textContent !== range) words.textContent = range;
    canvas.style.height = `${height}px`;
    const slowest = timelineWords(timeline, timeline.width * timeline.count);
    canvas.setAttribute("aria-label", `${strip.title} of each rank, ${range}. ${slowest}`);
    const surface = surfaceOf(canvas, widths[index], height, colors);
    if (!surface) return;
    drawRows(surface, timeline, strip, steps);
    canvas.onpointermove = (event) => {
      const share = (event.offsetX - surface.box.left) / (surface.box.right - surface.box.left);
      const step = steps.low + share * (steps.high - steps.low);
      const row = Math.min(timeline.ranks.length - 1, Math.max(0, Math.floor(event.offsetY / timeline.row)));
      const isIn = step > 0 && step <= timeline.width * timeline.count;
      canvas.parentElement.querySelector("figcaption span").textContent = isIn ? rowWords(timeline, row, step) : "";
    };
    canvas.onpointerleave = () => { canvas.parentElement.querySelector("figcaption span").textContent = ""; };
  });
}
