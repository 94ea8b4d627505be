"""Field types of settings, and the words for what each allows, in errors and on the pages."""

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
        defer_build=True,  # importing stays cheap; the validator is built when first used
    )


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


def _part(value: object) -> Duration:
    found = _duration(value)
    if found.total:
        raise ValueError("a total is the length of a whole command")
    return found


def _is_whole(value: Duration) -> bool:
    return value.amount >= 1 and value.amount.is_integer()


_LONGEST_PATH, _LONGEST_NAME = 3_800, 255
"""Bytes: Linux takes 4,096 in all, which leaves some for the files below; a name has 255."""
_PYTHON_NAME = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*:[^\W\d]\w*")
_FROM_ENVIRONMENT = re.compile(r"env:[A-Za-z_]\w*")
_BLANK = re.compile(r"\s")
_WORD = re.compile(r"[A-Za-z]\w*", re.ASCII)


def _fits_a_disk(value: str) -> bool:
    """True where a file system can hold a file of this path, and others in it."""
    parts = os.fsencode(value).split(b"/")
    return len(os.fsencode(value)) <= _LONGEST_PATH and max(map(len, parts)) <= _LONGEST_NAME


def _is_tokenizer(value: str) -> bool:
    kind, _, size = value.partition(":")
    learnt = size.isdecimal() and len(size) < 7 and 512 <= int(size) <= 500_000
    return _fits_a_disk(value) and (kind != "trained" or learnt)


def _is_address(value: str) -> bool:
    if _FROM_ENVIRONMENT.fullmatch(value):
        return True
    parts = urlsplit(value)
    return parts.scheme in ("http", "https") and bool(parts.hostname) and not _BLANK.search(value)


_Duration = Annotated[Duration, PlainValidator(_part), PlainSerializer(str, return_type=str)]
_UNITS = ", ".join(unit for unit in UNITS if unit != "%")

AnyDuration = Annotated[
    _Duration, Allowed(f'a number and a unit ({_UNITS} or %), e.g. "200 steps" or "10 %"')
]  # a point or an interval of a run; zero is allowed

Interval = Annotated[
    _Duration,
    Predicate(lambda value: value.amount > 0),
    Allowed(f'a number above 0 and a unit ({_UNITS} or %), e.g. "200 steps"'),
]  # something that recurs

Seconds = Annotated[
    _Duration,
    Predicate(lambda value: (value.seconds or 0.0) >= 0.1),
    Allowed('seconds, minutes or hours, at least 0.1 seconds, e.g. "10 seconds"'),
]  # something that recurs by the clock

StepInterval = Annotated[
    _Duration,
    Predicate(lambda value: value.unit == "steps" and _is_whole(value)),
    Allowed('a whole number of steps, e.g. "100 steps"'),
]  # something that recurs at the same updates, whatever sessions a run is made in

RunLength = Annotated[
    Duration,
    PlainValidator(_duration),
    PlainSerializer(str, return_type=str),
    Predicate(lambda value: value.amount > 0 and value.unit != "%"),
    Allowed(f'a number above 0 and a unit ({_UNITS}), e.g. "3 epochs" or "10 minutes total"'),
]  # the whole of a run, so not a share of one

BatchSize = Annotated[
    _Duration,
    Predicate(lambda value: value.unit in ("tokens", "examples") and _is_whole(value)),
    Allowed('a whole number of tokens or examples, e.g. "16384 tokens" or "64 examples"'),
]  # amount of data in one update

FileName = Annotated[str, Field(min_length=1), Predicate(_fits_a_disk)]
"""A file, a folder or an address; each part of at most 255 bytes."""

FolderName = Annotated[FileName, AfterValidator(expanded), Allowed("a folder")]
"""A folder or an address; `~` is expanded here, because the folder is opened in many places."""

TokenizerName = Annotated[
    str,
    Predicate(_is_tokenizer),
    Allowed("auto, a folder, a hub name, or trained:N with N from 512 to 500000"),
]  # origin of a tokenizer

METRIC_GROUPS = ("bleu", "rouge", "repetition", "recipe")
"""Metrics of written texts that auto stands for."""
ANY_TEXTS = (*METRIC_GROUPS, "exact_match", "token_f1", "valid_json")
OF_CLASSES = ("accuracy", "macro_f1")
MetricName = Annotated[
    str,
    Predicate(lambda value: value in ("auto", *ANY_TEXTS) or _PYTHON_NAME.fullmatch(value)),
    Allowed(f"auto, {', '.join(ANY_TEXTS)} or module:function"),
]  # a metric of written texts: one that comes with Toque, or a function of the user's
TaskMetricName = Annotated[
    str,
    Predicate(lambda value: value in (*ANY_TEXTS, *OF_CLASSES) or _PYTHON_NAME.fullmatch(value)),
    Allowed(f"{', '.join((*ANY_TEXTS, *OF_CLASSES))} or module:function"),
]  # a metric of the answers to a task


def _is_encoding(value: str) -> bool:
    """True where Python can read text in it: "rot13" and "base64" are no encodings of text."""
    try:
        "".encode(value)
        codecs.getincrementaldecoder(value)
    except (LookupError, ValueError):
        return False
    return True


EncodingName = Annotated[
    str, Predicate(_is_encoding), Allowed("utf-8, latin-1, cp1252 or another that Python knows")
]  # a character encoding


def _is_day(value: str) -> bool:
    """True for a day in ISO's long form, whose parts `date` takes in others, too."""
    try:
        return date.fromisoformat(value).isoformat() == value
    except ValueError:
        return False


Day = Annotated[str, Predicate(_is_day), Allowed("a day such as 2026-01-31")]

ScoreName = Annotated[
    str,
    Predicate(str.strip),
    Allowed("loss, perplexity, or a score of the texts such as bleu, rougeL or recipe_score"),
]  # a metric of an evaluation while training; a run that does not measure it is refused

PythonName = Annotated[str, Predicate(_PYTHON_NAME.fullmatch), Allowed("module:name")]
"""Something of the user's own, importable."""


@dataclass(frozen=True)
class Secret:
    """A value that no message, file or hash may hold."""


SecretAddress = Annotated[
    Annotated[str, Predicate(_is_address)] | None,
    Secret(),
    # What is written down is the variable's name, or that there is nothing.
    PlainSerializer(
        lambda value: value if (value or "").startswith("env:") else None, return_type=str | None
    ),
    Allowed("null, env:NAME (the address is in that environment variable), or an http(s) address"),
]  # address that messages are sent to

TaskName = Literal["write", "request", "nutrition", "difficulty", "cuisine", "next_step", "title"]
"""Task that a recipe can be turned into; `toque.cooking.prompts` has a table of them."""
ColumnPart = Literal[
    "title", "ingredients", "steps", "text", "prompt", "target", "messages", "system"
]
"""Part of a record that a field of a source may be named for."""
OwnTaskName = Annotated[
    str,
    Predicate(lambda value: _WORD.fullmatch(value) and value not in get_args(TaskName)),
    Allowed(f"a word that is none of {', '.join(get_args(TaskName))}"),
]
"""A task of the user's own."""
DifficultyName = Literal["easy", "medium", "hard"]

Fraction = Annotated[float, annotated_types.Ge(0), annotated_types.Lt(1)]
"""A share that leaves something over."""

Auto = Literal["auto"]
Once = Predicate(lambda values: len(set(values)) == len(values))  # no value of a list twice
AsTuple = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
"""YAML knows lists; a frozen tree holds tuples."""
