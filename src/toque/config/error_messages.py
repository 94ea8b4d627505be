"""Error messages for refused settings: where it stands, what was found, what is allowed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from toque.config.cross_checks import Problem
from toque.config.field_types import Secret, allowed_words, as_written
from toque.config.gone import GONE
from toque.config.suggestions import find_field
from toque.config.yaml_reader import Path, dotted

Origin = Callable[[Path], str]


def explain(error: ValidationError, given: Mapping[str, Any], origin: Origin) -> str:
    """One paragraph about the first thing that is wrong, and how many more there are.

    Args:
        error: what pydantic found.
        given: the values that were checked.
        origin: where the value at a path is written.
    """
    details = error.errors(include_url=False)
    first = details[0]
    places = {_setting(detail["loc"]) for detail in details}
    more = f" ({len(places) - 1} more to correct after this.)" if len(places) > 1 else ""
    return _value(first, given, origin) + more


def explain_combination(problem: Problem, given: Mapping[str, Any], origin: Origin) -> str:
    """One paragraph about values that are each allowed and together impossible."""
    paths: list[Path] = [tuple(name.split(".")) for name in problem.paths]
    absent = object()
    written = [path for path in paths if _at(given, path, absent) is not absent]
    prefix = f"{origin(written[0])}: " if written else ""
    return prefix + problem.message


def _value(detail: ErrorDetails, given: Mapping[str, Any], origin: Origin) -> str:
    path = _setting(detail["loc"])
    name = dotted(path)
    if detail["type"] == "missing":
        meaning = _help(find_field(path))
        return f"{origin(path[:-1])}: `{name}` is missing. Write it. {meaning}".rstrip()
    field = find_field(path)
    found = _found(_at(given, path))
    if field is not None and any(isinstance(item, Secret) for item in field.metadata):
        found = "not an address (it is a secret, so it is not shown)"
    allowed = "text" if field is None else allowed_words(field.annotation, field.metadata)
    verdict = f"{origin(path)}: `{name}` is {found}"
    if isinstance(path[-1], int):
        return f"{verdict}, which does not fit in its list. Allowed there: {allowed}."
    quote = " Quote it to make it text." if _is_unquoted(allowed, _at(given, path)) else ""
    gone = GONE.get(f"{name}={as_written(_at(given, path))}")
    if gone is not None:
        verdict = f"{verdict}, a value no more: {gone.removesuffix('.')}"
    return f"{verdict}. Allowed: {allowed}.{quote} {_help(field)}".rstrip()


def _setting(location: tuple[int | str, ...]) -> Path:
    """The part of pydantic's location that is a path of ours; it adds the names of types."""
    path: Path = ()
    for part in location:
        if isinstance(part, str) and find_field((*path, part)) is None:
            break
        path = (*path, part)
    return path


def _help(field: FieldInfo | None) -> str:
    text = field.description if field is not None else None
    return f"It means: {' '.join(text.split())}" if text else ""


def _is_unquoted(allowed: str, value: Any) -> bool:
    return isinstance(value, int | float) and (allowed.startswith(("a folder", "a file", "text")))


def _found(value: Any) -> str:
    if value is None:
        return "null (nothing is written there)"
    if isinstance(value, Mapping):
        return "a mapping" if value else "an empty mapping"
    if isinstance(value, list):
        return f"a list of {len(value)}" if value else "an empty list"
    if isinstance(value, bool | int | float):
        return as_written(value)
    text = str(value)
    return f'"{text[:80]}..."' if len(text) > 80 else f'"{text}"'


def _at(given: Any, path: Path, absent: Any = None) -> Any:
    for part in path:
        try:
            given = given[part]
        except (KeyError, IndexError, TypeError):
            return absent
    return given
