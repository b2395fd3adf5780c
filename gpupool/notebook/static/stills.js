// Plots from the state that a page keeps, in the place of the images of pictures that stay. It stands
// after plots.js: alone in the script beside such an image, and before live.js.

// Folds what is around plots as the reader has folded it before, in this cell.
function completeFrame(frame, course) {
  const { open } = keptOf(frame, course.view);
  for (const section of frame.querySelectorAll("details")) {
    const name = nameOfSection(section);
    section.open = open?.[name] ?? (section.open && isShown(name));
  }
  keepFolds(frame, course);
}

// Puts plots in the place of each picture of a page that has its state beside it. Each script of a page
// does so with all that are there and were not drawn: where it stands itself it cannot know everywhere.
function exploreStills(style) {
  for (const data of document.querySelectorAll("script.gpupool-state")) {
    const host = data.parentElement, frame = host.closest(".gpm-frame");
    if (host.gpupoolPlots) continue;  // not in the markup: a page that is saved and opened draws again
    const course = JSON.parse(data.textContent), root = element("div", "gpm-plots");
    let next = 0;
    const soon = () => { next ||= requestAnimationFrame(() => { next = 0; plots.paint(); }); };
    const plots = explorer(root, course, soon, keptOf(host, course.view).chosen);
    plots.paint();  // what fails does so while the image is still there
    root.gpupoolPlots = plots;
    root.append(element("style", "", style), data);
    host.replaceWith(root);
    watchPage(root, soon);  // draws when it has its size
    if (frame) completeFrame(frame, course);
  }
}
