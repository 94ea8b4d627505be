// The view for a new run: files, what they contain, the time and its forecast, and the start.

import { at, button, element, say } from "./dom.js";
import { acceptDrops, takeDropped } from "./drops.js";
import { linkTo, short, size } from "./format.js";
import { ask, failureOf, report } from "./requests.js";

const PARTS = {
  text: "Text to continue",
  prompt: "Prompt",
  target: "Answer",
  chosen: "Better answer",
  rejected: "Worse answer",
  messages: "Messages",
  title: "Title",
  ingredients: "Ingredients",
  steps: "Steps",
};
const TYPING_MS = 400; // pause in typing before the text is checked

let files; // names of the chosen files
let columns; // field of each part that the user chose
let proposal; // the newest answer of the server
let isEdited; // true if the YAML was changed by hand
let request; // AbortController of the newest request for a proposal

/** Open the view. The query may have files and a base. Return a function that stops its work. */
export function open({ query }) {
  files = new Set(query.getAll("file"));
  columns = {};
  proposal = null;
  isEdited = false;
  request = new AbortController();
  const drop = at("drop");
  at("file").addEventListener("change", () => void upload([...at("file").files]));
  for (const kind of ["dragenter", "dragover"]) drop.addEventListener(kind, () => drop.classList.add("over"));
  drop.addEventListener("dragleave", () => drop.classList.remove("over"));
  const endDrops = acceptDrops((chosen) => {
    drop.classList.remove("over");
    if (!at("texts-section").hidden) void upload(chosen); // copied settings have their own files
  });
  at("settings").addEventListener("change", onSetting);
  at("time").addEventListener(
    "input",
    debounce(() => {
      isEdited = false; // the configuration is written again for this time
      void propose();
    }),
  );
  at("name").addEventListener("change", rename);
  at("yaml").addEventListener("input", () => (isEdited = true));
  at("yaml").addEventListener("input", debounce(() => void check()));
  at("settings").addEventListener("submit", (event) => {
    event.preventDefault();
    void start();
  });
  const dropped = takeDropped();
  void prepare(query.get("base") ?? "", query.get("edit")).then(() => dropped.length && upload(dropped));
  return () => {
    endDrops();
    request.abort();
  };
}

function debounce(work) {
  let timer;
  return () => {
    clearTimeout(timer);
    timer = setTimeout(work, TYPING_MS);
  };
}

/** Fetch the models to start from and the files of the folder, or the configuration of the run `edited`. */
async function prepare(base, edited) {
  if (edited) return edit(edited);
  try {
    const [{ models }, list] = await Promise.all([ask("api/models"), ask("api/files")]);
    at("base").replaceChildren(
      new Option("a new model", ""),
      ...models.map(({ name }) => new Option(name, name, false, name === base)),
    );
    const known = new Set(list.files.map(({ name }) => name));
    files = new Set([...files].filter((name) => known.has(name)));
    showFiles(list.files);
  } catch (failure) {
    showProblem(failure);
    return;
  }
  explainBase();
  if (files.size) await recognise();
}

/** Show a copy of the configuration of a run, to change it. */
async function edit(run) {
  document.querySelector("h1").textContent = `New run, with the settings of ${run}`;
  for (const id of ["texts-section", "choices-section"]) at(id).hidden = true;
  at("forecast-title").textContent = "Settings";
  try {
    const { name, yaml } = await ask(`api/config?run=${encodeURIComponent(run)}`);
    at("name").value = name;
    at("yaml").value = yaml;
  } catch (failure) {
    showProblem(failure);
    return;
  }
  proposal = { forecast: "", remarks: [] };
  at("settings").hidden = false;
  at("advanced").open = true;
  await check();
}

function showFiles(list) {
  at("files-field").hidden = !list.length;
  at("files").replaceChildren(
    ...list.map(({ name, bytes }) => {
      const box = element("input", { type: "checkbox", value: name, checked: files.has(name) });
      box.addEventListener("change", () => {
        if (box.checked) files.add(name);
        else files.delete(name);
        columns = {};
        void recognise();
      });
      return element("li", {}, element("label", {}, box, element("span", {}, name), element("small", {}, size(bytes))));
    }),
  );
}

