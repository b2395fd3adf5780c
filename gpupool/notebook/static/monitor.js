// The live picture of a training or a loop: the browser's half of gpupool/notebook/monitor/widget.py. The
// plots are those of plots.js and explore.js, which stand before it in the same module.
//
// `view` and `lines` are the whole picture, refreshed now and then; custom messages {view, new}
// carry what has changed since. One course a model is kept, which all its views draw: they are in
// step, and a view that is opened later is complete.

const WIDGET = "application/vnd.jupyter.widget-view+json";
const OVER = ["finished", "stopped", "failed", "ended"];
const BUSY = "kernel is busy: press the stop button of the notebook";
const PAGE = `
  <div class="gpm-header">
    <span class="gpm-status" role="status" aria-live="polite"></span>
    <progress max="1" value="0" aria-label="Share of the training done"></progress>
    <span class="gpm-remaining"></span>
    <span class="gpm-buttons">
      <button type="button" class="gpm-stop"><span class="gpm-square" aria-hidden="true"></span
        ><span class="gpm-stop-label">Stop</span></button>
      <button type="button" class="gpm-save">Save plot</button>
    </span>
    <span class="gpm-hint" role="alert"></span>
  </div>
  <div class="gpm-notice" role="status" aria-live="polite"></div>
  <div class="gpm-body">
    <div class="gpm-plots"></div>
    <div class="gpm-tables"></div>
  </div>
  <details class="gpm-ranks" open>
    <summary><b class="gpm-rank-title"></b> <span class="gpm-rank-summary"></span></summary>
    <div class="gpm-scroll" role="region" aria-label="How each rank fares" tabindex="0"><table>
      <thead><tr></tr></thead><tbody></tbody></table></div>
  </details>`;

function headOf(words, scope) {
  const head = element("th", "", words);
  head.scope = scope;
  return head;
}

function drawTables(parent, sections) {
  parent.replaceChildren(...sections.map(([section, rows]) => {
    const table = element("table");
    table.createCaption().textContent = section;
    const body = table.createTBody();
    for (const [label, value] of rows) {
      const row = body.insertRow();
      row.append(headOf(label, "row"), element("td", "", value));
    }
    return table;
  }));
}

// A share as a bar beside its words; words alone where nobody knows the share.
function barCell(share, words, kind) {
  const cell = element("td"), both = element("div", "gpm-share");
  if (share !== null) {
    const bar = element("span", "gpm-bar"), done = element("span", `gpm-${kind}`);
    bar.setAttribute("aria-hidden", "true");
    done.style.width = `${100 * Math.min(1, share)}%`;
    bar.append(done);
    both.append(bar);
  }
  both.append(element("span", "", words));
  cell.append(both);
  return cell;
}

function rankRow(rank) {
  const row = element("tr");
  const step = element("td", "gpm-number", rank.step);
  if (rank.note) step.append(element("span", "gpm-badge", rank.note));
  row.append(
    headOf(rank.rank, "row"), element("td", "", rank.device),
    barCell(rank.utilization, rank.utilization_text, "utilization"),
    barCell(rank.memory, rank.memory_text, "memory"),
    element("td", "gpm-number", rank.temperature), step);
  return row;
}

function drawRanks(details, view) {
  details.hidden = view.ranks.length === 0;
  details.querySelector(".gpm-rank-title").textContent = view.rank_title;
  details.querySelector("thead tr").replaceChildren(
    ...view.rank_columns.map((words) => headOf(words, "col")));
  details.querySelector("tbody").replaceChildren(...view.ranks.map(rankRow));
}

function paint(el, { view }, shown) {
  const find = (selector) => el.querySelector(selector);
  // Written only when it changes: a live region that is rewritten is read aloud again.
  for (const [region, words] of [[".gpm-status", view.headline], [".gpm-notice", view.notice]]) {
    if (find(region).textContent !== words) find(region).textContent = words;
  }
  find("progress").value = view.progress ?? 0;
  find("progress").hidden = view.progress === null;  // nobody knows how much there is
  find(".gpm-remaining").textContent = view.remaining;
  if (shown.table !== view.table) drawTables(find(".gpm-tables"), view.table);
  if (shown.ranks !== view.ranks) drawRanks(find(".gpm-ranks"), view);
  find(".gpm-rank-summary").textContent = view.rank_summary;
  const { table, ranks } = view;
  Object.assign(shown, { table, ranks });
}

