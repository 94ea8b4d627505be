// A recipe's text, whole or half written, as its parts.

const SECTIONS = {
  ingredients: "ingredients",
  "ingredient list": "ingredients",
  instructions: "steps",
  steps: "steps",
  directions: "steps",
  method: "steps",
};
const BULLET = /^\s*(?:[-*•–]\s*)+/;
const NUMBER = /^\s*\d{1,3}\s*[.):](?!\d)\s*/;

/** {ingredients, steps, loose}: lines of each, and what stands before the first heading. */
export function partsOf(text) {
  const parts = { ingredients: [], steps: [], loose: [] };
  let section = "loose";
  for (const line of text.split("\n")) {
    const heading = SECTIONS[line.replace(/[\s#*_=:]+/g, " ").trim().toLowerCase()];
    if (heading) {
      section = heading;
      continue;
    }
    const item = section === "loose" ? line : line.replace(BULLET, "").replace(NUMBER, "");
    if (item.trim()) parts[section].push(item.trim());
  }
  return parts;
}

/** The recipe for other programs and people: as written, under its title. */
export function plainText(title, text) {
  return `${title}\n\n${text.trim()}\n`;
}
