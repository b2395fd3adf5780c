// The live picture of a training: the browser's half of gpupool/notebook/monitor.py.
//
// The kernel sends data that is ready to draw (axes with labelled ticks, bands, words); here
// it is only scaled to pixels. `view` and `lines` are the whole picture, refreshed every two
// seconds; custom messages {view, new} carry what came since.

const PLOTS = ["accuracy", "loss"];
const LINES = ["raw", "smooth", "validation"];
const OVER = ["finished", "stopped", "failed"];
const MARGIN = { left: 46, right: 22, top: 20, bottom: 36 };
const BUSY = "kernel is busy: press the stop button of the notebook";
const PAGE = `
  <div class="gpm-header">
    <span class="gpm-status" role="status" aria-live="polite"></span>
    <progress max="1" value="0" aria-label="Share of the training done"></progress>
    <span class="gpm-remaining"></span>
    <button type="button" class="gpm-stop">Stop</button>
    <span class="gpm-hint" role="alert"></span>
  </div>
  <div class="gpm-notice" role="status" aria-live="polite"></div>
  <div class="gpm-body">
    <div class="gpm-plots">
      <figure><figcaption>Accuracy (%)</figcaption><canvas role="img"></canvas></figure>
      <figure><figcaption>Loss</figcaption><canvas role="img"></canvas></figure>
      <div class="gpm-legend">
        <span>${sample('stroke-width="2.5"')} training (smoothed)</span>
        <span>${sample('stroke-opacity=".4"')} training</span>
        <span class="gpm-validated"><svg width="24" height="10" aria-hidden="true">
          <line x2="24" y1="5" y2="5" stroke="currentColor" stroke-dasharray="5 4"/>
          <circle cx="12" cy="5" r="3"/></svg> validation</span>
      </div>
    </div>
    <div class="gpm-tables"></div>
  </div>`;

function sample(style) {
  return `<svg width="24" height="10" aria-hidden="true">
    <line class="gpm-sample-accuracy" x2="12" y1="5" y2="5" stroke="var(--gpm-accuracy)" ${style}/>
    <line x1="12" x2="24" y1="5" y2="5" stroke="var(--gpm-loss)" ${style}/></svg>`;
}

// A canvas of the right size for the screen, cleared; null while it is not visible.
function prepared(canvas) {
  const width = canvas.clientWidth, height = canvas.clientHeight;
  if (!width || !height) return null;
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  const style = getComputedStyle(canvas);
  context.font = `11px ${style.fontFamily}`;
  const box = {
    left: MARGIN.left, right: width - MARGIN.right,
    top: MARGIN.top, bottom: height - MARGIN.bottom,
  };
  return { context, box, style };
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
      text(context, label, left + width / 2, box.top - 6, "center", 0.65);
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
    text(context, label, x(tick), box.bottom + 16, "center");
  }
  text(context, "Step", (box.left + box.right) / 2, box.bottom + 31, "center", 0.65);
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

function drawPlot(canvas, plot, lines, axes) {
  const surface = prepared(canvas);
  if (!surface) return;
  const { context, box, style } = surface;
  const x = scale(axes.steps, box.left, box.right);
  const y = scale(axes[plot], box.bottom, box.top);
  const color = style.getPropertyValue(`--gpm-${plot}`).trim();
  context.fillStyle = style.color;
  drawBands(surface, axes.bands, x);
  drawTicks(surface, axes.steps, axes[plot], x, y);
  drawLine(context, lines.raw, x, y, { color, alpha: 0.35 });
  drawLine(context, lines.smooth, x, y, { color, width: 2 });
  drawLine(context, lines.validation, x, y, { color: style.color, dash: [5, 4] });
  const radius = lines.validation.length <= 40 ? 3 : 1.5;
  for (const [step, value] of lines.validation) {
    context.beginPath();
    context.arc(x(step), y(value), radius, 0, 2 * Math.PI);
    context.fill();
  }
}

