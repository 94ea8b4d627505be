"""Column mapping: find the schema of a record and its fields for a recipe's parts by name."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from toque.cooking.schemas.item_objects import ItemReader
from toque.cooking.schemas.list_fields import printed
from toque.cooking.schemas.normalize import nutrient_fields
from toque.cooking.schemas.schema_org import is_schema_org
from toque.errors import DataError
from toque.sources.layouts import (
    Columns,
    FileLayout,
    RefusedFileError,
    TextRecordsError,
    columns_in_words,
    refuse_missing,
    shown_names,
)
from toque.sources.records import is_filled, unused_in

Role = Literal["title", "ingredients", "steps"]
ROLES: tuple[Role, ...] = ("title", "ingredients", "steps")
# Keys of an item, each with its field: ("measure", "measure1")
ItemFields = tuple[tuple[str, str], ...]

_NAMES: dict[Role, str] = {
    "title": """
        translatedrecipename title name recipename recipetitle dishname recipe dish headline
        strmeal strdrink label
    """,
    "ingredients": """
        translatedingredients ingredients ingredientlines ingredientslist ingredientlist
        recipeingredient recipeingredients recipeingredientparts extendedingredients
        ingredientsrawstr ingredientsraw rawingredients ingredientstext ingredient
        ingredientgroups ingredientsections recipeingredientgroups ingredientsflat
    """,
    "steps": """
        translatedinstructions directions steps instructionslist instructions recipeinstructions
        directionslist stepslist recipesteps cookingdirections cookinginstructions method methods
        preparation preparationmethod procedure process analyzedinstructions instructionlines
        instructiongroups instructionsections instructionsflat stepgroups recipestepgroups
        stepsections preparationsteps preparationgroups methodsteps cookingsteps strinstructions
    """,
}
# Common names, used only next to a recipe's other two parts.
_WEAK: dict[Role, tuple[str, ...]] = {
    "ingredients": ("sections", "items", "components"),
    "steps": ("sections",),
}
NAMES: dict[Role, tuple[str, ...]] = {
    role: tuple(n.split()) for role, n in _NAMES.items()
}
_OTHERS = {
    "tags": ("tags", "keywords", "categories", "category"),
    "cuisine": ("cuisine", "cuisines", "recipecuisine"),
    "servings": (
        "servings",
        "yields",
        "yield",
        "recipeyield",
        "serves",
        "recipeservings",
    ),
    "minutes": ("minutes", "totaltime", "totaltimeinmins", "readyinminutes", "time"),
    "prep_time": ("preptime", "preptimeinmins"),
    "cook_time": ("cooktime", "cooktimeinmins"),
    "source": ("source", "url", "link", "sourceurl"),
    "quantities": ("recipeingredientquantities",),
}
_TEXTS = ("title", "ingredients", "steps", "tags", "cuisine", "source")
_NUMBERS = ("servings", "minutes", "prep_time", "cook_time")
_LABELS = ("nutrition", "nutrients", "difficulty", "nutrition_class")
_NOT_FOLDED = re.compile(r"[^a-z0-9]")
_NUMBERED_NAME = re.compile(r"(?:str|recipe)?([a-z]+?)0*(\d{1,2})([a-z]*)")
_NUMBERED: dict[str, tuple[Role, str]] = dict.fromkeys(
    ("step", "steps", "instruction", "instructions", "direction", "directions"),
    ("steps", "text"),
)
for _key, _names in {
    "ingredient": "ingredient ingredients ingredientname",
    "quantity": "quantity quantities qty amount amounts ingredientquantity ingredientamount",
    "measure": "measure measures measurement ingredientmeasure ingredientmeasurement",
    "unit": "unit units ingredientunit",
    "note": "note notes preparation ingredientnote ingredientnotes ingredientpreparation",
}.items():
    _NUMBERED.update(dict.fromkeys(_names.split(), ("ingredients", _key)))
"""Names of numbered fields ("strIngredient1", "measure_1", "Step 1"), with part and key."""


@dataclass(frozen=True)
class Shape:
    """Schema and roles of a record, according to its field names."""

    schema: str
    # The record's field name per role or value such as "servings"
    roles: Mapping[str, str]
    # The record's name per name in lower-case letters and digits.
    folded: Mapping[str, str]
    nutrients: tuple[str, ...]  # fields that contain a nutrient
    read: frozenset[str]  # fields for numbers and labels, and for Food.com's quantities
    numbered: Mapping[Role, tuple[ItemFields, ...]]
    """The items of a role if each item has its own fields."""

    @property
    def missing(self) -> tuple[Role, ...]:
        """Roles without a field."""
        return tuple(
            role for role in ROLES if not (role in self.roles or role in self.numbered)
        )

    @property
    def numbered_fields(self) -> list[str]:
        """Fields that contain an item or a part of an item."""
        return [
            name
            for items in self.numbered.values()
            for item in items
            for _, name in item
        ]

    def fields(self, role: Role) -> list[str]:
        """Return the fields for a role, its own field first. Merged exports may have several."""
        role_fields = [self.roles[role]] if role in self.roles else []
        if role == "title":
            return role_fields
        others = _fields_named(NAMES[role], self.folded)
        return list(dict.fromkeys([*role_fields, *others]))

    def numbered_items(
        self, role: Role, raw: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        """Return the non-empty items of a part with numbered fields."""
        items = (
            {key: raw.get(name) for key, name in item}
            for item in self.numbered.get(role, ())
        )
        return [item for item in items if any(map(is_filled, item.values()))]

    def unused(self, raw: Mapping[str, Any]) -> dict[str, int]:
        """Find the texts of a record that no example, number or label uses."""
        # Only the first filled field of a role is used.
        used = {next(filter(raw.get, self.fields(role)), "") for role in ROLES}
        # A list of objects is not a number. Example: "yields": [{"yields": 2, "ingredients": ...}]
        numbers = {field for role, field in self.roles.items() if role in _NUMBERS}
        used |= self.read - {name for name in numbers if _holds_objects(raw.get(name))}
        used |= {name for name in raw if name.startswith("@")}  # fields of JSON-LD
        texts = {
            name: value
            for name, value in raw.items()
            if not isinstance(value, int | float)
        }
        return unused_in((texts,), used.union(self.numbered_fields))


def _holds_objects(value: Any) -> bool:
    """Return whether a value is a list with an object in it."""
    return isinstance(value, list) and any(isinstance(item, dict) for item in value)


@lru_cache(maxsize=512)
def shape_of(
    fields: tuple[str, ...], columns: tuple[tuple[str, str], ...] = ()
) -> Shape:
    """Return the shape of records with these fields. `columns` maps roles to fields first."""
    folded: dict[str, str] = {}
    for name in fields:
        folded.setdefault(_NOT_FOLDED.sub("", name.lower()), name)
    named = {role: name for role, name in columns if name in fields}
    # The rules of a schema do not apply to columns that the user names.
    schema = "generic" if named else _schema(frozenset(folded))
    roles = {**_guessed_roles(folded), **named}
    if schema == "spoonacular":  # the record may also have fields with the bare names
        roles["ingredients"] = folded["extendedingredients"]
    nutrients = tuple(n for n, _ in nutrient_fields(fields) if n not in roles.values())
    figures = frozenset(field for role, field in roles.items() if role not in _TEXTS)
    read = figures.union(nutrients, _LABELS)
    return Shape(schema, roles, folded, nutrients, read, _numbered(folded))


def _guessed_roles(folded: Mapping[str, str]) -> dict[str, str]:
    """Return the field of each role with a known name."""
    roles: dict[str, str] = {}
    for role, names in (*NAMES.items(), *_OTHERS.items()):
        if field := _first_field(names, folded):
            roles[role] = field
    # A weak name counts only if all remaining parts of a recipe have a field.
    for role, names in _WEAK.items():
        field = _first_field(names, folded)
        others = {*ROLES} - {role}
        if field and role not in roles and others <= roles.keys():
            roles[role] = field
    return roles


def _first_field(names: Iterable[str], folded: Mapping[str, str]) -> str | None:
    """Return the field with the first of these names, or None."""
    return next((folded[name] for name in names if name in folded), None)


def _numbered(folded: Mapping[str, str]) -> dict[Role, tuple[ItemFields, ...]]:
    """Return the numbered fields of ingredients and steps, by part and number.

    Ignore a part with a single numbered field.
    """
    ingredients: defaultdict[int, dict[str, str]] = defaultdict(dict)
    steps: defaultdict[int, dict[str, str]] = defaultdict(dict)
    for name, field in folded.items():
        match = _NUMBERED_NAME.fullmatch(name)
        if match and (part := _NUMBERED.get(match[1] + match[3])):
            role, key = part
            items = ingredients if role == "ingredients" else steps
            items[int(match[2])][key] = field

    for key in ("quantity", "unit", "measure"):
        numbers = {number for number, item in ingredients.items() if key in item}
        # The first field may have no number: "Quantity", "Quantity02", ...
        if numbers and 1 not in numbers and key in folded:
            ingredients[1][key] = folded[key]

    numbered: dict[Role, tuple[ItemFields, ...]] = {}
    if sum("ingredient" in item for item in ingredients.values()) > 1:
        numbered["ingredients"] = _sort_items(ingredients)
    if sum("text" in item for item in steps.values()) > 1:
        numbered["steps"] = _sort_items(steps)
    return numbered


def _sort_items(items: Mapping[int, Mapping[str, str]]) -> tuple[ItemFields, ...]:
    """Return the keys and fields of each item, in the order of their numbers."""
    return tuple(tuple(items[number].items()) for number in sorted(items))


def ingredients_in_steps(
    raw: Mapping[str, Any], shape: Shape, notes: Counter[str]
) -> list[str]:
    """Return the ingredient lines inside a record's steps."""
    for field in shape.fields("steps"):
        reader = ItemReader(f"{field}.ingredients", notes)
        if lines := reader.ingredients_in_steps(printed(raw.get(field))):
            return lines
    return []


