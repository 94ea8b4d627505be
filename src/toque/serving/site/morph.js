// Updates a part of the page to new HTML. Unchanged elements stay, with their focus, open state and
// scroll position.

/** Change the children of `place` to the children of `html`. */
export function morph(place, html) {
  const created = document.createElement("template");
  created.innerHTML = html;
  morphChildren(place, created.content);
}

function morphChildren(old, created) {
  const before = [...old.childNodes];
  const after = [...created.childNodes];
  after.forEach((node, i) => {
    const existing = before[i];
    if (!existing) old.append(node);
    else if (existing.nodeName !== node.nodeName) existing.replaceWith(node);
    else if (node.nodeType !== Node.ELEMENT_NODE) {
      if (existing.nodeValue !== node.nodeValue) existing.nodeValue = node.nodeValue;
    } else morphElement(existing, node);
  });
  before.slice(after.length).forEach((node) => node.remove());
}

function morphElement(existing, node) {
  for (const { name } of [...existing.attributes]) {
    if (name !== "open" && !node.hasAttribute(name)) existing.removeAttribute(name);
  }
  for (const { name, value } of node.attributes) {
    if (existing.getAttribute(name) !== value) existing.setAttribute(name, value);
  }
  if (existing instanceof HTMLInputElement) existing.checked = node.hasAttribute("checked");
  morphChildren(existing, node);
}
