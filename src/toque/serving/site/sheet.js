// A recipe on the page: its text while it is written, and then its scores and shopping list.

import { copy, copyOf, say, setItems } from "./dom.js";
import { partsOf, plainText } from "./recipe_text.js";
import { ShoppingList } from "./shopping_list.js";
import { showClasses, showVerdict } from "./verdict.js";

const CUT = "The text reached the maximum length of the model, so it may be incomplete.";

export class Sheet {
  text = "";
  #parts;
  #list;

  /** @param {{template, title, model, request, onAgain}} options */
  constructor({ template, title, model, request, onAgain }) {
    const { root, parts } = copyOf(template);
    this.root = root;
    this.model = model;
    this.title = title;
    this.#parts = parts;
    say(parts.title, title);
    say(parts.by, model);
    root.setAttribute("aria-label", `${title}, by ${model}`);
    this.#list = new ShoppingList(parts, { title, servings: request.servings });
    this.#on("copy", (button) => this.#copy(button, plainText(title, this.text)));
    this.#on("copy-list", (button) => this.#copy(button, this.#list.text));
    this.#on("print", () => window.print());
    this.#on("again", () => onAgain());
  }

  /** Remove the text, and show a message until the next text arrives. */
  restart(message) {
    this.text = "";
    this.#show();
    say(this.#parts.waiting, message);
    say(this.#parts.notice, "");
    this.root.setAttribute("aria-busy", "true");
  }

  /** Add new text. */
  append(text) {
    this.text += text;
    this.#parts.waiting.hidden = true;
    this.#show();
  }

  /** End the text. It may be incomplete. */
  end({ reason = "stop", tokens = 0, seconds = 0 } = {}) {
    this.root.setAttribute("aria-busy", "false");
    this.#parts.waiting.hidden = true;
    this.#parts.actions.hidden = !this.text;
    if (tokens) say(this.#parts.speed, `${tokens} tokens in ${seconds.toFixed(1)} s`);
    if (reason === "length") this.notice(CUT);
  }

  /** Show a message above the recipe. */
  notice(text) {
    say(this.#parts.notice, text);
  }

  /** Show the scores and the shopping list, and the classes when they arrive. */
  async showScores(verdict, classes) {
    this.#parts.after.hidden = false;
    showVerdict(this.#parts, verdict);
    await Promise.all([
      // Classes of a poor text would mislead.
      verdict.hint || classes.then((found) => showClasses(this.#parts.classes, found)),
      this.#list.open(this.text, verdict.requested),
    ]);
  }

  /** A sentence about the finished recipe for screen readers. */
  get summary() {
    const { ingredients, steps } = partsOf(this.text);
    return `${this.title} by ${this.model}: ${ingredients.length} ingredients, ${steps.length} steps.`;
  }

  #show() {
    const { ingredients, steps, loose } = partsOf(this.text);
    for (const [name, items] of Object.entries({ ingredients, steps })) {
      setItems(this.#parts[name].querySelector("ul, ol"), items);
      this.#parts[name].hidden = !items.length;
    }
    say(this.#parts.loose, loose.join("\n"));
  }

  #on(name, act) {
    const button = this.root.querySelector(`[data-do="${name}"]`);
    button.addEventListener("click", () => act(button));
  }

  async #copy(button, text) {
    const label = button.textContent;
    await copy(text);
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = label), 1600);
  }
}