// Built with textContent: nothing from the kernel is taken for HTML.
function drawTables(parent, sections) {
  parent.replaceChildren(...sections.map(([section, rows]) => {
    const table = document.createElement("table");
    table.createCaption().textContent = section;
    const body = table.createTBody();
    for (const [label, value] of rows) {
      const row = body.insertRow();
      const head = document.createElement("th");
      head.scope = "row";
      head.textContent = label;
      row.append(head);
      row.insertCell().textContent = value;
    }
    return table;
  }));
}

function isEmpty(lines) {
  return LINES.every((line) => lines[line].length === 0);
}

function wholeLines(model) {
  const whole = JSON.parse(model.get("lines"));
  const empty = () => Object.fromEntries(LINES.map((line) => [line, []]));
  return Object.fromEntries(PLOTS.map((plot) => [plot, whole[plot] ?? empty()]));
}

function paint(el, view, lines) {
  const find = (selector) => el.querySelector(selector);
  // Written only when it changes: a live region that is rewritten is read aloud again.
  for (const [region, words] of [[".gpm-status", view.headline], [".gpm-notice", view.notice]]) {
    if (find(region).textContent !== words) find(region).textContent = words;
  }
  find("progress").value = view.progress;
  find(".gpm-remaining").textContent = view.remaining;
  find(".gpm-validated").hidden = !PLOTS.some((plot) => lines[plot].validation.length);
  drawTables(find(".gpm-tables"), view.table);
  const figures = [...el.querySelectorAll("figure")];
  figures[0].hidden = isEmpty(lines.accuracy) && !isEmpty(lines.loss);
  PLOTS.forEach((plot, index) => {
    const canvas = figures[index].querySelector("canvas");
    drawPlot(canvas, plot, lines[plot], view.axes);
    canvas.setAttribute("aria-label", view.latest[plot]);
    canvas.dataset.points = lines[plot].raw.length;
  });
}

// The kernel cannot hear while it is busy (it depends on its version): after a second, say so.
function connectStop(model, button, hint) {
  let timer = 0, pressed = false;
  const show = () => {
    const status = model.get("status"), over = OVER.includes(status);
    const heard = over || status === "stopping";
    if (heard) hint.textContent = "";
    button.hidden = over;
    button.disabled = pressed || heard;
    button.textContent = button.disabled ? "Stopping…" : "Stop";
    return heard;
  };
  button.addEventListener("click", () => {
    pressed = true;
    model.send({ press: "stop" });
    timer = setTimeout(() => { if (!show()) hint.textContent = BUSY; }, 1000);
    show();
  });
  model.on("change:status", show);
  show();
  return () => { clearTimeout(timer); model.off("change:status", show); };
}

// Calls `redraw` when the size or the theme of the page changes.
function watchPage(el, redraw) {
  const sizes = new ResizeObserver(redraw);
  sizes.observe(el);
  const theme = new MutationObserver(redraw);
  theme.observe(document.body, { attributeFilter: ["data-jp-theme-light", "data-jp-theme-name"] });
  return () => { sizes.disconnect(); theme.disconnect(); };
}

function render({ model, el }) {
  el.classList.add("gpm");
  el.innerHTML = PAGE;
  let view = model.get("view"), lines = wholeLines(model), frame = 0;
  const soon = () => {
    frame ||= requestAnimationFrame(() => { frame = 0; paint(el, view, lines); });
  };
  const onWhole = () => { view = model.get("view"); lines = wholeLines(model); soon(); };
  const onNews = (message) => {
    if (!message.new) return;
    view = message.view;
    for (const plot of PLOTS) {
      for (const line of LINES) lines[plot][line].push(...message.new[plot][line]);
    }
    soon();
  };
  model.on("change:lines", onWhole);
  model.on("change:view", onWhole);
  model.on("msg:custom", onNews);
  const endStop = connectStop(model, el.querySelector(".gpm-stop"), el.querySelector(".gpm-hint"));
  const endWatch = watchPage(el, soon);
  soon();
  return () => {
    endStop();
    endWatch();
    cancelAnimationFrame(frame);
    model.off("change:lines", onWhole);
    model.off("change:view", onWhole);
    model.off("msg:custom", onNews);
  };
}

export default { render };
