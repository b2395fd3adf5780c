// Gives a confusion matrix its switch (counts or shares) and its orders. The table is complete without
// this: where a page takes scripts out, there are no buttons that do nothing.
((begin) => {
  // JupyterLab runs it before what it is about is in the page.
  const look = (times) => {
    const root = document.getElementById("UID");
    if (root) begin(root);
    else if (times) requestAnimationFrame(() => look(times - 1));
  };
  look(100);
})((root) => {
  if (root.dataset.alive) return;  // a page may run a script of its file twice
  root.dataset.alive = "1";
  const table = root.querySelector("table"), body = table.tBodies[0];
  const rows = [...body.rows], foot = table.tFoot.rows[0], head = table.tHead.rows[0];
  // The cells of each line as they are now: later they may stand in another order.
  const cells = new Map([head, foot, ...rows].map((line) => [line, [...line.cells]]));
  const counts = (row) => cells.get(row).slice(1, -1);
  const totals = rows.map((row) => counts(row).reduce((sum, cell) => sum + +cell.dataset.n, 0));
  const share = (cell) => (cell.dataset.s === "" ? -1 : +cell.dataset.s);
  const KEYS = {
    "by class": (row) => +rows[row].dataset.k,
    "by name": (row) => cells.get(rows[row])[0].title,
    "by recall": (row) => share(cells.get(rows[row]).at(-1)),
    "by precision": (row) => share(cells.get(foot)[row + 1]),
    "by samples": (row) => -totals[row],
  };

  function show(values) {
    rows.forEach((row, at) => counts(row).forEach((cell) => {
      const n = +cell.dataset.n, percent = (100 * n) / totals[at];
      const shown = percent >= 10 ? percent.toFixed(0) : percent.toFixed(1);
      cell.textContent = !n ? "" : values === "counts" ? n.toLocaleString("en") : `${shown} %`;
    }));
  }

  // Rows and columns alike, so that what is right stays on the diagonal.
  function sort(by) {
    const key = rows.map((_, row) => KEYS[by](row));
    const compare = (a, b) =>
      typeof key[a] === "string" ? key[a].localeCompare(key[b]) : key[a] - key[b];
    const order = rows.map((_, row) => row).sort((a, b) => compare(a, b) || a - b);
    for (const line of [head, foot, ...rows]) {
      const own = cells.get(line);
      line.replaceChildren(own[0], ...order.map((row) => own[row + 1]), own.at(-1));
    }
    body.replaceChildren(...order.map((row) => rows[row]));
  }

  function choice(label, names, chosen, act) {
    const made = document.createElement("select");
    made.setAttribute("aria-label", label);
    made.style.cssText = "font:inherit;color:inherit;background:transparent;margin-left:10px;"
      + "border:1px solid rgba(128,128,128,.5);border-radius:4px;padding:1px 4px";
    for (const name of names) {
      const option = new Option(name, name, false, name === chosen);
      option.style.color = "initial";
      made.append(option);
    }
    made.addEventListener("change", () => act(made.value));
    root.querySelector("[data-head]").append(made);
  }
  choice("Numbers", ["counts", "shares"], root.dataset.values, show);
  choice("Order", Object.keys(KEYS), root.dataset.sort, sort);
});
