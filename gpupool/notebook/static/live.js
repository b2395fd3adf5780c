// HTML that the kernel keeps up to date: the browser's half of gpupool/notebook/page/live_html.py.
//
// The elements of a model are found by their class wherever the page has them, each time they are
// drawn. Their parts are filled with HTML from the kernel, which has escaped all words of users; plots
// are those of plots.js. Of JupyterLab and Notebook 7 the page also knows the notebook and its
// kernel: it presses the notebook's own button, and keeps what is left when a kernel dies.
// plots.js and stills.js stand before this in the same module.

const ENDED = ["dead", "terminating", "restarting", "autorestarting"];
const ANSWER_MS = 1000;
const BUSY = "The kernel is busy. Press ■ (Interrupt) in the toolbar instead.";
const INTERRUPTED = "The kernel was busy, so the notebook's ■ (Interrupt) was pressed.";

// Makes one node like another, and leaves alone what is equal: what is unfolded, focused, being
// pressed or read aloud stays so.
function morph(old, made) {
  if (old.nodeName !== made.nodeName) {
    old.replaceWith(made);
  } else if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== made.data) old.data = made.data;
  } else {
    for (const { name, value } of made.attributes) {
      if (name !== "open" && old.getAttribute(name) !== value) old.setAttribute(name, value);
    }
    for (const { name } of [...old.attributes]) {
      if (name !== "open" && !made.hasAttribute(name)) old.removeAttribute(name);
    }
    morphChildren(old, made);
  }
}

function morphChildren(parent, made) {
  const before = [...parent.childNodes], after = [...made.childNodes];
  after.forEach((node, index) => {
    if (before[index]) morph(before[index], node);
    else parent.append(node);
  });
  before.slice(after.length).forEach((node) => node.remove());
}

function contextOf(model) {
  return model.widget_manager?.context;
}

function kernelOf(model) {
  return contextOf(model)?.sessionContext?.session?.kernel;
}

// Calls `act` once, when the kernel of a model ends, restarts, or is replaced by another one.
function onKernelEnd(model, act) {
  const session = contextOf(model)?.sessionContext, id = kernelOf(model)?.id;
  if (!id) return;
  const signals = [session.statusChanged, session.kernelChanged];
  const look = () => {
    const kernel = kernelOf(model);
    if (kernel?.id === id && !ENDED.includes(kernel.status)) return;
    signals.forEach((signal) => signal.disconnect(look));
    act();
  };
  signals.forEach((signal) => signal.connect(look));
}

// Calls `act(cell, index, data)` for each output of the model's notebook that has elements of it.
function eachOutput(model, name, act) {
  for (const cell of contextOf(model)?.model?.cells ?? []) {
    for (let index = 0; index < (cell.outputs?.length ?? 0); index++) {
      const { data } = cell.outputs.get(index);
      if (String(data?.["text/html"]).includes(name)) act(cell, index, data);
    }
  }
}

function setOutput(cell, index, data) {
  cell.outputs.set(index, { output_type: "display_data", data, metadata: {} });
}

// Presses the notebook's own stop button, which every kernel hears. Only for a cell that runs (its
// number comes when it is over): false where that cannot be.
function interruptCell(model, name) {
  let isRunning = false;
  eachOutput(model, name, (cell) => { isRunning ||= cell.executionCount == null; });
  const kernel = isRunning && kernelOf(model);
  if (kernel) kernel.interrupt().catch(() => {});
  return Boolean(kernel);
}

