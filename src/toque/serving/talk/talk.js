// A conversation with one model, or with two side by side; it is kept until the tab is closed.

import { element, say } from "./dom.js";
import { offered } from "./models.js";
import { Failure, useToken, write } from "./requests.js";

const FORMS = {
  pairs: "This model was trained on single questions: each goes to it as it is, without those before.",
  documents: "This model goes on with the text you type: it was trained on whole texts.",
  gaps: "This model was trained to fill gaps in texts, and answers nothing yet.",
};
const QUESTIONS = [
  "What can I cook with rice, eggs and peas?",
  "How do I keep rice from sticking?",
  "What can I use instead of butter?",
];
const BEGINNINGS = ["Once upon a time", "To make a good soup, you need", "The most important tool in a kitchen is"];
const EXAMPLES = { documents: BEGINNINGS, gaps: [] }; // by what a model was trained on; others answer questions
const MOST_SCROLLED_PX = 160; // a reader who is further up is left there
const KEY = "toque.talk";

const at = (id) => document.getElementById(id);
let turns = kept(); // [{question, answers: {model: text}}]
let writing = null; // the AbortController of what is being written
let models = []; // as the server describes them

async function start() {
  at("request").addEventListener("submit", (event) => {
    event.preventDefault();
    const typed = at("question").value;
    if (writing) writing.abort();
    else void answer(at("task").value ? typed : typed.trim()); // a task's prompt goes as it was trained
  });
  at("question").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!writing) at("request").requestSubmit();
  });
  document.addEventListener("keydown", (event) => event.key === "Escape" && writing?.abort());
  at("token").addEventListener("change", () => {
    useToken(at("token").value);
    void greet();
  });
  at("model").addEventListener("change", explain);
  at("task").addEventListener("change", () => {
    begin();
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
  await greet();
}

/** Ask which models there are. */
async function greet() {
  models = (await offered(at, problem)) ?? models;
  if (models.length) explain();
}

/** Say what the chosen model makes of a question, and offer the tasks that it learnt. */
function explain() {
  const { form, tasks } = models.find(({ name }) => name === at("model").value);
  const offers = tasks.map(({ name, prompt }) => new Option(name, prompt));
  at("task").replaceChildren(new Option("a question, as it is", ""), ...offers);
  at("task-field").hidden = !tasks.length;
  say(at("model-hint"), FORMS[form] ?? "");
  at("system-field").hidden = form in FORMS;
  say(at("greeting-model"), `${at("model").value} answers.`);
  at("examples").replaceChildren(...(EXAMPLES[form] ?? QUESTIONS).map(example));
}

/** An example, which a click asks. */
function example(text) {
  const button = element("button", { type: "button" }, text);
  button.addEventListener("click", () => void answer(text));
  return element("li", {}, button);
}

/** Scroll to the end of the conversation, unless the reader has scrolled up. */
function follow() {
  const page = document.documentElement;
  if (page.scrollHeight - innerHeight - scrollY < MOST_SCROLLED_PX) scrollTo(0, page.scrollHeight);
}

/** Begin a question with the prompt of the chosen task; its first field is there to be typed over. */
function begin() {
  const question = at("question");
  question.value = at("task").value;
  const field = /\{[^}]*\}/.exec(question.value);
  if (field) question.setSelectionRange(field.index, field.index + field[0].length);
}

/** Have each chosen model answer a question, after all that was said with it before. */
async function answer(question) {
  if (!question.trim()) return;
  const models = [...new Set([at("model").value, at("second").value].filter(Boolean))];
  const before = turns;
  const turn = { question, answers: {} };
  change([...before, turn]);
  begin(); // without the focus, which would open a phone's keyboard
  at("go").textContent = "Stop";
  at("status").textContent = "Writing an answer.";
  say(at("problem"), "");
  writing = new AbortController();
  const places = lay(at("turns").lastElementChild, models);
  scrollTo(0, document.documentElement.scrollHeight);
  await Promise.all(models.map((model, i) => reply(model, places[i], before, turn)));
  writing = null;
  at("go").textContent = "Ask";
  at("status").textContent = Object.values(turn.answers).join(" ");
  if (!turns.includes(turn)) return; // taken back, or begun again, while it was written
  if (!Object.keys(turn.answers).length) {
    if (at("question").value === at("task").value) at("question").value = question;
    change(before);
  } else keep();
}

async function reply(model, place, before, turn) {
  const messages = messagesOf(before, model);
  messages.push({ role: "user", content: turn.question });
  const seed = Math.floor(Math.random() * 2 ** 31);
  const request = { model, messages, seed, temperature: Number(at("temperature").value) };
  const began = performance.now();
  try {
    for await (const piece of write(request, writing.signal, "v1/chat/completions")) {
      if (piece.text) {
        turn.answers[model] = (turn.answers[model] ?? "") + piece.text;
        place.firstChild.textContent = turn.answers[model];
        follow();
      } else {
        const seconds = (performance.now() - began) / 1000;
        const cut = piece.reason === "length" ? ", cut at the longest answer" : "";
        say(place.lastChild, `${model}: ${piece.tokens} tokens, ${(piece.tokens / seconds).toFixed(0)} a second${cut}`);
        turn.answers[model] ??= "";
      }
    }
  } catch (failure) {
    if (failure.name !== "AbortError") problem(failure);
  }
  place.ariaBusy = "false";
}

/** What a model is told of earlier turns: its own answers, and the system text. */
function messagesOf(before, model) {
  const system = at("system-field").hidden ? "" : at("system").value.trim();
  const messages = system ? [{ role: "system", content: system }] : [];
  for (const { question, answers } of before) {
    const said = answers[model] ?? Object.values(answers)[0];
    if (said === undefined) continue; // nothing is written of it yet
    messages.push({ role: "user", content: question }, { role: "assistant", content: said });
  }
  return messages;
}

function change(to) {
  turns = to;
  keep();
  show();
}

function show() {
  at("turns").replaceChildren(
    ...turns.map(({ question, answers }) => {
      const item = element("li", {}, element("p", { className: "asked" }, question));
      lay(item, Object.keys(answers)).forEach((place, i) => {
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

/** Places for answers below a question. */
function lay(item, models) {
  const places = models.map(() =>
    element("article", { className: "answer", ariaBusy: "true" }, element("p"), element("p", { className: "by", hidden: true })),
  );
  const two = places.length > 1 ? " two" : "";
  if (places.length) item.append(element("div", { className: `answers${two}` }, ...places));
  return places;
}

/** Save the conversation as a line that `data.sources` reads. */
function save() {
  const line = JSON.stringify({ messages: messagesOf(turns, at("model").value) });
  const url = URL.createObjectURL(new Blob([`${line}\n`], { type: "application/json" }));
  element("a", { href: url, download: "talk.jsonl" }).click();
  URL.revokeObjectURL(url);
}

function kept() {
  try {
    const found = JSON.parse(sessionStorage.getItem(KEY) ?? "[]");
    return Array.isArray(found) ? found.filter((turn) => turn?.question && Object.keys(turn?.answers ?? {}).length) : [];
  } catch {
    return []; // storage is off, or holds what another program wrote
  }
}

function keep() {
  try {
    sessionStorage.setItem(KEY, JSON.stringify(turns));
  } catch {
    // Storage is off or full: the conversation on the page is none the worse.
  }
}

function problem(failure) {
  if (!(failure instanceof Failure)) throw failure;
  if (failure.status === 401) at("token-field").hidden = false;
  say(at("problem"), failure.message);
}

void start();
