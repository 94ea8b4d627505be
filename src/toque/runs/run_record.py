"""Record of a run: its history, texts and small files, read while they grow.

The lock file identifies the process that trains the run. It is only read. An attempt to lock it
could make a starting run fail.
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
from toque.runs.places import MAX_READ_BYTES, FileState, Place
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
# Counts among the scores.
COUNTS: Final = frozenset({"target_tokens", "target_bytes", "texts"})
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
_MAX_LINE_BYTES: Final = 4 << 20
"""Largest incomplete line. A longer line is skipped."""
_MAX_PROMPTS: Final = 64
_MAX_TEXTS: Final = 32
"""Texts per prompt. When there are more, every second text and the newest remain."""


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
        return {
            name: value
            for name, value in pairs.items()
            if isinstance(value, int | float)
        }


@final
class Tail:
    """Reader of a growing file that returns each line once.

    An incomplete line waits for its end. A writer ends a torn line before it adds another.
    """

    def __init__(self, place: Place, name: str) -> None:
        self._place = place
        self._name = name
        self._at = 0
        self._waiting = b""
        self._skipping = False
        self.file: FileState | None = None
        """State of the file at the last look, or None before it exists."""
        self.restarted = False
        """True if the file was replaced or cut before the last look. Earlier lines are void."""

    @property
    def behind(self) -> bool:
        """True if the file has unread bytes."""
        return self.file is not None and self._at < self.file.bytes

    def lines(self) -> list[str]:
        """Read new lines, from at most MAX_READ_BYTES of the file.

        Raises:
            OSError: The file cannot be read.
            BucketError: The bucket cannot be read.
        """
        previous = self.file
        file = self._place.look(self._name)
        self.file = file
        self.restarted = previous is not None and (
            file is None or file.tag != previous.tag or file.bytes < self._at
        )
        if self.restarted:
            self._at = 0
            self._waiting = b""
            self._skipping = False
        if file is None or file.bytes <= self._at:
            return []

        data = self._place.read(
            self._name, self._at, min(file.bytes, self._at + MAX_READ_BYTES)
        )
        self._at += len(data)
        *complete, self._waiting = (self._waiting + data).split(b"\n")
        if complete and self._skipping:
            del complete[0]
            self._skipping = False
        if len(self._waiting) > _MAX_LINE_BYTES:
            self._waiting = b""
            self._skipping = True
        return [line.decode("utf-8", "replace") for line in complete if line.strip()]


@dataclass(frozen=True)
class Holder:
    """Process that trains a run, and its state."""

    state: Literal["alive", "gone", "unknown"]
    pid: str = ""


@final
class HolderWatch:
    """Observer of the process that holds a run's lock or lease."""

    def __init__(
        self, place: Place, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
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
        lease_name = f"{_LOCK}.lease" if is_local else BUCKET_LOCK
        lease = self._place.look(lease_name)
        if lease is not None:
            # The holder is gone if its process has ended or no longer renews the lease.
            now = self._clock()
            content = self._place.read(lease_name, 0, min(lease.bytes, 1 << 12))
            if (content, lease.changed) != self._record:
                self._record = content, lease.changed
                self._unchanged_since = now
            owner = owner_in(content)
            is_gone = died_here(owner) or now - self._unchanged_since > STALE
            pid = self._pid() if is_local else str(owner.get("pid", ""))
            return Holder("gone" if is_gone else "alive", pid)
        if not is_local:
            # A process that trains in a bucket always has a lock there.
            return Holder("gone")
        lock = self._place.look(_LOCK)
        return Holder("unknown") if lock is None else _process(self._pid(), lock)

    def _pid(self) -> str:
        """Read the process id at the start of `.lock`."""
        text = self._place.read(_LOCK, 0, 64).decode("ascii", "replace")
        return text.partition(" ")[0].strip()


def _process(pid: str, lock: FileState) -> Holder:
    """Return the holder with a process id. It is gone if a younger process has the id."""
    if not pid.isascii() or not pid.isdigit() or len(pid) > 9:
        return Holder("unknown")
    try:
        process = psutil.Process(int(pid))
        started = process.create_time()
        is_gone = process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return Holder("gone", pid)
    except psutil.Error:
        return Holder("unknown", pid)
    is_younger = lock.changed is not None and started > lock.changed + _CLOCK_SLACK
    return Holder("gone" if is_gone or is_younger else "alive", pid)


@final
class RunRecord:
    """Files of a run or of one of its checkpoints, read with `read_whole` or with `refresh`.

    The record of a checkpoint has its scores, and the events up to its step.
    """

    def __init__(
        self, place: Place, *, at: str = "", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.at = at
        """Path of a checkpoint in the run, e.g. best/step-00000200. Empty for the run itself."""
        self._last_step = int(at.rpartition("-")[2]) if at else None
        self.place = place
        self._clock = clock
        self._events = Tail(place, METRICS)
        self._samples = Tail(place, SAMPLES)
        self._holders = HolderWatch(place, clock=clock)
        self._files: dict[str, tuple[FileState, str]] = {}
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
        events = self._events.file
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
        was_at_end = self._events.file is not None and not self._events.behind
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
        return (
            self._last_step is not None
            and isinstance(step, int)
            and step > self._last_step
        )

    def _reread(self, name: str) -> bool:
        """Read a small file again if it changed since the last look, and return True if it did."""
        path = self.path_of(name)
        file = self.place.look(path)
        previous = self._files.get(name)
        if file is None:
            return self._files.pop(name, None) is not None
        if previous is not None and previous[0] == file:
            return False
        data = self.place.read(path, 0, min(file.bytes, MAX_READ_BYTES))
        self._files[name] = (file, data.decode("utf-8", "replace"))
        return True

    def _take_text(self, sample: Mapping[str, Any]) -> None:
        prompt = str(sample.get("prompt", ""))
        texts = [*self.texts.pop(prompt, []), sample]
        if len(texts) > _MAX_TEXTS:
            texts = texts[len(texts) % 2 :: 2]
        self.texts[prompt] = texts
        while len(self.texts) > _MAX_PROMPTS:
            del self.texts[next(iter(self.texts))]
