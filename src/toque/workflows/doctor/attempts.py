"""Attempts of the checkup: a compile, two processes that share a sum, writing and reading the disk.

The first two run in processes of their own, beside everything else, and are ended when their time
is up: a checkup that hangs is worse than one that says so.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, Literal, Self

from toque.workflows.doctor.check_table import Check

COMPILE_SECONDS: Final = 14.0
SHARED_SECONDS: Final = 15.0
"""Until an attempt is given up, counted from the begin of the checkup."""
_DISK_BYTES: Final = 128 << 20
_PIECE: Final = 8 << 20
_SLOW_DISK: Final = 30e6
"""Bytes a second of durable writing, below which checkpoints hold training up. A guess."""
_SLICE_SECONDS: Final = 0.05

_COMPILE: Final = """
import torch
@torch.compile
def f(x):
    return (torch.nn.functional.gelu(x) * 2 + 1).sum()
x = torch.linspace(-1, 1, 1000, device={device!r})
whole, parts = float(f(x)), float((torch.nn.functional.gelu(x) * 2 + 1).sum())
assert abs(whole - parts) < 1e-3 * abs(parts), (whole, parts)
"""
_SHARED: Final = """
import datetime, sys, torch, torch.distributed as dist
rank, place, backend = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group(backend, init_method="file://" + place, rank=rank, world_size=2,
                        timeout=datetime.timedelta(seconds=30))
device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
x = torch.full((1000,), float(rank + 1), device=device)
dist.all_reduce(x)
assert x.tolist() == [3.0] * 1000, x[:4]
dist.destroy_process_group()
"""


@dataclass
class Attempt:
    """Processes that are tried, together; use as a context manager, which ends what is left.

    Args:
        programs: arguments of Python for each.
        seconds: after which they are given up.
        variables: of the environment besides this process's own.
    """

    programs: list[list[str]]
    seconds: float
    variables: dict[str, str]

    def __enter__(self) -> Self:
        self.began = time.monotonic()
        self.said: list[IO[str]] = [
            tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - closed on leaving
            for _ in self.programs
        ]
        self.running = [
            subprocess.Popen(  # noqa: S603 - our own programs
                [sys.executable, "-W", "ignore", *program],
                env={**os.environ, **self.variables},
                stdout=subprocess.DEVNULL,
                stderr=said,
                start_new_session=True,
            )
            for program, said in zip(self.programs, self.said, strict=True)
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.running:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # and what it has started
            process.wait()
        for said in self.said:
            said.close()

    def failure(self) -> tuple[float, str | None]:
        """Seconds it took, and what went wrong; None where all is well."""
        until = self.began + self.seconds
        while any(process.poll() is None for process in self.running):
            if time.monotonic() > until:
                return self.seconds, "timeout"
            time.sleep(_SLICE_SECONDS)
        took = time.monotonic() - self.began
        for process, said in zip(self.running, self.said, strict=True):
            if process.returncode:
                said.seek(0)
                lines = [line for line in said.read().splitlines() if line.strip()]
                return took, (lines or [f"exit code {process.returncode}"])[-1].strip()[:300]
        return took, None


def compiling(device: str, scratch: Path) -> Attempt:
    """An attempt to compile a small function, with nothing cached."""
    variables = {
        "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor"),
        "TRITON_CACHE_DIR": str(scratch / "triton"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    return Attempt([["-c", _COMPILE.format(device=device)]], COMPILE_SECONDS, variables)


def compiled(attempt: Attempt) -> Check:
    """Check of a compilation; never needed, as training continues without."""
    seconds, failure = attempt.failure()
    if failure is None:
        return Check("torch.compile", "ok", f"compiles and runs, {seconds:.1f} s")
    if failure == "timeout":
        return Check(
            "torch.compile",
            "warning",
            f"not done within {seconds:.0f} s",
            "The machine is slow or busy; runs compile only where it pays (train.compile=auto).",
        )
    return Check(
        "torch.compile",
        "warning",
        f"does not compile: {failure}",
        "Runs go on uncompiled. On a CPU it needs a C++ compiler (g++), on a GPU triton.",
    )


def sharing(backend: Literal["gloo", "nccl"], scratch: Path) -> Attempt:
    """An attempt of two processes to sum a tensor."""
    place = str(scratch / f"meeting-{backend}")
    programs = [["-c", _SHARED, str(rank), place, backend] for rank in (0, 1)]
    variables = {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
    }
    return Attempt(programs, SHARED_SECONDS, variables)


def shared(backend: str, attempt: Attempt) -> Check:
    """Check of an all-reduce; needed only by runs of several processes."""
    seconds, failure = attempt.failure()
    name = f"all-reduce over {backend}"
    if failure is None:
        return Check(name, "ok", f"two processes summed a tensor, {seconds:.1f} s")
    found = f"not done within {seconds:.0f} s" if failure == "timeout" else failure
    return Check(
        name,
        "warning",
        found,
        "Train in one process (train.strategy=single) until it works: look at the network "
        "interface (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME) and the firewall.",
    )


def disk(folder: Path) -> Check:
    """Durable writing and reading of the disk that runs would be on."""
    name = f"disk of {folder}"
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".toque-doctor-") as file:
            written = _timed_write(file.fileno())
            read = _timed_read(file.fileno())
    except OSError as error:
        return Check(
            name,
            "failed",
            f"cannot be written: {error.strerror or error}",
            "Runs and stores are written here: go to a folder of your own, or name others "
            "(run_dir, data.store).",
        )
    found = f"writes {written / 1e6:,.0f} MB/s durably, reads {read / 1e6:,.0f} MB/s"
    if written >= _SLOW_DISK:
        return Check(name, "ok", found)
    return Check(
        name, "warning", found, "Save less often (train.save_every), or put runs on a faster disk."
    )


def _timed_write(descriptor: int) -> float:
    """Bytes a second until all is durable."""
    piece = os.urandom(_PIECE)  # some disks compress
    began, done = time.perf_counter(), 0
    while done < _DISK_BYTES and time.perf_counter() - began < 3.0:
        done += os.write(descriptor, piece)
    os.fsync(descriptor)
    return done / (time.perf_counter() - began)


def _timed_read(descriptor: int) -> float:
    """Bytes a second from the disk, not from memory where the system can be asked for that."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.lseek(descriptor, 0, os.SEEK_SET)
    began, done = time.perf_counter(), 0
    while piece := os.read(descriptor, _PIECE):
        done += len(piece)
    return done / max(1e-9, time.perf_counter() - began)
