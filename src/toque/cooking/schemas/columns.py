"""Column mapping: which fields hold the title, the ingredients and the steps, and whose schema.

A schema is recognised by its field names, never by the name of a file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from toque.cooking.labels.nutrients import nutrient_fields
from toque.cooking.schemas.schema_org import is_schema_org
from toque.errors import DataError
from toque.sources.detect import Layout, refuse_missing, shown_names

Role = Literal["title", "ingredients", "steps"]
ROLES: tuple[Role, ...] = ("title", "ingredients", "steps")

Schema = Literal[
    "foodcom-raw",
    "foodcom",
    "recipenlg",
    "recipe1m",
    "recipe-box",
    "epicurious",
    "schema.org",
    "spoonacular",
    "generic",
]

# Folded: lower case, letters and digits only. The first that is there counts.
NAMES: dict[Role, tuple[str, ...]] = {
    "title": (
        "translatedrecipename",
        "title",
        "name",
        "recipename",
        "recipetitle",
        "dishname",
        "recipe",
        "dish",
        "headline",
    ),
    "ingredients": (
        "translatedingredients",
        "ingredients",
        "ingredientlines",
        "ingredientslist",
        "ingredientlist",
        "recipeingredient",
        "recipeingredients",
        "recipeingredientparts",
        "extendedingredients",
        "ingredientsrawstr",
        "ingredientsraw",
        "rawingredients",
        "ingredientstext",
        "ingredient",
    ),
    "steps": (
        "translatedinstructions",
        "directions",
        "steps",
        "instructionslist",
        "instructions",
        "recipeinstructions",
        "directionslist",
        "stepslist",
        "recipesteps",
        "cookingdirections",
        "cookinginstructions",
        "method",
        "methods",
        "preparation",
        "preparationmethod",
        "procedure",
        "process",
        "analyzedinstructions",
    ),
}
_OTHERS = {
    "tags": ("tags", "keywords", "categories", "category"),
    "cuisine": ("cuisine", "cuisines", "recipecuisine"),
    "servings": ("servings", "yields", "yield", "recipeyield", "serves", "recipeservings"),
    "minutes": ("minutes", "totaltime", "totaltimeinmins", "readyinminutes", "time"),
    "prep_time": ("preptime", "preptimeinmins"),
    "cook_time": ("cooktime", "cooktimeinmins"),
    "source": ("source", "url", "link", "sourceurl"),
}
_NOT_FOLDED = re.compile(r"[^a-z0-9]")


@dataclass(frozen=True)
class Shape:
    """Schema and roles of a record, by its field names."""

    schema: Schema
    roles: Mapping[str, str]
    """Role, or another known word such as "servings", to the record's own field name."""
    folded: Mapping[str, str]
    """Name in lower case, letters and digits only, to the record's own field name."""
    nutrients: tuple[str, ...]
    """Fields that hold a nutrient."""

    @property
    def missing(self) -> tuple[Role, ...]:
        """The roles without a field."""
        return tuple(role for role in ROLES if role not in self.roles)

    def another(self, raw: Mapping[str, Any], role: Role) -> Any:
        """The first non-empty value of all fields that may fill a role.

        Merged exports have "directions" from one site next to "steps" from another.
        """
        fields = (self.folded[name] for name in NAMES[role] if name in self.folded)
        return next((value for field in fields if (value := raw.get(field))), None)


@lru_cache(maxsize=512)
def shape_of(fields: tuple[str, ...], columns: tuple[tuple[str, str], ...] = ()) -> Shape:
    """The shape of records with these fields; `columns` names fields by role and comes first.

    >>> shape_of(("Recipe Name", "Ingredients", "Directions")).roles["title"]
    'Recipe Name'
    """
    folded: dict[str, str] = {}
    for name in fields:
        folded.setdefault(_NOT_FOLDED.sub("", name.lower()), name)
    named = {role: name for role, name in columns if name in fields}
    guessed = {
        role: folded[first]
        for role, names in (*NAMES.items(), *_OTHERS.items())
        if (first := next((name for name in names if name in folded), None)) is not None
    }
    # The rules of a schema do not apply to columns that the user has named.
    schema = "generic" if named else _schema(folded.keys())
    roles = {**guessed, **named}
    nutrients = tuple(n for n, _ in nutrient_fields(fields) if n not in roles.values())
    return Shape(schema, roles, folded, nutrients)


