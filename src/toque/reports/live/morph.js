// Replaces a part of the page by what it has become, and leaves alone what stays: the focus, what is
// opened, where a table is scrolled to.

/** Make the children of `place` those of `html`. */
export function become(place, html) {
  const made = document.createElement("template");
  made.innerHTML = html;
  children(place, made.content);
}

function children(old, made) {
  const before = [...old.childNodes];
  const after = [...made.childNodes];
  after.forEach((node, i) => {
    const there = before[i];
    if (!there) old.append(node);
    else if (there.nodeName !== node.nodeName) there.replaceWith(node);
    else if (node.nodeType !== Node.ELEMENT_NODE) {
      if (there.nodeValue !== node.nodeValue) there.nodeValue = node.nodeValue;
    } else same(there, node);
  });
  before.slice(after.length).forEach((node) => node.remove());
}

function same(there, node) {
  for (const { name } of [...there.attributes]) {
    if (name !== "open" && !node.hasAttribute(name)) there.removeAttribute(name);
  }
  for (const { name, value } of node.attributes) {
    if (there.getAttribute(name) !== value) there.setAttribute(name, value);
  }
  if (there instanceof HTMLInputElement) there.checked = node.hasAttribute("checked");
  children(there, node);
}
