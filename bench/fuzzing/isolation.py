"""Isolated cases: forked processes with a limit on processor time and on memory.

What a case raises is told; a case that takes more processor time than allowed is killed by the
kernel (SIGPROF), with the Python stack of that moment; a process that dies otherwise is told, too.
"""

from __future__ import annotations

import faulthandler
import os
import resource
import select
import shutil
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from time import monotonic
from typing import Any, Final

import msgspec

CPU_SECONDS: Final = 10.0
"""Processor time after which a case is a finding."""
WALL_SECONDS: Final = 240.0
"""Waiting, on a machine that others use, after which it is one."""
MORE_BYTES: Final = 2 << 30
"""Address space a case may take beyond what the process had."""
CASES_A_PROCESS: Final = 200

Case = Callable[[Random, Path], int]
"""Makes a damaged input in an empty folder, opens it, and gives the number of records met."""


@dataclass
class Told:
    """What is known of an area's cases so far."""

    cases: int = 0
    records: int = 0
    findings: list[dict[str, Any]] = field(default_factory=list)


def chance_of(seed: int, area: str, number: int) -> Random:
    """The generator of one case."""
    return Random(f"{seed}/{area}/{number}")


@dataclass(frozen=True)
class Isolation:
    """Runs cases in processes of their own.

    Args:
        seed: of the whole session.
        folder: for the files of one case at a time.
        keep: where the input of each finding is kept.
    """

    seed: int
    folder: Path
    keep: Path | None

    def run(self, case: Case, *, area: str, told: Told, seconds: float) -> None:
        """The cases that follow those in `told`, for so many seconds."""
        until = monotonic() + seconds
        while monotonic() < until:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            reading, writing = os.pipe()
            child = os.fork()
            if child == 0:
                os.close(reading)
                try:
                    self._live(case, area, told.cases, until, writing)
                finally:
                    os._exit(0)
            os.close(writing)
            begun, silent = self._listen(reading, area, told)
            os.close(reading)
            if silent:
                os.kill(child, signal.SIGKILL)
            ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if begun is not None:
                self._died(area, begun, told, ended, silent=silent)

    def _listen(self, reading: int, area: str, told: Told) -> tuple[int | None, bool]:
        """The case that was begun and never ended, and whether the process was silent for long."""
        begun, buffer = None, b""
        while True:
            if not select.select([reading], [], [], WALL_SECONDS)[0]:
                return begun, True
            some = os.read(reading, 1 << 16)
            if not some:
                return begun, False
            *lines, buffer = (buffer + some).split(b"\n")
            for event in map(msgspec.json.decode, lines):
                begun = event.get("begun")
                if begun is None:
                    told.cases += 1
                    told.records += event["records"]
                    told.findings += event["findings"]

    def _died(self, area: str, number: int, told: Told, ended: int, *, silent: bool) -> None:
        stack = self.folder / "stack"
        text = stack.read_text(errors="replace") if stack.exists() else ""
        why = f"the process ended with {ended}"
        if silent:
            why = f"no answer in {WALL_SECONDS:.0f} s"
        elif ended == -signal.SIGPROF:
            why = f"more than {CPU_SECONDS:.0f} s of processor time"
        told.cases += 1
        told.findings.append(self._finding(area, number, why, _innermost(text), text))

    def _finding(self, area: str, number: int, raised: str, at: str, stack: str) -> dict[str, Any]:
        kept = None
        if self.keep is not None:
            kept = self.keep / f"{area}-{self.seed}-{number}"
            shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(self.folder / "case", kept, symlinks=True)
        found = {"case": f"{area}:{number}", "seed": self.seed, "raised": raised, "at": at}
        return found | {"stack": stack[-2500:], "kept": str(kept) if kept else None}

    def _live(self, case: Case, area: str, first: int, until: float, writing: int) -> None:
        """The forked process: limited, silent, one case after another."""
        _limit(self.folder / "stack")
        place = self.folder / "case"
        for number in range(first, first + CASES_A_PROCESS):
            if monotonic() > until:
                return
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
            os.chdir(place)
            _tell(writing, begun=number)
            found = []
            records = 0
            signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
            try:
                records = case(chance_of(self.seed, area, number), place)
            except BaseException as error:  # noqa: BLE001 - whatever it is, it is the finding
                signal.setitimer(signal.ITIMER_PROF, 0)
                found.append(self._finding(area, number, *_told_of(error)))
            signal.setitimer(signal.ITIMER_PROF, 0)
            os.chdir(self.folder)
            _tell(writing, records=records, findings=found)


def _limit(stack: Path) -> None:
    """Less memory, one core (`prepare` then starts no processes), no output, a stack at the end."""
    silent = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(silent, descriptor)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[os.getppid() % len(cores)]})
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * os.sysconf("SC_PAGE_SIZE") + MORE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    file = stack.open("w")  # open for as long as the process lives
    faulthandler.register(signal.SIGPROF, file, all_threads=False, chain=True)
    faulthandler.enable(file, all_threads=False)


def _tell(writing: int, **event: Any) -> None:
    os.write(writing, msgspec.json.encode(event) + b"\n")


def _told_of(error: BaseException) -> tuple[str, str, str]:
    """What was raised, the innermost line of Toque's, and the end of the traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f"{os.sep}toque{os.sep}" in f.filename]
    at = (own or frames)[-1]
    said = f"{type(error).__name__}: {str(error)[:400]}"
    text = "".join(traceback.format_exception(error, limit=-12))
    place = f"{_short(at.filename)}:{at.lineno} {at.name}"
    return _plain(said), place, _plain(text)


def _plain(text: str) -> str:
    return text.encode(errors="replace").decode()


def _short(file: str) -> str:
    return file.rpartition(f"{os.sep}src{os.sep}")[2] or file


def _innermost(stack: str) -> str:
    """The innermost frame of Toque's in what faulthandler wrote."""
    for line in stack.splitlines():
        if f"{os.sep}toque{os.sep}" in line:
            return _short(line.strip().removeprefix('File "').replace('"', ""))
    return "not in Toque's code"


def one_case(case: Case, *, area: str, seed: int, number: int, folder: Path) -> int:
    """One case in this process, without limits: to look at a finding."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return case(chance_of(seed, area, number), folder)
