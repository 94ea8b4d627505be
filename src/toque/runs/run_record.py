"""Record of a run: its history, texts and small files, read while they grow.

The lock file identifies the process that trains the run. This module only reads the file, because
an attempt to lock it could make a starting run fail.
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
from toque.runs.history import METRICS, RunHistory, parse_event
from toque.runs.places import MAX_READ_BYTES, FileState, Place
from toque.storage.bucket_lock import LOCK as BUCKET_LOCK
from toque.storage.bucket_lock import died_here, owner_in
from toque.storage.json_files import decode_json
from toque.storage.locks import STALE

_LOCK: Final = "checkpoints/.lock"
_CLOCK_SLACK: Final = 5.0
"""Seconds by which a process may seem younger than its files, because clocks are inexact."""
SAMPLES: Final = "samples.jsonl"
EVALUATION: Final = "evaluation.json"
HELD_OUT: Final = ("loss", "perplexity")
"""Metrics of every held-out evaluation."""
BITS: Final = "bits_per_byte"
"""Metric that is measured if the number of bytes in the held-out targets is known."""
ACCURACY: Final = "rewards/accuracies"
"""Share of held-out pairs with a higher reward for the chosen answer, in runs with pairs."""
COUNTS: Final = frozenset({"target_tokens", "target_bytes", "texts", "pairs"})
"""Values of an evaluation that are counts, not scores."""
TASK_SCORES: Final[Mapping[str, str]] = {
    "loss": "loss",
    "choice_accuracy": "accuracy",
    "choice_macro_f1": "macro_f1",
    "ece": "ece",
}
"""Scores of a task's held-out examples. A key is the suffix of the metric's name, a value is the
field in EVALUATION.

The choice scores compare only the classes. The task's generated answers have separate scores.
"""
CONFIG: Final = "config.yaml"
END: Final = "end.json"
"""File in a run's folder that marks its model and scores as complete. It is written last."""
_MAX_LINE_BYTES: Final = 4 << 20
"""Maximum length of an incomplete line, in bytes. A longer line is skipped."""
_MAX_PROMPTS: Final = 64
_MAX_TEXTS: Final = 32
"""Maximum number of texts per prompt. Above it, only every second text and the newest remain."""


class FinalScores(msgspec.Struct):
    """Scores in EVALUATION, with checked types."""

    step: int | None = None
    heldout: dict[str, int | float | None] = {}
    generated: dict[str, int | float | None] = {}
    tasks: dict[str, dict[str, Any]] = {}
    intervals: dict[str, tuple[float | None, float | None]] = {}

    @property
    def metrics(self) -> dict[str, float]:
        """All scores that are not null, by their names in `toque.evaluate`."""
        task_scores = {
            f"{task}_{name}": scores.get(field)
            for task, scores in self.tasks.items()
            for name, field in TASK_SCORES.items()
        }
        all_scores = self.heldout | task_scores | self.generated
        return {
            name: value
            for name, value in all_scores.items()
            if isinstance(value, int | float)
        }


@final
class Tail:
    """Reader of a growing file that returns each line once.

    An incomplete line is returned when the rest of it is written. After a kill, the next writer
    first ends the incomplete line.
    """

    def __init__(self, place: Place, name: str) -> None:
        self._place = place
        self._name = name
        self._at = 0
        """Number of bytes read so far."""
        self._incomplete = b""
        self._is_skipping = False
        """True until the end of a line that is too long."""
        self.file: FileState | None = None
        """State of the file at the last read. None if it did not exist."""
        self.restarted = False
        """True if the file was replaced or truncated before the last read, which makes earlier
        lines invalid."""

    @property
    def behind(self) -> bool:
        """True if the file has unread bytes."""
        return self.file is not None and self._at < self.file.bytes

    def read_lines(self) -> list[str]:
        """Read new lines, from at most MAX_READ_BYTES of the file.

        Raises:
            OSError: The file cannot be read.
            BucketError: The bucket cannot be read.
        """
        file = self._place.look(self._name)
        self.restarted = self._is_replaced(file)
        self.file = file
        if self.restarted:
            self._at = 0
            self._incomplete = b""
            self._is_skipping = False
        if file is None or file.bytes <= self._at:
            return []

        end = min(file.bytes, self._at + MAX_READ_BYTES)
        data = self._place.read(self._name, self._at, end)
        self._at += len(data)
        lines = self._complete_lines(data)
        return [line.decode("utf-8", "replace") for line in lines if line.strip()]

    def _is_replaced(self, file: FileState | None) -> bool:
        """Check whether the file was replaced or truncated since the last read."""
        if self.file is None:
            return False
        return file is None or file.tag != self.file.tag or file.bytes < self._at

    def _complete_lines(self, data: bytes) -> list[bytes]:
        """Append data to the incomplete line. Return the lines that end in it, if not too long."""
        *complete, self._incomplete = (self._incomplete + data).split(b"\n")
        if complete and self._is_skipping:
            del complete[0]
            self._is_skipping = False
        if len(self._incomplete) > _MAX_LINE_BYTES:
            self._incomplete = b""
            self._is_skipping = True
        return complete


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
        self._place = place
        self._clock = clock
        self._lease: tuple[bytes, float | None] = b"", None
        """Content and modification time of the lease when it was last read."""
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
            content = self._place.read(lease_name, 0, min(lease.bytes, 1 << 12))
            owner = owner_in(content)
            unchanged_seconds = self._record_lease(content, lease.changed)
            is_gone = died_here(owner) or unchanged_seconds > STALE
            pid = self._read_pid() if is_local else str(owner.get("pid", ""))
            return Holder("gone" if is_gone else "alive", pid)

        if not is_local:
            # A process that trains in a bucket always has a lock there.
            return Holder("gone")
        lock = self._place.look(_LOCK)
        if lock is None:
            return Holder("unknown")
        return _find_holder(self._read_pid(), lock)

    def _record_lease(self, content: bytes, changed: float | None) -> float:
        """Record the current lease. Return the seconds for which it has not changed."""
        now = self._clock()
        if (content, changed) != self._lease:
            self._lease = content, changed
            self._unchanged_since = now
        return now - self._unchanged_since

    def _read_pid(self) -> str:
        """Read the process id at the start of `.lock`."""
        text = self._place.read(_LOCK, 0, 64).decode("ascii", "replace")
        return text.partition(" ")[0].strip()


