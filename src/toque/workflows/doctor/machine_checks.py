"""Machine checks: the machine and its software, looked at for what training needs.

What fails is what no run can do without. What only some runs need is a warning at most: a service
without credentials, an extra that is not installed, a compiler.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import psutil
import torch
from packaging.requirements import InvalidRequirement, Requirement

from toque.hardware.processor import WORTH_WHILE, others_now, usable_cores
from toque.models.precision import has_fast_bf16
from toque.reporter import SILENT, Reporter
from toque.storage.cache_folder import cache_folder
from toque.version import __version__
from toque.workflows.doctor.attempts import compiled, compiling, disk, shared, sharing
from toque.workflows.doctor.check_table import Check, Checkup

_PYTHON: Final = (3, 11)
_GIB: Final = 1 << 30
_LEAST_MEMORY, _SOME_MEMORY = _GIB // 2, 4 * _GIB
_LEAST_DISK, _SOME_DISK = _GIB // 4, 10 * _GIB
_SHARED_MEMORY: Final = 64 << 20
"""Docker's default, with which NCCL's processes do not reach each other."""
_FILES: Final = 1024
_NOT_FOR_USERS: Final = ("bench", "dev")


def check_machine(*, folder: Path | None = None, reporter: Reporter = SILENT) -> Checkup:
    """Run all checks; slow ones run concurrently.

    Args:
        folder: where runs would be written; the current one by default.
        reporter: hears that something is under way.
    """
    began = time.monotonic()
    here = (folder or Path()).resolve()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    backends = ["gloo", *(["nccl"] if torch.cuda.device_count() > 1 else [])]
    with ExitStack() as stack:
        stack.enter_context(reporter.working("checking this machine"))
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="toque-doctor-")))
        others = others_now()  # before this checkup keeps the cores busy itself
        groups = [
            stack.enter_context(sharing("gloo" if b == "gloo" else "nccl", scratch))
            for b in backends
        ]
        compile_ = stack.enter_context(compiling(device, scratch))
        checks = [
            *software(),
            *processor(others),
            *gpus(),
            arithmetic(device),
            *memory_and_limits(here),
            *places(here),
            *credentials(os.environ, Path.home()),
            *extras(),
        ]
        checks += [shared(b, group) for b, group in zip(backends, groups, strict=True)]
        checks.append(compiled(compile_))
    return Checkup(checks, time.monotonic() - began)


def software() -> Iterator[Check]:
    """Versions against the ranges that Toque is tested with."""
    own, least = sys.version_info[:2], ".".join(map(str, _PYTHON))
    python = f"{platform.python_version()}, {sys.executable}"
    if own < _PYTHON:
        yield Check("python", "failed", python, f"Install Python {least} or later.")
    else:
        yield Check("python", "ok", python)
    needed = [r for r in _requirements() if r.marker is None]
    if not needed:
        yield Check(
            "packages",
            "warning",
            f"toque {__version__} is not installed as a package, so its ranges are not known",
            "Install it: pip install . in its folder, or ./setup.sh.",
        )
        return
    wrong = [said for r in needed if (said := _out_of_range(r)) is not None]
    if wrong:
        yield Check(
            "packages", "failed", "; ".join(wrong), "Install those ranges: pip install toque."
        )
    else:
        versions = f"torch {torch.__version__}, transformers {_version('transformers')}"
        yield Check("packages", "ok", f"toque {__version__}, {versions}; {len(needed)} in range")


def _requirements() -> list[Requirement]:
    try:
        return [Requirement(text) for text in importlib.metadata.requires("toque") or []]
    except (importlib.metadata.PackageNotFoundError, InvalidRequirement):
        return []


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _out_of_range(requirement: Requirement) -> str | None:
    found = _version(requirement.name)
    if found is None:
        return f"{requirement.name} is missing"
    if requirement.specifier.contains(found, prereleases=True):
        return None
    return f"{requirement.name} {found} is outside {requirement.specifier}"


def processor(others: float) -> Iterator[Check]:
    """Cores, threads, 16-bit units, and what other programs take."""
    cores, threads = len(usable_cores()), torch.get_num_threads()
    cpu = torch.device("cpu")
    names = ("amx_tile", "avx512_bf16", "avx512", "avx2")  # torch has no public names for them
    units = [name for name in names if getattr(torch.cpu, f"_is_{name}_supported")()]
    precision = "bf16 is fast" if has_fast_bf16(cpu) else "float32: no fast bf16"
    found = (
        f"cores: {cores}, threads: {threads}, {', '.join(units) or 'no vector units'}; {precision}"
    )
    if threads != cores:
        todo = f"Unset OMP_NUM_THREADS: a thread for each core is {cores}."
        yield Check("processor", "warning", found, todo)
    else:
        yield Check("processor", "ok", found)
    if threads + others > cores + WORTH_WHILE:
        yield Check(
            "other programs",
            "warning",
            f"keep {others:.1f} of {cores} cores busy",
            "End them for full speed, or start runs with OMP_WAIT_POLICY=PASSIVE.",
        )
    else:
        yield Check("other programs", "ok", f"keep {others:.1f} of {cores} cores busy")


def gpus() -> Iterator[Check]:
    """GPUs as torch sees them, against those that the driver tells of."""
    driver = _driver()
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            it = torch.cuda.get_device_properties(index)
            bf16 = "bf16" if has_fast_bf16(torch.device("cuda", index)) else "no bf16"
            free, total = torch.cuda.mem_get_info(index)
            found = f"{it.name}, {free / _GIB:.1f} of {total / _GIB:.1f} GiB free, {bf16}"
            yield Check(f"GPU {index}", "ok", f"{found}, driver {driver or 'unknown'}")
    elif driver is not None:
        yield Check(
            "GPU",
            "failed",
            f"the driver ({driver}) tells of a GPU and torch {torch.__version__} cannot use it",
            "Install a build of torch with CUDA that the driver is new enough for, or update the "
            "driver; CUDA_VISIBLE_DEVICES= goes on without the GPU.",
        )
    else:
        yield Check("GPU", "ok", "none; this machine computes on its processor")


def _driver() -> str | None:
    """The driver's version where it tells of a GPU that is not hidden on purpose."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return None
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        told = subprocess.run(  # noqa: S603 - found on the path
            [program, "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = told.stdout.split()
    return lines[0] if told.returncode == 0 and lines else None


def arithmetic(device: str) -> Check:
    """A product whose exact value is known."""
    numbers = torch.arange(64, dtype=torch.float32).reshape(8, 8)  # their products are exact
    exact = [[sum((8 * i + k) * (8 * k + j) for k in range(8)) for j in range(8)] for i in range(8)]
    try:
        right = (numbers.to(device) @ numbers.to(device)).tolist() == exact
    except RuntimeError as error:
        said = str(error).splitlines()[0][:200]
        return Check("a product", "failed", f"{device}: {said}", "Install another build of torch.")
    if right:
        return Check("a product", "ok", f"right on {device}")
    return Check("a product", "failed", f"wrong on {device}", "Install another build of torch.")


def memory_and_limits(folder: Path) -> Iterator[Check]:
    """Free memory and disk, shared memory, open files."""
    memory = psutil.virtual_memory()
    found = f"{memory.available / _GIB:.1f} of {memory.total / _GIB:.1f} GiB free"
    yield _enough("memory", memory.available, _LEAST_MEMORY, _SOME_MEMORY, found,
                  "End other programs, or train something smaller.")  # fmt: skip
    space = shutil.disk_usage(folder)
    found = f"{space.free / _GIB:.1f} of {space.total / _GIB:.1f} GiB free"
    yield _enough("disk space", space.free, _LEAST_DISK, _SOME_DISK, found,
                  "Make room: a checkpoint is three times the model; some are kept.")  # fmt: skip
    there = Path("/dev/shm")  # noqa: S108 - looked at, not written
    if there.is_dir():
        free = shutil.disk_usage(there).free
        enough = free > _SHARED_MEMORY
        yield Check(
            there.as_posix(),
            "ok" if enough else "warning",
            f"{free / _GIB:.2f} GiB free",
            "" if enough else "Several GPUs talk through it: docker run --shm-size=1g.",
        )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft != resource.RLIM_INFINITY and soft < _FILES
    yield Check(
        "open files",
        "warning" if few else "ok",
        f"{soft} at once (at most {hard})",
        f"ulimit -n {_FILES}: stores of many shards open many files." if few else "",
    )


def _enough(name: str, free: int, least: int, some: int, found: str, todo: str) -> Check:
    if free < least:
        return Check(name, "failed", found, todo)
    return Check(name, "warning", found, todo) if free < some else Check(name, "ok", found)


def places(folder: Path) -> Iterator[Check]:
    """The disk that runs would be on, and the cache folder."""
    yield disk(folder)
    cache = cache_folder("measured")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache):
            pass
    except OSError as error:
        yield Check(
            "cache folder",
            "warning",
            f"{cache} cannot be written: {error.strerror}",
            "Set TOQUE_CACHE to a folder of your own: what was measured is measured again.",
        )
    else:
        yield Check("cache folder", "ok", str(cache))


def credentials(environment: Mapping[str, str], home: Path) -> Iterator[Check]:
    """Credentials for buckets and the hub: whether there are any. No value is read or shown."""

    def full(path: Path | str) -> bool:
        return Path(path).is_file() and Path(path).stat().st_size > 0

    gcloud = Path(environment.get("CLOUDSDK_CONFIG") or home / ".config" / "gcloud")
    named = environment.get("GOOGLE_APPLICATION_CREDENTIALS", "")
    shared_file = environment.get("AWS_SHARED_CREDENTIALS_FILE") or home / ".aws" / "credentials"
    key, secret = (
        bool(environment.get(name)) for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    )
    hub = Path(environment.get("HF_HOME") or home / ".cache" / "huggingface") / "token"
    found = {
        "gs://": bool(named) or full(gcloud / "application_default_credentials.json"),
        "s3://": key or bool(environment.get("AWS_PROFILE")) or full(shared_file),
        "hf hub": bool(environment.get("HF_TOKEN"))
        or full(environment.get("HF_TOKEN_PATH") or hub),
    }
    wrong: dict[str, tuple[str, str]] = {}
    if named and not Path(named).is_file():
        wrong["gs://"] = (
            f"GOOGLE_APPLICATION_CREDENTIALS names {named}, and there is no such file",
            "Correct it or unset it.",
        )
    if key and not secret:
        wrong["s3://"] = (
            "AWS_ACCESS_KEY_ID is set and AWS_SECRET_ACCESS_KEY is not",
            "Set both, or neither.",
        )
    for name, there in found.items():
        if name in wrong:
            yield Check(name, "failed", *wrong[name])
        else:
            none = "no credentials; needed only for what is private"
            yield Check(name, "ok", "credentials found" if there else none)


def extras() -> Iterator[Check]:
    """Optional parts: which are installed, and which of those are of another version."""
    by_extra: dict[str, list[Requirement]] = {}
    for requirement in (r for r in _requirements() if r.marker is not None):
        for name in importlib.metadata.metadata("toque").get_all("Provides-Extra") or []:
            marker = requirement.marker
            if name not in _NOT_FOR_USERS and marker and marker.evaluate({"extra": name}):
                by_extra.setdefault(name, []).append(requirement)
    absent = {n for n, needed in by_extra.items() if any(_version(r.name) is None for r in needed)}
    wrong = [
        said
        for needed in by_extra.values()
        for r in needed
        if _version(r.name) is not None and (said := _out_of_range(r))
    ]
    there = ", ".join(sorted(by_extra.keys() - absent)) or "none"
    found = f"installed: {there}; not: {', '.join(sorted(absent)) or 'none'}"
    if wrong:
        yield Check("extras", "warning", "; ".join(wrong), "pip install --upgrade 'toque[...]'.")
    elif by_extra:
        yield Check("extras", "ok", found)
