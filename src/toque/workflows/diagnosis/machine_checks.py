"""Checks of the machine and its software.

A check fails only if no run is possible. If only some runs are affected, it warns. Child processes
test a compilation and a sum over two processes.
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
from toque.hardware.devices import why_no_gpu, why_unusable
from toque.hardware.memory import describe_other_use
from toque.hardware.onednn import has_fast_bf16
from toque.hardware.processor import WORTH_WHILE, measure_other_use, usable_cores
from toque.hardware.thread_waits import chosen_by_user, waits_in
from toque.reporter import SILENT, Reporter
from toque.version import __version__

_PYTHON: Final = (3, 11)
_GIB: Final = 1 << 30
_MEMORY: Final = (_GIB // 2, 4 * _GIB)
"""Minimum and recommended bytes of free memory."""
_DISK: Final = (_GIB // 4, 10 * _GIB)
"""Minimum and recommended bytes of free disk space."""
_SHARED_MEMORY: Final = 64 << 20
"""Docker's default size of shared memory, with which NCCL fails."""
_FILES: Final = 1024
_NOT_FOR_USERS: Final = ("bench", "dev")
_TIMEOUT_SECONDS: Final = 15.0
"""Maximum time for a test in child processes."""
_MAX_FAILURE: Final = 300
"""Maximum length of the reason for a failure, in characters."""
_DISK_BYTES: Final = 128 << 20
_DISK_SECONDS: Final = 3.0
"""Maximum time for writing `_DISK_BYTES`."""
_PIECE: Final = 8 << 20
_SLOW_DISK: Final = 30e6
"""Bytes per second of durable writes, below which checkpoints slow training down. A guess."""

