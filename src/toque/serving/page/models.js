// The models that a server offers, among which both pages choose.

import { say } from "./dom.js";
import { ask } from "./requests.js";

/** The models as the server describes them, once the choices hold them; null if `problem` was told. */
export async function offered(at, problem) {
  let models;
  try {
    ({ models } = await ask("api/models"));
  } catch (failure) {
    problem(failure);
    return null;
  }
  say(at("problem"), "");
  at("token-field").hidden = true;
  const names = models.map(({ name }) => name);
  at("model").replaceChildren(...names.map((name) => new Option(name)));
  at("second").replaceChildren(new Option("no other", ""), ...names.map((name) => new Option(name)));
  at("beside").hidden = names.length < 2;
  say(at("served"), names.length === 1 ? `with ${names[0]}` : `with ${names.length} models`);
  return models;
}
