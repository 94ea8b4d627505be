"""Queue of training runs. Each run is a process of its own, which outlives the server.

One process trains at a time. It inherits a locked file descriptor, so that a server that starts
later sees whether a process is still alive, even if the earlier server was killed.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Literal, final

import msgspec
import psutil

from toque.errors import ConfigError, Interrupted
from toque.serving.request_errors import RequestError
from toque.storage.atomic import atomic_write
from toque.storage.json_files import decode_json
from toque.storage.locks import inheritable_lock
from toque.storage.no_follow import new_file, open_plain

_QUEUE: Final = "jobs.json"
_LOCK: Final = "training.lock"
_SAVED_EXITS: Final = (0, Interrupted.exit_code)
"""Exit codes of a run that is finished or can continue."""
_ERROR: Final = "toque: "
"""Start of the line with the error of a command."""
_MAX_LOG_BYTES: Final = 64 << 10
"""Maximum number of bytes of a log that are read, from its end."""


class Job(msgspec.Struct):
    """Run that waits, is being trained, or has failed."""

    id: str
    run: str
    """Folder of the run, relative to the folder of the studio."""
    command: list[str]
    """Arguments of `toque`."""
    state: Literal["waiting", "starting", "training", "failed"] = "waiting"
    message: str = ""
    """Reason for the failure."""
    is_stopping: bool = False
    """True after a request to stop."""
    queued: float = 0.0
    """Time when the job was added, in seconds since 1970."""
    pid: int | None = None
    owner: str = ""
    """Identity of the folder that started the job. A copy of the folder has another identity."""


@final
class Jobs:
    """Jobs of a studio, for several threads.

    Args:
        folder: Working folder of the commands.
        state: Folder for the queue and the logs.
    """

    def __init__(self, folder: Path, state: Path) -> None:
        self._folder = folder
        self._state = state
        self._mutex = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None
        (state / "logs").mkdir(parents=True, exist_ok=True)
        with inheritable_lock(state / _LOCK):
            # No one can choose the ctime of a file, so another folder does not have it.
            self._owner = str((state / _LOCK).stat().st_ctime_ns)
        self._jobs = _read_jobs(state / _QUEUE)
        for job in self._jobs:
            if job.owner != self._owner and job.state != "failed":
                job.state = "failed"
                job.message = (
                    "This job was added in another folder. Dismiss it, or change its settings to "
                    "start a new run."
                )

    @property
    def jobs(self) -> Sequence[Job]:
        """Copies of all jobs, the first of the queue first."""
        with self._mutex:
            return [msgspec.structs.replace(job) for job in self._jobs]

    def has(self, run: str) -> bool:
        """Check whether a run waits or is being trained."""
        with self._mutex:
            return any(job.run == run and job.state != "failed" for job in self._jobs)

    @contextmanager
    def kept_out(self, run: str) -> Iterator[None]:
        """Keep a run out of the queue while its folder is moved.

        Raises:
            RequestError: The run waits or is being trained.
        """
        with self._mutex:
            if self.has(run):
                raise RequestError(
                    409, f"{run} is being trained or waits. Stop it first."
                )
            yield

    def add(self, run: str, command: Sequence[str]) -> Job:
        """Add a job to the end of the queue, and start it if nothing is being trained.

        A failed job of the same run is removed.

        Raises:
            RequestError: The run already waits or is being trained.
        """
        with self._mutex:
            if self.has(run):
                raise RequestError(409, f"{run} is already in the queue.")
            self._jobs = [job for job in self._jobs if job.run != run]
            job = Job(
                secrets.token_hex(6),
                run,
                list(command),
                queued=time.time(),
                owner=self._owner,
            )
            self._jobs.append(job)
            try:
                self._save()
            except OSError as error:
                self._jobs.remove(job)
                raise RequestError(
                    507,
                    f"The queue cannot be written: {error.strerror}. Free some space, and try "
                    "again.",
                ) from error
            self.advance()
            return job

    def remove(self, id_: str) -> None:
        """Remove a waiting or failed job.

        Raises:
            RequestError: The job does not exist, or is being trained.
        """
        with self._mutex:
            job = self._find(id_)
            if job.state not in ("waiting", "failed"):
                raise RequestError(409, f"{job.run} is being trained. Stop it first.")
            self._jobs.remove(job)
            self._save()

    def stop(self, run: str) -> None:
        """Ask the process of a run to save a checkpoint and end.

        Raises:
            RequestError: No process trains this run.
        """
        with self._mutex:
            for job in self._jobs:
                if job.run == run and job.state == "training" and _is_alive(job):
                    assert job.pid is not None, "a job that is being trained has one"
                    # After a second signal, the process would exit without a checkpoint.
                    if not job.is_stopping:
                        job.is_stopping = True
                        self._save()
                        os.kill(job.pid, signal.SIGTERM)
                    return
        raise RequestError(409, f"This studio does not train {run} at the moment.")

    def advance(self) -> None:
        """Record the end of a process, and start the first waiting job if none is running."""
        with self._mutex:
            if self._process is not None:
                self._process.poll()  # removes the entry of an ended process
            with inheritable_lock(self._state / _LOCK) as lock:
                if (
                    lock is not None
                ):  # no process of this or an earlier server is training
                    self._start_next(lock)

    def _start_next(self, lock: int) -> None:
        """Record the end of the last process, and start the first waiting job.

        Args:
            lock: Descriptor of the locked file.
        """
        for job in [job for job in self._jobs if job.state == "training"]:
            self._record_end(job)
        for job in self._jobs:
            # If a job is starting, the server was killed before the process began, or the process
            # has ended since. The command continues a run exactly, and does nothing for a finished
            # run.
            if job.state in ("waiting", "starting"):
                self._start(job, lock)
                return

    def log(self, run: str) -> str:
        """Return the end of the newest log of a run. Without a log it is empty."""
        with suppress(OSError), open_plain(self._log_of(run)) as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _MAX_LOG_BYTES))
            return file.read().decode("utf-8", "replace")
        return ""

    def _log_of(self, run: str) -> Path:
        name = run.replace("/", "%").replace("\0", "%")
        return self._state / "logs" / f"{name}.log"

    def _find(self, id_: str) -> Job:
        for job in self._jobs:
            if job.id == id_:
                return job
        raise RequestError(404, "This job is not in the queue any more.")

    def _start(self, job: Job, lock: int) -> None:
        """Start the process of a job, which keeps the lock until it ends."""
        job.state = "starting"
        self._save()
        log_file = self._log_of(job.run)
        try:
            log_file.unlink(missing_ok=True)
            with new_file(log_file) as log:
                self._process = subprocess.Popen(  # noqa: S603 - our own command
                    # -P: a file of the folder never replaces a module of Python.
                    [sys.executable, "-P", "-m", "toque", *job.command],
                    cwd=self._folder,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[lock],
                    start_new_session=True,  # Ctrl-C in the terminal ends only the server
                )
        except OSError as error:
            job.state = "failed"
            job.message = f"The command cannot be started: {error.strerror}."
        else:
            job.state = "training"
            job.pid = self._process.pid
        self._save()

    def _record_end(self, job: Job) -> None:
        """Remove a job if its process ended as intended. Otherwise, record its failure."""
        code = None
        if self._process is not None and self._process.pid == job.pid:
            code = self._process.returncode
        error = _error_in(self.log(job.run))
        is_unknown = code is None or job.is_stopping
        # The exit code is unknown if an earlier server started the process.
        was_stopped = code is None and job.is_stopping
        if code in _SAVED_EXITS or was_stopped or (is_unknown and not error):
            # The files of the run show its state, also if its process was killed.
            self._jobs.remove(job)
        else:
            job.state = "failed"
            job.pid = None
            job.message = error or _describe_exit(code)
        self._process = None
        self._save()

    def _save(self) -> None:
        atomic_write(self._state / _QUEUE, msgspec.json.encode(self._jobs))


def _read_jobs(path: Path) -> list[Job]:
    """Read the jobs of an earlier server.

    Raises:
        ConfigError: The file is damaged.
    """
    try:
        with open_plain(path) as file:
            return decode_json(file.read(), list[Job])
    except FileNotFoundError:
        return []
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(
            f"{path} is damaged: {error}. It has the queue of the studio. Move it away to start "
            "with an empty queue. The runs are not affected."
        ) from error


def _is_alive(job: Job) -> bool:
    """Check that the process of a job exists. Its id may have been given to another process."""
    if job.pid is None:
        return False
    with suppress(psutil.Error):
        # Start times change if the clock is set. The command does not.
        command = psutil.Process(job.pid).cmdline()
        return command[-len(job.command) :] == job.command
    return False


def _error_in(log: str) -> str:
    """Return the last error message in a log, or ""."""
    lines = [line for line in log.splitlines() if line.startswith(_ERROR)]
    return lines[-1].removeprefix(_ERROR) if lines else ""


def _describe_exit(code: int | None) -> str:
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        hint = ""
        if name == "SIGKILL":
            hint = " The system may have needed its memory."
        return f"The process was killed ({name}).{hint} The log has its last messages."
    return f"The process ended with exit code {code}. The log has its last messages."