_COMPILE: Final = """
import torch
@torch.compile
def f(x):
    return (torch.nn.functional.gelu(x) * 2 + 1).sum()
x = torch.linspace(-1, 1, 1000, device={device!r})
compiled, eager = float(f(x)), float((torch.nn.functional.gelu(x) * 2 + 1).sum())
assert abs(compiled - eager) < 1e-3 * abs(eager), (compiled, eager)
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
    """Result of a check."""

    name: str
    state: Literal["ok", "warning", "failed"]
    found: str
    """Observed value."""
    todo: str = ""
    """Advice, or "" if the check has passed."""


@dataclass(frozen=True)
class Checkup:
    """Results of all checks."""

    checks: Sequence[MachineCheck]
    seconds: float

    def record(self) -> dict[str, Any]:
        """Return the results as JSON."""
        return asdict(self)

    def raise_if_failed(self) -> None:
        """Raise a CheckFailed that names the failed checks."""
        if failed := ", ".join(c.name for c in self.checks if c.state == "failed"):
            raise CheckFailed(
                f"This machine cannot train yet: {failed} failed. Follow the advice in the table "
                "above, and run `toque doctor` again."
            )


def _build_check(
    name: str,
    value: str,
    todo: str = "",
    *,
    passed: bool = False,
    needed: bool = False,
) -> MachineCheck:
    """Build a result. With advice and without `passed`, the check fails if `needed`, else warns."""
    if passed or not todo:
        return MachineCheck(name, "ok", value)
    return MachineCheck(name, "failed" if needed else "warning", value, todo)


def check_machine(*, reporter: Reporter = SILENT) -> Checkup:
    """Run all checks for runs in the working directory. Slow checks run concurrently."""
    began = time.monotonic()
    folder = Path.cwd()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    backends = ["gloo", *(["nccl"] if torch.cuda.device_count() > 1 else [])]
    with ExitStack() as stack:
        stack.enter_context(reporter.working("checking this machine"))
        scratch = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="toque-doctor-"))
        )
        other_cores = measure_other_use()  # before these checks use the cores
        pool = stack.enter_context(ThreadPoolExecutor())
        slow_checks = [
            pool.submit(_check_all_reduce, backend, scratch) for backend in backends
        ]
        slow_checks.append(pool.submit(_check_compile, device, scratch))
        checks = [
            *check_software(),
            _check_cores(),
            _check_other_programs(other_cores),
            *_check_gpus(),
            *_check_limits(folder),
            check_disk(folder),
            *check_credentials(os.environ, Path.home()),
        ]
        checks += [check.result() for check in slow_checks]
    return Checkup(checks, time.monotonic() - began)


def check_software() -> Iterator[MachineCheck]:
    """Check the versions of Python and packages, and list installed extras."""
    yield _check_python()
    try:
        requirements = [
            Requirement(text) for text in importlib.metadata.requires("toque") or []
        ]
        extras = importlib.metadata.metadata("toque").get_all("Provides-Extra") or []
    except (importlib.metadata.PackageNotFoundError, InvalidRequirement):
        yield _build_check(
            "packages",
            f"toque {__version__} is not installed as a package, so its requirements are unknown",
            "Install it with pip install . in its folder, or with ./setup.sh.",
        )
        return
    yield _check_packages(requirements)
    yield _check_extras(requirements, extras)


def _check_python() -> MachineCheck:
    python = f"{platform.python_version()}, {sys.executable}"
    todo = f"Install Python {'.'.join(map(str, _PYTHON))} or later."
    is_supported = sys.version_info[:2] >= _PYTHON
    return _build_check("python", python, todo, passed=is_supported, needed=True)


def _check_packages(requirements: Sequence[Requirement]) -> MachineCheck:
    """Check the versions of the packages that Toque always needs."""
    required = [
        requirement for requirement in requirements if requirement.marker is None
    ]
    if problems := _unmet_requirements(required):
        todo = "Install the required versions with pip install toque."
        return _build_check("packages", problems, todo, needed=True)
    versions = f"torch {torch.__version__}, transformers {_version('transformers')}"
    value = f"toque {__version__}, {versions}; {len(required)} requirements met"
    return _build_check("packages", value)


def _check_extras(
    requirements: Sequence[Requirement], extras: Sequence[str]
) -> MachineCheck:
    """List the packages of the extras, and check the versions of the installed ones."""
    environments = [{"extra": extra} for extra in extras if extra not in _NOT_FOR_USERS]
    optional = {
        requirement.name: requirement
        for requirement in requirements
        if requirement.marker and any(map(requirement.marker.evaluate, environments))
    }
    absent = sorted(name for name in optional if _version(name) is None)
    installed = sorted(optional.keys() - set(absent))
    if problems := _unmet_requirements([optional[name] for name in installed]):
        return _build_check("extras", problems, "Run pip install 'toque[...]'.")
    present_names = ", ".join(installed) or "none"
    absent_names = ", ".join(absent) or "none"
    value = f"installed: {present_names}; not installed: {absent_names}"
    return _build_check("extras", value)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _unmet_requirements(requirements: Sequence[Requirement]) -> str:
    """Describe the requirements that are not met. Return "" if all are met."""
    problems = []
    for requirement in requirements:
        version = _version(requirement.name)
        if version is None:
            problems.append(f"{requirement.name} is missing")
        elif not requirement.specifier.contains(version, prereleases=True):
            problems.append(
                f"{requirement.name} {version} is outside {requirement.specifier}"
            )
    return "; ".join(problems)


def _check_cores() -> MachineCheck:
    """Check the numbers of cores and threads, and list the vector units."""
    cores = len(usable_cores())
    threads = torch.get_num_threads()
    names = ("amx_tile", "avx512_bf16", "avx512", "avx2")
    # torch has no public functions for these.
    units = [name for name in names if getattr(torch.cpu, f"_is_{name}_supported")()]
    unit_names = ", ".join(units) or "no vector units"
    precision = "float32: no fast bf16"
    if has_fast_bf16(torch.device("cpu")):
        precision = "bf16 is fast"
    value = f"cores: {cores}, threads: {threads}, {unit_names}; {precision}"
    todo = f"Unset OMP_NUM_THREADS, so that Toque uses {cores} threads, one per core."
    return _build_check("processor", value, todo, passed=threads == cores)


def _check_other_programs(other_cores: float) -> MachineCheck:
    """Check that other programs leave a core for each thread."""
    cores = len(usable_cores())
    todo = "End them for full speed."
    if not chosen_by_user(waits_in()):
        todo = "End them for full speed, or start runs with OMP_WAIT_POLICY=PASSIVE."
    value = f"use {other_cores:.1f} of {cores} cores"
    has_cores = torch.get_num_threads() + other_cores <= cores + WORTH_WHILE
    return _build_check("other programs", value, todo, passed=has_cores)


def _find_driver_version() -> str | None:
    """Ask nvidia-smi for the driver's version. Return None without a driver or with hidden GPUs."""
    program = shutil.which("nvidia-smi")
    if program is None or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return None
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    with suppress(OSError, subprocess.SubprocessError):
        result = subprocess.run(  # noqa: S603
            command, capture_output=True, text=True, timeout=10, check=True
        )
        return next(iter(result.stdout.split()), None)
    return None


