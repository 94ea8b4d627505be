// The models of the server, for the views that generate texts.

import { at, say } from "./dom.js";
import { ask, report } from "./requests.js";

/**
 * Fetch the models and fill the two choices. `preferred` is the name of the model to choose first,
 * and `suits` selects models by their description. Return no models after a failure, which the view shows.
 */
export async function loadModels(preferred = "", suits = () => true) {
  let models;
  try {
    ({ models } = await ask("api/models"));
  } catch (failure) {
    report(failure);
    return [];
  }
  const all = models;
  models = all.filter((model) => model.name === preferred || suits(model));
  if (!all.length) say(at("problem"), "There is no model yet. Train one first.");
  else if (!models.length) say(at("problem"), "No model here can talk: all of them write only recipes. Use them under Cook.");
  const names = models.map(({ name }) => name);
  at("model").replaceChildren(...names.map((name) => new Option(name)));
  if (names.includes(preferred)) at("model").value = preferred;
  at("second").replaceChildren(new Option("none", ""), ...names.map((name) => new Option(name)));
  at("second-field").hidden = names.length < 2;
  say(at("served"), names.length === 1 ? `with ${names[0]}` : `with ${names.length} models`);
  return models;
}

/** The view for a model that was trained on texts of a form. */
export const viewFor = (form) => (form === "recipes" ? "use" : "talk");

/** The address where a copy of a run's configuration is changed. */
export const editLink = (run) => `#/new?edit=${encodeURIComponent(run)}`;

/** Ask a studio to read a model, if it has not yet. Other servers have read theirs at the start. */
export async function openModel(model, signal) {
  if (document.body.dataset.views.includes("home")) await ask("api/open", { model }, signal);
}

/** The names of the chosen models, one or two. */
export function chosenModels() {
  return [...new Set([at("model").value, at("second").value].filter(Boolean))];
}

/** A random seed, so that the same request gives another text. */
export const randomSeed = () => Math.floor(Math.random() * 2 ** 31);
