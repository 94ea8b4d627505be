// One recipe on the page: its text as it arrives, and then what can be said of it.

import { copy, copyOf, say, setItems } from "./dom.js";
import { plainText, partsOf } from "./recipe_text.js";
import { ShoppingList } from "./shopping_list.js";
import { showClasses, showVerdict } from "./verdict.js";

const CUT = "The text reached the longest length this model was trained on, and may end early.";

export class Sheet {
  text = "";
  #parts;
  #list;

  /** @param {{template, title, model, request, onAgain}} what */
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
    this.#on("copy", (button) => this.#copied(button, plainText(title, this.text)));
    this.#on("copy-list", (button) => this.#copied(button, this.#list.text));
    this.#on("print", () => window.print());
    this.#on("again", () => onAgain());
  }

  /** Begin a text from nothing. */
  restart(said) {
    this.text = "";
    this.#show();
    say(this.#parts.waiting, said);
    say(this.#parts.notice, "");
    this.root.setAttribute("aria-busy", "true");
  }

  /** Add what has arrived. */
  append(text) {
    this.text += text;
    this.#parts.waiting.hidden = true;
    this.#show();
  }

  /** The text has ended, whole or not. */
  end({ reason = "stop", tokens = 0, seconds = 0 } = {}) {
    this.root.setAttribute("aria-busy", "false");
    this.#parts.waiting.hidden = true;
    this.#parts.actions.hidden = !this.text;
    if (tokens) say(this.#parts.speed, `${tokens} tokens in ${seconds.toFixed(1)} s`);
    if (reason === "length") this.notice(CUT);
  }

  /** A sentence about this recipe, above it. */
  notice(text) {
    say(this.#parts.notice, text);
  }

  /** Fill in scores, classes, when they come, and the list. */
  async judge(verdict, classes) {
    this.#parts.after.hidden = false;
    showVerdict(this.#parts, verdict);
    await Promise.all([
      classes.then((found) => showClasses(this.#parts.classes, found)),
      this.#list.open(this.text, verdict.asked),
    ]);
  }

  /** What is said of the recipe when it is done. */
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

  async #copied(button, text) {
    const before = button.textContent;
    await copy(text);
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = before), 1600);
  }
}
