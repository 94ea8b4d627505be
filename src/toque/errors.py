"""Exceptions for users, each with its exit code.

A message is one paragraph: the problem, its location, the allowed values, and the next step. A
message marks arguments with `argument`: Python prints "n is 0", and the command line prints the
flag. Quoted text may be untrusted. Control characters are escaped, because a terminal would obey
them. A line break between two letters, as in a path, is also escaped. Other line breaks become
spaces.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

_MARKED = re.compile("\0([^\0]*)\0")
"""An argument that `argument` has marked."""
_LINE_BREAKS = re.compile(
    r"(?!(?<=\w).\w)(?<![ \t])[ \t]*+[\r\n\v\f\x85\u2028\u2029]\s*+", re.DOTALL
)
"""A line break and the spaces around it, unless it is between two letters."""
_UNPRINTABLE = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Control characters, marks that change the direction of text, and halves of surrogate pairs."""
_MAX_CHARS = 4000
"""Maximum length of a message, in characters. A library's message may quote an entire file."""


def argument(name: str) -> str:
    """Mark the name of an argument in a message: `n`, or with a value `steps=8`."""
    return f"\0{name}\0"


def in_shell(word: object) -> str:
    r"""Quote a word for a command that users paste into a shell, on one line.

    >>> in_shell("runs/my"), in_shell("my run"), in_shell("a\nb")
    ('runs/my', "'my run'", "$'a\\nb'")
    """
    text = str(word)
    # The double quote makes repr use single quotes, as $'...' needs.
    return shlex.quote(text) if text.isprintable() else "$'" + repr(f'"{text}')[2:]


def nearest_hint(name: str, candidates: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Suggest the most similar candidate for a message, or return "" without a similar one.

    >>> nearest_hint("rougel", ["rougeL", "bleu"]), nearest_hint("soup", ["bleu"])
    (' Nearest: rougeL.', '')
    """
    close = difflib.get_close_matches(name, [*candidates], n=1, cutoff=cutoff)
    return f" Nearest: {close[0]}." if close else ""


class ToqueError(Exception):
    """Base class of all exceptions for users. It is never raised itself."""

    exit_code: int = 1
    said_by_another: bool = False
    """True if another rank of the same run reports the error to the user."""

    def __str__(self) -> str:
        """Return the message with the names of arguments in Python."""
        return self.message(str)

    def message(self, name: Callable[[str], str]) -> str:
        """Return the message with each argument formatted by `name`.

        >>> ConfigError(f"{argument('n')} is 0.").message(lambda name: f"The flag of {name}")
        'The flag of n is 0.'
        """
        text = _MARKED.sub(lambda mark: name(mark[1]), super().__str__())
        return _as_paragraph(text)


def _as_paragraph(text: str) -> str:
    r"""Make a text safe for a terminal: one line, no control characters, limited length.

    >>> _as_paragraph("a file named \x1b[2J is\n  damaged")
    'a file named \\x1b[2J is damaged'
    >>> _as_paragraph("no\nsuch is not a folder.\nChoose another.")
    'no\\nsuch is not a folder. Choose another.'
    """
    if len(text) > _MAX_CHARS:
        text = f"{text[: _MAX_CHARS - 500]} … {text[-480:]}"
    text = _LINE_BREAKS.sub(" ", text)
    return _UNPRINTABLE.sub(
        lambda char: char[0].encode("unicode_escape").decode(), text
    )


class CheckFailed(ToqueError):
    """A check failed: computations that must agree differ, or an average is worse."""

    exit_code = 1


class ConfigError(ToqueError):
    """The command line or the configuration is invalid."""

    exit_code = 2


@contextmanager
def needing(
    extra: str,
    what: str,
    *,
    otherwise: str = "",
    raised: type[ToqueError] = ConfigError,
) -> Iterator[None]:
    """Convert an ImportError in the context into an error with the extra to install.

    Args:
        extra: Toque's extra that contains the package.
        what: The subject of the message: the feature that needs the package.
        otherwise: An alternative to the installation, for the message.
        raised: The class of the error.
    """
    try:
        yield
    except ImportError as error:
        raise raised(
            f"{what} needs the package {error.name}, which is not installed. Install it with `pip "
            f"install 'toque[{extra}]'`{otherwise}."
        ) from error


class DataError(ToqueError):
    """A source, a tokenizer or a store is missing, damaged or incompatible."""

    exit_code = 3


class CheckpointError(ToqueError):
    """A checkpoint or a run folder is missing, damaged, or belongs to another run."""

    exit_code = 4


class NonFiniteError(ToqueError):
    """The loss or the gradient norm became NaN or infinite."""

    exit_code = 5


class RankLost(ToqueError):
    """Another process of the run has ended or does not answer.

    If that process ended with an error, this process ends with the same exit code.
    """

    exit_code = 1


class Interrupted(ToqueError):
    """A signal stopped the run after a save. The run can continue."""

    exit_code = 75


_MAX_NAMES = 3  # maximum number of names in a sentence


def join_first(paths: Iterable[str]) -> str:
    """Join the first few of many paths, with the number of remaining paths."""
    paths = list(paths)
    names = ", ".join(paths[:_MAX_NAMES])
    n_more = len(paths) - _MAX_NAMES
    return f"{names} and {n_more} more" if n_more > 0 else names
