"""Field mapping: records of all known schemas in the form that `normalize` cleans."""

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
    only_a_link,
    rejoin_sentences,
    untokenised,
    with_apostrophes,
    without_boilerplate,
    without_misprints,
)
from toque.cooking.schemas.repetitions import (
    DOUBLED_LISTS,
    MIN_DOUBLED_CHARS,
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
    raw = {name: _limit_size(value, notes, 1) for name, value in raw.items()}
    if columns:
        yield _record_of(raw, columns, notes)
    elif is_schema_org(raw):
        yield from _schema_org_records(raw, notes)
    else:
        yield _record_of(_unwrap(raw, notes), columns, notes)


def _schema_org_records(
    raw: Mapping[str, Any], notes: Counter[str]
) -> Iterator[Record | str]:
    nodes = recipe_nodes(raw)
    for node in nodes:
        unused = shape_of(tuple(node), _NODE).unused(node)
        notes.update(f"{UNUSED}{name}" for name in unused)
        yield _repair(record_of_node(node, notes), notes)
    if not nodes:
        yield NO_NODE


def _unwrap(raw: Mapping[str, Any], notes: Counter[str]) -> Mapping[str, Any]:
    """Return the recipe inside a wrapper, and note the wrapper's other fields as unused."""
    recipe = unwrapped(raw)
    if recipe is not raw:
        notes.update(
            f"{UNUSED}{name}"
            for name, value in raw.items()
            if value is not recipe and is_filled(value)
        )
    return recipe


def _record_of(
    raw: Mapping[str, Any], columns: tuple[tuple[str, str], ...], notes: Counter[str]
) -> Record | str:
    """Return the record of a recipe's fields, or the reason for dropping it."""
    shape = shape_of(tuple(raw), columns)
    notes.update(f"{UNUSED}{name}" for name in shape.unused(raw))
    if shape.schema == "foodcom":  # R writes NA for missing values
        raw = {name: None if value == "NA" else value for name, value in raw.items()}

    try:
        record = _map_fields(raw, shape, notes)
        if adapt := _ADAPTERS.get(shape.schema):
            values = {name: raw[field] for name, field in shape.folded.items()}
            adapt(record, values, notes)
    except BrokenListError:
        return BROKEN_LIST
    return _repair(record, notes)


def _limit_size(value: Any, notes: Counter[str], depth: int) -> Any:
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
        return [_limit_size(item, notes, depth + 1) for item in value]
    return {name: _limit_size(item, notes, depth + 1) for name, item in value.items()}


def _repair(record: Record, notes: Counter[str]) -> Record:
    """Repair scraping defects in the ingredients and steps of a record."""
    lines = _repair_lines(record.get("ingredients"), notes)
    steps = _repair_lines(record.get("directions"), notes)
    lines = _without_second_list(lines, notes)
    if len(steps) == 1 and "\n" in steps[0]:
        steps = [line for line in steps[0].splitlines() if line.strip()]
    if only_a_link(steps):
        notes["steps that only link to a page"] += 1
        steps = []
    return record | {"ingredients": lines, "directions": steps}


def _repair_lines(lines: list[str] | None, notes: Counter[str]) -> list[str]:
    """Return lines without the website's buttons and without misprints."""
    return without_misprints(without_boilerplate(lines or [], notes), notes)


def _without_second_list(lines: list[str], notes: Counter[str]) -> list[str]:
    """Drop a second copy of the ingredients, and repetitions of the previous line."""
    n_repeated = sum(line == before for before, line in pairwise(lines))
    # A single short line that repeats the previous line can be an ingredient of the next part.
    shortest = 1 if n_repeated > 1 else MIN_DOUBLED_CHARS
    return without_repeat(lines, notes, DOUBLED_LISTS, shortest=shortest)


def _map_fields(raw: Mapping[str, Any], shape: Shape, notes: Counter[str]) -> Record:
    """Return the record with our field names."""
    record = {role: raw[name] for role, name in shape.roles.items() if name in raw}
    tags = words_in(record.get("tags"))
    record |= {
        "title": text_of(record.get("title")),
        "ingredients": _lines_of_role(raw, shape, "ingredients", notes),
        "directions": _lines_of_role(raw, shape, "steps", notes),
        "tags": [*tags, *words_in(record.get("cuisine"))],
        "source": text_of(raw.get("source")),
        "difficulty": raw.get("difficulty"),
        "nutrition_class": raw.get("nutrition_class"),
    }
    return record | _nutrients_of(raw, shape)


def _nutrients_of(raw: Mapping[str, Any], shape: Shape) -> Record:
    """Return the nutrients in an object of their own, or in top-level fields."""
    for name in ("nutrition", "nutrients"):
        nutrients = printed(raw.get(name))
        if isinstance(nutrients, dict) and nutrients:
            return {"nutrition": nutrients}
    return {name: raw[name] for name in shape.nutrients}


def _lines_of_role(
    raw: Mapping[str, Any], shape: Shape, role: Role, notes: Counter[str]
) -> list[str]:
    """Return the lines of the role's first non-empty field.

    If all fields are empty, use numbered fields, then ingredients inside steps.

    Raises:
        BrokenListError: If the role has only one field and its list is broken.
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


def _adapt_foodcom_raw(
    record: Record, raw: Mapping[str, Any], notes: Counter[str]
) -> None:
    """Adapt RAW_recipes.csv: nutrition is kcal, then percent of daily values per serving."""
    for name in ("ingredients", "directions"):
        record[name] = untokenised(record[name], notes)
    record |= {"source": "food.com", "title": with_apostrophes(record["title"], notes)}
    numbers = _list_of(raw.get("nutrition"))
    are_finite = all(
        isinstance(number, int | float) and abs(number) < _MOST for number in numbers
    )
    if are_finite and len(numbers) == 1 + len(DAILY_VALUES):
        nutrition = {"energy_kcal": numbers[0]}
        for name, percent in zip(DAILY_VALUES, numbers[1:], strict=True):
            nutrition[name] = round(percent / 100 * DAILY_VALUES[name], 2)
        record["nutrition"] = nutrition


def _adapt_foodcom(record: Record, raw: Mapping[str, Any], notes: Counter[str]) -> None:
    """Adapt recipes.csv and recipes.parquet. Quantities without a unit ("1/4") are omitted."""
    record |= {"source": "food.com", "servings": raw.get("recipeservings")}
    parts = record["ingredients"]
    quantities = _list_of(raw.get("recipeingredientquantities"))
    if len(quantities) != len(parts):
        return
    for at, quantity in enumerate(quantities):
        if isinstance(quantity, str) and any(map(str.isalpha, quantity)):
            parts[at] = f"{quantity.strip()} {parts[at]}"
        else:
            notes["quantities without a unit left out"] += bool(quantity)


def _adapt_recipenlg(
    record: Record, raw: Mapping[str, Any], notes: Counter[str]
) -> None:
    """Adapt RecipeNLG: join the steps that its scraper split, and use the link as the source."""
    record["directions"] = rejoin_sentences(record["directions"], notes, anywhere=True)
    record["source"] = text_of(raw.get("link")) or record["source"]


def _adapt_spoonacular(
    record: Record, raw: Mapping[str, Any], notes: Counter[str]
) -> None:
    """Adapt the API's response, complete or as a table with reprs in its cells."""
    names = ("cuisines", "dishtypes", "diets")
    record["tags"] = [tag for name in names for tag in words_in(raw.get(name))]
    record["source"] = text_of(raw.get("sourceurl"))
    is_default = str(record.get("minutes")) in _API_DEFAULT_MINUTES
    if is_default and not raw.get("cookingminutes"):
        notes["times that are only the API's default"] += 1
        record["minutes"] = None


# Adapters for collections that need more than their field names.
_ADAPTERS: dict[str, Callable[[Record, Mapping[str, Any], Counter[str]], None]] = {
    "foodcom-raw": _adapt_foodcom_raw,
    "foodcom": _adapt_foodcom,
    "recipenlg": _adapt_recipenlg,
    "spoonacular": _adapt_spoonacular,
}


def _list_of(value: Any) -> list[Any]:
    """Return a list, a printed list, or a list of one text."""
    value = printed(value)
    if isinstance(value, str):
        return [value]
    return value if isinstance(value, list) else []
