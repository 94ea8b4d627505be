"""Field types of settings, and the words that say what each allows.

The same words stand in an error, in the configuration page and in the help: they are read from
the annotation, so they cannot disagree with what is checked.
"""

from __future__ import annotations

import re
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin
from urllib.parse import urlsplit

import annotated_types
from pydantic import AfterValidator, BaseModel, BeforeValidator, PlainSerializer, PlainValidator

from toque.errors import ConfigError
from toque.units import Duration


@dataclass(frozen=True)
class Allowed:
    """The words for what a setting may be, where its type alone does not say it."""

    text: str


def _duration(value: object) -> Duration:
    if not isinstance(value, str | Duration):
        raise ValueError("not a duration")  # noqa: TRY004 - pydantic collects ValueError only
    try:
        return Duration.parse(value)
    except ConfigError as error:
        raise ValueError(str(error)) from error


def _positive(value: Duration) -> Duration:
    if value.amount <= 0:
        raise ValueError("must be above zero")
    return value


def _length(value: Duration) -> Duration:
    if value.unit == "%":
        raise ValueError("a share needs a whole")
    return _positive(value)


def _batch(value: Duration) -> Duration:
    if value.unit not in ("tokens", "examples") or not value.amount.is_integer():
        raise ValueError("not a number of tokens or examples")
    return _positive(value)


def _tokenizer(value: str) -> str:
    kind, colon, size = value.partition(":")
    if kind == "trained" and not (colon and size.isdecimal() and 512 <= int(size) <= 500_000):
        raise ValueError("not a vocabulary size")
    return value


def _metric(value: str) -> str:
    if value not in METRIC_GROUPS and not _DOTTED.fullmatch(value):
        raise ValueError("not a metric")
    return value


def _python_name(value: str) -> str:
    if not _DOTTED.fullmatch(value):
        raise ValueError("not module:name")
    return value


def _webhook(value: str) -> str:
    if re.fullmatch(r"env:[A-Za-z_]\w*", value):
        return value
    parts = urlsplit(value)
    blank = re.search(r"\s", value)
    if parts.scheme not in ("http", "https") or not parts.hostname or blank:
        raise ValueError("not an address")
    return value


def _public(value: str | None) -> str | None:
    return value if value is not None and value.startswith("env:") else None


def _different(values: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(values)) < len(values):
        raise ValueError("one of them twice")
    return values


def _tuple(value: object) -> object:
    # YAML knows lists; a frozen tree holds tuples.
    return tuple(value) if isinstance(value, list) else value


_written = PlainSerializer(str, return_type=str)
_UNITS = "steps, epochs, tokens, examples, minutes"

AnyDuration = Annotated[
    Duration,
    PlainValidator(_duration),
    _written,
    Allowed(f'a number and a unit ({_UNITS} or %), e.g. "200 steps" or "10 %"'),
]
"""A point or an interval of a run; zero is allowed."""

Interval = Annotated[
    Duration,
    PlainValidator(_duration),
    AfterValidator(_positive),
    _written,
    Allowed(f'a number above 0 and a unit ({_UNITS} or %), e.g. "200 steps"'),
]
"""Something that recurs."""

RunLength = Annotated[
    Duration,
    PlainValidator(_duration),
    AfterValidator(_length),
    _written,
    Allowed(f'a number above 0 and a unit ({_UNITS}), e.g. "3 epochs"'),
]
"""The whole of a run, so not a share of one."""

BatchSize = Annotated[
    Duration,
    PlainValidator(_duration),
    AfterValidator(_batch),
    _written,
    Allowed('a whole number of tokens or examples, e.g. "16384 tokens" or "64 examples"'),
]
"""What one update sees."""

TokenizerName = Annotated[
    str,
    AfterValidator(_tokenizer),
    Allowed("auto, a folder, a hub name, or trained:N with N from 512 to 500000"),
]
"""Where a tokenizer comes from."""

METRIC_GROUPS = ("auto", "bleu", "chrf", "rouge", "repetition", "recipe")
_DOTTED = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*:[^\W\d]\w*")
MetricName = Annotated[
    str,
    AfterValidator(_metric),
    Allowed(f"{', '.join(METRIC_GROUPS)} or module:function"),
]
"""A metric of written texts: one that comes with Toque, or a function of the user's."""

PythonName = Annotated[str, AfterValidator(_python_name), Allowed("module:name")]
"""Something of the user's own, importable."""


@dataclass(frozen=True)
class Secret:
    """A value that no message, file or hash may hold."""


SecretAddress = Annotated[
    Annotated[str, AfterValidator(_webhook)] | None,
    Secret(),
    # What is written down is the variable's name, or that there is nothing.
    PlainSerializer(_public, return_type=str | None),
    Allowed("null, env:NAME (the address is in that environment variable), or an http(s) address"),
]
"""Where messages are sent."""

TaskName = Literal["write", "request", "nutrition", "difficulty", "cuisine", "next_step", "title"]
"""What a recipe can be turned into; `toque.cooking.prompts` has the same list."""

Fraction = Annotated[float, annotated_types.Ge(0), annotated_types.Lt(1)]
"""A share that leaves something over."""

Auto = Literal["auto"]
Once = AfterValidator(_different)
"""No value of a list twice."""
AsTuple = BeforeValidator(_tuple)


def allowed_words(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """What a setting with this annotation may be, in words.

    >>> allowed_words(Literal["linear", "cosine"] | None)
    'linear, cosine or null'
    """
    said = next((item.text for item in metadata if isinstance(item, Allowed)), None)
    if said is not None:
        return said
    parts = _branches(annotation, metadata)
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " or " + parts[-1]


def _branches(annotation: Any, metadata: Sequence[Any]) -> list[str]:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return [allowed_words(arguments[0], arguments[1:])]
    if origin in (Union, types.UnionType):
        # Numbers before null, words first: "auto or a whole number".
        ordered = sorted(arguments, key=lambda branch: branch is types.NoneType)
        return [words for branch in ordered for words in _branches(branch, metadata)]
    if origin is Literal:
        return [_word(value) for value in arguments]
    if origin is tuple:
        return [f"a list of {_plural(arguments[0])}"]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return ["{" + ", ".join(f"{name}: ..." for name in annotation.model_fields) + "}"]
    if annotation is bool:
        return ["true", "false"]
    return [_scalar(annotation) + _bounds(metadata)]


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _plural(item: Any) -> str:
    return "texts" if item is str else allowed_words(item)


def _scalar(annotation: Any) -> str:
    names = {
        types.NoneType: "null",
        int: "a whole number",
        float: "a number",
        str: "text",
    }
    return names.get(annotation, "a mapping of names to values")


def _bounds(metadata: Sequence[Any]) -> str:
    words = {
        annotated_types.Ge: ("from", "ge"),
        annotated_types.Gt: ("above", "gt"),
        annotated_types.Le: ("to", "le"),
        annotated_types.Lt: ("below", "lt"),
    }
    flat = [inner for item in metadata for inner in getattr(item, "metadata", (item,))]
    found = [
        f" {word} {getattr(item, attribute)}"
        for kind, (word, attribute) in words.items()
        for item in flat
        if isinstance(item, kind)
    ]
    return "".join(found)
