// The conversation view: one or two models answer. The tab stores the conversation until it is closed.

import { at, button, element, onEscape, say } from "./dom.js";
import { chosenModels, loadModels, openModel, randomSeed } from "./models.js";
import { report, write } from "./requests.js";

const HINTS = {
  pairs: "This model was trained on single questions. It receives each question without the earlier ones.",
  documents: "This model was trained on entire texts. It continues the text that you enter.",
  gaps: "This model was trained to fill gaps in texts. It does not answer questions yet.",
};
const QUESTIONS = [
  "What can I cook with rice, eggs and peas?",
  "How do I keep rice from sticking?",
  "What can I use instead of butter?",
];
const BEGINNINGS = ["Once upon a time", "To make a good soup, you need", "The most important tool in a kitchen is"];
const EXAMPLES = { documents: BEGINNINGS, gaps: [] }; // by the training data of a model; other models get questions
const MAX_DISTANCE_PX = 160; // a reader who scrolled up by more stays there
const KEY = "toque.talk";

let turns; // [{question, answers: {model: text}}]
let writing; // AbortController of the running request, or null
let models; // descriptions from the server

/** Open the view. `names` may have the name of a model. Return a function that stops its work. */
export function open({ names }) {
  turns = stored();
  writing = null;
  models = [];
  at("request").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = at("question").value;
    if (writing) writing.abort();
    else void answer(at("task").value ? text : text.trim()); // the prompt of a task is sent unchanged
  });
  at("question").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!writing) at("request").requestSubmit();
  });
  const ignoreEscape = onEscape(() => writing?.abort());
  at("model").addEventListener("change", explain);
  at("task").addEventListener("change", () => {
    showTaskPrompt();
    at("question").focus();
  });
  at("undo").addEventListener("click", () => {
    writing?.abort();
    at("question").value = turns.at(-1).question;
    change(turns.slice(0, -1));
    at("question").focus();
  });
  at("fresh").addEventListener("click", () => {
    writing?.abort();
    change([]);
    at("question").focus();
  });
  at("save").addEventListener("click", save);
  show();
  void loadModels(names[0], ({ form }) => form !== "recipes").then((loaded) => {
    models = loaded;
    if (!at("go")) return; // another view was opened meanwhile
    for (const id of ["go", "question"]) at(id).disabled = !loaded.length;
    at("examples").hidden = !loaded.length;
    explain();
  });
  return () => {
    writing?.abort();
    ignoreEscape();
  };
}

/** Describe how the chosen model uses a question, and list its tasks. */
function explain() {
  const chosen = models.find(({ name }) => name === at("model").value);
  if (!chosen) return;
  const { form, tasks } = chosen;
  const options = tasks.map(({ name, prompt }) => new Option(name, prompt));
  at("task").replaceChildren(new Option("a question, unchanged", ""), ...options);
  at("task-field").hidden = !tasks.length;
  say(at("model-hint"), HINTS[form] ?? "");
  at("system-field").hidden = form in HINTS;
  say(at("greeting-model"), `${at("model").value} answers.`);
  at("examples").replaceChildren(
    ...(EXAMPLES[form] ?? QUESTIONS).map((text) => element("li", {}, button(text, () => void answer(text)))),
  );
}

/** Scroll to the end of the conversation, unless the reader has scrolled up. */
function follow() {
  const page = document.documentElement;
  if (page.scrollHeight - innerHeight - scrollY < MAX_DISTANCE_PX) scrollTo(0, page.scrollHeight);
}

/** Show the prompt of the chosen task. Its first field is selected, so that typing replaces it. */
function showTaskPrompt() {
  const question = at("question");
  question.value = at("task").value;
  const field = /\{[^}]*\}/.exec(question.value);
  if (field) question.setSelectionRange(field.index, field.index + field[0].length);
}