function initialize({ model }) {
  const name = `gpl-${model.get("uid")}`, elements = document.getElementsByClassName(name);
  const course = { view: { clock: { started_at: name } }, lines: {} };
  const pressed = new Set(), plots = new Map();  // element -> its plots
  let state = { parts: {} }, hint = "", focused = "", frame = 0;
  let isAlive = false, isGone = false, isNew = false;  // ... of the kernel, and of the plots

  // What stands in a part now; null: what the notebook has kept.
  function htmlOf({ dataset: { part, live } }) {
    if (isGone) return state.gone?.[part] ?? (live === undefined ? state.parts[part] : "");
    return state.parts[part] ?? null;
  }

  // All views share one press, as a second interrupt would end a training at once.
  function press(button) {
    const what = button.dataset.press;
    if (pressed.has(what) || isGone) return;
    pressed.add(what);
    // what runs as far as this page knows: a press that is heard late must not meet what comes next
    model.send({ press: what, meant: state.meant });
    setTimeout(() => {
      if (!pressed.has(what)) return;
      const isPassedOn = button.matches(".gpl-kernel") && interruptCell(model, name);
      hint = isPassedOn ? INTERRUPTED : BUSY;
      soon();
    }, ANSWER_MS);
    soon();
  }

  function listen(el) {
    const buttonOf = ({ target }) => target.closest("[data-press]");
    el.addEventListener("click", (event) => { if (buttonOf(event)) press(buttonOf(event)); });
    el.addEventListener("pointerdown", (event) => {
      if (!event.button && buttonOf(event)?.matches(".gpl-now")) press(buttonOf(event));
    });
    el.addEventListener("focusin", (event) => { focused = buttonOf(event)?.dataset.press ?? ""; });
    // A moment later it is known whether the user has left it, or it was taken out of the page.
    el.addEventListener("focusout", ({ target }) => {
      setTimeout(() => { if (target.isConnected) focused = ""; });
    });
  }

  function fill(el) {
    const html = htmlOf(el), key = JSON.stringify([html, hint, [...pressed]]), isFirst = !el.gplKey;
    if (html === null || el.gplKey === key) return;
    if (isFirst) listen(el);
    el.gplKey = key;
    const made = document.createElement("template");
    made.innerHTML = html;
    for (const button of made.content.querySelectorAll("[data-press]")) {
      button.disabled ||= pressed.has(button.dataset.press);
    }
    for (const words of made.content.querySelectorAll(".gpl-hint")) {
      if (hint) words.textContent = hint;
    }
    morphChildren(el, made.content);
    if (isFirst && focused) {
      el.querySelector(`[data-press="${focused}"]`)?.focus({ preventScroll: true });
    }
  }

  function showPlots(el) {
    if (!plots.has(el)) {
      const shown = explorer(el, course, repaint, keptOf(el, course.view).chosen);
      el.classList.remove("gpm-image");
      const endWatch = watchPage(el, repaint);
      plots.set(el, { paint: shown.paint, end: () => { shown.end(); endWatch(); } });
      shown.paint();
    } else if (isNew) plots.get(el).paint();
  }

  function draw() {
    frame = 0;
    for (const [el, { end }] of plots) if (!el.isConnected) { end(); plots.delete(el); }
    if (!isAlive && !isGone) return;  // nobody is there: what was saved stands for itself
    for (const el of [...elements]) {
      const box = el.closest(".gpl-frame");
      if (el.dataset.part === "plots" && state.plots) showPlots(el);
      else fill(el);
      if (box && !box.gplKnown) {
        box.gplKnown = true;
        completeFrame(box, course);
      }
    }
    isNew = false;
  }

  const soon = () => { if (elements.length || plots.size) frame ||= requestAnimationFrame(draw); };
  const repaint = () => { isNew = true; soon(); };

  function take(news) {
    isAlive = true;
    if ("presses" in news && news.presses !== state.presses) {
      pressed.clear();
      hint = "";
    }
    if (news.plots) Object.assign(course, JSON.parse(news.plots));
    isNew ||= Boolean(news.plots);
    state = { ...state, ...news, parts: { ...state.parts, ...news.parts } };
    // The kernel does so too, but not in a page that was loaded again: that has forgotten the display.
    if (news.still) eachOutput(model, name, (cell, index) => setOutput(cell, index, news.still));
    soon();
  }

  // The kernel has ended, and nobody else will say so: here, and in what the notebook keeps.
  function lose() {
    if (state.still) return;
    isGone = true;
    soon();
    eachOutput(model, name, (cell, index, data) => {
      const page = document.createElement("template");
      page.innerHTML = data["text/html"];
      for (const el of page.content.querySelectorAll(`.${name}`)) {
        el.innerHTML = htmlOf(el) ?? el.innerHTML;
      }
      const words = state.gone?.text ?? data["text/plain"];
      setOutput(cell, index, { "text/html": page.innerHTML, "text/plain": words });
    });
  }

  const restore = () => { const all = model.get("state"); if (all.parts) take(all); };
  restore();
  isAlive = false;  // it may come from a file: the kernel has yet to answer
  model.on("change:state", restore);
  model.on("msg:custom", take);
  model.send({ press: "hello" });
  onKernelEnd(model, lose);
  const page = new MutationObserver(soon);
  page.observe(document.body, { childList: true, subtree: true });
  return () => {
    page.disconnect();
    cancelAnimationFrame(frame);
    for (const { end } of plots.values()) end();
    for (const el of elements) if (el.dataset.live !== undefined) el.replaceChildren();
  };
}

export default { initialize };
