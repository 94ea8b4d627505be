// The recipe view: one or two models write a recipe for a request. The browser stores the recipes.

import { Chips } from "./chips.js";
import { compose, recall, titleOf } from "./compose.js";
import { at, button, element, onEscape, say, stepper } from "./dom.js";
import { entries, forget, keep } from "./history.js";
import { chosenModels, loadModels } from "./models.js";
import { report } from "./requests.js";
import { Sheet } from "./sheet.js";

const IDEAS = [
  ["Lentil Soup", "red lentils, carrots, cumin, lemon juice"],
  ["Fried Rice with Peas", "rice, eggs, peas, garlic, soy sauce"],
  ["Baked Sweet Potatoes", "sweet potatoes, olive oil, sour cream, salsa"],
];
const HINTS = {
  pairs: "This model was trained on other prompts. It receives your text unchanged.",
  documents: "This model was trained on entire texts. It continues the text that you enter.",
  gaps: "This model was trained to fill gaps in texts. It does not write recipes yet.",
};
const narrow = matchMedia("(max-width: 56rem)"); // as in the style sheet

let ingredients;
let avoid;
let writing; // AbortController of the running request, or null
let models; // descriptions from the server

/** Open the view. `names` may have the name of a model. Return a function that stops its work. */
export function open({ names }) {
  ingredients = new Chips(at("ingredients"));
  avoid = new Chips(at("avoid"));
  writing = null;
  models = [];
  stepper(at("servings"));
  at("request").addEventListener("submit", (event) => {
    event.preventDefault();
    if (writing) writing.abort();
    else void cook(request());
  });
  const ignoreEscape = onEscape(() => writing?.abort());
  at("model").addEventListener("change", explain);
  at("forget").addEventListener("click", () => {
    forget();
    showHistory();
  });
  at("more").open = !narrow.matches;
  at("ideas").replaceChildren(...IDEAS.map(idea));
  showHistory();
  void loadModels(names[0]).then((loaded) => {
    models = loaded;
    explain();
  });
  return () => {
    writing?.abort();
    ignoreEscape();
  };
}

/** Describe what a model does with the request if it was not trained on recipes. */
function explain() {
  const form = models.find(({ name }) => name === at("model").value)?.form;
  say(at("model-hint"), HINTS[form] ?? "");
}

function request() {
  return {
    dish: at("dish").value.trim(),
    style: at("style").value.trim(),
    ingredients: ingredients.values,
    avoid: avoid.values,
    servings: Number(at("servings").value),
    temperature: Number(at("temperature").value),
    models: chosenModels(),
  };
}

/** Write a recipe with each chosen model, side by side, and store the result. */
async function cook(request) {
  writing = new AbortController();
  const { signal } = writing;
  const sheets = showSheets(request, request.models);
  for (const sheet of sheets) sheet.restart("Waiting for the model …");
  say(at("problem"), "");
  at("go").textContent = "Stop";
  at("status").textContent = `Writing ${titleOf(request)}.`;
  if (narrow.matches) at("recipes").scrollIntoView();
  try {
    await Promise.all(sheets.map((sheet) => attempt(sheet, () => compose(sheet, request, signal))));
  } finally {
    writing = null;
    if (at("go")) at("go").textContent = "Write the recipe"; // unless another view was opened
  }
  const done = sheets.filter((sheet) => sheet.text);
  if (done.length) keep(request, done.map(({ model, text }) => ({ model, text })));
  if (!at("history")) return;
  at("status").textContent = done.map((sheet) => sheet.summary).join(" ");
  showHistory();
}

async function attempt(sheet, work) {
  try {
    await work();
  } catch (failure) {
    sheet.end();
    if (failure.name === "AbortError") sheet.notice("Stopped.");
    else showProblem(failure, sheet);
  }
}

/** Replace the sheets by an empty sheet per model. */
function showSheets(request, names) {
  const again = () => writing ?? void cook(request);
  const sheets = names.map(
    (model) => new Sheet({ template: at("sheet"), title: titleOf(request), model, request, onAgain: again }),
  );
  at("empty").hidden = true;
  at("sheets").replaceChildren(...sheets.map(({ root }) => root));
  at("sheets").classList.toggle("side-by-side", sheets.length > 1);
  return sheets;
}

/** Show an error on the sheet with its text, or below the form if no text has arrived. */
function showProblem(failure, sheet) {
  report(failure, (text) => {
    if (sheet.text) sheet.notice(text);
    else {
      sheet.root.remove();
      say(at("problem"), text);
    }
    if (!at("sheets").children.length) at("empty").hidden = false;
  });
}

function idea([dish, foods]) {
  const example = button(element("strong", {}, dish), () => {
    fill({ dish, style: "", ingredients: foods.split(", "), avoid: [], servings: 4 });
    at("request").requestSubmit();
  });
  example.append(` ${foods}`);
  return element("li", {}, example);
}

function fill(request) {
  for (const name of ["dish", "style", "servings", "temperature"]) {
    if (name in request) at(name).value = request[name];
  }
  ingredients.values = request.ingredients;
  avoid.values = request.avoid;
}

function showHistory() {
  const stored = entries();
  at("history").hidden = !stored.length;
  at("history").querySelector("ol").replaceChildren(...stored.map(historyItem));
}

function historyItem(entry) {
  const time = new Date(entry.when).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
  const name = titleOf(entry.request);
  const by = entry.recipes.map(({ model }) => model).join(", ");
  const show = button(name, () => void reopen(entry));
  show.append(element("small", {}, `${time}, ${by}`));
  const drop = () => {
    forget(entry.id);
    showHistory();
  };
  return element("li", {}, show, button("×", drop, { className: "quiet", ariaLabel: `Delete ${name}` }));
}

/** Show an earlier recipe again. */
async function reopen({ request, recipes }) {
  if (writing) return;
  fill(request);
  const sheets = showSheets(request, recipes.map(({ model }) => model));
  at("recipes").focus();
  await Promise.all(
    sheets.map((sheet, i) => attempt(sheet, () => recall(sheet, request, recipes[i].text))),
  );
}
