"""Field types of settings, with descriptions of allowed values for errors and pages."""

from __future__ import annotations

import codecs
import os
import re
from dataclasses import dataclass
from datetime import date
from typing import Annotated, Literal, get_args
from urllib.parse import urlsplit

import annotated_types
from annotated_types import Predicate
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
)

from toque.errors import ConfigError
from toque.units import UNITS, Duration
from toque.user_paths import expanded


class Config(BaseModel):
    """Base of every section."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
        defer_build=True,  # keeps the import fast: the validator is built at its first use
    )


@dataclass(frozen=True)
class Allowed:
    """Description of the allowed values, if the type does not describe them completely."""

    text: str


def _parse_duration(value: object) -> Duration:
    if not isinstance(value, str | Duration):
        raise ValueError("not a duration")  # noqa: TRY004 - pydantic collects ValueError only
    try:
        return Duration.parse(value)
    except ConfigError as error:
        raise ValueError(str(error)) from error


def _parse_duration_without_total(value: object) -> Duration:
    duration = _parse_duration(value)
    if duration.total:
        raise ValueError("a total is the length of an entire command")
    return duration


def _is_whole_number(value: Duration) -> bool:
    return value.amount >= 1 and value.amount.is_integer()


_MAX_PATH_BYTES = 3_800
"""Maximum length of a path, in bytes. Linux allows 4,096, including the names of nested files.
"""
_MAX_NAME_BYTES = 255
"""Maximum length of a file name in Linux, in bytes."""
_PYTHON_NAME = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*:[^\W\d]\w*")
_FROM_ENVIRONMENT = re.compile(r"env:[A-Za-z_]\w*")
_BLANK = re.compile(r"\s")
_WORD = re.compile(r"[A-Za-z]\w*", re.ASCII)


def _is_possible_path(value: str) -> bool:
    """Return whether a file system allows a folder with this path."""
    path = os.fsencode(value)
    longest_name = max(path.split(b"/"), key=len)
    return len(path) <= _MAX_PATH_BYTES and len(longest_name) <= _MAX_NAME_BYTES


def _is_tokenizer(value: str) -> bool:
    kind, _, size = value.partition(":")
    if kind == "trained":
        # `int` rejects thousands of digits, so their number is checked first.
        is_short_number = size.isdecimal() and len(size) < 7
        return is_short_number and 512 <= int(size) <= 500_000
    return _is_possible_path(value)


def _is_address(value: str) -> bool:
    if _FROM_ENVIRONMENT.fullmatch(value):
        return True
    parts = urlsplit(value)
    is_web_address = parts.scheme in ("http", "https") and bool(parts.hostname)
    return is_web_address and not _BLANK.search(value)


_Duration = Annotated[
    Duration,
    PlainValidator(_parse_duration_without_total),
    PlainSerializer(str, return_type=str),
]
_UNITS = ", ".join(unit for unit in UNITS if unit != "%")

AnyDuration = Annotated[
    _Duration,
    Allowed(f'a number and a unit ({_UNITS} or %), e.g. "200 steps" or "10 %"'),
]
"""A point or a part of a run. 0 is allowed."""

Interval = Annotated[
    _Duration,
    Predicate(lambda value: value.amount > 0),
    Allowed(f'a number above 0 and a unit ({_UNITS} or %), e.g. "200 steps"'),
]
"""Distance between two events of a run."""

Seconds = Annotated[
    _Duration,
    Predicate(lambda value: (value.seconds or 0.0) >= 0.1),
    Allowed('seconds, minutes or hours, at least 0.1 seconds, e.g. "10 seconds"'),
]
"""Time between two events."""

StepInterval = Annotated[
    _Duration,
    Predicate(lambda value: value.unit == "steps" and _is_whole_number(value)),
    Allowed('a whole number of steps, e.g. "100 steps"'),
]
"""Updates between two events. Interruptions of the run do not change the events' steps."""

RunLength = Annotated[
    Duration,
    PlainValidator(_parse_duration),
    PlainSerializer(str, return_type=str),
    Predicate(lambda value: value.amount > 0 and value.unit != "%"),
    Allowed(
        f'a number above 0 and a unit ({_UNITS}), e.g. "3 epochs" or "10 minutes total"'
    ),
]
"""Length of a run."""

BatchSize = Annotated[
    _Duration,
    Predicate(
        lambda value: value.unit in ("tokens", "examples") and _is_whole_number(value)
    ),
    Allowed(
        'a whole number of tokens or examples, e.g. "16384 tokens" or "64 examples"'
    ),
]
"""Amount of data per update."""

FileName = Annotated[str, Field(min_length=1), Predicate(_is_possible_path)]
"""A file, a folder, an address or a hub name."""