// The kernel cannot hear while it is busy (it depends on its version): after a second, say so.
function connectStop(model, course, el) {
  const button = el.querySelector(".gpm-stop"), label = el.querySelector(".gpm-stop-label");
  const hint = el.querySelector(".gpm-hint");
  let timer = 0, pressed = false;
  const show = () => {
    const status = model.get("status"), over = OVER.includes(status);
    const heard = over || status === "stopping";
    if (heard) hint.textContent = "";
    button.hidden = over || !course.view.stop_label;
    button.disabled = pressed || heard;
    label.textContent = button.disabled ? "Stopping…" : course.view.stop_label;
    return heard;
  };
  button.addEventListener("click", () => {
    pressed = true;
    timer = setTimeout(() => { if (!show()) hint.textContent = BUSY; }, 1000);
    show();
    model.send({ press: "stop" });
  });
  model.on("change:status", show);
  return { show, end: () => { clearTimeout(timer); model.off("change:status", show); } };
}

// The points of a line, a new list where there is none yet.
function pointsOf(lines, plot, line) {
  return ((lines[plot] ??= {})[line] ??= []);
}

// Puts the still picture in this widget's place in the notebook's own outputs. The kernel does so
// too, but not in a page that was loaded again: that has forgotten the display, and would save a
// widget that nobody can show. JupyterLab's manager of widgets knows the notebook; others do not.
function leaveStill(model) {
  const { model_id: id, data } = model.get("still");
  for (const cell of (data && model.widget_manager?.context?.model?.cells) || []) {
    for (let index = 0; index < (cell.outputs?.length ?? 0); index++) {
      if (cell.outputs.get(index).data?.[WIDGET]?.model_id !== id) continue;
      cell.outputs.set(index, { output_type: "display_data", data, metadata: {} });
    }
  }
}

// Keeps the course of a model up to date, and redraws its views.
function follow(model, course) {
  const tell = () => course.views.forEach((redraw) => redraw());
  const takeView = () => { course.view = model.get("view"); tell(); };
  const takeLines = () => { course.lines = JSON.parse(model.get("lines")); tell(); };
  takeView();
  takeLines();
  model.on("change:view", takeView);
  model.on("change:lines", takeLines);
  model.on("change:still", () => leaveStill(model));
  leaveStill(model);
  model.on("msg:custom", (message) => {
    if (!message.new) return;
    course.view = { ...course.view, ...message.view };
    for (const [plot, lines] of Object.entries(message.new)) {
      for (const [line, points] of Object.entries(lines)) {
        pointsOf(course.lines, plot, line).push(...points);
      }
    }
    tell();
  });
}

function render(model, el, course) {
  el.classList.add("gpm");
  el.innerHTML = PAGE;
  const stop = connectStop(model, course, el), shown = {};
  let frame = 0;
  const soon = () => {
    frame ||= requestAnimationFrame(() => {
      frame = 0;
      stop.show();
      paint(el, course, shown);
      plots.paint();
    });
  };
  const plots = explorer(el.querySelector(".gpm-plots"), course, soon);
  el.querySelector(".gpm-save").addEventListener("click", () => savePlot(plots, course));
  course.views.add(soon);
  const endWatch = watchPage(el, soon);
  soon();
  return () => {
    stop.end();
    plots.end();
    endWatch();
    cancelAnimationFrame(frame);
    course.views.delete(soon);
  };
}

export default () => {
  const course = { view: {}, lines: {}, views: new Set() };
  return {
    initialize: ({ model }) => follow(model, course),
    render: ({ model, el }) => render(model, el, course),
  };
};
