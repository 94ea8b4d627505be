"""The exceptions a user can meet, each with the exit code of the command contract.

ToqueError
├── CheckFailed       1   `toque check` found two answers where there must be one
├── ConfigError       2   wrong usage or configuration
├── DataError         3   sources, tokenizer or store
├── CheckpointError   4   checkpoint or run folder
├── NonFiniteError    5   training stopped on a loss or gradient that is not a number
└── Interrupted       75  stopped by a signal, saved and resumable

A message is one paragraph: what was found, where, what is allowed, what to do.
"""

from __future__ import annotations

from typing import ClassVar


class ToqueError(Exception):
    """Base of everything a user may meet; never raised itself."""

    exit_code: ClassVar[int] = 1


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


class Interrupted(ToqueError):
    """A signal asked the run to stop; it saved and can continue."""

    exit_code: ClassVar[int] = 75
