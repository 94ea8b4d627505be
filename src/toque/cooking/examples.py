"""Training examples of a recipe: prompt and target of each task, keys, and label columns.

Each task has a prompt with parts of a recipe, and an answer:

* `write` turns title and ingredient names into the recipe.
* `request` turns a free request into the recipe.
* `nutrition` turns title and ingredient lines into Healthy, Moderate or Indulgent.
* `difficulty` turns title, ingredient names and steps into easy, medium or hard.
* `cuisine` turns title and ingredient names into one of `origins.CUISINES`.
* `next_step` turns title, ingredient names and up to three steps into the next step.
* `title` turns ingredient names and steps into the title.

All answers are text, so every model family can learn every task. docs/reference/formats.md lists
the columns. Labels are estimated only for recipes in English.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from xxhash import xxh3_64_intdigest

from toque.cooking.labels.difficulty import judged_difficulty
from toque.cooking.labels.features import Reading, read
from toque.cooking.labels.nutrition import nutrition_of
from toque.cooking.labels.origins import cuisine_of, language_of
from toque.cooking.labels.quality import quality_of
from toque.cooking.prompts import (
    CLASSES,
    RECIPE_TASKS,
    REQUESTS,
    TASKS,
    WITH_INGREDIENTS,
    Task,
    distinct_names,
)
from toque.cooking.recipe import DIFFICULTIES, NUTRITION_CLASSES, Recipe, to_text
from toque.cooking.text_keys import normalised
from toque.keyed_random import key_of
from toque.sources.records import NO_LABEL, Example, examples_note, missing_note

UNKNOWN: Final = 255  # column value of an unknown label
UNCLEAN_NAMES: Final = (
    "ingredient names left out of prompts: not only the name of a food"
)
BY_RULE = 0  # our rule
BY_FIGURES = 1  # the source's figures
BY_SOURCE = 2  # the source's label


def examples_of(
    recipe: Recipe, notes: Counter[str], tasks: Sequence[Task] = ("write",)
) -> list[Example] | str:
    """Return a recipe's examples, one per task in ascending order, or a reason for dropping it."""
    reading = read(recipe)
    columns = labels_of(reading, notes)
    if n_unclean := sum(not facts.has_clean_name for facts in reading.lines):
        notes[UNCLEAN_NAMES] += n_unclean

    body = normalised("\n".join((*recipe.ingredients, *recipe.steps)))
    title = normalised(recipe.title)
    hashed = (body, title, b"%b\n%b" % (title, body))
    key, title_key, record_key = map(xxh3_64_intdigest, hashed)
    codes = {task: int(columns[task]) for task in CLASSES if columns[task] != UNKNOWN}
    examples: list[Example] = []
    fields = _Fields(reading, codes, record_key)
    for number, task in enumerate(TASKS):
        if task not in tasks:
            continue
        form = RECIPE_TASKS[task]
        try:
            prompt_and_target = (
                str(form.prompt).format_map(fields),
                form.target.format_map(fields),
            )
        except KeyError:
            notes[missing_note(task, NEEDS[task])] += 1
            continue
        if tuple(tasks) != ("write",):  # every recipe has a "write" example
            notes[examples_note(task)] += 1
        examples.append(
            Example(
                *prompt_and_target,
                key,
                title_key,
                record_key,
                task=number,
                columns=columns,
            )
        )
    return examples or f"{NO_LABEL} for {', '.join(tasks)}"


def labels_of(reading: Reading, notes: Counter[str]) -> dict[str, int | float]:
    """Return the label columns of a recipe. The source's own labels take precedence."""
    recipe = reading.recipe
    quality = quality_of(reading)
    language = language_of(reading) if quality.parts["language"] < 1.0 else "English"
    is_english = language == "English"
    if not is_english:
        notes[f"recipes in {language} (labels know English only)"] += 1
    if recipe.difficulty is None:
        report = judged_difficulty(reading)
        # In a foreign text only the counts of ingredients and steps are reliable.
        difficulty = report.level if is_english else report.by_bounds
        difficulty_from = BY_RULE
    else:
        difficulty, difficulty_from = recipe.difficulty, 1
        notes["difficulty as the source says"] += 1
    nutrition = recipe.nutrition_class
    nutrition_from = BY_SOURCE
    coverage = 1.0
    if nutrition is None:
        recipe_nutrition = nutrition_of(reading)
        nutrition, coverage = recipe_nutrition.klass, recipe_nutrition.coverage
        nutrition_from = BY_RULE if recipe_nutrition.estimated else BY_FIGURES
        if recipe_nutrition.estimated and not is_english:
            nutrition, coverage = None, 0.0
    nutrition_from = nutrition_from if nutrition else UNKNOWN
    notes[_ORIGINS[nutrition_from]] += 1
    cuisine = cuisine_of(recipe.tags)
    return {
        "n_ingredients": len(recipe.ingredients),
        "n_steps": len(recipe.steps),
        "quality": quality.score,
        "difficulty": DIFFICULTIES.index(difficulty),
        "difficulty_from": difficulty_from,
        "nutrition": UNKNOWN
        if nutrition is None
        else NUTRITION_CLASSES.index(nutrition),
        "nutrition_from": nutrition_from,
        "nutrition_coverage": coverage,
        "cuisine": UNKNOWN if cuisine is None else cuisine,
    }


