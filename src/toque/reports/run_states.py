"""State of a run in words: how a session ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_ENDED: Final = {
    "finished": "Finished",
    "early_stopping": "Stopped early, as asked",
    "interrupted": "Interrupted and saved; the same command continues it",
    "non_finite": "Stopped on a loss that is not finite",
}


def ended_in_words(end: Mapping[str, Any]) -> str:
    """What an `end` event says.

    >>> ended_in_words({"event": "end", "step": 1200, "reason": "early_stopping"})
    'Stopped early, as asked, at step 1,200.'
    """
    reason = str(end.get("reason"))
    said = _ENDED.get(reason, reason.replace("_", " ").capitalize())
    error = f" ({end['error']})" if end.get("error") else ""
    return f"{said}{error}, at step {end['step']:,}."
