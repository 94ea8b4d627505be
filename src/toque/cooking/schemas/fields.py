"""Field mapping from records of all known schemas to the form that `normalize` cleans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any

from toque.cooking.schemas.columns import (
    Role,
    Shape,
    ingredients_in_steps,
    shape_of,
    unwrapped,
)
from toque.cooking.schemas.item_objects import UNUSED, ItemReader
from toque.cooking.schemas.list_fields import (
    BrokenListError,
    lines_in,
    printed,
    text_of,
    words_in,
)
from toque.cooking.schemas.repairs import (
    DOUBLED_LISTS,
    MIN_DOUBLED_CHARS,
    only_a_link,
    rejoined,
    untokenised,
    with_apostrophes,
    without_boilerplate,
    without_misprints,
    without_repeat,
)
from toque.cooking.schemas.schema_org import is_schema_org, recipe_nodes, record_of_node
from toque.sources.records import is_filled

BROKEN_LIST = "broken list"
NO_NODE = "no recipe in record"
_NODE = (("ingredients", "recipeIngredient"), ("steps", "recipeInstructions"))

# Daily values in Food.com's percentages: the US label before 2016, plus 25 g of sugar, which is not
# on that label. With them, energy matches 9/4/4 kcal per gram (tests/cooking/schemas).
DAILY_VALUES = {
    "fat_g": 65.0, "sugar_g": 25.0, "sodium_mg": 2400.0, "protein_g": 50.0,
    "saturated_fat_g": 20.0, "carbohydrate_g": 300.0,
}  # fmt: skip
# Limit per text; the longest of 90,000 real recipes has 15,290.
MAX_FIELD_CHARS = 200_000
# Maximum nesting depth of a record's values; real pages have a depth of ten.
MAX_DEPTH = 100
_API_DEFAULT_MINUTES = ("45", "45.0")  # Spoonacular's value for an unknown time

_MOST = 1e9  # upper bound of numbers in a record

Record = dict[str, Any]


def records_of(
    raw: Mapping[str, Any], columns: tuple[tuple[str, str], ...], notes: Counter[str]
) -> Iterator[Record | str]:
    """Read the records in a raw record, or a reason for dropping it. A graph may have several."""
    raw = {name: _shortened(value, notes, 1) for name, value in raw.items()}

    if not columns and is_schema_org(raw):
        nodes = recipe_nodes(raw)
        for node in nodes:
            unused = shape_of(tuple(node), _NODE).unused(node)
            notes.update(f"{UNUSED}{name}" for name in unused)
            yield _repaired(record_of_node(node, notes), notes)
        if not nodes:
            yield NO_NODE
        return

    if not columns and (recipe := unwrapped(raw)) is not raw:
        around = (
            name
            for name, value in raw.items()
            if value is not recipe and is_filled(value)
        )
        notes.update(f"{UNUSED}{name}" for name in around)
        raw = recipe

    shape = shape_of(tuple(raw), columns)
    notes.update(f"{UNUSED}{name}" for name in shape.unused(raw))
    if shape.schema == "foodcom":  # R writes NA for missing values
        raw = {name: None if value == "NA" else value for name, value in raw.items()}

    try:
        record = _generic(raw, shape, notes)
        if adapt := _ADAPTERS.get(shape.schema):
            adapt(
                record,
                {name: raw[field] for name, field in shape.folded.items()},
                notes,
            )
    except BrokenListError:
        yield BROKEN_LIST
        return
    yield _repaired(record, notes)


def _shortened(value: Any, notes: Counter[str], depth: int) -> Any:
    """Limit the texts in a value to `MAX_FIELD_CHARS` and its depth to `MAX_DEPTH`."""
    if isinstance(value, str):
        if len(value) <= MAX_FIELD_CHARS:
            return value
        notes[f"fields over {MAX_FIELD_CHARS:,} characters cut"] += 1
        return value[:MAX_FIELD_CHARS]
    if not isinstance(value, list | dict):
        return value
    if depth > MAX_DEPTH:
        notes[f"values nested over {MAX_DEPTH} deep left out"] += 1
        return None
    if isinstance(value, list):
        return [_shortened(item, notes, depth + 1) for item in value]
    return {name: _shortened(item, notes, depth + 1) for name, item in value.items()}


def _repaired(record: Record, notes: Counter[str]) -> Record:
    lines, steps = (
        without_misprints(without_boilerplate(record.get(name) or [], notes), notes)
        for name in ("ingredients", "directions")
    )
    if len(steps) == 1 and "\n" in steps[0]:
        steps = [line for line in steps[0].splitlines() if line.strip()]
    # One line that repeats the line before it can be an ingredient of the next part.
    n_repeated = sum(line == before for before, line in pairwise(lines))
    shortest = 1 if n_repeated > 1 else MIN_DOUBLED_CHARS
    lines = without_repeat(lines, notes, DOUBLED_LISTS, shortest=shortest)
    if only_a_link(steps):
        notes["steps that only link to a page"] += 1
        steps = []
    return record | {"ingredients": lines, "directions": steps}


def _generic(raw: Mapping[str, Any], shape: Shape, notes: Counter[str]) -> Record:
    record = {role: raw[name] for role, name in shape.roles.items() if name in raw}
    record["title"] = text_of(record.get("title"))
    record.pop("steps", None)
    record["ingredients"] = _first_lines(raw, shape, "ingredients", notes)
    record["directions"] = _first_lines(raw, shape, "steps", notes)
    record["tags"] = [
        *words_in(record.get("tags")),
        *words_in(record.pop("cuisine", None)),
    ]
    record["source"] = text_of(raw.get("source"))
    for name in ("difficulty", "nutrition_class"):
        record[name] = raw.get(name)
    record.pop("nutrition", None)
    for name in ("nutrition", "nutrients"):
        nutrients = printed(raw.get(name))
        if isinstance(nutrients, dict) and nutrients:
            return record | {"nutrition": nutrients}
    # Nutrients may also be top-level fields.
    return record | {n: raw[n] for n in shape.nutrients if n not in record}


def _first_lines(
    raw: Mapping[str, Any], shape: Shape, role: Role, notes: Counter[str]
) -> list[str]:
    """Return the lines of the first non-empty field, of numbered fields, or inside the steps.

    A broken list is an error only if it is the only field.
    """
    of_ingredients = role == "ingredients"
    fields = shape.fields(role)
    for field in fields:
        reader = ItemReader(field, notes, raw)
        try:
            lines = lines_in(raw.get(field), commas=of_ingredients, reader=reader)
        except BrokenListError:  # numpy omits the middle of a long list
            if len(fields) == 1:
                raise
            continue
        if any(map(str.strip, lines)):
            return lines
    if items := shape.numbered_items(role, raw):
        reader = ItemReader(role, notes)
        return reader.ingredients(items) if of_ingredients else reader.steps(items)
    return ingredients_in_steps(raw, shape, notes) if of_ingredients else []


def _foodcom_raw(record: Record, raw: Mapping[str, Any], notes: Counter[str]) -> None:
    """Adapt RAW_recipes.csv: nutrition is kcal, then percent of daily values per serving."""
    for name in ("ingredients", "directions"):
        record[name] = untokenised(record[name], notes)
    record |= {"source": "food.com", "title": with_apostrophes(record["title"], notes)}
    numbers = _list_of(raw.get("nutrition"))
    if len(numbers) == 1 + len(DAILY_VALUES) and all(
        isinstance(number, int | float) and abs(number) < _MOST for number in numbers
    ):
        record["nutrition"] = {"energy_kcal": numbers[0]} | {
            name: round(percent / 100 * daily, 2)
            for (name, daily), percent in zip(
                DAILY_VALUES.items(), numbers[1:], strict=True
            )
        }


def _foodcom(record: Record, raw: Mapping[str, Any], notes: Counter[str]) -> None:
    """Adapt recipes.csv and recipes.parquet. Quantities without a unit ("1/4") are omitted."""
    record |= {"source": "food.com", "servings": raw.get("recipeservings")}
    parts, quantities = (
        record["ingredients"],
        _list_of(raw.get("recipeingredientquantities")),
    )
    if len(quantities) != len(parts):
        return
    for at, quantity in enumerate(quantities):
        if isinstance(quantity, str) and any(map(str.isalpha, quantity)):
            parts[at] = f"{quantity.strip()} {parts[at]}"
        else:
            notes["quantities without a unit left out"] += bool(quantity)


def _recipenlg(record: Record, raw: Mapping[str, Any], notes: Counter[str]) -> None:
    record["directions"] = rejoined(record["directions"], notes, anywhere=True)
    record["source"] = text_of(raw.get("link")) or record["source"]


def _spoonacular(record: Record, raw: Mapping[str, Any], notes: Counter[str]) -> None:
    """Adapt the API's response, complete or as a table with reprs in its cells."""
    names = ("cuisines", "dishtypes", "diets")
    record["tags"] = [tag for name in names for tag in words_in(raw.get(name))]
    record["source"] = text_of(raw.get("sourceurl"))
    if str(record.get("minutes")) in _API_DEFAULT_MINUTES and not raw.get(
        "cookingminutes"
    ):
        notes["times that are only the API's default"] += 1
        record["minutes"] = None


# Adapters for collections that need more than their field names.
_ADAPTERS: dict[str, Callable[[Record, Mapping[str, Any], Counter[str]], None]] = {
    "foodcom-raw": _foodcom_raw,
    "foodcom": _foodcom,
    "recipenlg": _recipenlg,
    "spoonacular": _spoonacular,
}


def _list_of(value: Any) -> list[Any]:
    value = printed(value)
    if isinstance(value, str):
        return [value]
    return value if isinstance(value, list) else []