/** Upload files, with their progress, and choose them. */
async function upload(chosen) {
  say(at("problem"), "");
  const names = [];
  for (const file of chosen) names.push(await uploadOne(file)); // the server takes few at a time
  for (const name of names.filter(Boolean)) files.add(name);
  at("file").value = "";
  if (!names.some(Boolean)) return;
  columns = {};
  try {
    showFiles((await ask("api/files")).files);
  } catch (failure) {
    showProblem(failure);
  }
  await recognise();
}

/** Upload a file. Return its name in the folder, or null. `fetch` cannot report the progress of an upload. */
function uploadOne(file) {
  const bar = element("progress", { max: file.size || 1, value: 0, ariaLabel: `upload of ${file.name}` });
  const text = element("span", { className: "hint" }, `${file.name}, ${size(file.size)}`);
  const transfer = new XMLHttpRequest();
  const cancel = button("Cancel", () => transfer.abort(), { className: "quiet" });
  const item = element("li", { className: "upload" }, text, bar, cancel);
  at("uploads").append(item);
  return new Promise((resolve) => {
    const end = (name, problem = "") => {
      item.remove();
      if (problem) say(at("problem"), problem);
      resolve(name);
    };
    transfer.upload.addEventListener("progress", ({ loaded }) => (bar.value = loaded));
    transfer.addEventListener("abort", () => end(null));
    transfer.addEventListener("error", () => end(null, `The upload of ${file.name} ended, because the server cannot be reached.`));
    transfer.addEventListener("load", async () => {
      if (transfer.status < 300) {
        const { name, is_new: isNew } = JSON.parse(transfer.responseText);
        return end(name, isNew ? "" : `${name} is already in this folder.`);
      }
      const answer = new Response(transfer.responseText, { status: transfer.status });
      return end(null, (await failureOf(answer)).message);
    });
    transfer.open("PUT", `api/files/${encodeURIComponent(file.name)}`);
    transfer.send(file);
  });
}

/** Show the contents of the chosen files, and then the forecast. */
async function recognise() {
  const place = at("recognised");
  isEdited = false;
  at("settings").hidden = true;
  if (!files.size) {
    place.replaceChildren();
    return;
  }
  place.replaceChildren(element("p", { className: "waiting" }, "Reading the files …"));
  let answer;
  try {
    answer = await ask("api/recognise", { files: [...files], columns });
  } catch (failure) {
    place.replaceChildren();
    showProblem(failure);
    return;
  }
  if (answer.problem) {
    place.replaceChildren(element("p", { className: "problem" }, answer.problem), ...columnForm(answer));
    return;
  }
  place.replaceChildren(...answer.sources.map(sourceTable));
  at("learn-field").hidden = !answer.sources.every(({ kind }) => kind === "recipes");
  at("settings").hidden = false;
  at("status").textContent = answer.sources.map(({ path, summary }) => `${path}: ${summary}`).join(". ");
  await propose();
}

/** A table of what was recognised in a source, with examples. */
function sourceTable({ path, summary, languages, remarks, problems, examples }) {
  const rows = [
    ["Contents", summary],
    languages.length && ["Languages", languages.join(", ")],
    problems.length && ["Left out", problems.join("; ")],
  ].filter(Boolean);
  const list = element("dl", { className: "rows" });
  for (const [name, text] of rows) list.append(element("dt", {}, name), element("dd", {}, text));
  const box = element("section", { className: "source" }, element("h3", {}, path), list);
  for (const remark of remarks) box.append(element("p", { className: "hint" }, remark));
  const shown = examples.map(([prompt, text]) =>
    element("li", {}, element("p", { className: "hint" }, prompt || "(no prompt)"), element("pre", {}, text)),
  );
  if (shown.length) {
    const label = `${shown.length} ${shown.length === 1 ? "example" : "examples"}`;
    box.append(element("details", {}, element("summary", {}, label), element("ol", {}, ...shown)));
  }
  return box;
}

/** Choices for the fields of a file with unknown columns. */
function columnForm({ fields, suggestions }) {
  if (!fields.length) return [];
  const first = suggestions[0] ?? {};
  const choices = Object.entries(PARTS).map(([part, label]) => {
    const select = element("select", { id: `part-${part}` }, new Option("none", ""), ...fields.map((field) => new Option(field)));
    const field = columns[part] ?? first[part];
    if (fields.includes(field)) select.value = field;
    select.dataset.part = part;
    return element("div", { className: "field" }, element("label", { htmlFor: select.id }, label), select);
  });
  const apply = button("Use these columns", () => {
    const selects = [...form.querySelectorAll("select")].filter(({ value }) => value);
    columns = Object.fromEntries(selects.map(({ dataset, value }) => [dataset.part, value]));
    void recognise();
  });
  const form = element("div", { className: "columns" }, ...choices);
  return [
    element("p", {}, "Choose the columns. A prompt and an answer are enough, or only a text."),
    form,
    element("p", { className: "actions" }, apply),
  ];
}