_ORIGINS: Final = {
    BY_RULE: "nutrition class estimated from the ingredients",
    BY_FIGURES: "nutrition class from the source's figures",
    BY_SOURCE: "nutrition class as the source says",
    UNKNOWN: "nutrition class unknown",
}


# Maximum steps before the requested step; a full prompt would truncate more.
SHOWN_STEPS: Final = 3
_FOODS_OF_A_REQUEST: Final = 3
_REQUEST, _NEXT_STEP = 1, 2

# Reasons why a record has no example of a task.
NEEDS: Final[dict[Task, str]] = {
    "nutrition": "neither a field nutrition_class, nor nutrition figures per serving, nor "
    "ingredients that tell enough",
    "cuisine": "no field cuisine and no tag that names one cuisine",
    "next_step": "one step alone",
}


class _Fields:
    """Texts of a recipe by their names in `RECIPE_TASKS`. A missing text raises KeyError.

    `codes` are the recipe's class codes. `key` determines the random choices.
    """

    def __init__(self, reading: Reading, codes: Mapping[Task, int], key: int) -> None:
        self.reading = reading
        self.codes = codes
        self.key = key

    @property
    def n_before(self) -> int:
        """Number of steps before the next step, at least 1. 0 for a recipe of one step."""
        n = len(self.reading.recipe.steps)
        return 1 + key_of(self.key, _NEXT_STEP) % (n - 1) if n > 1 else 0

    def __getitem__(self, name: str) -> str:
        return _FIELDS[name](self)

    def names(self) -> list[str]:
        return distinct_names(
            facts.name for facts in self.reading.lines if facts.has_clean_name
        )

    def using(self) -> str:
        names = self.names()
        return f"{WITH_INGREDIENTS}{', '.join(names)}" if names else ""

    def steps(self, first: int = 0, end: int | None = None) -> str:
        steps = self.reading.recipe.steps[first:end]
        return "\n".join(
            f"{n}. {step}" for n, step in enumerate(steps, start=first + 1)
        )

    def steps_before(self) -> str:
        return self.steps(max(0, self.n_before - SHOWN_STEPS), self.n_before)

    def next_step(self) -> str:
        if not self.n_before:
            raise KeyError("next_step")
        return f"{self.n_before + 1}. {self.reading.recipe.steps[self.n_before]}"

    def request(self) -> str:
        recipe, foods = self.reading.recipe, self.names()[:_FOODS_OF_A_REQUEST]
        recipe_fields = {
            "title": recipe.title,
            "foods": " and ".join(filter(None, (", ".join(foods[:-1]), *foods[-1:]))),
            "servings": str(recipe.servings or ""),
            "minutes": str(recipe.minutes or ""),
        }
        unknown = [f"{{{name}}}" for name, value in recipe_fields.items() if not value]
        forms = [form for form in REQUESTS if not any(name in form for name in unknown)]
        return forms[key_of(self.key, _REQUEST) % len(forms)].format(**recipe_fields)


_FIELDS: Final[dict[str, Callable[[_Fields], str]]] = {
    "title": lambda of: of.reading.recipe.title,
    "recipe": lambda of: to_text(of.reading.recipe),
    "using": _Fields.using,
    "request": _Fields.request,
    "lines": lambda of: "".join(
        f"\n- {line}" for line in of.reading.recipe.ingredients
    ),
    "foods": lambda of: ", ".join(of.names()),
    "steps": _Fields.steps,
    "steps_before": _Fields.steps_before,
    "next_step": _Fields.next_step,
    "nutrition": lambda of: CLASSES["nutrition"][of.codes["nutrition"]],
    "difficulty": lambda of: CLASSES["difficulty"][of.codes["difficulty"]],
    "cuisine": lambda of: CLASSES["cuisine"][of.codes["cuisine"]],
}


class _FieldsSoFar(_Fields):
    """Texts of an unfinished recipe. All its steps precede the next step."""

    @property
    def n_before(self) -> int:
        return len(self.reading.recipe.steps)


def question(task: Task, recipe: Recipe) -> str:
    """Return the prompt of a task as in training. The next step follows all steps of the recipe."""
    return str(RECIPE_TASKS[task].prompt).format_map(_FieldsSoFar(read(recipe), {}, 0))
