"""Training examples of a recipe: prompt and target of each task, keys, and label columns.

The prompt of each task has parts of a recipe, and its target is another part or a label:

* `write` turns title and ingredient names into the recipe.
* `request` turns a free request into the recipe.
* `nutrition` turns title and ingredient lines into Healthy, Moderate or Indulgent.
* `difficulty` turns title, ingredient names and steps into easy, medium or hard.
* `cuisine` turns title and ingredient names into one of `origins.CUISINES`.
* `next_step` turns title, ingredient names and up to three steps into the next step.
* `title` turns ingredient names and steps into the title.

All targets are text, so every model family can learn every task. docs/reference/formats.md lists
the columns. Labels are estimated only for recipes in English.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from xxhash import xxh3_64_intdigest

from toque.cooking.labels.difficulty import estimate_difficulty
from toque.cooking.labels.features import Reading, read_features
from toque.cooking.labels.nutrition import nutrition_of
from toque.cooking.labels.origins import cuisine_of, language_of
from toque.cooking.labels.quality import quality_of
from toque.cooking.normalised_words import duplicate_key
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
from toque.keyed_random import key_of
from toque.sources.records import NO_LABEL, Example, examples_note, missing_note

UNKNOWN = 255  # column value for an unknown label
UNCLEAN_NAMES = "ingredient names left out of prompts: not only the name of a food"
# Origins of a nutrition class, as codes of the column `nutrition_from`.
BY_RULE = 0  # our rule
BY_FIGURES = 1  # the source's nutrients
BY_SOURCE = 2  # the source's label
# In the column `difficulty_from`, 0 is our rule as well.
_DIFFICULTY_BY_SOURCE = 1


def examples_of(
    recipe: Recipe, notes: Counter[str], tasks: Sequence[Task] = ("write",)
) -> list[Example] | str:
    """Return a recipe's examples, one per task in ascending order, or a reason for dropping it.

    `notes` counts estimated labels and missing examples.
    """
    reading = read_features(recipe)
    columns = labels_of(reading, notes)
    if n_unclean := sum(not facts.has_clean_name for facts in reading.lines):
        notes[UNCLEAN_NAMES] += n_unclean

    body = duplicate_key("\n".join((*recipe.ingredients, *recipe.steps)))
    title = duplicate_key(recipe.title)
    key = xxh3_64_intdigest(body)
    title_key = xxh3_64_intdigest(title)
    record_key = xxh3_64_intdigest(b"%b\n%b" % (title, body))
    codes = {task: int(columns[task]) for task in CLASSES if columns[task] != UNKNOWN}
    fields = _Fields(reading, codes, record_key)

    examples: list[Example] = []
    for number, task in enumerate(TASKS):
        if task not in tasks:
            continue
        template = RECIPE_TASKS[task]
        try:
            prompt = str(template.prompt).format_map(fields)
            target = template.target.format_map(fields)
        except KeyError:
            notes[missing_note(task, NEEDS[task])] += 1
            continue
        if tuple(tasks) != ("write",):  # every recipe has a "write" example
            notes[examples_note(task)] += 1
        examples.append(
            Example(
                prompt,
                target,
                key,
                title_key,
                record_key,
                task=number,
                columns=columns,
            )
        )
    return examples or f"{NO_LABEL} for {', '.join(tasks)}"


def labels_of(reading: Reading, notes: Counter[str]) -> dict[str, int | float]:
    """Return the label columns of a recipe, and count their origins in `notes`.

    The source's own labels take precedence.
    """
    recipe = reading.recipe
    quality = quality_of(reading)
    language = language_of(reading) if quality.parts["language"] < 1.0 else "English"
    is_english = language == "English"
    if not is_english:
        notes[f"recipes in {language} (labels know English only)"] += 1
    cuisine = cuisine_of(recipe.tags)
    return {
        "n_ingredients": len(recipe.ingredients),
        "n_steps": len(recipe.steps),
        "quality": quality.score,
        **_difficulty_columns(reading, notes, is_english=is_english),
        **_nutrition_columns(reading, notes, is_english=is_english),
        "cuisine": UNKNOWN if cuisine is None else cuisine,
    }


def _difficulty_columns(
    reading: Reading, notes: Counter[str], *, is_english: bool
) -> dict[str, int]:
    """Return the source's difficulty, or an estimate."""
    difficulty = reading.recipe.difficulty
    difficulty_from = _DIFFICULTY_BY_SOURCE
    if difficulty is not None:
        notes["difficulty as the source says"] += 1
    else:
        report = estimate_difficulty(reading)
        # In a foreign text only the counts of ingredients and steps are reliable.
        difficulty = report.level if is_english else report.by_bounds
        difficulty_from = BY_RULE
    return {
        "difficulty": DIFFICULTIES.index(difficulty),
        "difficulty_from": difficulty_from,
    }


