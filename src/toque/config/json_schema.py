"""JSON schema of the configuration, with which editors complete and check the file."""

from __future__ import annotations

import json
from typing import Any, Final

from pydantic.fields import FieldInfo

from toque.config.field_types import Allowed, Config
from toque.config.schema import RunConfig
from toque.units import Duration

SCHEMA_FILE: Final = "toque-schema.json"
_HARDWARE: Final = {
    "type": "object",
    "description": "Settings for particular GPUs, by name, used if a command names that GPU.",
    "additionalProperties": {"type": "object"},
}


def schema_text() -> str:
    """Return the schema of a configuration file (JSON Schema 2020-12) as JSON.

    Limits that the schema does not express are in the descriptions. `toque show` checks them.
    """
    schema = RunConfig.model_json_schema(mode="serialization")
    definitions = schema["$defs"]
    for model in _sections(RunConfig):
        owner = schema if model is RunConfig else definitions[model.__name__]
        for name, field in model.model_fields.items():
            _complete_entry(owner["properties"][name], field)
        owner.pop("required", None)  # a file contains only changed settings
    schema["properties"]["hardware"] = _HARDWARE
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return json.dumps({**head, **schema}, indent=1, ensure_ascii=False) + "\n"


def _complete_entry(entry: dict[str, Any], field: FieldInfo) -> None:
    """Add the allowed values and the default of a field to its entry in the schema."""
    description = entry.get("description", "")
    for item in field.metadata:
        if isinstance(item, Allowed):
            description += f" Allowed: {item.text}."
    entry["description"] = " ".join(description.split())
    if isinstance(field.default, Duration):
        entry["default"] = str(field.default)


def _sections(model: type[Config]) -> list[type[Config]]:
    """List a section and all sections in it, without duplicates."""
    sections = [model]
    for section in sections:  # grows during the loop
        for field in section.model_fields.values():
            models = _models_in(field.annotation)
            sections += [model for model in models if model not in sections]
    return sections


def _models_in(annotation: Any) -> list[type[Config]]:
    """List the sections in the annotation of a field."""
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return [annotation]
    parts = getattr(annotation, "__args__", ())
    return [model for part in parts for model in _models_in(part)]
