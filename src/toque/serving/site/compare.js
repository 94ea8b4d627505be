// The view for comparisons: two models write for a prompt, and a person chooses without their names.

import { at, element, say } from "./dom.js";
import { loadModels, openModel, randomSeed } from "./models.js";
import { ask, report, write } from "./requests.js";

const percent = new Intl.NumberFormat("en", { style: "percent" });

let models; // descriptions from the server
let sides; // [{model, text}] of the shown texts, the left one first
let prompt; // prompt of the shown texts
let writing; // AbortController of the running request, or null

/** Open the view. The query may have the first model. Return a function that stops its work. */
export function open({ query }) {
  models = [];
  sides = [];
  writing = null;
  at("request").addEventListener("submit", (event) => {
    event.preventDefault();
    if (writing) writing.abort();
    else void compare();
  });
  for (const choice of at("choices").children) {
    choice.addEventListener("click", () => void choose(choice.dataset.choice));
  }
  void start(query.get("left") ?? "");
  return () => writing?.abort();
}

async function start(left) {
  models = await loadModels(left);
  at("go").disabled = !models.length;
  if (!models.length) return;
  at("second-field").hidden = false;
  const other = models.find(({ name }) => name !== at("model").value) ?? models[0];
  at("second").value = other.name;
  if (models.length < 2) say(at("problem"), "There is only one model. Train a second one to compare them.");
  try {
    showWins((await ask("api/wins")).wins);
  } catch (failure) {
    report(failure);
  }
}

/** Let both models write, in a random order of sides. */
async function compare() {
  const names = [at("model").value, at("second").value];
  if (!names[1] || names[0] === names[1]) {
    say(at("problem"), "Choose two different models.");
    return;
  }
  if (Math.random() < 0.5) names.reverse();
  const typed = at("prompt").value.trim();
  writing = new AbortController();
  say(at("problem"), "");
  say(at("revealed"), "");
  at("choices").hidden = true;
  at("go").textContent = "Stop";
  at("status").textContent = "Two models are writing.";
  const places = names.map((_, i) => {
    const place = element("article", { className: "answer sheet", ariaBusy: "true" }, element("h2", {}, i ? "B" : "A"), element("p"));
    place.setAttribute("aria-label", i ? "Text B" : "Text A");
    return place;
  });
  at("texts").replaceChildren(...places);
  sides = names.map((model) => ({ model, text: "" }));
  try {
    for (const model of new Set(names)) await openModel(model, writing.signal);
    const prompts = await Promise.all(sides.map((side, i) => generate(side, places[i], typed)));
    prompt = prompts[0] === prompts[1] ? prompts[0] : typed;
    at("choices").hidden = false;
    at("status").textContent = "Both texts are complete. Choose the better one.";
  } catch (failure) {
    writing.abort(); // the other text
    if (failure.name !== "AbortError") report(failure);
  }
  writing = null;
  if (at("go")) at("go").textContent = "Write both";
}

/** Write the text of a side. Return the prompt in the format of the model. */
async function generate(side, place, typed) {
  const { form } = models.find(({ name }) => name === side.model);
  const isTalk = form === "conversations";
  let request = { messages: [{ role: "user", content: typed }] };
  let path = "v1/chat/completions";
  let used = typed;
  if (!isTalk) {
    used = form === "recipes" ? await recipePrompt(side.model, typed) : typed;
    request = { prompt: used };
    path = "v1/completions";
  }
  const body = { ...request, model: side.model, seed: randomSeed(), temperature: 0.7 };
  for await (const piece of write(body, writing.signal, path)) {
    if (!piece.text) continue;
    side.text += piece.text;
    place.lastChild.textContent = side.text;
  }
  place.ariaBusy = "false";
  return used;
}

/** The prompt of a recipe model for "dish: ingredients". */
async function recipePrompt(model, typed) {
  const [dish, foods = ""] = typed.split(":", 2);
  const ingredients = foods.split(",").map((food) => food.trim()).filter(Boolean);
  return (await ask("api/prompt", { model, dish: dish.trim(), ingredients }, writing.signal)).prompt;
}

async function choose(choice) {
  const [left, right] = sides;
  try {
    await ask("api/feedback", { prompt, left, right, choice });
    at("choices").hidden = true;
    say(at("revealed"), `A: ${left.model}. B: ${right.model}. Your choice is saved.`);
    showWins((await ask("api/wins")).wins);
    at("revealed").focus();
  } catch (failure) {
    report(failure);
  }
}

function showWins(wins) {
  at("wins").hidden = !wins.length;
  const head = element("tr", {}, ...["first model", "second model", "wins", "both bad", "share of the first"].map((text) => element("th", {}, text)));
  const rows = wins.map(({ models: names, wins: counts, both_bad: bad, interval }) => {
    const total = counts[0] + counts[1];
    const share = total
      ? `${percent.format(counts[0] / total)} (${percent.format(interval[0])} to ${percent.format(interval[1])})`
      : "-";
    return element("tr", {}, ...[...names, `${counts[0]} : ${counts[1]}`, String(bad), share].map((text) => element("td", {}, text)));
  });
  at("counts").replaceChildren(element("thead", {}, head), element("tbody", {}, ...rows));
  at("learn").href = `#/new?file=feedback.jsonl&base=${encodeURIComponent(at("model").value)}`;
}