def _nutrition_columns(
    reading: Reading, notes: Counter[str], *, is_english: bool
) -> dict[str, int | float]:
    """Return the source's nutrition class, or the class of its nutrients, or an estimate."""
    klass = reading.recipe.nutrition_class
    nutrition_from = BY_SOURCE
    coverage = 1.0
    if klass is None:
        nutrition = nutrition_of(reading)
        klass, coverage = nutrition.klass, nutrition.coverage
        nutrition_from = BY_RULE if nutrition.estimated else BY_FIGURES
        if nutrition.estimated and not is_english:
            klass, coverage = None, 0.0
    if klass is None:
        nutrition_from = UNKNOWN
    notes[_ORIGINS[nutrition_from]] += 1
    return {
        "nutrition": UNKNOWN if klass is None else NUTRITION_CLASSES.index(klass),
        "nutrition_from": nutrition_from,
        "nutrition_coverage": coverage,
    }


_ORIGINS = {
    BY_RULE: "nutrition class estimated from the ingredients",
    BY_FIGURES: "nutrition class from the source's figures",
    BY_SOURCE: "nutrition class as the source says",
    UNKNOWN: "nutrition class unknown",
}


SHOWN_STEPS = 3
"""Maximum number of steps in the prompt for the next step. More would fill the prompt."""
_FOODS_OF_A_REQUEST = 3
_REQUEST, _NEXT_STEP = 1, 2  # components of the random keys of two tasks

# Reasons why a record has no example of a task.
NEEDS: dict[Task, str] = {
    "nutrition": "neither a field nutrition_class, nor nutrition figures per serving, nor "
    "ingredients that tell enough",
    "cuisine": "no field cuisine and no tag that names one cuisine",
    "next_step": "one step alone",
}


class _Fields:
    """Texts of a recipe by their names in `RECIPE_TASKS`. A missing text raises KeyError.

    Args:
        reading: Features of the recipe.
        codes: Class codes of the recipe by task.
        key: Key of the random choices.
    """

    def __init__(self, reading: Reading, codes: Mapping[Task, int], key: int) -> None:
        self.reading = reading
        self.codes = codes
        self.key = key

    @property
    def n_before(self) -> int:
        """Number of steps before the next step, at least 1. 0 for a recipe with one step."""
        n_steps = len(self.reading.recipe.steps)
        if n_steps < 2:
            return 0
        return 1 + key_of(self.key, _NEXT_STEP) % (n_steps - 1)

    def __getitem__(self, name: str) -> str:
        return _FIELDS[name](self)

    def food_names(self) -> list[str]:
        """Return the names of the ingredients as in prompts."""
        return distinct_names(
            facts.name for facts in self.reading.lines if facts.has_clean_name
        )

    def using(self) -> str:
        names = self.food_names()
        return f"{WITH_INGREDIENTS}{', '.join(names)}" if names else ""

    def steps(self, first: int = 0, end: int | None = None) -> str:
        """Format steps[first:end] with their numbers in the recipe."""
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
        """Choose a form of `REQUESTS` at random. All its fields must be known."""
        recipe = self.reading.recipe
        *first_foods, last_food = self.food_names()[:_FOODS_OF_A_REQUEST] or [""]
        foods = (
            f"{', '.join(first_foods)} and {last_food}" if first_foods else last_food
        )
        values = {
            "title": recipe.title,
            "foods": foods,
            "servings": str(recipe.servings or ""),
            "minutes": str(recipe.minutes or ""),
        }
        unknown = [f"{{{name}}}" for name, value in values.items() if not value]
        forms = [form for form in REQUESTS if not any(name in form for name in unknown)]
        form = forms[key_of(self.key, _REQUEST) % len(forms)]
        return form.format(**values)


_FIELDS: dict[str, Callable[[_Fields], str]] = {
    "title": lambda fields: fields.reading.recipe.title,
    "recipe": lambda fields: to_text(fields.reading.recipe),
    "using": _Fields.using,
    "request": _Fields.request,
    "lines": lambda fields: "".join(
        f"\n- {line}" for line in fields.reading.recipe.ingredients
    ),
    "foods": lambda fields: ", ".join(fields.food_names()),
    "steps": _Fields.steps,
    "steps_before": _Fields.steps_before,
    "next_step": _Fields.next_step,
    "nutrition": lambda fields: CLASSES["nutrition"][fields.codes["nutrition"]],
    "difficulty": lambda fields: CLASSES["difficulty"][fields.codes["difficulty"]],
    "cuisine": lambda fields: CLASSES["cuisine"][fields.codes["cuisine"]],
}


class _FieldsSoFar(_Fields):
    """Texts of an unfinished recipe. All its steps precede the next step."""

    @property
    def n_before(self) -> int:
        return len(self.reading.recipe.steps)


def question(task: Task, recipe: Recipe) -> str:
    """Return the prompt of a task as in training. The next step follows all steps of the recipe."""
    fields = _FieldsSoFar(read_features(recipe), codes={}, key=0)
    return str(RECIPE_TASKS[task].prompt).format_map(fields)
