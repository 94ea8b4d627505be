// The page of a model that runs in the browser. A worker computes, so that the page stays usable.

import { Chips } from "./chips.js";
import { at, copy, onEscape, say, setItems } from "./dom.js";
import { partsOf, plainText } from "./recipe_text.js";

const LOST = "The model stopped. Reload the page. If this happens again, the device may have too little memory.";

const settings = await (await fetch("settings.json")).json();
const ingredients = at("ingredients") && new Chips(at("ingredients"));
const goLabel = at("go").textContent;
const worker = new Worker("writer.js", { type: "module" });
let text = "";
let isWriting = false;
let hasOnlyDish = false;

worker.addEventListener("message", ({ data }) => handlers[data.kind](data));
worker.addEventListener("error", () => fail(LOST));
at("request").addEventListener("submit", (event) => {
  event.preventDefault();
  if (isWriting) worker.postMessage({ kind: "stop" });
  else write();
});
onEscape(() => worker.postMessage({ kind: "stop" }));
at("copy").addEventListener("click", () => void copy(plainText(at("title").textContent, text)));
at("print").addEventListener("click", () => window.print());
void keepOffline();

const handlers = {
  loaded({ share }) {
    at("loaded").value = share;
  },
  ready({ differs }) {
    at("loaded").hidden = true;
    at("go").disabled = false;
    say(at("state"), "The model is ready.");
    if (differs) {
      say(at("problem"), "This browser divides texts into other tokens than the model was trained on, so its texts may be poor. Try another browser.");
    }
  },
  text(message) {
    text = message.text;
    at("waiting").hidden = true;
    show();
  },
  end({ tokens, seconds, isCut, isStopped }) {
    finish();
    at("actions").hidden = !text;
    say(at("speed"), `${tokens} tokens in ${seconds.toFixed(1)} s (${(tokens / seconds).toFixed(1)} per second)`);
    if (isStopped) say(at("notice"), "Stopped.");
    else if (isCut) say(at("notice"), "The text reached the maximum length of the model, so it may be incomplete.");
    else if (hasOnlyDish) say(at("notice"), "Recipes are better if you name some ingredients.");
  },
  problem({ message }) {
    fail(message);
  },
};

function write() {
  const dish = at("dish").value.trim();
  const prompt = promptFor(dish);
  hasOnlyDish = Boolean(settings.recipes) && !ingredients.values.length;
  text = "";
  isWriting = true;
  at("go").textContent = "Stop";
  at("empty").hidden = true;
  at("sheet").hidden = false;
  at("sheet").setAttribute("aria-busy", "true");
  at("waiting").hidden = false;
  at("actions").hidden = true;
  say(at("notice"), "");
  say(at("problem"), "");
  say(at("title"), settings.recipes ? dish : "");
  show();
  if (matchMedia("(max-width: 56rem)").matches) at("recipes").scrollIntoView();
  worker.postMessage({ kind: "write", prompt, temperature: Number(at("temperature").value) });
}

/** The prompt in the form that the model was trained on. */
function promptFor(dish) {
  if (!settings.recipes) return dish;
  const distinct = new Map(ingredients.values.map((name) => [name.toLowerCase(), name]));
  const names = [...distinct.values()].slice(0, settings.recipes.max_ingredients);
  return `${settings.recipes.asks} ${dish}${names.length ? settings.recipes.using + names.join(", ") : ""}`;
}

function show() {
  const { ingredients, steps, loose } = settings.recipes ? partsOf(text) : { ingredients: [], steps: [], loose: [text] };
  for (const [name, items] of Object.entries({ ingredients, steps })) {
    const part = at(`${name}-part`);
    setItems(part.querySelector("ul, ol"), items);
    part.hidden = !items.length;
  }
  say(at("loose"), loose.join("\n"));
}

function finish() {
  isWriting = false;
  at("go").textContent = goLabel;
  at("sheet").setAttribute("aria-busy", "false");
  at("waiting").hidden = true;
}

function fail(message) {
  finish();
  at("loaded").hidden = true;
  say(at("state"), "");
  say(at("problem"), message);
}

/** Store the files of the page in the browser, so that it opens without a network. */
async function keepOffline() {
  if (!navigator.serviceWorker) return; // the address is not secure
  await navigator.serviceWorker.register("service.js");
  await navigator.serviceWorker.ready;
  document.documentElement.dataset.offline = "ready";
}