def _check_gpus() -> Iterator[MachineCheck]:
    """Check that torch can use every GPU that the driver reports and the user does not hide."""
    driver = _find_driver_version()
    if not torch.cuda.is_available():
        yield _explain_no_gpu(driver)
        return
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        if problem := why_unusable(device):
            # The first sentence is the problem, and the rest is advice.
            value, todo = problem.split(". ", 1)
            yield _build_check(f"GPU {index}", value, todo, needed=index == 0)
        else:
            yield _describe_gpu(device, driver)
            yield attention_on(device)


def _explain_no_gpu(driver: str | None) -> MachineCheck:
    """Report why torch uses no GPU. This is an error only if there is a driver."""
    reason, is_error = why_no_gpu()
    if not is_error and driver is None:
        return _build_check("GPU", f"none that is used: {reason}")
    return _build_check(
        "GPU",
        f"there is a driver ({driver or 'unknown'}), but torch cannot use it: {reason}",
        "Install a build of torch with a CUDA version that the driver supports, or update "
        "the driver. To train without the GPU, set CUDA_VISIBLE_DEVICES= (empty).",
        needed=True,
    )


def _describe_gpu(device: torch.device, driver: str | None) -> MachineCheck:
    """Describe a usable GPU. Warn about other programs that use it."""
    name = torch.cuda.get_device_name(device)
    free, total = torch.cuda.mem_get_info(device)
    bf16 = "bf16" if has_fast_bf16(device) else "no bf16"
    value = f"{name}, {_format_free(free, total)}, {bf16}, driver {driver or 'unknown'}"
    todo = ""
    if others := describe_other_use(device):
        todo = f"For larger models and more rows, end other programs: {others}."
    return _build_check(f"GPU {device.index}", value, todo)


def attention_on(device: torch.device) -> MachineCheck:
    """Check FlexAttention in 16 bits with heads of size 64, as a run does."""
    from toque.models.forward.flex_attention import kernels_on  # loads transformers

    dtype = torch.bfloat16 if has_fast_bf16(device) else torch.float16
    plain = kernels_on(device, dtype, 64, biased=False)
    biased = kernels_on(device, dtype, 64, biased=True)
    todo = (
        "Runs use dense masks, which are slower. FlexAttention needs triton and a C "
        "compiler."
    )
    return _build_check(
        f"attention on {device}",
        f"flex, {plain}; with T5's bias, {biased}",
        todo,
        passed=plain.options is not None and biased.options is not None,
    )


