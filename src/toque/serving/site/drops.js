// Files that are dropped anywhere on the page.

let dropped = []; // files for the view for a new run

/** Call `work` with dropped files, which the browser would open. Return a function that ends this. */
export function acceptDrops(work) {
  const stopper = new AbortController();
  const { signal } = stopper;
  for (const kind of ["dragenter", "dragover", "drop"]) {
    window.addEventListener(kind, (event) => event.preventDefault(), { signal });
  }
  window.addEventListener("drop", ({ dataTransfer: { files } }) => files.length && work([...files]), { signal });
  return () => stopper.abort();
}

/** Open the view for a new run with files that were dropped on another view. */
export function openWith(files) {
  dropped = files;
  location.hash = "#/new";
}

/** Return the files that were dropped on another view, once. */
export function takeDropped() {
  const files = dropped;
  dropped = [];
  return files;
}
