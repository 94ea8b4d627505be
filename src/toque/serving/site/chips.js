// A field for several short entries. Each entry is a chip with a button that removes it.

import { element } from "./dom.js";

export class Chips {
  #list;
  #input;

  constructor(field) {
    this.#list = field.querySelector("ul");
    this.#input = field.querySelector("input");
    this.#input.addEventListener("keydown", (event) => this.#onKey(event));
    this.#input.addEventListener("input", () => this.#input.value.includes(",") && this.#addTyped());
  }

  /** The entries, including text that is not a chip yet. */
  get values() {
    this.#addTyped();
    return [...this.#list.children].map((chip) => chip.dataset.value);
  }

  set values(values) {
    this.#list.replaceChildren();
    values.forEach((value) => this.#add(value));
  }

  #onKey(event) {
    if (event.key === "Enter" && this.#input.value.trim()) {
      event.preventDefault(); // the next Enter submits the form
      this.#addTyped();
    } else if (event.key === "Backspace" && !this.#input.value) {
      this.#list.lastElementChild?.remove();
    }
  }

  #addTyped() {
    this.#input.value.split(",").forEach((value) => this.#add(value.trim()));
    this.#input.value = "";
  }

  #add(value) {
    const known = [...this.#list.children].map((chip) => chip.dataset.value.toLowerCase());
    if (!value || known.includes(value.toLowerCase())) return;
    const remove = element("button", { type: "button", ariaLabel: `Remove ${value}` }, "×");
    const chip = element("li", {}, element("span", {}, value), remove);
    chip.dataset.value = value;
    remove.addEventListener("click", () => {
      chip.remove();
      this.#input.focus();
    });
    this.#list.append(chip);
  }
}
