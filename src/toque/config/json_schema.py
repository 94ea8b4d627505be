"""JSON schema of the configuration, by which editors complete and check the file."""

from __future__ import annotations

import json
from typing import Any, Final

from toque.config.field_types import Allowed, Config
from toque.config.schema import RunConfig
from toque.units import Duration

SCHEMA_FILE: Final = "toque-schema.json"
_ANY_CARD: Final = {
    "type": "object",
    "description": "What a file sets for a card, by its name, when a command is given that card.",
    "additionalProperties": {"type": "object"},
}


def schema_text() -> str:
    """The schema (JSON Schema 2020-12) of a configuration file, as JSON.

    What a setting may be beyond its type stands in its description; `toque show` checks all of it.
    """
    schema = RunConfig.model_json_schema(mode="serialization")
    definitions = schema["$defs"]
    for model in _sections(RunConfig):
        owner = schema if model is RunConfig else definitions[model.__name__]
        for name, field in model.model_fields.items():
            told = owner["properties"][name]
            allowed = [each.text for each in field.metadata if isinstance(each, Allowed)]
            words = [told.get("description", ""), *(f"Allowed: {text}." for text in allowed)]
            told["description"] = " ".join(" ".join(words).split())
            if isinstance(field.default, Duration):
                told["default"] = str(field.default)
        owner.pop("required", None)  # a file names what it changes
    schema["properties"]["hardware"] = _ANY_CARD
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return json.dumps({**head, **schema}, indent=1, ensure_ascii=False) + "\n"


def _sections(model: type[Config]) -> list[type[Config]]:
    """A section with those in it, each once."""
    found = [model]
    for known in found:
        for field in known.model_fields.values():
            found += [kind for kind in _models_in(field.annotation) if kind not in found]
    return found


def _models_in(annotation: Any) -> list[type[Config]]:
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return [annotation]
    return [kind for part in getattr(annotation, "__args__", ()) for kind in _models_in(part)]
