// The bars of a pool: the browser's half of gpupool/notebook/pool/pool_buttons.py.
//
// A bar is HTML that the notebook keeps (pool/bar.py). This finds the pool's bars in the page by
// their class, each time they are drawn, and writes the newest state, the countdown and two
// buttons into them. Buttons are there only while a kernel answers: a saved notebook has none.
// A notice of ranks that hang has a place for an Interrupt button too, in the cell that runs.
// life.js stands before this in the same module.

const GONE = "The kernel of this notebook does not answer: it has ended, and the pool with it.";
const SURE_MS = 5000;
const COUNTS = ["idle", "broken"];

function newButton(parent, name, onClick) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = `gpb-button gpb-${name}`;
  button.addEventListener("click", onClick);
  parent.append(button);
  return button;
}

function newHint(parent) {
  const hint = document.createElement("span");
  hint.className = "gpb-hint";
  hint.setAttribute("role", "status");
  parent.append(hint);
  return hint;
}

// A model's kernel: whether it is there, and what it has not heard yet. Calls `onChange` when that
// changes, and when there is a new view. A new page asks for an answer, and so does one that has
// lost the kernel, or found it again.
class Link {
  constructor(model, onChange) {
    this.model = model;
    this.onChange = onChange;
    this.isAlive = false; // the kernel has answered
    this.isGone = false; // and does so no more
    this.pressed = ""; // the button that the kernel has not heard yet
    this.hint = "";
    this.presses = model.get("view").presses;
    this.onView = () => this.take();
    this.onLost = () => this.lose();
    model.on("change:view", this.onView);
    model.on("comm_live_update", this.onLost);
    this.ask();
  }
  ask() {
    this.model.send({ press: "hello" });
  }
  // `isBeside` says which output of the notebook the button stands in, if it is one of a cell that
  // runs: where the kernel does not hear it, the page presses the notebook's own.
  send(name, isBeside = () => false) {
    this.pressed = name;
    this.hint = "";
    // what runs as far as this page knows: a press that is heard late must not meet what comes next
    this.model.send({ press: name, meant: this.model.get("view").meant });
    clearTimeout(this.answer);
    this.answer = setTimeout(() => {
      if (this.pressed) this.hint = interruptCell(this.model, isBeside) ? INTERRUPTED : BUSY;
      this.onChange();
    }, ANSWER_MS);
    this.onChange();
  }
  take() {
    const { presses } = this.model.get("view");
    if (presses !== this.presses) this.pressed = this.hint = "";
    this.presses = presses;
    this.isAlive = true;
    this.isGone = false;
    this.onChange();
  }
  lose() {
    this.isGone ||= this.isAlive;
    this.isAlive = false;
    this.onChange();
    clearTimeout(this.again);
    this.again = setTimeout(() => this.ask(), ANSWER_MS);
  }
  end() {
    clearTimeout(this.answer);
    clearTimeout(this.again);
    this.model.off("change:view", this.onView);
    this.model.off("comm_live_update", this.onLost);
  }
}

// 25 min, 4 min, 1:05: as long as it is far, minutes are enough.
function leftText(seconds) {
  const s = Math.max(0, Math.round(seconds));
  if (s > 120) return `${Math.round(s / 60)} min`;
  return `${Math.floor(s / 60)}:${String(s % 60).padStart(2, "0")} min`;
}

function newCells(row, tag, texts) {
  for (const text of texts) {
    const cell = document.createElement(tag);
    cell.textContent = text;
    if (tag === "th") cell.scope = "row";
    row.append(cell);
  }
}

// What the kernel and the user have said last, for all bars of the pool.
class State {
  constructor(model, onChange) {
    this.model = model;
    this.isSure = false; // "Shut down" wants to be pressed again
    this.isOpen = false; // the details
    this.take();
    this.link = new Link(model, onChange);
  }
  take() {
    if (this.view === this.model.get("view")) return;
    this.view = this.model.get("view");
    this.at = performance.now();
  }
  get left() {
    const left = this.view.idle_left_s;
    if (left == null || !COUNTS.includes(this.view.state) || !this.link.isAlive) return "";
    return `shuts down in ${leftText(left - (performance.now() - this.at) / 1000)} if idle`;
  }
}

function drawHead(bar, state) {
  const { view, link: { isGone } } = state;
  const find = (name) => bar.querySelector(`.gpb-${name}`);
  const colour = isGone ? "#6e7781" : view.colour;
  find("dot").style.color = find("state").style.borderColor = colour;
  write(find("state"), isGone ? "stopped" : view.state);
  const isStale = (fact) => (state.left || isGone) && fact.startsWith("shuts down ");
  const line = view.line.split(" · ").filter((fact) => !isStale(fact));
  write(find("facts"), [...line, state.left].filter(Boolean).join(" · "));
  const reason = find("reason"), notice = isGone ? GONE : view.notice;
  write(reason, notice);
  reason.style.borderLeftColor = isGone ? colour : view.edge;
  reason.style.display = notice ? "" : "none";
  bar.classList.toggle("gpb-over", isGone || view.state === "stopped");
}

