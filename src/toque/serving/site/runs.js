// The live view of runs: requests the changes from the server, and updates the page.

import { Controls } from "./controls.js";
import { at, say } from "./dom.js";
import { encodePath } from "./format.js";
import { morph } from "./morph.js";
import { repeat } from "./poll.js";
import { failureOf } from "./requests.js";

const RETRY_MS = 2000; // pause after a failed request

/** Open the view for the run in `names`, or for the first run. Return a function that stops it. */
export function open({ names, query }) {
  let controls = null;
  /** Show the actions for the shown run, which changes when another row of the table is chosen. */
  const follow = (name) => {
    if (controls?.name === name) return;
    controls?.stop();
    at("controls").replaceChildren();
    controls = new Controls(name);
  };
  if (names.length) follow(names.join("/"));
  const view = new LiveView(names.join("/"), query.getAll("over"), follow);
  return () => {
    view.stop();
    controls?.stop();
  };
}

class LiveView {
  #shown = {}; // HTML of each element by its id
  #state = ""; // the last announced state
  #stopper = new AbortController();
  #request = new AbortController();
  #version = ""; // version of the shown contents
  #wake;

  /**
   * `over` has the names of the runs in the plots. Empty means the server's choice. `follow` receives
   * the name of the shown run.
   */
  constructor(name, over, follow) {
    this.name = name;
    this.over = over;
    this.follow = follow;
    const { signal } = this.#stopper;
    document.addEventListener("click", (event) => this.#onClick(event), { signal });
    document.addEventListener("change", (event) => this.#onChange(event), { signal });
    this.#wake = repeat(() => this.#update(), signal);
  }

  stop() {
    this.#stopper.abort();
    document.body.classList.remove("stale");
  }

  #onClick(event) {
    const name = event.target.closest("[data-show]")?.dataset.show;
    if (name !== undefined) this.#goTo(name, this.over);
  }

  /** Plot the runs with a checked box. An empty name means no run. */
  #onChange(event) {
    if (event.target.dataset?.over === undefined) return;
    const names = [...document.querySelectorAll("[data-over]:checked")].map((box) => box.dataset.over);
    this.#goTo(this.name, names.length ? names : [""]);
  }

  /** Change the shown run and the plotted runs. The address has both, so a reader can share it. */
  #goTo(name, over) {
    this.name = name;
    this.over = over;
    const path = encodePath(name);
    const query = over.length ? `?${new URLSearchParams(over.map((other) => ["over", other]))}` : "";
    history.pushState(null, "", `#/runs/${path}${query}`);
    this.#shown.runs = undefined; // restores a box that the server does not check
    this.#version = "";
    this.#request.abort();
    this.#wake();
  }

  /** Request the changes and show them. Return the pause before the next request, or null to stop. */
  async #update() {
    this.#request = new AbortController();
    const signal = AbortSignal.any([this.#stopper.signal, this.#request.signal]);
    const query = new URLSearchParams(this.over.map((name) => ["over", name]));
    if (this.name) query.set("show", this.name);
    query.set("since", this.#version);
    try {
      const answer = await fetch(`api/page?${query}`, { signal });
      if (answer.status === 401) {
        await failureOf(answer); // asks for the token
        return null;
      }
      if (!answer.ok) throw new Error(`The server answered with status ${answer.status}.`);
      const page = await answer.json();
      if (signal.aborted) return 0;
      this.#report("");
      this.#show(page);
      this.#version = page.version;
      return 1000 * page.pause_seconds;
    } catch {
      if (signal.aborted) return 0; // another run was chosen, or the view was closed
      this.#report("The server cannot be reached, so this page is not updated. Check that its command still runs.");
      return RETRY_MS;
    }
  }

  #show({ parts = {}, title, state, name }) {
    if (name && (!this.name || name === this.name)) this.follow(name); // a new run may not be found yet
    const { over, show } = document.activeElement.dataset;
    for (const [id, html] of Object.entries(parts)) {
      if (this.#shown[id] !== html) morph(at(id), html);
      this.#shown[id] = html;
    }
    // A row moves when its run ends. The focus moves with it.
    if (over !== undefined) document.querySelector(`[data-over="${CSS.escape(over)}"]`)?.focus();
    if (show !== undefined) document.querySelector(`[data-show="${CSS.escape(show)}"]`)?.focus();
    if (title !== undefined) document.title = title;
    if (state !== undefined) this.#announce(state);
  }

  /** Announce a state to screen readers, but not if only its numbers have changed. */
  #announce(state) {
    const words = state.replace(/[\d,.:]+/g, "");
    if (words !== this.#state) at("status").textContent = state;
    this.#state = words;
  }

  #report(text) {
    say(at("problem"), text);
    document.body.classList.toggle("stale", Boolean(text));
  }
}
