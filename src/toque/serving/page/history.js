// Recipes of earlier, kept in this browser alone.

const KEY = "toque.history";
const MOST = 50;

/** The entries, the newest first: {id, when, request, recipes: [{model, text}]}. */
export function entries() {
  try {
    const kept = JSON.parse(localStorage.getItem(KEY) ?? "[]");
    return Array.isArray(kept) ? kept.filter((entry) => entry?.request && entry?.recipes) : [];
  } catch {
    return []; // storage is off, or holds what another program wrote
  }
}

/** Keep a request with what was written for it. */
export function keep(request, recipes) {
  const entry = { id: crypto.randomUUID?.() ?? String(Math.random()), when: Date.now(), request, recipes };
  store([entry, ...entries()].slice(0, MOST));
}

/** Forget one entry, or all. */
export function forget(id = null) {
  store(id === null ? [] : entries().filter((entry) => entry.id !== id));
}

function store(kept) {
  try {
    localStorage.setItem(KEY, JSON.stringify(kept));
  } catch {
    // Storage is off or full: the recipe on the page is none the worse.
  }
}
