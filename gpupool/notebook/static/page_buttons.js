// What models without a view share that put buttons into HTML of the notebook: the browser's half
// of gpupool/notebook/page/page_buttons.py. It stands before that of the model in the same module.
//
// Buttons are there only while a kernel answers: a saved notebook has none.

const BUSY = "kernel is busy: press the stop button of the notebook";
const ANSWER_MS = 1000;

function write(element, text) {
  if (element && element.textContent !== text) element.textContent = text;
}

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
  send(name) {
    this.pressed = name;
    this.hint = "";
    // what runs as far as this page knows: a press that is heard late must not meet what comes next
    this.model.send({ press: name, meant: this.model.get("view").meant });
    clearTimeout(this.answer);
    this.answer = setTimeout(() => {
      if (this.pressed) this.hint = BUSY;
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