function drawDetails(bar, view) {
  const body = bar.querySelector(".gpb-ranks tbody");
  const key = JSON.stringify([view.ranks, view.more]);
  if (!body || bar.dataset.gpbRows === key) return;
  bar.dataset.gpbRows = key;
  body.replaceChildren();
  for (const rank of view.ranks) newCells(body.insertRow(), "td", rank);
  const more = bar.querySelector(".gpb-facts-table tbody");
  more?.replaceChildren();
  for (const [label, text] of more ? view.more : []) {
    const row = more.insertRow();
    newCells(row, "th", [label]);
    newCells(row, "td", [text]);
  }
}

function drawButtons(bar, state, press) {
  const place = bar.querySelector(".gpb-buttons");
  const { link } = state;
  if (!place || !link.isAlive || state.view.state === "stopped") {
    place?.replaceChildren();
    return;
  }
  if (!place.firstChild) {
    newButton(place, "interrupt", () => press("interrupt"));
    newButton(place, "stop", () => press("stop"));
    newHint(place);
  }
  const [interrupt, stop, hint] = place.children;
  const isBusy = state.view.state === "busy";
  write(interrupt, "Interrupt");
  write(stop, state.isSure ? "Shut down: really?" : "Shut down");
  write(hint, link.hint || state.view.note);
  interrupt.disabled = !isBusy || link.pressed !== "";
  interrupt.title = isBusy ? "Interrupt what runs on the ranks" : "Nothing runs on the ranks";
  stop.disabled = link.pressed === "stop";
  stop.title = "End every process of the pool";
}

// The button of a notice, which is another one each second, as the notice counts them: it hears
// when the pointer goes down, not when it comes up again, and keeps the focus.
function drawInterrupt(slot, state, press) {
  const { link } = state;
  if (!link.isAlive) {
    slot.replaceChildren();
    return;
  }
  if (!slot.firstChild) {
    const button = newButton(slot, "interrupt", press);
    button.addEventListener("pointerdown", ({ button: which }) => { if (!which) press(); });
    button.addEventListener("focus", () => { state.isFocused = true; });
    // A moment later it is known whether the user has left it, or it was taken out of the page.
    button.addEventListener("blur", () => {
      setTimeout(() => { if (button.isConnected) state.isFocused = false; });
    });
    newHint(slot);
    write(button, "Interrupt");
    button.title = "Interrupt what runs on the ranks; variables are kept";
    if (state.isFocused) button.focus({ preventScroll: true });
  }
  slot.firstChild.disabled = link.pressed !== "";
  write(slot.lastChild, link.hint);
}

// A bar that is drawn again closes its details: open them again where the user has opened them.
function keepOpen(bar, state) {
  const details = bar.querySelector(".gpb-details");
  if (details.dataset.gpbKnown) return;
  details.dataset.gpbKnown = "yes";
  details.open = state.isOpen;
  details.addEventListener("toggle", () => { state.isOpen = details.open; });
}

// What a press of a button does: "Shut down" asks first while a cell runs.
function presses(state, draw) {
  let sure = 0;
  return (name) => {
    clearTimeout(sure);
    const asks = name === "stop" && state.view.state === "busy" && !state.isSure;
    state.isSure = asks;
    if (asks) sure = setTimeout(() => { state.isSure = false; draw(); }, SURE_MS);
    else state.link.send(name);
    draw();
  };
}

function initialize({ model }) {
  const bars = document.getElementsByClassName(`gpupool-bar-${model.get("uid")}`);
  const place = `gpupool-interrupt-${model.get("uid")}`;
  const slots = document.getElementsByClassName(place);
  const pressBeside = () => {
    state.link.send("interrupt", (data) => String(data["text/html"]).includes(place));
  };
  let frame = 0;
  const draw = () => {
    frame = 0;
    if (!state.link.isAlive && !state.link.isGone) return; // a saved notebook: nobody is there
    for (const bar of bars) {
      drawHead(bar, state);
      drawDetails(bar, state.view);
      drawButtons(bar, state, press);
      keepOpen(bar, state);
    }
    for (const slot of slots) drawInterrupt(slot, state, pressBeside);
  };
  const soon = () => { if (bars.length || slots.length) frame ||= requestAnimationFrame(draw); };
  const state = new State(model, () => { state.take(); soon(); });
  const press = presses(state, draw);
  const page = new MutationObserver(soon);
  page.observe(document.body, { childList: true, subtree: true });
  const clock = setInterval(() => { if (state.left) soon(); }, 1000);
  return () => {
    state.link.end();
    page.disconnect();
    clearInterval(clock);
    cancelAnimationFrame(frame);
    for (const bar of bars) bar.querySelector(".gpb-buttons")?.replaceChildren();
    for (const slot of slots) slot.replaceChildren();
  };
}

export default { initialize };
