"""Schemas of answers in JSON: those that are shipped, by name, and others in files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from toque.errors import ConfigError, argument
from toque.user_paths import named_path

SHIPPED: Final = {"recipe": Path(__file__).with_name("recipe.schema.json")}


def answer_schema(named: str | Path | Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema itself, one of SHIPPED by its name, or that of a file; ConfigError if none is."""
    if isinstance(named, Mapping):
        return named
    file = SHIPPED.get(str(named)) or named_path(named)
    try:
        found = json.loads(file.read_bytes())
        wrong = "" if isinstance(found, dict) else f"is a JSON {type(found).__name__}, no object"
    except OSError as error:
        wrong = f"cannot be read: {error.strerror}"
    except (ValueError, RecursionError) as error:
        wrong = f"is no JSON: {error}"
    if wrong:
        names = f"a JSON file with {argument('schema')}, or one of {', '.join(SHIPPED)}"
        raise ConfigError(f"The schema {file} {wrong}. Name {names}.")
    return dict(found)
