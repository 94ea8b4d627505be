"""Webhook: messages to a chat or a program when a run starts, improves, ends or fails.

The address is a secret, because anyone who has it can post there. No message, log or error
contains it.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from toque.training.callbacks import Callback, Goal, RunEnd, RunStart, State, StepInfo
from toque.training.observers.background_thread import BackgroundThread
from toque.training.state_values import optional_number_in
from toque.units import Progress
from toque.version import __version__

TIMEOUT_SECONDS: Final = 10.0  # time limit per message, in the background thread
# Seconds that a finished run waits for its last message.
END_PATIENCE_SECONDS: Final = 3.0
_DISCORD_HOSTS: Final = ("discord.com", "discordapp.com")
# Discord rejects content of more than 2,000 characters.
_MAX_DISCORD_CHARACTERS: Final = 1900

Warn = Callable[[Progress, str], None]


class Webhook(Callback):
    """Sender of messages about the run named `run` to an http or https address."""

    def __init__(self, address: str, *, run: str, goal: Goal, warn: Warn) -> None:
        self._address = address
        self.run = run
        self._goal = goal
        self._best: float | None = None
        self._thread = BackgroundThread("webhook messages", 16, describe_error, warn)

    def on_fit_start(self, start: RunStart) -> None:
        """Announce the run."""
        step = start.progress.step
        beginning = f"continues from step {step:,}" if step else "begins"
        self._send("start", start.progress, f"{beginning}, until {start.stop_after}")

    def on_step(self, info: StepInfo) -> None:
        """Warn when messages are lost."""
        self._thread.warn_of_losses(info.progress)

    def on_evaluate(self, at: Progress, metrics: Mapping[str, float]) -> None:
        """Announce the best value so far of the run's metric."""
        value = metrics.get(self._goal.metric)
        if value is not None and self._goal.is_better(value, self._best):
            self._best = value
            text = f"{self._goal} so far, {value:.4f}"
            self._send("best", at, text, loss=metrics.get("loss"))

    def on_fit_end(self, end: RunEnd) -> None:
        """Announce how the run ended, and wait a little for the message to be sent."""
        best = self._best
        text = f"{end.reason.replace('_', ' ')} after {end.seconds / 60:.1f} minutes"
        if best is not None:
            text += f", {self._goal} {best:.4f}"
        if end.error:
            text += f": {end.error}"
        event = "failure" if end.error else "end"
        loss = None if end.best is None else end.best.loss
        self._send(event, end.progress, text, loss=loss)
        self._thread.close(end.progress, patience_seconds=END_PATIENCE_SECONDS)

    def state_dict(self) -> State:
        """Return the best value, so that a continued run does not announce it again."""
        return {"best": self._best}

    def load_state_dict(self, state: State) -> None:
        """Restore the best value."""
        self._best = optional_number_in(state, "best")

    def _send(
        self, event: str, at: Progress, message: str, *, loss: float | None = None
    ) -> None:
        text = f"{self.run}: {message} (step {at.step:,})"
        body = encode_message(
            self._address, event, run=self.run, step=at.step, text=text, loss=loss
        )
        self._thread.offer(lambda: post_json(self._address, body))


def encode_message(
    address: str, event: str, *, run: str, step: int, text: str, loss: float | None
) -> bytes:
    """Encode a message as JSON, in Discord's format for a Discord address."""
    host = (urlsplit(address).hostname or "").lower()
    # The dot keeps out hosts such as notdiscord.com.
    is_discord = f".{host}".endswith(tuple(f".{name}" for name in _DISCORD_HOSTS))
    message: dict[str, Any]
    if is_discord:
        # An "@everyone" in an error message must not notify people.
        message = {
            "content": text[:_MAX_DISCORD_CHARACTERS],
            "allowed_mentions": {"parse": []},
        }
    else:
        message = {"event": event, "run": run, "step": step, "loss": loss, "text": text}
    return json.dumps(message).encode()


def post_json(address: str, body: bytes) -> None:
    """Send `body` as an HTTP POST request.

    Raises:
        OSError: The message could not be sent, or the response was an error.
    """
    request = urllib.request.Request(  # noqa: S310 - the configuration allows only http and https
        address,
        data=body,
        # Discord rejects Python's default user agent.
        headers={
            "Content-Type": "application/json",
            "User-Agent": f"toque/{__version__}",
        },
        method="POST",
    )
    with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:  # noqa: S310
        response.read(1)


def describe_error(error: Exception) -> str:
    """Describe an error by its type only, because urllib's messages may contain the address."""
    if isinstance(error, urllib.error.HTTPError):
        return f"the last response was HTTP {error.code}"
    reason = getattr(error, "reason", error)
    return f"the last failed with {type(reason).__name__}"
