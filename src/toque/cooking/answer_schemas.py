"""JSON schemas for generated answers, shipped with Toque or read from a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from toque.errors import ConfigError, argument
from toque.user_paths import named_path

SHIPPED: Final = {"recipe": Path(__file__).with_name("recipe.schema.json")}


def answer_schema(schema: str | Path | Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema: a mapping as it is, a shipped schema by name, or the content of a file.

    Raises:
        ConfigError: The file cannot be read or is not a JSON object.
    """
    if isinstance(schema, Mapping):
        return schema

    file = SHIPPED.get(str(schema)) or named_path(schema)
    problem = ""
    try:
        content = json.loads(file.read_bytes())
        if isinstance(content, dict):
            return content
        problem = f"is a JSON {type(content).__name__}, not an object"
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
    except (ValueError, RecursionError) as error:
        problem = f"is not JSON: {error}"
    names = f"a JSON file with {argument('schema')}, or one of {', '.join(SHIPPED)}"
    raise ConfigError(f"The schema {file} {problem}. Name {names}.")