FolderName = Annotated[FileName, AfterValidator(expanded), Allowed("a folder")]
"""A folder or an address, with `~` expanded."""

TokenizerName = Annotated[
    str,
    Predicate(_is_tokenizer),
    Allowed("auto, a folder, a hub name, or trained:N with N from 512 to 500000"),
]

METRIC_GROUPS = ("bleu", "rouge", "repetition", "recipe")
"""Metrics of generated texts that auto includes."""
ANY_TEXTS = (*METRIC_GROUPS, "exact_match", "token_f1", "valid_json")
OF_CLASSES = ("accuracy", "macro_f1")
MetricName = Annotated[
    str,
    Predicate(
        lambda value: value in ("auto", *ANY_TEXTS) or _PYTHON_NAME.fullmatch(value)
    ),
    Allowed(f"auto, {', '.join(ANY_TEXTS)} or module:function"),
]
"""A metric of generated texts: a metric of Toque or a function of the user."""
TaskMetricName = Annotated[
    str,
    Predicate(
        lambda value: (
            value in (*ANY_TEXTS, *OF_CLASSES) or _PYTHON_NAME.fullmatch(value)
        )
    ),
    Allowed(f"{', '.join((*ANY_TEXTS, *OF_CLASSES))} or module:function"),
]
"""A metric of the answers to a task."""


def _is_encoding(value: str) -> bool:
    """Return whether Python can decode bytes to text with an encoding, unlike with "rot13"."""
    try:
        "".encode(value)
        codecs.getincrementaldecoder(value)
    except (LookupError, ValueError):
        return False
    return True


EncodingName = Annotated[
    str,
    Predicate(_is_encoding),
    Allowed("utf-8, latin-1, cp1252 or another text encoding of Python"),
]


def _is_day(value: str) -> bool:
    """Return whether a text is a date as YYYY-MM-DD. Python also parses other ISO formats."""
    try:
        return date.fromisoformat(value).isoformat() == value
    except ValueError:
        return False


Day = Annotated[str, Predicate(_is_day), Allowed("a day such as 2026-01-31")]

ScoreName = Annotated[
    str,
    Predicate(str.strip),
    Allowed(
        "loss, perplexity, or a score of the texts such as bleu, rougeL or cookable"
    ),
]
"""A metric of the evaluations during training. A run that does not compute it is refused."""

RewardName = Annotated[
    str,
    Predicate(
        lambda name: (
            bool(name.strip()) and (":" not in name or _PYTHON_NAME.fullmatch(name))
        )
    ),
    Allowed("a recipe score such as cookable, or module:function"),
]
"""A score of generated texts. `toque.evaluation.rewards` knows the names."""
PythonName = Annotated[str, Predicate(_PYTHON_NAME.fullmatch), Allowed("module:name")]
"""An object of the user, which is imported."""


@dataclass(frozen=True)
class Secret:
    """Marker of a value that must not appear in a message, a file or a hash."""


SecretAddress = Annotated[
    Annotated[str, Predicate(_is_address)] | None,
    Secret(),
    # Only the name of an environment variable is serialized, not an address.
    PlainSerializer(
        lambda value: value if (value or "").startswith("env:") else None,
        return_type=str | None,
    ),
    Allowed(
        "null, env:NAME (the address is in that environment variable), or an http(s) address"
    ),
]
"""Address to which messages are sent."""

TaskName = Literal[
    "write", "request", "nutrition", "difficulty", "cuisine", "next_step", "title"
]
"""A recipe task. `toque.cooking.prompts` lists the prompts for each task."""
ColumnPart = Literal[
    "title", "ingredients", "steps", "text", "prompt", "target", "chosen", "rejected",
    "messages", "system",
]  # fmt: skip
"""Part of a record that `columns` can map to a field of a source."""
OwnTaskName = Annotated[
    str,
    Predicate(lambda value: _WORD.fullmatch(value) and value not in get_args(TaskName)),
    Allowed(f"a word other than {', '.join(get_args(TaskName))}"),
]
"""A task that the user defines."""
DifficultyName = Literal["easy", "medium", "hard"]
TableName = Literal["embeddings", "head"]

Fraction = Annotated[float, annotated_types.Ge(0), annotated_types.Lt(1)]
"""A fraction of at least 0 and below 1."""

Auto = Literal["auto"]
Once = Predicate(lambda values: len(set(values)) == len(values))
"""Values without duplicates."""
AsTuple = BeforeValidator(
    lambda value: tuple(value) if isinstance(value, list) else value
)
"""Conversion of YAML's lists to tuples, because the settings are frozen."""
