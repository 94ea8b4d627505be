"""Record of a run: its history, its texts and its small files, taken in while they grow.

The process that trains it is known by the content of the lock or its lease, which are only read:
taking the lock to see whether it is free could refuse a run that begins in that moment.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Literal, final

import msgspec
import psutil

from toque.errors import CheckpointError, ToqueError
from toque.runs.history import METRICS, RunHistory, event_in
from toque.runs.places import MOST_BYTES, FoundFile, Place
from toque.storage.bucket_lock import LOCK as BUCKET_LOCK
from toque.storage.bucket_lock import died_here, owner_in
from toque.storage.json_files import decode_json
from toque.storage.locks import STALE

_LOCK: Final = "checkpoints/.lock"
_CLOCK_SLACK: Final = 5.0  # seconds by which a process may seem younger than its files
SAMPLES: Final = "samples.jsonl"
EVALUATION: Final = "evaluation.json"
HELD_OUT: Final = ("loss", "perplexity")
BITS: Final = "bits_per_byte"  # measured if the bytes of the held-out targets are known
COUNTS: Final = frozenset({"target_tokens", "target_bytes", "texts"})  # counts among the scores
TASK_SCORES: Final[Mapping[str, str]] = {
    "loss": "loss",
    "choice_accuracy": "accuracy",
    "choice_macro_f1": "macro_f1",
    "ece": "ece",
}
"""Scores of a task's held-out examples: suffix of the metric's name, and key in EVALUATION.

The choice scores compare the classes only. The task's generated answers have separate scores.
"""
CONFIG: Final = "config.yaml"
END: Final = "end.json"
"""File in a run's folder that identifies the end of its model and scores. It is written last."""
_LONGEST_LINE: Final = 4 << 20  # bytes of an incomplete line; a longer line is skipped
_MOST_PROMPTS: Final = 64
_MOST_TEXTS: Final = 32  # texts per prompt; of more, every second text and the newest remain


class FinalScores(msgspec.Struct):
    """Scores of EVALUATION with checked types."""

    step: int | None = None
    heldout: dict[str, int | float | None] = {}
    generated: dict[str, int | float | None] = {}
    tasks: dict[str, dict[str, Any]] = {}

    @property
    def metrics(self) -> dict[str, float]:
        """Every score that is not null, by its name in `toque.evaluate`."""
        task_scores = {
            f"{task}_{name}": scores.get(field)
            for task, scores in self.tasks.items()
            for name, field in TASK_SCORES.items()
        }
        pairs = {**self.heldout, **task_scores, **self.generated}
        return {name: value for name, value in pairs.items() if isinstance(value, int | float)}


@final
class Tail:
    """Reader of a growing file that returns each line once.

    An incomplete line waits for its end. A writer ends a torn line before it adds another.
    """

    def __init__(self, place: Place, name: str) -> None:
        self._place, self._name = place, name
        self._at = 0
        self._waiting = b""
        self._skipping = False
        self.found: FoundFile | None = None
        """The file at the last look, or None before it exists."""
        self.restarted = False
        """True if the file was replaced or cut before the last look. Earlier lines are void."""

    @property
    def behind(self) -> bool:
        """True if the file has unread bytes."""
        return self.found is not None and self._at < self.found.bytes

    def lines(self) -> list[str]:
        """Read new lines, from at most MOST_BYTES of the file.

        Raises:
            OSError: The file cannot be read.
            BucketError: The bucket cannot be read.
        """
        before, self.found = self.found, self._place.look(self._name)
        now = self.found
        self.restarted = before is not None and (
            now is None or now.tag != before.tag or now.bytes < self._at
        )
        if self.restarted:
            self._at, self._waiting, self._skipping = 0, b"", False
        if now is None or now.bytes <= self._at:
            return []
        data = self._place.read(self._name, self._at, min(now.bytes, self._at + MOST_BYTES))
        self._at += len(data)
        *complete, self._waiting = (self._waiting + data).split(b"\n")
        if complete and self._skipping:
            complete, self._skipping = complete[1:], False
        if len(self._waiting) > _LONGEST_LINE:
            self._waiting, self._skipping = b"", True
        return [line.decode("utf-8", "replace") for line in complete if line.strip()]