def _check_limits(folder: Path) -> Iterator[MachineCheck]:
    """Check free memory, free disk space, shared memory, and the limit on open files."""
    memory = psutil.virtual_memory()
    todo = "End other programs, or train a smaller model."
    yield _check_free("memory", memory.available, memory.total, _MEMORY, todo)
    space = shutil.disk_usage(folder)
    todo = (
        "Free some space. A checkpoint has three times the size of the model, and a run keeps "
        "several."
    )
    yield _check_free("disk space", space.free, space.total, _DISK, todo)
    shared = Path("/dev/shm")  # noqa: S108 - only read
    if shared.is_dir():
        free = shutil.disk_usage(shared).free
        value = f"{free / _GIB:.2f} GiB free"
        todo = "Several GPUs need more shared memory: docker run --shm-size=1g."
        is_enough = free > _SHARED_MEMORY
        yield _build_check(shared.as_posix(), value, todo, passed=is_enough)

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    value = f"limit {soft} (hard limit {hard})"
    todo = f"Run ulimit -n {_FILES}, because stores with many shards open many files."
    is_enough = soft == resource.RLIM_INFINITY or soft >= _FILES
    yield _build_check("open files", value, todo, passed=is_enough)


def _check_free(
    name: str, free: int, total: int, limits: tuple[int, int], todo: str
) -> MachineCheck:
    """Check that free bytes reach a minimum (or fail) and a recommended amount (or warn)."""
    minimum, recommended = limits
    return _build_check(
        name,
        _format_free(free, total),
        todo,
        passed=free >= recommended,
        needed=free < minimum,
    )


def _format_free(free: int, total: int) -> str:
    return f"{free / _GIB:.1f} of {total / _GIB:.1f} GiB free"


def check_disk(folder: Path) -> MachineCheck:
    """Check that the disk of a folder is writable and fast enough."""
    name = f"disk of {folder}"
    try:
        written, read = _measure_disk(folder)
    except OSError as error:
        return _build_check(
            name,
            f"cannot be written: {error.strerror or error}",
            "Toque writes runs and stores here. Change to a folder of your own, or set run_dir and "
            "data.store.",
            needed=True,
        )

    value = f"writes {written / 1e6:,.0f} MB/s durably, reads {read / 1e6:,.0f} MB/s"
    todo = "Save less often (train.save_every), or put runs on a faster disk."
    return _build_check(name, value, todo, passed=written >= _SLOW_DISK)


def _measure_disk(folder: Path) -> tuple[float, float]:
    """Measure the speed of durable writes, and of reads, in bytes per second."""
    piece = os.urandom(_PIECE)  # random, because some disks compress
    done = 0
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".toque-doctor-") as file:
        descriptor = file.fileno()
        began = time.perf_counter()
        while done < _DISK_BYTES and time.perf_counter() - began < _DISK_SECONDS:
            done += os.write(descriptor, piece)
        os.fsync(descriptor)
        written = done / (time.perf_counter() - began)

        if hasattr(os, "posix_fadvise"):  # read from the disk, not from the cache
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.lseek(descriptor, 0, os.SEEK_SET)
        began = time.perf_counter()
        while os.read(descriptor, _PIECE):
            pass
        read = done / max(1e-9, time.perf_counter() - began)
    return written, read


def check_credentials(
    environment: Mapping[str, str], home: Path
) -> Iterator[MachineCheck]:
    """Check whether credentials for buckets and the hub exist. Their values are never shown."""
    yield _check_google_credentials(environment, home)
    yield _check_amazon_credentials(environment, home)

    hub_home = Path(environment.get("HF_HOME") or home / ".cache" / "huggingface")
    token_file = environment.get("HF_TOKEN_PATH") or hub_home / "token"
    has_token = bool(environment.get("HF_TOKEN")) or _has_content(token_file)
    yield _report_credentials("hf hub", exist=has_token)


def _has_content(path: Path | str) -> bool:
    return Path(path).is_file() and Path(path).stat().st_size > 0


def _report_credentials(name: str, *, exist: bool) -> MachineCheck:
    value = "no credentials; only private data needs them"
    if exist:
        value = "credentials found"
    return _build_check(name, value)


