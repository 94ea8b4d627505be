"""Exceptions a user can meet, each with its exit code.

ToqueError
├── CheckFailed       1   `toque check` found two answers where there must be one
├── ConfigError       2   wrong usage or configuration
├── DataError         3   sources, tokenizer or store
├── CheckpointError   4   checkpoint or run folder
├── NonFiniteError    5   training stopped on a loss or gradient that is not a number
├── RankLost          1   another process of the same run is gone or does not answer
└── Interrupted       75  stopped by a signal, saved and resumable

A message is one paragraph: what was found, where, what is allowed, what to do.
"""

from __future__ import annotations

from typing import ClassVar


class ToqueError(Exception):
    """Base of everything a user may meet; never raised itself."""

    exit_code: ClassVar[int] = 1
    said_by_another: bool = False
    """Whether another rank of the same run tells the user about it."""


class CheckFailed(ToqueError):
    """`toque check` computed an update in two ways that must agree and do not."""

    exit_code: ClassVar[int] = 1


class ConfigError(ToqueError):
    """The command line or the configuration cannot be used as written."""

    exit_code: ClassVar[int] = 2


class DataError(ToqueError):
    """A source, a tokenizer or a store is missing, damaged or does not fit."""

    exit_code: ClassVar[int] = 3


class CheckpointError(ToqueError):
    """A checkpoint or a run folder is missing, damaged, or belongs to another run."""

    exit_code: ClassVar[int] = 4


class NonFiniteError(ToqueError):
    """The loss or the gradient norm became NaN or infinite."""

    exit_code: ClassVar[int] = 5


class RankLost(ToqueError):
    """Another of the processes that share the run is gone or does not answer."""

    exit_code: ClassVar[int] = 1


class Interrupted(ToqueError):
    """A signal asked the run to stop; it saved and can continue."""

    exit_code: ClassVar[int] = 75