@dataclass(frozen=True)
class Holder:
    """Process that trains a run, and its state."""

    state: Literal["alive", "gone", "unknown"]
    pid: str = ""


@final
class HolderWatch:
    """Observer of the process that holds a run's lock or lease."""

    def __init__(self, place: Place, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._place, self._clock = place, clock
        self._record: tuple[bytes, float | None] = b"", None
        self._unchanged_since = clock()

    def look(self) -> Holder:
        """Return the current holder.

        Raises:
            OSError: The folder cannot be read.
            BucketError: The bucket cannot be read.
        """
        is_local = self._place.folder is not None
        lease = f"{_LOCK}.lease" if is_local else BUCKET_LOCK
        if (found := self._place.look(lease)) is not None:
            # A holder is gone if its process has ended or if it no longer renews its lease.
            now, record = self._clock(), self._place.read(lease, 0, min(found.bytes, 1 << 12))
            if (record, found.changed) != self._record:
                self._record, self._unchanged_since = (record, found.changed), now
            owner = owner_in(record)
            is_over = died_here(owner) or now - self._unchanged_since > STALE
            pid = self._pid() if is_local else str(owner.get("pid", ""))
            return Holder("gone" if is_over else "alive", pid)
        if not is_local:
            return Holder("gone")  # who holds a bucket's run keeps its lock there
        found = self._place.look(_LOCK)
        return Holder("unknown") if found is None else _process(self._pid(), found)

    def _pid(self) -> str:
        """Read the process id at the start of `.lock`."""
        text = self._place.read(_LOCK, 0, 64).decode("ascii", "replace")
        return text.partition(" ")[0].strip()


def _process(pid: str, lock: FoundFile) -> Holder:
    """Return the holder with a process id. It is gone if a younger process has the id."""
    if not pid.isascii() or not pid.isdigit() or len(pid) > 9:
        return Holder("unknown")
    try:
        began = psutil.Process(int(pid)).create_time()
        is_over = psutil.Process(int(pid)).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return Holder("gone", pid)
    except psutil.Error:
        return Holder("unknown", pid)
    if lock.changed is not None and began > lock.changed + _CLOCK_SLACK:
        return Holder("gone", pid)
    return Holder("gone" if is_over else "alive", pid)


@final
class RunRecord:
    """A run's files, read once by `read_whole` or again and again by `refresh`.

    With `at`, the place of a checkpoint in the run, its scores and the events up to its step.
    """

    def __init__(
        self, place: Place, *, at: str = "", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.at = at
        """Place of a checkpoint in the run, as best/step-00000200; "" for the whole run."""
        self._last_step = int(at.rpartition("-")[2]) if at else None
        self.place, self._clock = place, clock
        self._events, self._samples = Tail(place, METRICS), Tail(place, SAMPLES)
        self._holders = HolderWatch(place, clock=clock)
        self._files: dict[str, tuple[FoundFile, str]] = {}
        self.history = RunHistory()
        self.texts: dict[str, list[Mapping[str, Any]]] = {}
        """Texts by prompt, the newest prompt last."""
        self.holder = Holder("unknown")
        self.version = 0
        """Number of observed changes."""
        self.trouble = ""
        """Reason why the files could not be read at the last look, or ""."""
        self._grew_at: float | None = None
        self._gone_since: float | None = None

    @property
    def is_scored(self) -> bool:
        """True once the finished model and its scores are written."""
        return END in self._files

    @property
    def is_elsewhere(self) -> bool:
        """True if lines came after its process was seen gone: it runs on another machine."""
        grew, gone = self._grew_at, self._gone_since
        return grew is not None and gone is not None and grew > gone

    @property
    def written_at(self) -> float | None:
        """Time of the newest event, in seconds since 1970."""
        events = self._events.found
        return None if events is None else events.changed

    def text(self, name: str) -> str:
        """Return the text of CONFIG or EVALUATION, or "" before the file exists."""
        return self._files[name][1] if name in self._files else ""

    def evaluation(self) -> dict[str, Any]:
        """Decode evaluation.json. A missing or damaged file is empty."""
        try:
            return decode_json(self.text(EVALUATION), dict[str, Any])
        except msgspec.DecodeError:
            return {}

    def read_whole(self) -> None:
        """Read the files to their ends.

        Raises:
            CheckpointError: A file cannot be read.
            BucketError: The bucket cannot be read.
        """
        try:
            self._look()
            while self._events.behind or self._samples.behind:
                self._look()
        except OSError as error:
            raise CheckpointError(
                f"Cannot read {error.filename or self.place.address}: {error.strerror}. Check "
                "that you may read this file, or choose another run."
            ) from error

    def refresh(self) -> None:
        """Read new lines and changed files. If this fails, `trouble` has the reason."""
        before = (self.trouble, self.holder)
        try:
            self._look()
            self.trouble = ""
        except (OSError, ToqueError) as error:
            self.trouble = str(getattr(error, "strerror", None) or error)
        if (self.trouble, self.holder) != before:
            self.version += 1

    def _look(self) -> None:
        was_at_end = self._events.found is not None and not self._events.behind
        lines = self._events.lines()
        if self._events.restarted:
            self.history, self.texts = RunHistory(), {}
            self._samples = Tail(self.place, SAMPLES)
        for line in lines:
            if (event := event_in(line)) is not None and not self._is_later(event):
                self.history.take(event)
        texts = self._samples.lines()
        for line in texts:
            with suppress(msgspec.DecodeError):
                self._take_text(decode_json(line, dict[str, Any]))
        changed = {self._reread(name) for name in (EVALUATION, CONFIG, END)}
        if lines or texts or self._events.restarted or True in changed:
            self.version += 1
        if lines and was_at_end:
            self._grew_at = self._clock()
        self.holder = self._holders.look()
        if self.holder.state != "gone":
            self._gone_since = None
        elif self._gone_since is None:
            self._gone_since = self._clock()

    @property
    def address(self) -> str:
        """Address of the run, or of the checkpoint in it."""
        return f"{self.place.address}/{self.at}".rstrip("/")

    def path_of(self, name: str) -> str:
        """Path below the run of a file: scores of a checkpoint are in its folder."""
        return f"{self.at}/{name}" if self.at and name != CONFIG else name

    def _is_later(self, event: Mapping[str, Any]) -> bool:
        """True for an event after the step of the checkpoint."""
        step = event.get("step")
        return self._last_step is not None and isinstance(step, int) and step > self._last_step

    def _reread(self, name: str) -> bool:
        """Read a small file again if it changed since the last look, and return True if it did."""
        path = self.path_of(name)
        file = self.place.look(path)
        previous = self._files.get(name)
        if file is None:
            return self._files.pop(name, None) is not None
        if previous is not None and previous[0] == file:
            return False
        data = self.place.read(path, 0, min(file.bytes, MOST_BYTES))
        self._files[name] = (file, data.decode("utf-8", "replace"))
        return True

    def _take_text(self, sample: Mapping[str, Any]) -> None:
        prompt = str(sample.get("prompt", ""))
        texts = [*self.texts.pop(prompt, []), sample]
        if len(texts) > _MOST_TEXTS:
            texts = texts[len(texts) % 2 :: 2]
        self.texts[prompt] = texts
        while len(self.texts) > _MOST_PROMPTS:
            del self.texts[next(iter(self.texts))]
