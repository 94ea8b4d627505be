"""Webhook: messages to a chat or a program when a run starts, improves, ends or fails.

The address is a secret, since whoever has it can write there: it is in no message, log or error.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from toque.training.callbacks import LOSS, Callback, RunEnd, RunStart, State, StepInfo
from toque.training.observers.background_thread import BackgroundThread
from toque.training.state_values import number_in
from toque.units import Progress
from toque.version import __version__

TIMEOUT_SECONDS: Final = 10.0  # longest wait for one message, in the background thread
END_PATIENCE_SECONDS: Final = 3.0  # seconds that a finished run waits for its last message
_DISCORD_HOSTS: Final = ("discord.com", "discordapp.com")
_DISCORD_LETTERS: Final = 1900  # Discord refuses content of more than 2,000 characters

Warn = Callable[[Progress, str], None]


class Webhook(Callback):
    """Tells an http or https address when the run of this name starts, improves, ends or fails."""

    def __init__(self, address: str, *, run: str, warn: Warn) -> None:
        self._address, self.run = address, run
        self._best: float | None = None
        self._thread = BackgroundThread("webhook messages", 16, describe, warn)

    def on_fit_start(self, start: RunStart) -> None:
        """Announce the run."""
        begun = f"continues from step {start.progress.step:,}" if start.progress.step else "begins"
        self._send("start", start.progress, f"{begun}, until {start.stop_after}")

    def on_step(self, info: StepInfo) -> None:
        """Warn when messages are lost."""
        self._thread.warn_of_losses(info.progress)

    def on_evaluate(self, at: Progress, metrics: Mapping[str, float]) -> None:
        """Announce the lowest held-out loss so far."""
        loss = metrics.get("loss")
        if loss is not None and LOSS.better(loss, self._best):
            self._best = loss
            self._send("best", at, f"lowest held-out loss so far, {loss:.4f}", loss=loss)

    def on_fit_end(self, end: RunEnd) -> None:
        """Announce how the run ended, and wait a little for that to arrive."""
        best = self._best
        text = f"{end.reason.replace('_', ' ')} after {end.seconds / 60:.1f} minutes"
        text += f", best held-out loss {best:.4f}" if best is not None else ""
        text += f": {end.error}" if end.error else ""
        self._send("failure" if end.error else "end", end.progress, text, loss=best)
        self._thread.close(end.progress, patience_seconds=END_PATIENCE_SECONDS)

    def state_dict(self) -> State:
        """The best loss, so that a continued run does not announce it again."""
        return {"best": self._best}

    def load_state_dict(self, state: State) -> None:
        """Restore it."""
        self._best = None if state["best"] is None else number_in(state, "best")

    def _send(self, event: str, at: Progress, message: str, *, loss: float | None = None) -> None:
        text = f"{self.run}: {message} (step {at.step:,})"
        body = body_for(self._address, event, run=self.run, step=at.step, text=text, loss=loss)
        self._thread.offer(lambda: post_json(self._address, body))


def body_for(
    address: str, event: str, *, run: str, step: int, text: str, loss: float | None
) -> bytes:
    """The message as JSON: in Discord's form for an address of Discord's, plain for any other."""
    host = (urlsplit(address).hostname or "").lower()
    message: dict[str, Any]
    if any(host == known or host.endswith("." + known) for known in _DISCORD_HOSTS):
        # An "@everyone" in an error's text must not notify anybody.
        message = {"content": text[:_DISCORD_LETTERS], "allowed_mentions": {"parse": []}}
    else:
        message = {"event": event, "run": run, "step": step, "loss": loss, "text": text}
    return json.dumps(message).encode()


def post_json(address: str, body: bytes) -> None:
    """Send `body`; an OSError if it could not be sent, or the response was an error."""
    request = urllib.request.Request(  # noqa: S310 - the configuration takes http and https only
        address,
        data=body,
        # Discord turns Python's own user agent away.
        headers={"Content-Type": "application/json", "User-Agent": f"toque/{__version__}"},
        method="POST",
    )
    with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:  # noqa: S310
        answer.read(1)


def describe(error: Exception) -> str:
    """The kind of error; never the address, which texts of urllib's errors may hold."""
    if isinstance(error, urllib.error.HTTPError):
        return f"the last was answered with HTTP {error.code}"
    reason = getattr(error, "reason", error)
    return f"the last failed with {type(reason).__name__}"
