// The start view: cards of runs, and the machine.

import { at, button, element, say } from "./dom.js";
import { acceptDrops, openWith } from "./drops.js";
import { baseName, duration, linkTo, short, size } from "./format.js";
import { poll } from "./poll.js";
import { ask } from "./requests.js";
import { editLink, viewFor } from "./models.js";

/** Open the view. Return a function that stops it. */
export function open() {
  const cards = new Map(); // element and JSON of each card by the name of its run
  const refresh = poll("api/home", (home) => show(home, cards, () => refresh()), (text) => say(at("problem"), text));
  offerUndo(() => refresh());
  at("empty-trash").addEventListener("click", () => {
    if (!window.confirm("Delete all runs in the trash? They cannot be restored.")) return;
    at("undo").hidden = true;
    void attempt(ask("api/empty", {}), refresh);
  });
  const endDrops = acceptDrops(openWith);
  return () => {
    endDrops();
    refresh.stop();
  };
}

/** Offer to restore the run that was just deleted. */
function offerUndo(refresh) {
  const deleted = sessionStorage.getItem("toque.deleted");
  if (!deleted) return;
  sessionStorage.removeItem("toque.deleted");
  const { run, id } = JSON.parse(deleted);
  const undo = button("Undo", () => {
    at("undo").hidden = true;
    void attempt(ask("api/restore", { run, id }), refresh);
  });
  at("undo").replaceChildren(`${run} is in the trash. `, undo);
  at("undo").hidden = false;
}

function show({ folder, machine, runs, models, trash }, cards, refresh) {
  say(at("folder"), baseName(folder) || folder);
  at("machine").textContent = [
    `${machine.cores} ${machine.cores === 1 ? "core" : "cores"}`,
    ...machine.gpus,
    `${size(machine.free_memory_bytes)} of ${size(machine.memory_bytes)} memory free`,
    `${size(machine.free_disk_bytes)} disk free`,
  ].join(" · ");
  at("waiting").hidden = true;
  at("empty").hidden = runs.length > 0;
  const names = new Set(runs.map(({ name }) => name));
  for (const [name, { root }] of cards) {
    if (names.has(name)) continue;
    root.remove();
    cards.delete(name);
  }
  runs.forEach((run, i) => {
    const json = JSON.stringify(run);
    let card = cards.get(run.name);
    if (card?.json !== json) {
      const root = runCard(run, refresh);
      card?.root.replaceWith(root);
      card = { root, json };
      cards.set(run.name, card);
    }
    const place = at("runs").children[i];
    if (place !== card.root) at("runs").insertBefore(card.root, place ?? null);
  });
  at("trash-section").hidden = !trash.length;
  at("trash").replaceChildren(
    ...trash.map(({ id, run }) =>
      element("li", {}, `${run} `, button("Restore", () => void attempt(ask("api/restore", { run, id }), refresh), { className: "quiet" })),
    ),
  );
  at("models-section").hidden = !models.length;
  at("models").replaceChildren(
    ...models.map((name) => element("li", {}, element("a", { href: linkTo("use", name) }, name))),
  );
}

function runCard(run, refresh) {
  const { name, state, sentence, score, parameters, seconds, sources, curve, done } = run;
  const facts = [
    parameters && `${short(parameters)} parameters`,
    seconds && `trained for ${duration(seconds)}`,
    sources.length && `on ${sources.join(", ")}`,
  ];
  const title = run.folder_exists
    ? element("a", { href: linkTo("runs", name) }, baseName(name))
    : element("span", {}, baseName(name));
  const card = element(
    "li",
    { className: "card" },
    element("p", { className: "card-state" }, element("span", { className: `mark ${state}` }, state)),
    element("h3", {}, title),
    sparkline(curve),
  );
  if (score) {
    const unit = score.is_share ? " of 1, " : " ";
    card.append(element("p", { className: "score" }, element("strong", {}, score.value.toFixed(2)), unit, score.title));
  }
  if (done !== null && done !== undefined) {
    const left = run.seconds_left ? `, about ${duration(run.seconds_left)} left` : "";
    const label = `${Math.round(100 * done)} %${left}`;
    card.append(element("progress", { max: 1, value: done, ariaLabel: label }), element("p", { className: "hint" }, label));
  }
  card.append(element("p", { className: "hint" }, facts.filter(Boolean).join(", ")));
  if (state === "failed" || state === "killed") card.append(element("p", { className: "problem" }, sentence));
  else if (state !== "ended" && state !== "running") card.append(element("p", { className: "hint" }, sentence));
  if (run.remark) card.append(element("p", { className: "hint" }, run.remark));
  card.append(element("p", { className: "actions" }, ...actionsOf(run, refresh)));
  return card;
}

function actionsOf(run, refresh) {
  const actions = [];
  if (run.is_finished || run.saved) {
    const view = viewFor(run.form);
    actions.push(element("a", { className: "button", href: linkTo(view, run.name) }, view === "use" ? "Cook" : "Talk"));
  }
  if (run.job && (run.state === "queued" || run.state === "failed")) {
    const text = run.state === "queued" ? "Remove from the queue" : "Dismiss";
    actions.push(button(text, () => void attempt(ask("api/dismiss", { job: run.job }), refresh)));
  }
  if (run.state === "failed") actions.push(element("a", { className: "button", href: editLink(run.name) }, "Change its settings"));
  return actions;
}

async function attempt(request, refresh) {
  try {
    await request;
    refresh();
  } catch (failure) {
    say(at("problem"), failure.message);
  }
}

/** The learning curve as the server drew it. It has only numbers. */
function sparkline(svg) {
  const place = element("div", { className: "curve" });
  place.innerHTML = svg;
  return place;
}