/** Let each chosen model answer a question. It receives the conversation before it. */
async function answer(question) {
  if (!question.trim()) return;
  const names = chosenModels();
  const before = turns;
  const turn = { question, answers: {} };
  change([...before, turn]);
  showTaskPrompt(); // without the focus, which would open the keyboard of a phone
  at("go").textContent = "Stop";
  at("status").textContent = "Writing an answer.";
  say(at("problem"), "");
  writing = new AbortController();
  const places = addAnswers(at("turns").lastElementChild, names);
  scrollTo(0, document.documentElement.scrollHeight);
  await Promise.all(names.map((model, i) => reply(model, places[i], before, turn)));
  writing = null;
  if (!at("turns")) return; // another view was opened
  at("go").textContent = "Ask";
  at("status").textContent = Object.values(turn.answers).join(" ");
  if (!turns.includes(turn)) return; // removed while it was written
  if (!Object.keys(turn.answers).length) {
    if (at("question").value === at("task").value) at("question").value = question;
    change(before);
  } else store();
}

async function reply(model, place, before, turn) {
  const messages = messagesOf(before, model);
  messages.push({ role: "user", content: turn.question });
  const request = { model, messages, seed: randomSeed(), temperature: Number(at("temperature").value) };
  const start = performance.now();
  try {
    await openModel(model, writing.signal);
    for await (const piece of write(request, writing.signal, "v1/chat/completions")) {
      if (piece.text) {
        turn.answers[model] = (turn.answers[model] ?? "") + piece.text;
        place.firstChild.textContent = turn.answers[model];
        follow();
      } else {
        const seconds = (performance.now() - start) / 1000;
        const cut = piece.reason === "length" ? ", cut at the maximum length" : "";
        const rate = (piece.tokens / seconds).toFixed(0);
        say(place.lastChild, `${model}: ${piece.tokens} tokens, ${rate} per second${cut}`);
        turn.answers[model] ??= "";
      }
    }
  } catch (failure) {
    if (failure.name !== "AbortError") report(failure);
  }
  place.ariaBusy = "false";
}

/** The earlier messages for a model: its own answers, and the instructions. */
function messagesOf(before, model) {
  const system = at("system-field").hidden ? "" : at("system").value.trim();
  const messages = system ? [{ role: "system", content: system }] : [];
  for (const { question, answers } of before) {
    const reply = answers[model] ?? Object.values(answers)[0];
    if (reply === undefined) continue; // without an answer yet
    messages.push({ role: "user", content: question }, { role: "assistant", content: reply });
  }
  return messages;
}

function change(to) {
  turns = to;
  store();
  show();
}

function show() {
  at("turns").replaceChildren(
    ...turns.map(({ question, answers }) => {
      const item = element("li", {}, element("p", { className: "question" }, question));
      addAnswers(item, Object.keys(answers)).forEach((place, i) => {
        place.ariaBusy = "false";
        place.firstChild.textContent = Object.values(answers)[i];
        say(place.lastChild, Object.keys(answers)[i]);
      });
      return item;
    }),
  );
  for (const id of ["undo", "fresh", "save"]) at(id).hidden = !turns.length;
  at("greeting").hidden = turns.length > 0;
}

/** Add an element for each model's answer below a question. */
function addAnswers(item, names) {
  const places = names.map(() =>
    element("article", { className: "answer", ariaBusy: "true" }, element("p"), element("p", { className: "by", hidden: true })),
  );
  const two = places.length > 1 ? " two" : "";
  if (places.length) item.append(element("div", { className: `answers${two}` }, ...places));
  return places;
}

/** Save the conversation as a line that `data.sources` can read. */
function save() {
  const line = JSON.stringify({ messages: messagesOf(turns, at("model").value) });
  const url = URL.createObjectURL(new Blob([`${line}\n`], { type: "application/json" }));
  element("a", { href: url, download: "talk.jsonl" }).click();
  URL.revokeObjectURL(url);
}

function stored() {
  try {
    const list = JSON.parse(sessionStorage.getItem(KEY) ?? "[]");
    return Array.isArray(list) ? list.filter((turn) => turn?.question && Object.keys(turn?.answers ?? {}).length) : [];
  } catch {
    return []; // storage is off, or another program wrote there
  }
}

function store() {
  try {
    sessionStorage.setItem(KEY, JSON.stringify(turns));
  } catch {
    // Storage is off or full. The conversation stays on the page.
  }
}