/** Use the name for the folder of the run. */
function rename() {
  const name = at("name").value.toLowerCase().replace(/[^a-z0-9]+/g, "-");
  at("yaml").value = at("yaml").value.replace(/^run_dir:[^#\n]*[^#\s]/m, `run_dir: runs/${name}`);
  isEdited = true;
}

function onSetting(event) {
  if (event.target.id === "yaml" || event.target.id === "name" || event.target.id === "time") return;
  at("other-time").hidden = chosenTime() !== "";
  isEdited = false;
  explainBase();
  void propose();
}

const chosenTime = () => document.querySelector("[name=time]:checked").value;

function explainBase() {
  const text = at("base").value
    ? "The run starts with the weights of this model, and continues its training on your texts."
    : "A new model learns its language only from your texts. With fewer than 5,000, copy the folder of a pretrained model here, and start from it.";
  say(at("base-hint"), text);
}

/** Request a configuration for the choices, and show it with its forecast. */
async function propose() {
  request.abort();
  request = new AbortController();
  const { signal } = request;
  at("go").disabled = true;
  at("measuring").hidden = false;
  at("forecast").hidden = true;
  say(at("choices-problem"), "");
  try {
    const base = at("base").value;
    const learn = base && !at("learn-field").hidden ? at("learn").value : "imitation";
    const time = chosenTime() || at("time").value;
    const body = { name: [...files][0], files: [...files], columns, base, time, learn };
    proposal = await ask("api/propose", body, signal);
  } catch (failure) {
    if (failure.name === "AbortError") return;
    at("measuring").hidden = true;
    report(failure, (text) => say(at("choices-problem"), text[0].toUpperCase() + text.slice(1)));
    return;
  }
  if (!isEdited) at("yaml").value = proposal.yaml;
  at("name").value = proposal.name;
  showForecast();
}

/** Show the forecast, and what the run needs. */
function showForecast() {
  const { parameters, memory_bytes: memory, room_bytes: room, fits, disk_bytes: disk, free_disk_bytes: free } = proposal;
  const numbers = [
    ["model", `${short(parameters)} parameters`],
    ["memory", `${size(memory)} of ${size(room)}`],
    ["disk", `${size(disk)} of ${size(free)}`],
  ];
  at("numbers").replaceChildren(
    ...numbers.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))),
  );
  at("forecast-text").textContent = proposal.forecast;
  const remarks = [...proposal.remarks];
  if (!fits) {
    const changes = proposal.changes.length ? ` These changes would fit: ${proposal.changes.join("; ")}.` : "";
    remarks.unshift(`This run does not fit into the memory.${changes}`);
  }
  if (disk > free) remarks.unshift("The disk has too little free space for this run.");
  at("remarks").replaceChildren(...remarks.map((text) => element("li", {}, text)));
  at("measuring").hidden = true;
  at("forecast").hidden = false;
  at("go").disabled = !fits;
}

/** Check the edited configuration. Mark the line of an error, or show what the run needs. */
async function check() {
  request.abort();
  request = new AbortController();
  at("go").disabled = true;
  at("measuring").hidden = true;
  try {
    const { line, problem = "", ...needs } = await ask("api/check", { yaml: at("yaml").value }, request.signal);
    say(at("yaml-problem"), line ? `Line ${line}: ${problem}` : problem);
    at("yaml").ariaInvalid = String(Boolean(problem));
    if (problem) return;
    proposal = { ...proposal, ...needs, forecast: "" }; // the forecast was for other settings
    showForecast();
  } catch (failure) {
    if (failure.name !== "AbortError") showProblem(failure);
  }
}

async function start() {
  at("go").disabled = true;
  if (window.Notification?.permission === "default") void Notification.requestPermission();
  try {
    const { run } = await ask("api/start", { name: at("name").value, yaml: at("yaml").value });
    location.hash = linkTo("runs", run);
  } catch (failure) {
    showProblem(failure);
    at("go").disabled = false;
  }
}

function showProblem(failure) {
  report(failure);
  at("problem").scrollIntoView({ block: "nearest" });
}
