"""Machine checks: the machine and its software, looked at for what training needs.

What fails is what no run can do without; what only some runs need is a warning at most. A compile
and two processes that share a sum are tried in processes of their own.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

import psutil
import torch
from packaging.requirements import InvalidRequirement, Requirement

from toque.errors import CheckFailed
from toque.hardware.devices import no_gpu, unusable
from toque.hardware.memory import held_by_others
from toque.hardware.onednn import has_fast_bf16
from toque.hardware.processor import WORTH_WHILE, others_now, usable_cores
from toque.hardware.thread_waits import chosen_by_user, waits_in
from toque.reporter import SILENT, Reporter
from toque.version import __version__

_PYTHON: Final = (3, 11)
_GIB: Final = 1 << 30
_LEAST_MEMORY, _SOME_MEMORY = _GIB // 2, 4 * _GIB
_LEAST_DISK, _SOME_DISK = _GIB // 4, 10 * _GIB
_SHARED_MEMORY: Final = 64 << 20
"""Docker's default, with which NCCL's processes do not reach each other."""
_FILES: Final = 1024
_NOT_FOR_USERS: Final = ("bench", "dev")
_ATTEMPT_SECONDS: Final = 15.0  # seconds until an attempt is given up
_DISK_BYTES: Final = 128 << 20
_PIECE: Final = 8 << 20
_SLOW_DISK: Final = 30e6
"""Bytes a second of durable writing, below which checkpoints hold training up. A guess."""

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


@dataclass(frozen=True)
class MachineCheck:
    """One thing that was looked at or tried, with advice where not all is well."""

    name: str
    state: Literal["ok", "warning", "failed"]
    found: str
    todo: str = ""


@dataclass(frozen=True)
class Checkup:
    """All that was looked at and tried."""

    checks: Sequence[MachineCheck]
    seconds: float

    def record(self) -> dict[str, Any]:
        """The checks as a JSON value."""
        return asdict(self)

    def raise_if_failed(self) -> None:
        """Raise a CheckFailed that names what is needed and broken."""
        if failed := ", ".join(c.name for c in self.checks if c.state == "failed"):
            raise CheckFailed(
                f"This machine cannot train yet: {failed} failed. The table above says what to do "
                "about each; `toque doctor` looks again."
            )


def _checked(name: str, found: str, todo: str = "", *, needed: bool = False) -> MachineCheck:
    """A check that is ok where there is nothing to do about it."""
    return MachineCheck(name, "ok" if not todo else "failed" if needed else "warning", found, todo)


def check_machine(*, reporter: Reporter = SILENT) -> Checkup:
    """Run all checks, for runs in the current folder; slow ones run concurrently."""
    began, here = time.monotonic(), Path.cwd()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    backends = ["gloo", *(["nccl"] if torch.cuda.device_count() > 1 else [])]
    with ExitStack() as stack:
        stack.enter_context(reporter.working("checking this machine"))
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="toque-doctor-")))
        others = others_now()  # before this checkup keeps the cores busy itself
        pool = stack.enter_context(ThreadPoolExecutor())
        tried = [pool.submit(_all_reduces, backend, scratch) for backend in backends]
        tried.append(pool.submit(_compiles, device, scratch))
        checks = [
            *software(),
            *_processor(others),
            *_gpus(),
            *_memory_and_limits(here),
            disk(here),
            *credentials(os.environ, Path.home()),
        ]
        checks += [attempt.result() for attempt in tried]
    return Checkup(checks, time.monotonic() - began)


def software() -> Iterator[MachineCheck]:
    """Versions against the ranges that Toque is tested with, and the extras that are installed."""
    python = f"{platform.python_version()}, {sys.executable}"
    old = sys.version_info[:2] < _PYTHON
    todo = f"Install Python {'.'.join(map(str, _PYTHON))} or later." if old else ""
    yield _checked("python", python, todo, needed=True)
    try:
        wanted = [Requirement(text) for text in importlib.metadata.requires("toque") or []]
        extras = importlib.metadata.metadata("toque").get_all("Provides-Extra") or []
    except (importlib.metadata.PackageNotFoundError, InvalidRequirement):
        yield _checked(
            "packages",
            f"toque {__version__} is not installed as a package, so its ranges are not known",
            "Install it: pip install . in its folder, or ./setup.sh.",
        )
        return
    needed = [r for r in wanted if r.marker is None]
    versions = f"torch {torch.__version__}, transformers {_version('transformers')}"
    fine = f"toque {__version__}, {versions}; {len(needed)} in range"
    wrong = _out_of_range(needed)
    todo = "Install those ranges: pip install toque." if wrong else ""
    yield _checked("packages", wrong or fine, todo, needed=True)
    of_extras = {
        r.name: r
        for r in wanted
        for name in extras
        if r.marker is not None
        and name not in _NOT_FOR_USERS
        and r.marker.evaluate({"extra": name})
    }
    absent = sorted(name for name in of_extras if _version(name) is None)
    there = sorted(of_extras.keys() - set(absent))
    wrong = _out_of_range([of_extras[name] for name in there])
    fine = f"installed: {', '.join(there) or 'none'}; not: {', '.join(absent) or 'none'}"
    yield _checked("extras", wrong or fine, "pip install --upgrade 'toque[...]'." if wrong else "")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _out_of_range(requirements: Sequence[Requirement]) -> str:
    """The requirements that are not met in words; "" where all are."""
    wrong = []
    for requirement in requirements:
        version = _version(requirement.name)
        if version is None:
            wrong.append(f"{requirement.name} is missing")
        elif not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} {version} is outside {requirement.specifier}")
    return "; ".join(wrong)


def _processor(others: float) -> Iterator[MachineCheck]:
    """Cores, threads, 16-bit units, and what other programs take."""
    cores, threads = len(usable_cores()), torch.get_num_threads()
    names = ("amx_tile", "avx512_bf16", "avx512", "avx2")  # torch has no public names for them
    units = [name for name in names if getattr(torch.cpu, f"_is_{name}_supported")()]
    precision = "bf16 is fast" if has_fast_bf16(torch.device("cpu")) else "float32: no fast bf16"
    units_found = ", ".join(units) or "no vector units"
    found = f"cores: {cores}, threads: {threads}, {units_found}; {precision}"
    todo = f"Unset OMP_NUM_THREADS: a thread for each core is {cores}." if threads != cores else ""
    yield _checked("processor", found, todo)
    busy = threads + others > cores + WORTH_WHILE
    sleep = "" if chosen_by_user(waits_in()) else ", or start runs with OMP_WAIT_POLICY=PASSIVE"
    todo = f"End them for full speed{sleep}." if busy else ""
    yield _checked("other programs", f"keep {others:.1f} of {cores} cores busy", todo)


def _gpus() -> Iterator[MachineCheck]:
    """GPUs as torch sees them, against those that the driver knows and nobody hides on purpose."""
    program, driver = shutil.which("nvidia-smi"), None
    if os.environ.get("CUDA_VISIBLE_DEVICES") != "" and program is not None:
        command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
        with suppress(OSError, subprocess.SubprocessError):
            said = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)  # noqa: S603 - found on the path
            driver = next(iter(said.stdout.split()), None)
    if not torch.cuda.is_available():
        why, fails = no_gpu()
        fails = fails or driver is not None
        told = f"a driver ({driver or 'unknown'}) is there, and torch cannot use it: {why}"
        yield _checked(
            "GPU",
            told if fails else f"none that is used: {why}",
            "Install a build of torch with CUDA that the driver is new enough for, or update the "
            "driver; CUDA_VISIBLE_DEVICES= continues without the GPU." * fails,
            needed=True,
        )
        return
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        if refused := unusable(device):
            yield _checked(f"GPU {index}", *refused.split(". ", 1), needed=index == 0)
            continue
        bf16 = "bf16" if has_fast_bf16(device) else "no bf16"
        free, total = torch.cuda.mem_get_info(device)
        found = f"{torch.cuda.get_device_name(device)}, {free / _GIB:.1f} of {total / _GIB:.1f} GiB"
        others = held_by_others(device)
        todo = f"For larger models and more rows end some: {others}." if others else ""
        yield _checked(f"GPU {index}", f"{found} free, {bf16}, driver {driver or 'unknown'}", todo)
        yield attention_on(device)


def attention_on(device: torch.device) -> MachineCheck:
    """FlexAttention in 16 bits with heads of 64, as a run tries it."""
    from toque.models.forward.flex_attention import kernels_on  # loads transformers

    dtype = torch.bfloat16 if has_fast_bf16(device) else torch.float16
    plain, biased = (kernels_on(device, dtype, 64, biased=b) for b in (False, True))
    fails = plain.options is None or biased.options is None
    todo = (
        "Masks take its place, which is slower. It needs triton and a C compiler." if fails else ""
    )
    return _checked(f"attention on {device}", f"flex, {plain}; with T5's bias, {biased}", todo)


def _memory_and_limits(folder: Path) -> Iterator[MachineCheck]:
    """Free memory and disk, shared memory, open files."""
    memory, space = psutil.virtual_memory(), shutil.disk_usage(folder)
    for name, free, total, least, some, todo in (
        ("memory", memory.available, memory.total, _LEAST_MEMORY, _SOME_MEMORY,
         "End other programs, or train something smaller."),
        ("disk space", space.free, space.total, _LEAST_DISK, _SOME_DISK,
         "Make room: a checkpoint is three times the model; some are kept."),
    ):  # fmt: skip
        found = f"{free / _GIB:.1f} of {total / _GIB:.1f} GiB free"
        yield _checked(name, found, todo if free < some else "", needed=free < least)
    there = Path("/dev/shm")  # noqa: S108 - looked at, not written
    if there.is_dir():
        free = shutil.disk_usage(there).free
        todo = "Several GPUs talk through it: docker run --shm-size=1g."
        todo = "" if free > _SHARED_MEMORY else todo
        yield _checked(there.as_posix(), f"{free / _GIB:.2f} GiB free", todo)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft != resource.RLIM_INFINITY and soft < _FILES
    todo = f"ulimit -n {_FILES}: stores of many shards open many files." if few else ""
    yield _checked("open files", f"{soft} at once (at most {hard})", todo)


def disk(folder: Path) -> MachineCheck:
    """Durable writing and reading of the disk that runs would be on."""
    name, piece, done = f"disk of {folder}", os.urandom(_PIECE), 0  # some disks compress
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".toque-doctor-") as file:
            descriptor, began = file.fileno(), time.perf_counter()
            while done < _DISK_BYTES and time.perf_counter() - began < 3.0:
                done += os.write(descriptor, piece)
            os.fsync(descriptor)
            written = done / (time.perf_counter() - began)
            if hasattr(os, "posix_fadvise"):  # from the disk, and not from memory
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.lseek(descriptor, 0, os.SEEK_SET)
            began = time.perf_counter()
            while os.read(descriptor, _PIECE):
                pass
            read = done / max(1e-9, time.perf_counter() - began)
    except OSError as error:
        return _checked(
            name,
            f"cannot be written: {error.strerror or error}",
            "Runs and stores are written here: go to a folder of your own, or name others "
            "(run_dir, data.store).",
            needed=True,
        )
    found = f"writes {written / 1e6:,.0f} MB/s durably, reads {read / 1e6:,.0f} MB/s"
    todo = "Save less often (train.save_every), or put runs on a faster disk."
    return _checked(name, found, todo if written < _SLOW_DISK else "")


def credentials(environment: Mapping[str, str], home: Path) -> Iterator[MachineCheck]:
    """Credentials for buckets and the hub, there or not. No value is read or shown."""

    def full(path: Path | str) -> bool:
        return Path(path).is_file() and Path(path).stat().st_size > 0

    gcloud = Path(environment.get("CLOUDSDK_CONFIG") or home / ".config" / "gcloud")
    named = environment.get("GOOGLE_APPLICATION_CREDENTIALS", "")
    aws = environment.get("AWS_SHARED_CREDENTIALS_FILE") or home / ".aws" / "credentials"
    key, secret = environment.get("AWS_ACCESS_KEY_ID"), environment.get("AWS_SECRET_ACCESS_KEY")
    hub = Path(environment.get("HF_HOME") or home / ".cache" / "huggingface") / "token"
    hub = Path(environment.get("HF_TOKEN_PATH") or hub)
    there = {
        "gs://": bool(named) or full(gcloud / "application_default_credentials.json"),
        "s3://": bool(key or environment.get("AWS_PROFILE")) or full(aws),
        "hf hub": bool(environment.get("HF_TOKEN")) or full(hub),
    }
    wrong: dict[str, tuple[str, str]] = {}
    if named and not Path(named).is_file():
        found = f"GOOGLE_APPLICATION_CREDENTIALS names {named}, and there is no such file"
        wrong["gs://"] = (found, "Correct it or unset it.")
    if key and not secret:
        found = "AWS_ACCESS_KEY_ID is set and AWS_SECRET_ACCESS_KEY is not"
        wrong["s3://"] = (found, "Set both, or neither.")
    none = "no credentials; needed only for what is private"
    for name, is_there in there.items():
        found, todo = wrong.get(name, ("credentials found" if is_there else none, ""))
        yield _checked(name, found, todo, needed=True)


def _compiles(device: str, scratch: Path) -> MachineCheck:
    """A small function compiled with nothing cached; never needed, as runs continue without."""
    variables = {
        "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor"),
        "TRITON_CACHE_DIR": str(scratch / "triton"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    seconds, failure = tried([["-c", _COMPILE.format(device=device)]], variables)
    if not failure:
        return _checked("torch.compile", f"compiles and runs, {seconds:.1f} s")
    return _checked(
        "torch.compile",
        f"does not compile: {failure}",
        "Runs continue uncompiled. On a CPU it needs a C++ compiler (g++), on a GPU triton.",
    )


def _all_reduces(backend: str, scratch: Path) -> MachineCheck:
    """A tensor summed by two processes; needed only by runs of several."""
    place, name = str(scratch / f"meeting-{backend}"), f"all-reduce over {backend}"
    programs = [["-c", _SHARED, str(rank), place, backend] for rank in (0, 1)]
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    variables = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": interface}
    seconds, failure = tried(programs, variables)
    if not failure:
        return _checked(name, f"two processes summed a tensor, {seconds:.1f} s")
    return _checked(
        name,
        failure,
        "Train in one process (train.strategy=single) until it works: look at the network "
        "interface (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME) and the firewall.",
    )


def tried(
    programs: Sequence[Sequence[str]],
    variables: Mapping[str, str],
    *,
    limit_seconds: float = _ATTEMPT_SECONDS,
) -> tuple[float, str]:
    """Seconds of programs of Python run together, in processes ended when the time is up.

    And what went wrong; "" where all is well.
    """
    began = time.monotonic()
    running = [
        subprocess.Popen(  # noqa: S603 - our own programs
            [sys.executable, "-W", "ignore", *program], env={**os.environ, **variables},
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace",
            start_new_session=True,
        )
        for program in programs
    ]  # fmt: skip
    failure = ""
    try:
        for process in running:
            left = began + limit_seconds - time.monotonic()
            lines = process.communicate(timeout=max(0.0, left))[1].strip().splitlines()
            if process.returncode and not failure:
                failure = (lines or [f"exit code {process.returncode}"])[-1].strip()[:300]
    except subprocess.TimeoutExpired:
        failure = failure or f"not done within {limit_seconds:.0f} s"
    finally:
        for process in running:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # and what it has started
            process.communicate()
    return time.monotonic() - began, failure
