// Earlier recipes, stored only in this browser.

const KEY = "toque.history";
const MAX_ENTRIES = 50;

/** The entries, the newest first: {id, when, request, recipes: [{model, text}]}. */
export function entries() {
  try {
    const stored = JSON.parse(localStorage.getItem(KEY) ?? "[]");
    return Array.isArray(stored) ? stored.filter((entry) => entry?.request && entry?.recipes) : [];
  } catch {
    return []; // storage is off, or another program wrote there
  }
}

/** Store a request with its recipes. */
export function keep(request, recipes) {
  const entry = { id: crypto.randomUUID?.() ?? String(Math.random()), when: Date.now(), request, recipes };
  store([entry, ...entries()].slice(0, MAX_ENTRIES));
}

/** Delete one entry, or all entries. */
export function forget(id = null) {
  store(id === null ? [] : entries().filter((entry) => entry.id !== id));
}

function store(list) {
  try {
    localStorage.setItem(KEY, JSON.stringify(list));
  } catch {
    // Storage is off or full. The recipe stays on the page.
  }
}
