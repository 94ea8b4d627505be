// The shopping list of a recipe for a number of servings. The server computes it.

import { element, say, stepper } from "./dom.js";
import { ask } from "./requests.js";

export class ShoppingList {
  #parts;
  #title;
  #recipe = "";
  #requested = [];
  #items = [];
  #requests = 0;

  constructor(parts, { title, servings }) {
    this.#parts = parts;
    this.#title = title;
    parts.servings.value = servings;
    stepper(parts.servings, () => this.#refresh());
    parts.makes.addEventListener("change", () => {
      if (!parts.makes.checkValidity()) return;
      say(parts.estimated, "servings.");
      this.#refresh();
    });
  }

  /** Show the list of a recipe's text. It includes requested ingredients that only the steps name. */
  async open(text, requested) {
    this.#recipe = text;
    this.#requested = requested;
    await this.#fetch(null);
    say(this.#parts.estimated, "servings. This is an estimate that you can change.");
  }

  /** The list as plain text. */
  get text() {
    const lines = this.#items.map(({ food, amounts, note }) =>
      [amounts.join(" + "), food, note && `(${note})`].filter(Boolean).join(" "),
    );
    return `${this.#title}, for ${this.#parts.servings.value}\n${lines.map((line) => `- ${line}\n`).join("")}`;
  }

  async #refresh() {
    try {
      await this.#fetch(Number(this.#parts.makes.value));
    } catch (failure) {
      say(this.#parts.estimated, failure.message);
    }
  }

  async #fetch(makes) {
    const number = ++this.#requests; // answers may arrive in another order
    const servings = Number(this.#parts.servings.value);
    const list = await ask("api/shopping-list", {
      title: this.#title,
      text: this.#recipe,
      servings,
      makes,
      requested: this.#requested,
    });
    if (number !== this.#requests) return;
    this.#parts.makes.value = list.makes;
    this.#show(list.items);
  }

  #show(items) {
    this.#items = items;
    say(this.#parts["written-for"], `as written, for about ${this.#parts.makes.value}`);
    const bought = new Set(
      [...this.#parts.items.querySelectorAll(":checked")].map((box) => box.value),
    );
    this.#parts.items.replaceChildren(
      ...items.map(({ food, amounts, note }) => {
        const box = element("input", { type: "checkbox", value: food, checked: bought.has(food) });
        const remark = note ? [element("span", { className: "note" }, ` ${note}`)] : [];
        const name = element("span", { className: "food" }, food, ...remark);
        const amount = element("span", { className: "amount" }, amounts.join(" + "));
        return element("li", {}, element("label", {}, box, name, amount));
      }),
    );
    this.#parts.shopping.hidden = !items.length;
  }
}