def unwrapped(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the recipe inside a wrapper such as {"recipe": {...}}, or the record itself."""
    if not shape_of(tuple(raw)).missing:
        return raw
    inside = [value for value in raw.values() if isinstance(value, dict)]
    recipes = [value for value in inside if not shape_of(tuple(value)).missing]
    return recipes[0] if len(recipes) == 1 else raw


def _schema(names: frozenset[str]) -> str:
    """Return the name of the collection with these folded field names, or "generic"."""
    if {"recipeingredientparts", "recipeinstructions"} <= names:
        return "foodcom"
    if "extendedingredients" in names:
        return "spoonacular"
    if names & {"type", "graph"} and not names & {"ingredients", "directions"}:
        return "schema.org"
    counts = {"nsteps", "ningredients", "contributorid"}
    if {"name", "ingredients"} <= names and names & counts:
        return "foodcom-raw"
    if {"title", "ingredients", "directions", "ner"} <= names:
        return "recipenlg"
    descriptions = {"desc", "categories"}
    if {"title", "ingredients", "directions"} <= names and names & descriptions:
        return "epicurious"
    return "generic"


def schema_of_records(
    records: Sequence[Mapping[str, Any]], *, in_dict: bool = False
) -> str:
    """Return the schema of decoded records. `in_dict` means one object with the records by id."""
    for record in records:
        if is_schema_org(record):
            return "schema.org"
        ingredients = record.get("ingredients")
        steps = record.get("instructions")
        if _begins_with_text_object(ingredients) and _begins_with_text_object(steps):
            return "recipe1m"
        if in_dict and isinstance(ingredients, list) and isinstance(steps, str):
            return "recipe-box"
        schema = shape_of(tuple(record)).schema
        if schema != "generic":
            return schema
    return "generic"


def _begins_with_text_object(value: Any) -> bool:
    """Return whether a list begins with an object such as {"text": "2 eggs"}."""
    first = value[0] if isinstance(value, list) and value else None
    return isinstance(first, dict) and "text" in first


# Field names of prompt and answer, in order of priority.
PAIRS = (
    ("prompt", "target"),
    ("prompt", "completion"),
    ("prompt", "response"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("question", "answer"),
    ("question", "answers"),
    ("input", "output"),
    ("source", "target"),
)
ANSWERS = ("chosen", "rejected")
"""Field names of the answers in preference pairs."""
_PROMPTS = ("prompt", "instruction", "question", "input", "query")
"""Field names of the prompt in preference pairs, in order of priority."""
_BEFORE = ("system", "systemprompt")
_AFTER = (
    "input",
    "context",
    "passage",
    "paragraph",
    "article",
    "document",
    "background",
)
_MESSAGES = ("messages", "conversations", "conversation")
_NEEDED = ("text", "choices", "options", "history", *_MESSAGES)
"""Fields that a prompt may need. The user must decide whether to use them."""


def check_recipe_fields(
    path: Path, layout: FileLayout, shape: Shape, columns: Mapping[str, str]
) -> None:
    """Check before any work that a file can contain recipes.

    Raises:
        TextRecordsError: If it has texts, or prompts and answers, but no ingredients and steps.
        RefusedFileError: If a role has no field, or a prompt may need an unused field.
        DataError: If a named field is missing.
    """
    refuse_missing(path, layout, columns)
    missing = shape.missing
    folded = shape.folded
    if any(ingredients_in_steps(raw, shape, Counter()) for raw in layout.sample):
        missing = tuple(role for role in missing if role != "ingredients")
    if {"ingredients", "steps"} <= set(missing):
        _refuse_preferences(path, layout, folded)
        _refuse_messages(path, layout, folded)
        if pair := next((pair for pair in PAIRS if folded.keys() >= set(pair)), None):
            raise _pairs_error(path, layout, folded, pair)
        if column := folded.get("text"):
            raise TextRecordsError(
                f"{path} is {layout.described} of documents (its column {column!r}), not of "
                f"recipes. Give its source columns: {{text: {column}}} and list recipes in "
                "another source.",
                {"text": column},
            )
    if missing:
        raise _missing_roles_error(path, layout, missing)


def _missing_roles_error(
    path: Path, layout: FileLayout, missing: tuple[Role, ...]
) -> DataError:
    """Return the error for a file without fields for these roles."""
    roles = " and ".join(missing)
    accepted_names = "; ".join(
        f"{role}: {', '.join(NAMES[role][1:8])}" for role in missing
    )
    named: dict[str, str] = dict.fromkeys(missing, "NAME")
    pairs = {"prompt": "NAME", "target": "NAME"}
    texts = {"text": "NAME"}
    others = (
        f"If it contains other texts: {columns_in_words(pairs)} for prompts and their answers, "
        f"{columns_in_words(texts)} for complete texts."
    )
    return RefusedFileError(
        f"{path} is {layout.described} without a column of {roles}, so it has no complete "
        f"recipes. Found: {shown_names(layout.fields) or 'no column'}. Known names (case, spaces "
        f"and punctuation are ignored): {accepted_names}. Download the full file, or name the "
        f"column: {columns_in_words(named)} in its source of data.sources. {others}",
        f"no recipes: without a column of {roles}",
        [named, pairs, texts],
        layout.fields,
    )


def _refuse_preferences(
    path: Path, layout: FileLayout, folded: Mapping[str, str]
) -> None:
    """Raise an error with the columns for the source if records are preference pairs."""
    if not folded.keys() >= {*ANSWERS}:
        return
    columns: dict[str, str | tuple[str, ...]] = {}
    system = _first_field(_BEFORE, folded)
    has_messages = _holds_messages(layout, folded[ANSWERS[0]])
    if has_messages and system is not None:
        columns["system"] = system
    if prompt := next((name for name in _PROMPTS if name in folded), None):
        fields = [folded[prompt]]
        # Messages already contain the system prompt and the context.
        if not has_messages:
            fields += _fields_named((n for n in _AFTER if n != prompt), folded)
            fields[:0] = [] if system is None else [system]
        columns["prompt"] = tuple(fields) if len(fields) > 1 else fields[0]
    columns |= {name: folded[name] for name in ANSWERS}
    raise TextRecordsError(
        f"{path} is {layout.described} of preference pairs, not of recipes. Give its source "
        f"{columns_in_words(columns)}.",
        columns,
    )


def _holds_messages(layout: FileLayout, name: str) -> bool:
    """Return whether the first value of a field is a list of messages. Tables have no sample."""
    first = next((v for raw in layout.sample if is_filled(v := raw.get(name))), None)
    return isinstance(first, list) and isinstance(first[0], dict)


def _refuse_messages(path: Path, layout: FileLayout, folded: Mapping[str, str]) -> None:
    """Raise an error with the columns for the source if records contain lists of messages."""
    messages = _message_columns(layout, folded)
    if messages is None:
        return
    columns = {"messages": messages}
    if system := _first_field(_BEFORE, folded):
        columns["system"] = system
    raise TextRecordsError(
        f"{path} is {layout.described} of conversations, not of recipes. Give its source "
        f"{columns_in_words(columns)}.",
        columns,
    )


def _message_columns(
    layout: FileLayout, folded: Mapping[str, str]
) -> str | tuple[str, ...] | None:
    """Return the field with lists of messages, or the fields of a prompt and its answer."""
    listed = {name for name in folded.values() if _holds_messages(layout, name)}
    for name in _fields_named(_MESSAGES, folded):
        # For tables, the contents of the field are unknown.
        if name in listed or not layout.sample:
            return name
    for pair in PAIRS:
        if listed.issuperset(map(folded.get, pair)):
            return tuple(_fields_named(pair, folded))
    return None


def _fields_named(names: Iterable[str], folded: Mapping[str, str]) -> list[str]:
    """Return the fields with these names."""
    return [folded[name] for name in names if name in folded]


def _pairs_error(
    path: Path, layout: FileLayout, folded: Mapping[str, str], pair: tuple[str, str]
) -> DataError:
    """Return the error for a file of prompts and answers, with the columns for its source."""
    prompt_column, target = _fields_named(pair, folded)
    others = {name: field for name, field in folded.items() if name not in pair}
    prompt = [
        *_fields_named(_BEFORE, others),
        prompt_column,
        *_fields_named(_AFTER, others),
    ]
    columns = _pair_columns(prompt, target)
    what = f"{path} is {layout.described} of prompts and answers"
    for name in _fields_named(_NEEDED, others):
        # With an instruction, the text only repeats the instruction and the response as a prompt.
        if name == folded.get("text") and pair[0] == "instruction":
            continue
        # For tables, it is unknown whether the field is filled.
        is_unknown = not layout.sample
        if is_unknown or any(is_filled(raw.get(name)) for raw in layout.sample):
            entire = _pair_columns([*prompt, name], target)
            return RefusedFileError(
                f"{what} (its columns {prompt_column!r} and {target!r}) with a column {name!r} "
                "next to them, without which a prompt may not make sense. Name the columns of a "
                f"prompt: {columns_in_words(entire)} with it, or {columns_in_words(columns)} "
                "without.",
                f"prompts next to a column {name!r}: columns must say whether it is part of a "
                "prompt",
                [entire, columns],
            )
    return TextRecordsError(
        f"{what} (its columns {shown_names(prompt)} and {target!r}), not of recipes. Give its "
        f"source {columns_in_words(columns)}.",
        columns,
    )


def _pair_columns(prompt: list[str], target: str) -> Columns:
    """Return the columns for a prompt from one or several fields and its target."""
    return {"prompt": tuple(prompt) if len(prompt) > 1 else prompt[0], "target": target}


def prompt_of(record: Mapping[str, Any]) -> str:
    """Return a record's prompt with the texts before and after it, as in training."""
    prompt_parts = (record.get(name) for name in (*_BEFORE, "prompt", *_AFTER))
    return "\n\n".join(
        text for text in prompt_parts if isinstance(text, str) and text.strip()
    )
