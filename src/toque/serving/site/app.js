// The application: shows the view that the address names, such as #/runs/my or #/use/my.

import { at, element, say } from "./dom.js";
import { login } from "./requests.js";

const VIEWS = document.body.dataset.views.split(" ");
const fragments = {}; // HTML of each view that was loaded
let leave = () => {}; // stops the work of the shown view
let opened = 0; // number of the newest request to open a view

/** The view, the names after it, and the query of the address. */
function route() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const [name, ...names] = path.split("/").map(decodeURIComponent);
  const view = VIEWS.includes(name) ? name : VIEWS[0];
  return { view, names: view === name ? names : [], query: new URLSearchParams(query) };
}

async function open() {
  const number = ++opened;
  const { view, names, query } = route();
  let module;
  try {
    [fragments[view], module] = await Promise.all([fragments[view] ?? fragment(view), import(`./${view}.js`)]);
  } catch {
    if (number === opened) showFailure();
    return;
  }
  if (number !== opened) return; // another view was opened meanwhile
  leave();
  leave = () => {};
  at("view").innerHTML = fragments[view];
  at("token-form").hidden = true;
  at("view").hidden = false;
  for (const link of document.querySelectorAll(".masthead li a")) {
    if (link.hash === `#/${view}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  say(at("served"), "");
  document.title = "Toque";
  leave = module.open({ names, query }) ?? leave;
  if (number > 1) at("view").focus(); // a screen reader continues at the new view
}

async function fragment(view) {
  const answer = await fetch(`page/${view}.html`);
  if (!answer.ok) throw new Error(answer.statusText);
  return answer.text();
}

function showFailure() {
  const again = element("button", { type: "button" }, "Try again");
  again.addEventListener("click", () => void open());
  const text = "The server cannot be reached, so this view cannot be loaded. ";
  at("view").replaceChildren(element("p", { className: "problem", role: "alert" }, text, again));
}

/** Ask for the token of the server. A request that was refused without it sends this event. */
function askForToken() {
  at("view").hidden = true;
  at("token-form").hidden = false;
  at("token").focus();
}

document.addEventListener("token-needed", askForToken);
at("token-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  try {
    await login(at("token").value);
  } catch (failure) {
    say(at("token-problem"), failure.message);
    return;
  }
  at("token").value = "";
  void open();
});
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address names the view
  at("view").focus();
});
window.addEventListener("hashchange", () => void open());
void open();