def _find_holder(pid: str, lock: FileState) -> Holder:
    """Look up the process that wrote a lock. It is gone if a younger process has its id."""
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
    """Files of a run or of one of its checkpoints. Read them with `read_whole` or `refresh`.

    A checkpoint's record has the checkpoint's scores, and the run's events up to its step.
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
        """Generated texts by prompt, the newest prompt last."""
        self.holder = Holder("unknown")
        self.version = 0
        """Number of observed changes."""
        self.trouble = ""
        """Reason why the files could not be read at the last refresh, or ""."""
        self._grew_at: float | None = None
        """Time when lines were last added to files that had been read completely."""
        self._gone_since: float | None = None
        """Time when the lock's holder was first found gone."""

    @property
    def is_scored(self) -> bool:
        """True if the finished model and its scores are complete."""
        return END in self._files

    @property
    def is_elsewhere(self) -> bool:
        """True if a process on another machine trains the run.

        Its lines appear although no process on this machine has the lock.
        """
        if self._grew_at is None or self._gone_since is None:
            return False
        return self._grew_at > self._gone_since

    @property
    def written_at(self) -> float | None:
        """Time of the newest event, in seconds since 1970."""
        events = self._events.file
        return None if events is None else events.changed

    def text(self, name: str) -> str:
        """Return the text of CONFIG or EVALUATION, or "" before the file exists."""
        return self._files[name][1] if name in self._files else ""

    def evaluation(self) -> dict[str, Any]:
        """Decode evaluation.json. Return {} if the file is missing or damaged."""
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
            self._read_changes()
            while self._events.behind or self._samples.behind:
                self._read_changes()
        except OSError as error:
            raise CheckpointError(
                f"Cannot read {error.filename or self.place.address}: {error.strerror}. Check "
                "that you may read this file, or choose another run."
            ) from error

    def refresh(self) -> None:
        """Read new lines and changed files. If reading fails, set `trouble` to the reason."""
        before = (self.trouble, self.holder)
        try:
            self._read_changes()
            self.trouble = ""
        except (OSError, ToqueError) as error:
            self.trouble = str(getattr(error, "strerror", None) or error)
        if (self.trouble, self.holder) != before:
            self.version += 1

    def _read_changes(self) -> None:
        """Read the next part of each growing file, changed small files, and the holder."""
        has_events = self._read_events()
        has_texts = self._read_texts()
        changed_files = [n for n in (EVALUATION, CONFIG, END) if self._reread(n)]
        if has_events or has_texts or changed_files:
            self.version += 1

        self.holder = self._holders.look()
        if self.holder.state != "gone":
            self._gone_since = None
        elif self._gone_since is None:
            self._gone_since = self._clock()

    def _read_events(self) -> bool:
        """Add new events to the history. Return True if the file changed."""
        was_at_end = self._events.file is not None and not self._events.behind
        lines = self._events.read_lines()
        if self._events.restarted:
            self.history = RunHistory()
            self.texts = {}
            self._samples = Tail(self.place, SAMPLES)
        for line in lines:
            event = parse_event(line)
            if event is not None and not self._is_later(event):
                self.history.add(event)
        if lines and was_at_end:
            self._grew_at = self._clock()
        return bool(lines) or self._events.restarted

    def _read_texts(self) -> bool:
        """Add new texts. Return True if the file has new lines."""
        lines = self._samples.read_lines()
        for line in lines:
            with suppress(msgspec.DecodeError):
                self._add_text(decode_json(line, dict[str, Any]))
        return bool(lines)

    @property
    def address(self) -> str:
        """Address of the run, or of the checkpoint in it."""
        return f"{self.place.address}/{self.at}".rstrip("/")

    def path_of(self, name: str) -> str:
        """Return a file's path in the run. The scores of a checkpoint are in its own folder."""
        return f"{self.at}/{name}" if self.at and name != CONFIG else name

    def _is_later(self, event: Mapping[str, Any]) -> bool:
        """Check whether an event happened after the checkpoint's step."""
        step = event.get("step")
        if self._last_step is None or not isinstance(step, int):
            return False
        return step > self._last_step

    def _reread(self, name: str) -> bool:
        """Read a small file again if it changed. Return True if it changed or was removed."""
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

    def _add_text(self, sample: Mapping[str, Any]) -> None:
        """Add a text to its prompt. Drop texts and prompts above the limits."""
        prompt = str(sample.get("prompt", ""))
        texts = [*self.texts.pop(prompt, []), sample]
        if len(texts) > _MAX_TEXTS:
            # Keep every second text, the newest included.
            newest_first = texts[::-1]
            texts = newest_first[::2][::-1]
        self.texts[prompt] = texts
        if len(self.texts) > _MAX_PROMPTS:
            oldest_prompt = next(iter(self.texts))
            del self.texts[oldest_prompt]