def _schema(fields: Iterable[str]) -> Schema:
    there = frozenset(fields)
    if {"recipeingredientparts", "recipeinstructions"} <= there:
        return "foodcom"
    if "extendedingredients" in there:
        return "spoonacular"
    if there & {"type", "graph"} and not there & {"ingredients", "directions"}:
        return "schema.org"
    if {"name", "ingredients"} <= there and there & {"nsteps", "ningredients", "contributorid"}:
        return "foodcom-raw"
    if {"title", "ingredients", "directions", "ner"} <= there:
        return "recipenlg"
    if {"title", "ingredients", "directions"} <= there and there & {"desc", "categories"}:
        return "epicurious"
    return "generic"


def schema_of_records(records: Sequence[Mapping[str, Any]], *, in_dict: bool = False) -> Schema:
    """The schema of decoded records, by their field names and values.

    Args:
        records: a sample from one file.
        in_dict: whether the file is an object of them by id.
    """
    for record in records:
        if is_schema_org(record):
            return "schema.org"
        ingredients, steps = record.get("ingredients"), record.get("instructions")
        if _texts(ingredients) and _texts(steps):
            return "recipe1m"
        if in_dict and isinstance(ingredients, list) and isinstance(steps, str):
            return "recipe-box"
        schema = shape_of(tuple(record)).schema
        if schema != "generic":
            return schema
    return "generic"


PAIRS = (
    ("prompt", "target"),
    ("prompt", "completion"),
    ("prompt", "response"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("question", "answer"),
    ("input", "output"),
    ("source", "target"),
)
"""Field names of prompts and answers, in the order in which they are tried."""


class TextRecordsError(DataError):
    """The records are documents, or prompts with answers, instead of recipes.

    `columns` names the fields as a source's columns do: {"text": ...} or {"prompt", "target"}.
    """

    def __init__(self, message: str, columns: Mapping[str, str]) -> None:
        super().__init__(message)
        self.columns = dict(columns)


def refuse_cut_schema(path: Path, layout: Layout, columns: Mapping[str, str]) -> None:
    """Raise before any work if a file cannot hold recipes.

    Args:
        path: the file.
        layout: how it stores records, with every field name.
        columns: fields the user has named by role.

    Raises:
        TextRecordsError: the records have a field "text", or a prompt and its answer, and neither
            ingredients nor steps.
        DataError: a role is filled by no field, or a named field is not there.
    """
    refuse_missing(path, layout, columns)
    what = layout.described
    shape = shape_of(layout.fields, tuple(columns.items()))
    missing = shape.missing
    no_recipes = {"ingredients", "steps"} <= set(missing)
    if no_recipes and "text" in shape.folded:
        column = shape.folded["text"]
        raise TextRecordsError(
            f"{path} is {what} of documents (its column {column!r}), not of recipes. Give its "
            f"source columns: {{text: {column}}} and name recipes in another.",
            {"text": column},
        )
    pair = next((p for p in PAIRS if shape.folded.keys() >= set(p)), None)
    if no_recipes and pair is not None:
        prompt, target = (shape.folded[name] for name in pair)
        raise TextRecordsError(
            f"{path} is {what} of prompts and answers (its columns {prompt!r} and {target!r}), not "
            f"of recipes. Give its source columns: {{prompt: {prompt}, target: {target}}}.",
            {"prompt": prompt, "target": target},
        )
    if missing:
        words = " and ".join(missing)
        known = "; ".join(f"{role}: {', '.join(NAMES[role][1:8])}" for role in missing)
        named = ", ".join(f"{role}: NAME" for role in missing)
        raise DataError(
            f"{path} is {what} without a column of {words}, so it holds no whole recipes. Found: "
            f"{shown_names(layout.fields) or 'no column'}. Known names (in any case and spelling): "
            f"{known}. Fetch the full file, or say which column it is: "
            f"data.sources=[{{path: ..., columns: {{{named}}}}}]."
        )


def _texts(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and isinstance(value[0], dict)
        and ("text" in value[0])
    )
