"""Verdicts on runs, asked for now and then: each reads the whole run."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, final

from toque.reports.verdict import Verdict, verdict_of

_EVERY: Final = 30.0
"""Seconds between two verdicts on a run that goes on."""
_SHARE: Final = 0.01
"""Most of the time that verdicts may take."""


@final
class Verdicts:
    """The newest verdict on each run.

    Args:
        ask: reads a run.
        clock: seconds that pass.
    """

    def __init__(
        self,
        *,
        ask: Callable[[Path], Verdict | None] = verdict_of,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask, self._clock = ask, clock
        self._known: dict[Path, tuple[float, object, Verdict | None]] = {}

    def of(self, folder: Path, version: object) -> Verdict | None:
        """The verdict on a run.

        Args:
            folder: of the run.
            version: what changes with its files.
        """
        due, seen, verdict = self._known.get(folder, (0.0, None, None))
        now = self._clock()
        if folder in self._known and (seen == version or now < due):
            return verdict
        verdict = self._ask(folder)
        took = self._clock() - now
        self._known[folder] = (now + max(_EVERY, took / _SHARE), version, verdict)
        return verdict
