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
const UNFINISHED = /^\s*\d{0,3}$/; // perhaps a step's number
const NUMBER = /^\s*\d{1,3}\s*[.):](?!\d)\s*/;

/** {ingredients, steps, loose}: lines of each, and what is neither. */
export function partsOf(text) {
  const parts = { ingredients: [], steps: [], loose: [] };
  let section = "loose";
  const lines = text.split("\n");
  if (mayBecomeMore(lines.at(-1))) lines.pop();
  for (const line of lines) {
    const heading = SECTIONS[bare(line)];
    if (heading) {
      section = heading;
      continue;
    }
    const item = line.replace(BULLET, "").replace(NUMBER, "").trim();
    if (section !== "loose") parts[section].push(item);
    else if (BULLET.test(line)) parts.ingredients.push(item); // its heading is missing
    else if (NUMBER.test(line)) parts.steps.push(item);
    else parts.loose.push(line.trim());
  }
  for (const name of Object.keys(parts)) parts[name] = parts[name].filter(Boolean);
  return parts;
}

const bare = (line) => line.replace(/[\s#*_=:]+/g, " ").trim().toLowerCase();

/** Whether the last line may turn out a heading or a number, which would take back what it shows. */
function mayBecomeMore(line) {
  const begun = bare(line);
  return UNFINISHED.test(line) || Object.keys(SECTIONS).some((name) => name !== begun && name.startsWith(begun));
}

/** The recipe for other programs and people: as written, under its title. */
export function plainText(title, text) {
  return `${title}\n\n${text.trim()}\n`;
}
