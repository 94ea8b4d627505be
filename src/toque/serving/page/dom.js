// Elements: made, and found by their part in a copied template. Text is only ever set as text.

/** An element with properties and children: `element("li", {className: "soft"}, "2 eggs")`. */
export function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

/** A copy of a template's one element, with its `data-part` elements by their names. */
export function copyOf(template) {
  const root = template.content.firstElementChild.cloneNode(true);
  const parts = Object.fromEntries(
    [...root.querySelectorAll("[data-part]")].map((each) => [each.dataset.part, each]),
  );
  return { root, parts };
}

/** Make a list's items say `texts`; items that already do are left alone, so nothing flickers. */
export function setItems(list, texts) {
  texts.forEach((text, i) => {
    const item = list.children[i] ?? list.appendChild(document.createElement("li"));
    if (item.textContent !== text) item.textContent = text;
  });
  while (list.children.length > texts.length) list.lastElementChild.remove();
}

/** Show text in an element, or hide the element when there is none. */
export function say(target, text) {
  target.textContent = text;
  target.hidden = !text;
}

/** The − and + beside a number; `onChange` hears of every valid number, typed or stepped. */
export function stepper(input, onChange = () => {}) {
  const heard = () => input.checkValidity() && input.value && onChange(Number(input.value));
  for (const button of input.parentElement.querySelectorAll("[data-step]")) {
    button.addEventListener("click", () => {
      input.stepUp(Number(button.dataset.step));
      heard();
    });
  }
  input.addEventListener("change", heard);
}

/** Copy text, also where the page is not on a secure address and has no clipboard. */
export async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const field = element("textarea", { value: text, className: "visually-hidden" });
  document.body.append(field);
  field.select();
  document.execCommand("copy");
  field.remove();
}