def _check_google_credentials(
    environment: Mapping[str, str], home: Path
) -> MachineCheck:
    key_file = environment.get("GOOGLE_APPLICATION_CREDENTIALS", "")
    if key_file and not Path(key_file).is_file():
        value = f"GOOGLE_APPLICATION_CREDENTIALS is {key_file}, which does not exist"
        return _build_check("gs://", value, "Correct it or unset it.", needed=True)
    gcloud = Path(environment.get("CLOUDSDK_CONFIG") or home / ".config" / "gcloud")
    default_file = gcloud / "application_default_credentials.json"
    exist = bool(key_file) or _has_content(default_file)
    return _report_credentials("gs://", exist=exist)


def _check_amazon_credentials(
    environment: Mapping[str, str], home: Path
) -> MachineCheck:
    key = environment.get("AWS_ACCESS_KEY_ID")
    if key and not environment.get("AWS_SECRET_ACCESS_KEY"):
        value = "AWS_ACCESS_KEY_ID is set, but AWS_SECRET_ACCESS_KEY is not"
        return _build_check("s3://", value, "Set both, or neither.", needed=True)
    default_file = home / ".aws" / "credentials"
    file = environment.get("AWS_SHARED_CREDENTIALS_FILE") or default_file
    is_set = bool(key or environment.get("AWS_PROFILE"))
    return _report_credentials("s3://", exist=is_set or _has_content(file))


def _check_compile(device: str, scratch: Path) -> MachineCheck:
    """Compile a small function with an empty cache."""
    variables = {
        "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor"),
        "TRITON_CACHE_DIR": str(scratch / "triton"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    seconds, failure = run_programs([["-c", _COMPILE.format(device=device)]], variables)
    if not failure:
        return _build_check("torch.compile", f"compiles and runs, {seconds:.1f} s")
    return _build_check(
        "torch.compile",
        f"does not compile: {failure}",
        "Runs continue without it. On a CPU it needs a C++ compiler (g++), on a GPU triton.",
    )


def _check_all_reduce(backend: str, scratch: Path) -> MachineCheck:
    """Sum a tensor over two processes."""
    name = f"all-reduce over {backend}"
    meeting_point = str(scratch / f"meeting-{backend}")
    programs = [["-c", _SHARED, str(rank), meeting_point, backend] for rank in (0, 1)]
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    variables = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": interface}
    seconds, failure = run_programs(programs, variables)
    if not failure:
        return _build_check(name, f"two processes summed a tensor, {seconds:.1f} s")
    return _build_check(
        name,
        failure,
        "Check the network interface (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME) and the firewall. "
        "Until this works, train in one process (train.strategy=single).",
    )


def run_programs(
    programs: Sequence[Sequence[str]],
    variables: Mapping[str, str],
    *,
    limit_seconds: float = _TIMEOUT_SECONDS,
) -> tuple[float, str]:
    """Run Python programs concurrently, and kill them after a time limit.

    Returns:
        The seconds, and the reason for a failure or "".
    """
    began = time.monotonic()
    processes = [
        subprocess.Popen(  # noqa: S603 - our own programs
            [sys.executable, "-W", "ignore", *program], env={**os.environ, **variables},
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace",
            start_new_session=True,
        )
        for program in programs
    ]  # fmt: skip
    failure = ""
    try:
        for process in processes:
            remaining = began + limit_seconds - time.monotonic()
            _, errors = process.communicate(timeout=max(0.0, remaining))
            if process.returncode and not failure:
                lines = errors.strip().splitlines()
                last_line = lines[-1] if lines else f"exit code {process.returncode}"
                failure = last_line.strip()[:_MAX_FAILURE]
    except subprocess.TimeoutExpired:
        failure = failure or f"not done within {limit_seconds:.0f} s"
    finally:
        for process in processes:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return time.monotonic() - began, failure
