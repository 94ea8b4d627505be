// The page: a request is typed, one or two models write, and what they wrote is kept.

import { Chips } from "./chips.js";
import { compose, recall, titleOf } from "./compose.js";
import { element, say, stepper } from "./dom.js";
import { entries, forget, keep } from "./history.js";
import { offered } from "./models.js";
import { Failure, useToken } from "./requests.js";
import { Sheet } from "./sheet.js";

const IDEAS = [
  ["Lentil Soup", "red lentils, carrots, cumin, lemon juice"],
  ["Fried Rice with Peas", "rice, eggs, peas, garlic, soy sauce"],
  ["Baked Sweet Potatoes", "sweet potatoes, olive oil, sour cream, salsa"],
];
const FORMS = {
  pairs: "This model was trained on prompts of its maker's own: what you type goes to it as it is.",
  documents: "This model goes on with the text you type: it was trained on whole texts.",
  gaps: "This model was trained to fill gaps in texts, and writes no recipes yet.",
};

const at = (id) => document.getElementById(id);
const form = at("request");
const narrow = matchMedia("(max-width: 56rem)"); // as in the style sheets
const ingredients = new Chips(at("ingredients"));
const avoid = new Chips(at("avoid"));
let writing = null; // the AbortController of what is being written
let models = []; // as the server describes them

async function start() {
  stepper(at("servings"));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (writing) writing.abort();
    else void cook(requested());
  });
  document.addEventListener("keydown", (event) => event.key === "Escape" && writing?.abort());
  at("token").addEventListener("change", () => {
    useToken(at("token").value);
    void greet();
  });
  at("model").addEventListener("change", explain);
  at("forget").addEventListener("click", () => {
    forget();
    showHistory();
  });
  at("more").open = !narrow.matches;
  at("ideas").replaceChildren(...IDEAS.map(idea));
  showHistory();
  await greet();
}

/** Ask which models there are. */
async function greet() {
  models = (await offered(at, problem)) ?? models;
  if (models.length) explain();
}

/** Say what a model that was not trained on recipes will make of a wish. */
function explain() {
  const form = models.find(({ name }) => name === at("model").value)?.form ?? "recipes";
  say(at("model-hint"), FORMS[form] ?? "");
}

function requested() {
  const asked = [at("model").value, at("second").value];
  return {
    dish: at("dish").value.trim(),
    style: at("style").value.trim(),
    ingredients: ingredients.values,
    avoid: avoid.values,
    servings: Number(at("servings").value),
    temperature: Number(at("temperature").value),
    models: [...new Set(asked.filter(Boolean))],
  };
}

/** Write a recipe with each model asked, side by side, and keep what came of it. */
async function cook(request) {
  writing = new AbortController();
  const { signal } = writing;
  const sheets = lay(request, request.models);
  for (const sheet of sheets) sheet.restart("Reading the request …");
  say(at("problem"), "");
  at("go").textContent = "Stop";
  at("status").textContent = `Writing ${titleOf(request)}.`;
  if (narrow.matches) at("recipes").scrollIntoView();
  try {
    await Promise.all(sheets.map((sheet) => attempt(sheet, () => compose(sheet, request, signal))));
  } finally {
    writing = null;
    at("go").textContent = "Write the recipe";
  }
  const done = sheets.filter((sheet) => sheet.text);
  at("status").textContent = done.map((sheet) => sheet.summary).join(" ");
  if (done.length) keep(request, done.map(({ model, text }) => ({ model, text })));
  showHistory();
}

async function attempt(sheet, work) {
  try {
    await work();
  } catch (failure) {
    sheet.end();
    if (failure.name === "AbortError") sheet.notice("Stopped.");
    else problem(failure, sheet);
  }
}

/** Sheets for the models, empty, in place of those before. */
function lay(request, names) {
  const again = () => writing ?? void cook(request);
  const sheets = names.map(
    (model) => new Sheet({ template: at("sheet"), title: titleOf(request), model, request, onAgain: again }),
  );
  at("empty").hidden = true;
  at("sheets").replaceChildren(...sheets.map(({ root }) => root));
  at("sheets").classList.toggle("side-by-side", sheets.length > 1);
  return sheets;
}

/** Say what went wrong: on the recipe's own sheet, or under the form when there is none. */
function problem(failure, sheet = null) {
  if (!(failure instanceof Failure)) throw failure;
  if (failure.status === 401) at("token-field").hidden = false;
  if (sheet?.text) sheet.notice(failure.message);
  else {
    sheet?.root.remove();
    say(at("problem"), failure.message);
  }
  if (!at("sheets").children.length) at("empty").hidden = false;
}

function idea([dish, foods]) {
  const button = element("button", { type: "button" }, element("strong", {}, dish), ` ${foods}`);
  button.addEventListener("click", () => {
    fill({ dish, style: "", ingredients: foods.split(", "), avoid: [], servings: 4 });
    form.requestSubmit();
  });
  return element("li", {}, button);
}

function fill(request) {
  for (const name of ["dish", "style", "servings", "temperature"]) {
    if (name in request) at(name).value = request[name];
  }
  ingredients.values = request.ingredients;
  avoid.values = request.avoid;
}

function showHistory() {
  const kept = entries();
  at("history").hidden = !kept.length;
  at("history").querySelector("ol").replaceChildren(...kept.map(earlier));
}

function earlier(entry) {
  const when = new Date(entry.when).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
  const name = titleOf(entry.request);
  const by = entry.recipes.map(({ model }) => model).join(", ");
  const open = element("button", { type: "button" }, name, element("small", {}, `${when}, ${by}`));
  open.addEventListener("click", () => void reopen(entry));
  const drop = element("button", { type: "button", className: "quiet", ariaLabel: `Forget ${name}` }, "×");
  drop.addEventListener("click", () => {
    forget(entry.id);
    showHistory();
  });
  return element("li", {}, open, drop);
}

/** Show an earlier recipe again. */
async function reopen({ request, recipes }) {
  if (writing) return;
  fill(request);
  const sheets = lay(request, recipes.map(({ model }) => model));
  at("recipes").focus();
  await Promise.all(
    sheets.map((sheet, i) => attempt(sheet, () => recall(sheet, request, recipes[i].text))),
  );
}

void start();
