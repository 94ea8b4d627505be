"""Exceptions a user can meet, each with its exit code.

A message is one paragraph: what was found, where, what is allowed, what to do. Arguments in it are
marked by `argument`, so that Python reads "n is 0" and the command line puts the flag instead. What
it quotes may come from anyone's file: control characters, which a terminal would obey, are written
out, and so is a line break between two letters, as in a path; other line breaks are spaces.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

_MARKED = re.compile("\0([^\0]*)\0")
_LINE_BREAKS = re.compile(
    r"(?!(?<=\w).\w)(?<![ \t])[ \t]*+[\r\n\v\f\x85\u2028\u2029]\s*+", re.DOTALL
)
_UNPRINTABLE = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
_LONGEST = 4000  # characters of a message; a library may quote a whole file in its own


def argument(name: str) -> str:
    """An argument for a message, as Python writes it: `n`, or `steps=8` to give it a value."""
    return f"\0{name}\0"


def in_shell(word: object) -> str:
    r"""A word of a command that is pasted into a shell, on one line.

    >>> in_shell("runs/mine"), in_shell("my run"), in_shell("a\nb")
    ('runs/mine', "'my run'", "$'a\\nb'")
    """
    text = str(word)
    # The mark before it has repr take single quotes, as such a word needs them.
    return shlex.quote(text) if text.isprintable() else "$'" + repr(f'"{text}')[2:]


def nearest_hint(given: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """The part of a message that names the likeliest of `known`; "" where none is like `given`.

    >>> nearest_hint("rougel", ["rougeL", "bleu"]), nearest_hint("soup", ["bleu"])
    (' Nearest: rougeL.', '')
    """
    close = difflib.get_close_matches(given, [*known], n=1, cutoff=cutoff)
    return f" Nearest: {close[0]}." if close else ""


class ToqueError(Exception):
    """Base of everything a user may meet; never raised itself."""

    exit_code: int = 1
    said_by_another: bool = False  # true where another rank of the same run reports it to the user

    def __str__(self) -> str:
        """The message, with arguments as Python names them."""
        return self.message(str)

    def message(self, name: Callable[[str], str]) -> str:
        """The message, with every argument as `name` puts it.

        >>> ConfigError(f"{argument('n')} is 0.").message(lambda name: f"The flag of {name}")
        'The flag of n is 0.'
        """
        return _in_a_paragraph(_MARKED.sub(lambda found: name(found[1]), super().__str__()))


def _in_a_paragraph(text: str) -> str:
    r"""Text for a terminal: one line, nothing in it that a terminal would obey, not endless.

    >>> _in_a_paragraph("a file named \x1b[2J is\n  damaged")
    'a file named \\x1b[2J is damaged'
    >>> _in_a_paragraph("no\nsuch is no folder.\nName another.")
    'no\\nsuch is no folder. Name another.'
    """
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST - 500]} … {text[-480:]}"
    text = _LINE_BREAKS.sub(" ", text)
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class CheckFailed(ToqueError):
    """Two computations that must agree do not: `check`, or a fault of `drill`."""

    exit_code = 1


class ConfigError(ToqueError):
    """The command line or the configuration cannot be used as written."""

    exit_code = 2


@contextmanager
def needing(
    extra: str, what: str, *, otherwise: str = "", raised: type[ToqueError] = ConfigError
) -> Iterator[None]:
    """A context of imports: an error names the extra with the package that is missing."""
    try:
        yield
    except ImportError as error:
        raise raised(
            f"{what} needs the package {error.name}, which is not installed. Install it with `pip "
            f"install 'toque[{extra}]'`{otherwise}."
        ) from error


class DataError(ToqueError):
    """A source, a tokenizer or a store is missing, damaged or does not fit."""

    exit_code = 3


class CheckpointError(ToqueError):
    """A checkpoint or a run folder is missing, damaged, or belongs to another run."""

    exit_code = 4


class NonFiniteError(ToqueError):
    """The loss or the gradient norm became NaN or infinite."""

    exit_code = 5


class RankLost(ToqueError):
    """Another of the processes that share the run is gone or does not answer.

    Where that one ended by an error, this one leaves with the same exit code.
    """

    exit_code = 1


class Interrupted(ToqueError):
    """A signal asked the run to stop; it saved and can continue."""

    exit_code = 75
