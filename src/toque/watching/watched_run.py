"""Watched run: what its files say, taken in line by line while they grow."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, final

from toque.errors import ConfigError, ToqueError
from toque.runs.history import METRICS, event_in
from toque.storage.json_files import decode_json
from toque.units import Duration, Progress
from toque.watching.holders import Holder, HolderWatch
from toque.watching.places import Place
from toque.watching.run_numbers import Curves, add_system, gpus_of, number, numbers
from toque.watching.tail import Tail

SAMPLES: Final = "samples.jsonl"
_END: Final = "end.json"
_OF_STEPS: Final = ("loss", "lr", "grad_norm", "tokens_per_second", "pad_fraction", "mfu")
_MOST_PROMPTS: Final = 64
_MOST_TEXTS: Final = 32
"""Of a prompt; of more, every second one is forgotten, and the newest stay."""
_MOST_WARNINGS: Final = 20
_SMOOTHED_OVER: Final = 0.02
"""Share of what has passed that the smoothed loss looks back on."""


@dataclass(frozen=True)
class Totals:
    """Sums over the updates that count."""

    tokens: int = 0
    target_tokens: int = 0
    seconds: float = 0.0


@dataclass
class Facts:
    """The newest of every kind of event, and what was counted."""

    start: Mapping[str, Any] = field(default_factory=dict)
    end: Mapping[str, Any] | None = None
    """Of the session that began last; None while it goes on, or was killed."""
    step: Mapping[str, Any] = field(default_factory=dict)
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    best: tuple[float, int] | None = None
    """Lowest held-out loss, and its step."""
    saved: int | None = None
    system: Mapping[str, Any] = field(default_factory=dict)
    watt_hours: float | None = None
    """Of the GPUs, over the time that was measured; None where no power was."""
    totals: Totals = Totals()
    spent: float = 0.0
    """Seconds of this session: updates, evaluations and saves."""
    began_at: Progress = Progress()
    """Where this session began."""
    warnings: list[str] = field(default_factory=list)

    @property
    def progress(self) -> Progress:
        """How far the run is."""
        return Progress(
            step=int(self.step.get("step", 0)),
            epoch=float(self.step.get("epoch") or 0.0),
            tokens=self.totals.tokens,
            target_tokens=self.totals.target_tokens,
            seconds=self.totals.seconds,
        )

    @property
    def stop_after(self) -> Duration | None:
        """How long the run is to be; None where its start does not say."""
        try:
            return Duration.parse(str(self.start.get("stop_after", "")))
        except ConfigError:
            return None

    @property
    def done(self) -> float | None:
        """Share of the run that is done."""
        whole = self.stop_after
        if whole is None or whole.unit in ("%", "examples"):
            return None  # examples are not in the events
        return whole.fraction(self.progress)

    @property
    def seconds_left(self) -> float | None:
        """Until training ends, at the rate of this session; None before there is one."""
        whole, done = self.stop_after, self.done
        if whole is None or done is None:
            return None
        gained = done - whole.fraction(self.began_at)
        return self.spent * (1.0 - done) / gained if gained > 0 else None


@final
class WatchedRun:
    """A run and its curves, renewed by `refresh`.

    Args:
        place: of the run.
        clock: seconds that pass.
    """

    def __init__(self, place: Place, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.place, self._clock = place, clock
        self._events, self._samples = Tail(place, METRICS), Tail(place, SAMPLES)
        self._holders = HolderWatch(place, clock=clock)
        self.version = 0
        """Rises with everything that is seen to change."""
        self.holder = Holder("unknown")
        self.is_scored = False
        """Whether the finished model and its scores are there."""
        self.grew_at: float | None = None
        """When a new line was last seen, by `clock`; None before any came while watching."""
        self.trouble = ""
        """Why the files could not be read at the last look; "" where they could."""
        self._gone_since: float | None = None
        self._forget()

    def _forget(self) -> None:
        self.facts = Facts()
        self.curves = Curves()
        self.texts: dict[str, list[dict[str, Any]]] = {}
        self._at_saves: dict[int, Totals] = {}
        self._smoothed, self._n_losses = 0.0, 0

    @property
    def has_begun(self) -> bool:
        """Whether a session ever began."""
        return bool(self.facts.start)

    @property
    def is_elsewhere(self) -> bool:
        """Whether lines came after its process was seen gone: it runs on another machine."""
        seen = self.grew_at is not None and self._gone_since is not None
        return seen and self.grew_at > self._gone_since  # type: ignore[operator]

    @property
    def written_at(self) -> float | None:
        """When its figures were last written, in seconds since 1970."""
        found = self._events.found
        return None if found is None else found.changed

    def read_whole(self) -> None:
        """Take in all there is.

        Raises:
            OSError: a file cannot be read.
        """
        self._look()
        while self._events.behind or self._samples.behind:
            self._look()

    def refresh(self) -> None:
        """Take in what is new. What cannot be read is said in `trouble`, and tried again."""
        before = (self.trouble, self.holder, self.is_scored)
        try:
            self._look()
            self.trouble = ""
        except (OSError, ToqueError) as error:
            self.trouble = str(getattr(error, "strerror", None) or error)
        if (self.trouble, self.holder, self.is_scored) != before:
            self.version += 1

    def _look(self) -> None:
        was_at_end = self._events.found is not None and not self._events.behind
        lines = self._events.lines()
        if self._events.restarted:
            self._forget()
            self._samples = Tail(self.place, SAMPLES)
        for line in lines:
            if (event := event_in(line)) is not None:
                self._take(event)
        texts = self._samples.lines()
        for line in texts:
            self._take_text(line)
        if lines or texts or self._events.restarted:
            self.version += 1
            if was_at_end:
                self.grew_at = self._clock()
        self.holder = self._holders.look()
        if self.holder.state != "gone":
            self._gone_since = None
        elif self._gone_since is None:
            self._gone_since = self._clock()
        self.is_scored = self.place.look(_END) is not None

    def _take(self, event: Mapping[str, Any]) -> None:
        take = {
            "start": self._start, "step": self._step, "evaluation": self._evaluation,
            "save": self._save, "warning": self._warning, "end": self._ended,
            "system": self._system, "gradients": self._gradients,
        }.get(event["event"])  # fmt: skip
        if take is not None:
            take(event)

    def _start(self, event: Mapping[str, Any]) -> None:
        """A session begins; what an earlier one did beyond its step is undone."""
        facts, at = self.facts, int(event["step"])
        for name, curve in self.curves.items():
            if not name.startswith("system "):
                curve.drop_after(at)
        totals = self._at_saves.get(at, facts.totals) if at else Totals()
        self._at_saves = {step: saved for step, saved in self._at_saves.items() if step <= at}
        best = facts.best if facts.best is not None and facts.best[1] <= at else None
        step = {**facts.step, "step": at, "epoch": event.get("epoch")} if at else {}
        self.facts = replace(facts, start=event, end=None, step=step, best=best, totals=totals,
                             spent=0.0, saved=at or None)  # fmt: skip
        self.facts.began_at = self.facts.progress

    def _step(self, event: Mapping[str, Any]) -> None:
        x, facts = float(event["step"]), self.facts
        for name in _OF_STEPS:
            if name in event:
                self.curves[name].add(x, number(event[name]))
        seconds, waited = number(event.get("seconds")), number(event.get("data_wait_seconds"))
        if seconds and waited is not None:
            self.curves["data_wait"].add(x, waited / seconds)
        if (loss := number(event.get("loss"))) is not None:
            self._n_losses += 1
            over = max(2.0, _SMOOTHED_OVER * self._n_losses) if self._n_losses > 1 else 1.0
            self._smoothed += (loss - self._smoothed) / over
            self.curves["loss smoothed"].add(x, self._smoothed)
        facts.totals = Totals(
            facts.totals.tokens + int(number(event.get("tokens")) or 0),
            facts.totals.target_tokens + int(number(event.get("target_tokens")) or 0),
            facts.totals.seconds + (seconds or 0.0),
        )
        facts.spent += seconds or 0.0
        facts.step = event

    def _evaluation(self, event: Mapping[str, Any]) -> None:
        at = int(event["step"])
        for name, value in numbers(event.get("metrics")).items():
            self.curves[f"held-out {name}"].add(float(at), value)
            if name == "loss" and (self.facts.best is None or value < self.facts.best[0]):
                self.facts.best = (value, at)
        self.facts.evaluation = event
        self.facts.spent += number(event.get("seconds")) or 0.0

    def _save(self, event: Mapping[str, Any]) -> None:
        self.facts.saved = int(event["step"])
        self._at_saves[self.facts.saved] = self.facts.totals
        self.facts.spent += number(event.get("blocked_seconds")) or 0.0

    def _warning(self, event: Mapping[str, Any]) -> None:
        said = f"Step {int(number(event.get('step')) or 0):,}: {event.get('message')}"
        self.facts.warnings = [*self.facts.warnings, said][-_MOST_WARNINGS:]

    def _ended(self, event: Mapping[str, Any]) -> None:
        self.facts.end = event

    def _system(self, event: Mapping[str, Any]) -> None:
        self.facts.system = event
        watts = [w for gpu in gpus_of(event) if (w := number(gpu.get("power_watts"))) is not None]
        if watts:
            spent = sum(watts) * (number(event.get("seconds")) or 0.0) / 3600
            self.facts.watt_hours = (self.facts.watt_hours or 0.0) + spent
        add_system(self.curves, event)

    def _gradients(self, event: Mapping[str, Any]) -> None:
        x, groups = number(event.get("step")), event.get("groups")
        if x is None or not isinstance(groups, Mapping):
            return
        for name, own in groups.items():
            for what, value in numbers(own).items():
                self.curves[f"group {what} {name}"].add(x, value)

    def _take_text(self, line: str) -> None:
        try:
            sample = decode_json(line, dict[str, Any])
        except ValueError:
            return
        prompt = str(sample.get("prompt", ""))
        own = [*self.texts.pop(prompt, []), sample]
        self.texts[prompt] = own if len(own) <= _MOST_TEXTS else own[len(own) % 2 :: 2]
        while len(self.texts) > _MOST_PROMPTS:
            del self.texts[next(iter(self.texts))]
