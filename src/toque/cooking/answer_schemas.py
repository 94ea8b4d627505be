"""Schemas of answers in JSON: those that are shipped, by name, and others in files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from toque.errors import ConfigError, argument

_END: Final = ".schema.json"
SHIPPED: Final[Mapping[str, Path]] = {
    file.name.removesuffix(_END): file for file in sorted(Path(__file__).parent.glob(f"*{_END}"))
}


def answer_schema(named: str | Path | Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema itself, one of SHIPPED by its name, or that of a file; ConfigError if none is."""
    if isinstance(named, Mapping):
        return named
    file = SHIPPED.get(str(named), Path(named))
    names = f"Name a JSON file with {argument('schema')}, or one of {', '.join(SHIPPED)}"
    try:
        found = json.loads(file.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"The schema {file} cannot be read: {error.strerror}. {names}."
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"The schema {file} is no JSON: {error}. {names}.") from error
    if not isinstance(found, dict):
        kind = type(found).__name__
        raise ConfigError(
            f"The schema {file} is a JSON {kind}, and a schema is an object. {names}."
        )
    return found
