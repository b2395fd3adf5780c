// The Stop button of a loop of the user's: the browser's half of gpupool/notebook/own_loop/stop_button.py.
//
// The picture is HTML that is drawn anew twice a second (loop_picture.py). Each time this puts the
// same button into it again, before the page is painted: a press that began before ends in it.

class Stop {
  constructor(press) {
    this.box = document.createElement("span");
    this.box.className = "gpb-buttons";
    this.press = () => { if (!this.button.disabled) press(); };
    this.button = newButton(this.box, "stop", this.press);
    this.button.title = "End the loop after its next report";
    this.hint = newHint(this.box);
    this.isDown = this.hasFocus = false;
    this.listen();
  }
  // A click is lost where the button was taken out of the page between its press and its release.
  listen() {
    const { button } = this;
    button.addEventListener("focus", () => { this.hasFocus = true; });
    button.addEventListener("blur", (event) => { if (event.relatedTarget) this.hasFocus = false; });
    button.addEventListener("keydown", (event) => { if (event.key === " ") this.press(); });
    this.listening = new AbortController();
    const options = { capture: true, signal: this.listening.signal };
    document.addEventListener("pointerdown", (event) => {
      this.isDown = event.button === 0 && event.target === button;
      this.hasFocus = this.isDown;
    }, options);
    document.addEventListener("pointerup", (event) => {
      if (this.isDown && event.target === button) this.press();
      this.isDown = false;
    }, options);
  }
  put(place) {
    if (place.firstChild === this.box) return;
    place.replaceChildren(this.box);
    if (this.hasFocus) this.button.focus({ preventScroll: true });
  }
  draw(isStopping, hint) {
    write(this.button, isStopping ? "Stopping…" : "Stop");
    write(this.hint, hint);
    this.button.disabled = isStopping;
  }
  end() {
    this.listening.abort();
    this.box.remove();
  }
}

function initialize({ model }) {
  const uid = model.get("uid"), stops = [];
  const places = document.getElementsByClassName(`gpl-stop-${uid}`);
  const hints = document.getElementsByClassName(`gpl-hint-${uid}`);
  const draw = () => {
    for (const hint of hints) hint.hidden = link.isAlive;
    for (const [n, place] of [...places].entries()) {
      if (!link.isAlive) {
        if (place.firstChild) place.replaceChildren();
        continue;
      }
      stops[n] ??= new Stop(() => link.send("stop"));
      stops[n].put(place);
      stops[n].draw(link.pressed !== "" || model.get("view").is_stopping, link.hint);
    }
  };
  const link = new Link(model, () => draw());
  const page = new MutationObserver(draw);
  page.observe(document.body, { childList: true, subtree: true });
  return () => {
    link.end();
    page.disconnect();
    for (const stop of stops) stop.end();
  };
}

export default { initialize };
