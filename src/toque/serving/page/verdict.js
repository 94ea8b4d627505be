// What is said of a finished recipe: what was asked for and is there, its scores, its classes.

import { element, say } from "./dom.js";

const NAMES = {
  recipe_score: "Recipe score",
  ingredient_coverage: "Asked for, and there",
  hallucinated_ingredients: "Not asked for",
  ingredients_used: "Ingredients the steps use",
  steps_listed: "Foods of the steps that are listed",
  title_kept: "Foods of the title",
  variety: "Says little twice",
  quantity_sanity: "Amounts a kitchen knows",
  times_and_heat: "Times and oven heat",
  sentences_once: "Sentences said once",
  oven_fits: "No oven where none belongs",
  structure: "Structure",
  ingredient_coherence: "Ingredients with amounts",
  instruction_quality: "Steps with a cooking verb",
  completeness: "Completeness",
  format_correctness: "Headings",
  form: "Form, overall",
  ingredients_named: "Ingredients a step names",
  requested_listed: "Asked for, and listed",
  added_once: "Nothing added twice",
  foods_listed: "No food missing from the list",
  dish_made: "Steps that make the dish",
  food_cooked: "Raw food is cooked",
  amounts_usual: "Amounts usual for the dish",
  amounts_differ: "Amounts that differ",
  phrases_once: "No repeated phrases",
  steps_detailed: "Detailed steps",
};
const LOW_IS_GOOD = new Set(["hallucinated_ingredients"]);
const percent = new Intl.NumberFormat("en", { style: "percent" });

const USED = ["good", "✓", "used"];
const UNLISTED = ["partly", "!", "in the steps, not in the list"];
const MISSED = ["bad", "✕", "missed"];
const AVOIDED = ["bad", "✕", "to be left out, and there"];

/** Show scores, and which ingredients were asked for, not listed, missed, or to be left out. */
export function showVerdict(parts, { scores, asked, missed, unlisted, avoided, hint }) {
  const { cookable: score, ...others } = scores;
  if (score === undefined) return; // no recipe was asked for
  parts.verdict.hidden = false;
  parts.score.replaceChildren(
    element("strong", {}, score.toFixed(2)),
    " of 1 for cookable; recipes by people have about 0.7",
  );
  parts.asked.replaceChildren(
    ...asked.map((food) => mark(food, missed.includes(food) ? MISSED : unlisted.includes(food) ? UNLISTED : USED)),
    ...avoided.map((food) => mark(food, AVOIDED)),
  );
  say(parts.hint, hint);
  parts.scores.replaceChildren(
    ...Object.entries(others).flatMap(([name, value]) => {
      const label = NAMES[name] ?? name.replaceAll("_", " ");
      const good = LOW_IS_GOOD.has(name) ? 1 - value : value;
      const bar = element("meter", { value: good, min: 0, max: 1, ariaLabel: label });
      return [
        element("dt", {}, label),
        element("dd", {}, bar, element("span", {}, percent.format(value))),
      ];
    }),
  );
}

function mark(food, [className, sign, meaning]) {
  const symbol = element("span", { ariaHidden: "true" }, sign);
  return element("li", { className }, symbol, ` ${food} `, element("small", {}, meaning));
}

/** Show the class of each task: the model's with its probability, else the one rules give. */
export function showClasses(list, { classes }) {
  list.replaceChildren(
    ...classes.map(({ task, answer, probabilities }) => {
      const sure = probabilities ? percent.format(probabilities[answer]) : "by rule";
      const others = Object.entries(probabilities ?? {}).map(([name, share]) => `${name} ${percent.format(share)}`);
      const title = others.join(", ") || "Worked out from the ingredients and steps, not by the model";
      return element(
        "div",
        { title },
        element("dt", {}, task),
        element("dd", {}, answer, " ", element("small", {}, sure)),
      );
    }),
  );
  list.hidden = !classes.length;
}
