"""Recipe JSON lines to examples, with the field names recipe collections use.

A record is dropped for one of `REASONS`, with its line number; it is never fatal here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import xxhash

from toque.cooking.cleaning import clean_ingredients, clean_steps, clean_text, clean_title
from toque.cooking.jsonlines import MAX_LINE_BYTES, TOO_LONG, decode_line, line_blocks
from toque.cooking.metrics import MIN_CHARS, overall_quality
from toque.cooking.recipe import (
    DIFFICULTIES,
    NUTRITION_CLASSES,
    ParsedRecipe,
    Recipe,
    difficulty_of,
    to_text,
)
from toque.cooking.templates import write_prompt
from toque.data.example import Block, BlockExamples, Example

Reason = Literal[
    "not UTF-8",
    "not JSON",
    "not an object",
    "no title",
    "no ingredients",
    "no steps",
    "too short",
    "line too long",
]
REASONS: tuple[Reason, ...] = get_args(Reason)

MIN_STEP_CHARS = 20
"""Steps that are shorter in all say nothing a model could learn ("Mix." )."""

UNKNOWN = 255
"""Column value of a label that the record does not carry."""

_TITLE = ("title", "name", "recipe_name")
_INGREDIENTS = ("ingredients", "ingredient_lines", "recipeIngredient", "extendedIngredients")
_STEPS = (
    "directions",
    "steps",
    "instructions_list",
    "instructions",
    "recipeInstructions",
    "method",
)
_TAGS = ("tags", "keywords")
_SERVINGS = ("servings", "yields", "yield", "recipeYield", "serves")
_MINUTES = ("minutes", "total_time", "totalTime", "ready_in_minutes", "readyInMinutes")
_PARTS_OF_TIME = (("prep_time", "prepTime"), ("cook_time", "cookTime"))
_NUTRITION = {
    "energy_kcal": ("energy_kcal", "calories", "kcal"),
    "fat_g": ("fat_g", "fatContent", "fat"),
    "sugar_g": ("sugar_g", "sugarContent", "sugar"),
    "salt_g": ("salt_g",),
    "protein_g": ("protein_g", "proteinContent", "protein"),
    "sodium_mg": ("sodium_mg", "sodiumContent", "sodium"),
}
_ITEM_TEXT = ("text", "original", "line", "name")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_ISO_TIME = re.compile(r"P(?:(\d+)D)?T?(?:(\d+)H)?(?:(\d+)M)?(?:\d+S)?", re.IGNORECASE)
_HOURS = re.compile(r"(\d+(?:\.\d+)?)\s*h", re.IGNORECASE)
_MINUTE = re.compile(r"(\d+(?:\.\d+)?)\s*m", re.IGNORECASE)
_NOT_ALPHANUMERIC = re.compile(r"[\W_]+")
_T = TypeVar("_T", bound=str)


@dataclass(frozen=True)
class RecipeReader:
    """Reads `.jsonl`, `.jsonl.gz` and `.json` files of one recipe a line."""

    def blocks(self, path: Path) -> Iterator[Block]:
        """Runs of whole lines of `path`; see `line_blocks`.

        Raises:
            DataError: the file cannot be read or is of another kind.
        """
        return line_blocks(Path(path))

    def examples(self, block: Block) -> BlockExamples:
        """One "write" example per usable recipe, and why the others were dropped."""
        examples: list[Example] = []
        dropped: dict[str, list[int]] = {}
        notes: Counter[str] = Counter()
        read = 0
        for number, line in enumerate(block.payload.splitlines(), start=block.first_line):
            if not line.strip():
                continue
            read += 1
            recipe = read_recipe(line, notes)
            if isinstance(recipe, Recipe):
                examples.append(write_example(recipe, source=block.source))
            else:
                dropped.setdefault(recipe, []).append(number)
        return BlockExamples(
            examples=examples,
            read=read,
            kept=len(examples),
            dropped=dropped,
            notes={what: count for what, count in notes.items() if count},
        )


recipe_reader = RecipeReader()


def read_recipe(line: bytes, notes: Counter[str]) -> Recipe | Reason:
    """The cleaned recipe of one line, or why there is none. Repairs are counted in `notes`."""
    if line == TOO_LONG or len(line) > MAX_LINE_BYTES:
        return "line too long"
    try:
        record = decode_line(line)
    except UnicodeDecodeError:
        return "not UTF-8"
    except ValueError:
        return "not JSON"
    if not isinstance(record, dict):
        return "not an object"
    return recipe_of(record, notes)


def recipe_of(record: Mapping[str, Any], notes: Counter[str]) -> Recipe | Reason:
    """The cleaned recipe of a decoded record, or why there is none."""
    title = clean_title(_text(_first(record, _TITLE)), notes)
    ingredients = clean_ingredients(_items(_first(record, _INGREDIENTS)), notes)
    steps = clean_steps(_items(_first(record, _STEPS)), notes)
    if not any(character.isalnum() for character in title):
        return "no title"
    if not ingredients:
        return "no ingredients"
    if not steps:
        return "no steps"
    recipe = Recipe(
        title=title,
        ingredients=ingredients,
        steps=steps,
        tags=_tags(record, notes),
        servings=_whole(_first(record, _SERVINGS)),
        minutes=_minutes(record),
        source=_text(record.get("source")),
        nutrition=_nutrition(record),
        difficulty=_label(record.get("difficulty"), DIFFICULTIES),
        nutrition_class=_label(record.get("nutrition_class"), NUTRITION_CLASSES),
    )
    if sum(map(len, steps)) < MIN_STEP_CHARS or _text_chars(recipe) < MIN_CHARS:
        return "too short"
    return recipe


def write_example(recipe: Recipe, *, source: int) -> Example:
    """The example of the task "write": from title and ingredient names to the whole recipe."""
    target = to_text(recipe)
    body = _normalised("\n".join((*recipe.ingredients, *recipe.steps)))
    title = _normalised(recipe.title)
    n_ingredients, n_steps = len(recipe.ingredients), len(recipe.steps)
    difficulty = recipe.difficulty or difficulty_of(n_ingredients, n_steps)
    as_read = ParsedRecipe(recipe.ingredients, recipe.steps, True, True)
    nutrition = recipe.nutrition_class
    return Example(
        prompt=write_prompt(recipe.title, recipe.ingredients),
        target=target,
        key=_key(body),
        title_key=_key(title),
        record_key=_key(f"{title}\n{body}"),
        columns={
            "n_ingredients": n_ingredients,
            "n_steps": n_steps,
            "quality": overall_quality(as_read, len(target)),
            "difficulty": DIFFICULTIES.index(difficulty),
            "nutrition": UNKNOWN if nutrition is None else NUTRITION_CLASSES.index(nutrition),
            "source": source,
        },
    )


def _text_chars(recipe: Recipe) -> int:
    """At most `len(to_text(recipe))`, without building it."""
    return 29 + sum(3 + len(line) for line in (*recipe.ingredients, *recipe.steps))


def _normalised(text: str) -> str:
    return _NOT_ALPHANUMERIC.sub("", text.casefold())


def _key(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode())


def _first(record: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    """The first of the named fields that holds something."""
    return next((record[name] for name in names if record.get(name)), None)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _items(value: Any) -> Iterator[str]:
    """The strings of a list, of one string, or of schema.org's nested items, in order."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            if isinstance(item, str):
                yield item
            else:
                yield from _items(item)
    elif isinstance(value, dict):
        if nested := value.get("itemListElement") or value.get("steps"):
            yield from _items(nested)
        else:
            yield _text(_first(value, _ITEM_TEXT))


