"""Retry of requests to a bucket: growing waits with jitter, until a deadline.

gcsfs and s3fs retry by themselves, which repairs a broken line but is not enough here: s3fs gives
up after about a second of waiting (five tries), and neither repeats an upload that arrived damaged
or a range that came short. Without this module `..._fail_are_repeated_and_counted`
(tests/storage/test_buckets.py) and `test_fault_34_...` (tests/faults/test_network.py) fail.
"""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeVar, final

DEADLINE: Final = 120.0
"""Seconds after which a request that keeps failing is given up."""
FIRST_WAIT = 0.5
LONGEST_WAIT: Final = 30.0
_DENIED: Final = ("401", "403", "Forbidden", "AccessDenied", "Unauthorized", "InvalidAccessKeyId")

Result = TypeVar("Result")


class MismatchError(OSError):
    """The bytes that arrived are not those that were sent: always worth another try."""


_WORD = re.compile(r"\w+")


def mentions(error: Exception, *signs: str) -> bool:
    """True if an error has one of the words or status codes in its text, code or cause."""
    # Whole words: an MD5 with "403" in it is no refusal.
    words = _WORD.findall(f"{error} {getattr(error, 'code', '')} {error.__cause__ or ''}")
    return any(sign in words for sign in signs)


def is_denied(error: Exception) -> bool:
    """True if the service refused for want of rights."""
    if isinstance(error, MismatchError):
        return False
    return isinstance(error, PermissionError) or mentions(error, *_DENIED)


def is_transient(error: Exception) -> bool:
    """True if the same request may succeed later."""
    return not (isinstance(error, FileNotFoundError) or is_denied(error))


@final
@dataclass
class Retry:
    """Repeats requests.

    Args:
        deadline: seconds for one request, repeats included; 0 for a single try.
        stop: set by whoever does not want to wait any longer.
    """

    deadline: float = DEADLINE
    stop: threading.Event = field(default_factory=threading.Event)
    waits: list[float] = field(default_factory=list)
    """Seconds waited, one for every repeat; from all threads."""

    def __call__(self, ask: Callable[[], Result], failures: tuple[type[Exception], ...]) -> Result:
        """The result of `ask`; what it raises of `failures` is raised when nothing helps."""
        began, attempt = time.monotonic(), 0
        while True:
            try:
                return ask()
            except failures as error:
                late = time.monotonic() - began > self.deadline or self.stop.is_set()
                if late or not is_transient(error):
                    raise
            longest = min(LONGEST_WAIT, FIRST_WAIT * 2**attempt)
            # Drawn, so that many threads or machines do not all come back at the same instant.
            self.waits.append(random.uniform(longest / 2, longest))
            self.stop.wait(self.waits[-1])
            attempt += 1
