// The live page: asks the server what is new, and puts what changed where it belongs.

import { become } from "./morph.js";
import { tokenHeader, useToken } from "./stream.js";

const AGAIN_MS = 2000; // after the server could not be reached
const at = (id) => document.getElementById(id);
let listening = null; // the AbortController of the requests
const shown = {}; // HTML by the id of its element

function start() {
  document.addEventListener("click", (event) => {
    const name = event.target.closest("[data-show]")?.dataset.show;
    if (name !== undefined) choose((chosen) => chosen.set("show", name));
  });
  document.addEventListener("change", (event) => {
    if (event.target.dataset?.over !== undefined) choose(drawn);
  });
  at("token-field").addEventListener("submit", (event) => {
    event.preventDefault();
    useToken(at("token").value);
    void listen();
  });
  window.addEventListener("popstate", () => void listen());
  void listen();
}

/** The runs whose box is checked; an empty name stands for none. */
function drawn(chosen) {
  const names = [...document.querySelectorAll("[data-over]:checked")].map((box) => box.dataset.over);
  chosen.delete("over");
  for (const name of names.length ? names : [""]) chosen.append("over", name);
}

/** Change what is shown; the address says it, so that it can be kept and sent. */
function choose(change) {
  const chosen = new URLSearchParams(location.search);
  change(chosen);
  history.pushState(null, "", `?${chosen}`);
  shown.runs = undefined; // a box that may not be checked is unchecked again
  void listen();
}

/** Ask again and again until another choice, and also when the connection breaks. */
async function listen() {
  listening?.abort();
  const mine = new AbortController();
  listening = mine;
  for (let since = ""; !mine.signal.aborted; ) {
    let pause = AGAIN_MS;
    try {
      const query = new URLSearchParams(location.search);
      query.set("since", since);
      const answer = await fetch(`api/page?${query}`, { headers: tokenHeader(), signal: mine.signal });
      at("token-field").hidden = answer.status !== 401;
      if (answer.status === 401) {
        problem("This server asks for its token, the one given to `toque watch --token`.");
        return;
      }
      if (!answer.ok) throw new Error(`The server answered with ${answer.status}.`);
      const news = await answer.json();
      if (mine.signal.aborted) return;
      problem("");
      show(news);
      since = news.version;
      pause = 1000 * news.pause_seconds;
    } catch {
      if (mine.signal.aborted) return;
      problem("The server cannot be reached, so these metrics stand still. Is `toque watch` still running?");
    }
    await new Promise((resolve) => setTimeout(resolve, pause));
  }
}

function show({ parts = {}, title, said }) {
  const { over, show: chosen } = document.activeElement.dataset;
  for (const [id, html] of Object.entries(parts)) {
    if (shown[id] !== html) become(at(id), html);
    shown[id] = html;
  }
  // Rows change places when a run ends; the focus goes with its run.
  if (over !== undefined) document.querySelector(`[data-over="${CSS.escape(over)}"]`)?.focus();
  if (chosen !== undefined) document.querySelector(`[data-show="${CSS.escape(chosen)}"]`)?.focus();
  if (title !== undefined) document.title = title;
  if (said !== undefined) tell(said);
}

let state = "";

/** Say a state aloud where it is another one; a higher step alone is none. */
function tell(said) {
  const now = said.replace(/[\d,.:]+/g, "");
  if (now !== state) at("said").textContent = said;
  state = now;
}

function problem(text) {
  at("problem").hidden = !text;
  at("problem").textContent = text;
  document.body.classList.toggle("stale", Boolean(text));
}

start();
