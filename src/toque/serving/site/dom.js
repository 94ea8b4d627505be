// Helpers for elements. Text is always set as text, never as HTML.

/** The element with an id. */
export const at = (id) => document.getElementById(id);

/** Create an element with properties and children: `element("li", {className: "soft"}, "2 eggs")`. */
export function element(name, properties = {}, ...children) {
  const created = Object.assign(document.createElement(name), properties);
  created.append(...children);
  return created;
}

/** Create a button with a function for its clicks. */
export function button(text, onClick, properties = {}) {
  const created = element("button", { type: "button", ...properties }, text);
  created.addEventListener("click", () => onClick(created));
  return created;
}

/** Copy the element of a template. Also return its `data-part` elements by name. */
export function copyOf(template) {
  const root = template.content.firstElementChild.cloneNode(true);
  const parts = Object.fromEntries(
    [...root.querySelectorAll("[data-part]")].map((each) => [each.dataset.part, each]),
  );
  return { root, parts };
}

/** Show one text per item of a list. Items with the right text are not touched, so nothing flickers. */
export function setItems(list, texts) {
  texts.forEach((text, i) => {
    const item = list.children[i] ?? list.appendChild(document.createElement("li"));
    if (item.textContent !== text) item.textContent = text;
  });
  while (list.children.length > texts.length) list.lastElementChild.remove();
}

/** Show text in an element, or hide the element if the text is empty. */
export function say(target, text) {
  target.textContent = text;
  target.hidden = !text;
}

/** Call `act` when Escape is pressed. Return a function that ends this. */
export function onEscape(act) {
  const listen = (event) => event.key === "Escape" && act();
  document.addEventListener("keydown", listen);
  return () => document.removeEventListener("keydown", listen);
}

/** Connect the buttons − and + next to a number. `onChange` receives every valid number. */
export function stepper(input, onChange = () => {}) {
  const report = () => input.checkValidity() && input.value && onChange(Number(input.value));
  for (const step of input.parentElement.querySelectorAll("[data-step]")) {
    step.addEventListener("click", () => {
      input.stepUp(Number(step.dataset.step));
      report();
    });
  }
  input.addEventListener("change", report);
}

/** Copy text. A page on an insecure address has no clipboard, so it copies from a text field. */
export async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const field = element("textarea", { value: text, className: "unseen" });
  document.body.append(field);
  field.select();
  document.execCommand("copy");
  field.remove();
}
