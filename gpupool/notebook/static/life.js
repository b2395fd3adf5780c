// The life of a monitor beside its curves: the kernel that may end, the notebook's interrupt, and clocks
// that tick between messages. It stands before monitor.js in the same module.
//
// JupyterLab and Notebook 7 let a widget reach its notebook; other front ends do not, and there
// none of this happens but the ticking.

const WIDGET = "application/vnd.jupyter.widget-view+json";
const OVER = ["finished", "stopped", "failed", "ended"];
const ENDED = ["dead", "terminating", "restarting", "autorestarting"];
const ANSWER_MS = 1000;
const BUSY = "The kernel is busy. Press ■ (Interrupt) in the toolbar instead.";
const INTERRUPTED = "The kernel was busy, so the notebook's ■ (Interrupt) was pressed.";

// Only what changes: a live region that is rewritten is read aloud again.
function write(target, words) {
  if (target && target.textContent !== words) target.textContent = words;
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

// Calls `act(cell, index)` for each output of a model's notebook whose data `isIt`.
function eachOutput(model, isIt, act) {
  for (const cell of contextOf(model)?.model?.cells ?? []) {
    for (let index = 0; index < (cell.outputs?.length ?? 0); index++) {
      if (isIt(cell.outputs.get(index).data ?? {})) act(cell, index);
    }
  }
}

// Whether the data of an output are the widget of this model.
function isWidget(model) {
  return (data) => data[WIDGET]?.model_id === model.get("lost").model_id;
}

// Puts a still picture in this widget's place in the notebook's own outputs. The kernel does so
// too at the end, but not in a page that was loaded again: that has forgotten the display, and
// would save a widget that nobody can show. A kernel that was killed cannot do so at all.
function leaveStill(model, { data }) {
  if (!data) return;
  eachOutput(model, isWidget(model), (cell, index) => {
    cell.outputs.set(index, { output_type: "display_data", data, metadata: {} });
  });
}

// Whether the cell that shows an output is the one that runs: only that one may be interrupted.
function isRunning(model, isIt) {
  let found = false;
  // its number comes when it is over, and a cell that waits for its turn has no outputs
  eachOutput(model, isIt, (cell) => { found ||= cell.executionCount == null; });
  return found;
}

// Presses the notebook's own stop button, which every kernel hears: false where that cannot be.
function interruptCell(model, isIt) {
  const kernel = kernelOf(model);
  if (!kernel || !isRunning(model, isIt)) return false;
  kernel.interrupt().catch(() => {});
  return true;
}

// As `duration` in gpupool/core/formatting.py.
function durationText(seconds) {
  if (seconds < 9.95) return `${seconds.toFixed(1)} s`;
  const s = Math.round(seconds);
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${s % 60} s`;
  return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
}

// What the view says of time, as it is now: {Elapsed, "Time left", remaining}, {} while it stands.
function timesOf({ clock, remaining }, since_s) {
  if (!clock?.running) return {};
  const times = { Elapsed: durationText(clock.elapsed_s + since_s) };
  if (clock.remaining_s === null) return times;
  const left = Math.max(0, clock.remaining_s - since_s);
  const about = left < 10 ? "less than 10 s" : `about ${durationText(left)}`;
  return {
    ...times, "Time left": durationText(left),
    remaining: remaining.replace(/(about .*|less than 10 s) left$/, `${about} left`),
  };
}