def _tags(record: Mapping[str, Any], notes: Counter[str]) -> tuple[str, ...]:
    value = _first(record, _TAGS)
    items = value.split(",") if isinstance(value, str) else _items(value)
    return tuple(tag for item in items if (tag := clean_text(item, notes)))


def _number(value: Any) -> float | None:
    """A finite number, or the first number of a text ("4 servings", "143 kcal")."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value) if abs(value) < 1e9 else None  # also false for NaN
    match = _NUMBER.search(value) if isinstance(value, str) else None
    return float(match.group()) if match and len(match.group()) < 10 else None


def _whole(value: Any) -> int | None:
    number = _number(value)
    return round(number) if number is not None and number >= 1 else None


def _minutes(record: Mapping[str, Any]) -> int | None:
    total = _duration(_first(record, _MINUTES))
    if total is None:
        parts = [_duration(_first(record, names)) for names in _PARTS_OF_TIME]
        total = sum(part for part in parts if part is not None) or None
    return total


def _duration(value: Any) -> int | None:
    """Minutes of a number, "1 hour 20 min" or ISO 8601 "PT1H20M"."""
    if not isinstance(value, str):
        return _whole(value)
    if value.upper().startswith("P") and (iso := _ISO_TIME.fullmatch(value.strip())):
        days, hours, minutes = (int(group or 0) for group in iso.groups())
        return 1440 * days + 60 * hours + minutes or None
    hour, minute = _HOURS.search(value), _MINUTE.search(value)
    if hour or minute:
        whole = 60 * float(hour[1] if hour else 0) + float(minute[1] if minute else 0)
        return round(whole) or None
    return _whole(value)


def _nutrition(record: Mapping[str, Any]) -> dict[str, float] | None:
    nested = _first(record, ("nutrition", "nutrients"))
    facts = nested if isinstance(nested, dict) else record
    found = {name: _number(_first(facts, fields)) for name, fields in _NUTRITION.items()}
    known = {name: value for name, value in found.items() if value is not None}
    return known or None


def _label(value: Any, allowed: tuple[_T, ...]) -> _T | None:
    folded = value.casefold() if isinstance(value, str) else None
    return next((label for label in allowed if label.casefold() == folded), None)
