// Scores of a finished recipe: requested ingredients, all scores and classes.

import { element, say } from "./dom.js";

const NAMES = {
  recipe_score: "Recipe score",
  ingredient_coverage: "Requested ingredients in the recipe",
  hallucinated_ingredients: "Ingredients that were not requested",
  ingredients_used: "Ingredients that the steps use",
  steps_listed: "Foods in the steps that are listed",
  title_kept: "Foods in the title",
  variety: "Few repetitions",
  quantity_sanity: "Possible amounts",
  times_and_heat: "Possible times and temperatures",
  sentences_once: "No repeated sentences",
  oven_fits: "Oven only for baked dishes",
  structure: "Structure",
  ingredient_coherence: "Ingredients with amounts",
  instruction_quality: "Steps with a cooking verb",
  completeness: "Completeness",
  format_correctness: "Headings",
  form: "Form, overall",
  ingredients_named: "Ingredients that a step names",
  requested_listed: "Requested ingredients that are listed",
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
const MISSING = ["bad", "✕", "missing"];
const AVOIDED = ["bad", "✕", "unwanted"];

/** Show the scores, and the state of each requested and each unwanted ingredient. */
export function showVerdict(parts, { scores, requested, missing, unlisted, avoided, hint }) {
  const { cookable: score, ...others } = scores;
  if (score === undefined) return; // the prompt does not ask for a recipe
  parts.verdict.hidden = false;
  const stateOf = (food) => {
    if (missing.includes(food)) return MISSING;
    return unlisted.includes(food) ? UNLISTED : USED;
  };
  parts.score.replaceChildren(
    element("strong", {}, score.toFixed(2)),
    " of 1 for cookable; recipes by people have about 0.7",
  );
  parts.requested.replaceChildren(
    ...requested.map((food) => mark(food, stateOf(food))),
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

/** Show the class of each task, with its probability if the model chose it. */
export function showClasses(list, { classes }) {
  list.replaceChildren(
    ...classes.map(({ task, answer, probabilities }) => {
      const origin = probabilities ? percent.format(probabilities[answer]) : "by rule";
      const others = Object.entries(probabilities ?? {}).map(([name, share]) => `${name} ${percent.format(share)}`);
      const title = others.join(", ") || "Computed from the ingredients and steps, not by the model";
      return element(
        "div",
        { title },
        element("dt", {}, task),
        element("dd", {}, answer, " ", element("small", {}, origin)),
      );
    }),
  );
  list.hidden = !classes.length;
}
