// Parts of a recipe's text, which may be incomplete.

const SECTIONS = {
  ingredients: "ingredients",
  "ingredient list": "ingredients",
  instructions: "steps",
  steps: "steps",
  directions: "steps",
  method: "steps",
};
const BULLET = /^\s*(?:[-*•–]\s*)+/;
const UNFINISHED = /^\s*\d{0,3}$/; // may become the number of a step
const NUMBER = /^\s*\d{1,3}\s*[.):](?!\d)\s*/;

/** Divide a text into the lines of {ingredients, steps, loose}. */
export function partsOf(text) {
  const parts = { ingredients: [], steps: [], loose: [] };
  let section = "loose";
  const lines = text.split("\n");
  if (mayBecomeMore(lines.at(-1))) lines.pop();
  for (const line of lines) {
    const heading = SECTIONS[bare(line.replace(BULLET, ""))];
    if (heading) {
      section = heading;
      continue;
    }
    const item = line.replace(BULLET, "").replace(NUMBER, "").trim();
    if (section !== "loose") parts[section].push(item);
    else if (BULLET.test(line)) parts.ingredients.push(item); // without a heading
    else if (NUMBER.test(line)) parts.steps.push(item);
    else parts.loose.push(line.trim());
  }
  for (const name of Object.keys(parts)) parts[name] = parts[name].filter(Boolean);
  return parts;
}

const bare = (line) => line.replace(/[\s#*_=:]+/g, " ").trim().toLowerCase();

/** Check whether the last line may become a heading or a number. It is not shown until then. */
function mayBecomeMore(line) {
  const begun = bare(line);
  return UNFINISHED.test(line) || Object.keys(SECTIONS).some((name) => name !== begun && name.startsWith(begun));
}

/** The recipe as plain text, with its title. */
export function plainText(title, text) {
  return `${title}\n\n${text.trim()}\n`;
}
