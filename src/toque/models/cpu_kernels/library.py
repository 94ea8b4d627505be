"""The C kernels beside this file, compiled when first asked for: by gcc, for AVX512-BF16, on Linux.

Compiling takes half a second and happens in a private folder that is removed at once: nothing is
kept that another program could exchange. Threads are those of torch's own OpenMP, whose file the
kernels are linked with: a second OpenMP would keep threads of its own, spinning beside torch's.
Where anything is missing the callers compute by torch's operators instead, which takes longer.
"""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Final

import torch

_SOURCES: Final = tuple(map(str, sorted(Path(__file__).parent.glob("*.c"))))
_EXTENSIONS: Final = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512bf16", "fma")
_FLAGS: Final = (
    *("-O2", "-std=gnu11", "-fPIC", "-fopenmp", "-ffp-contract=off"),
    *(f"-m{name}" for name in _EXTENSIONS),
)
_SECONDS: Final = 60
"""For gcc, which needs half of one: a file system that hangs must not hang a run."""


@cache
def library() -> ctypes.CDLL | None:
    """The kernels of this process; None where `why_not` has a reason."""
    found = _built()
    return found if isinstance(found, ctypes.CDLL) else None


def why_not() -> str | None:
    """Why there are no kernels here, for a reader; None where there are."""
    found = _built()
    return found if isinstance(found, str) else None


@cache
def _built() -> ctypes.CDLL | str:
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return "they are for Linux on x86_64"
    if not torch.cpu._is_avx512_bf16_supported():  # noqa: SLF001  # no public name
        return "the processor has no AVX512-BF16"
    openmp = next(iter(sorted(Path(torch.__file__).parent.glob("lib/libgomp*.so*"))), None)
    if openmp is None:
        return "torch has no OpenMP of GNU's beside it"
    gcc = shutil.which("gcc")
    if gcc is None:
        return "there is no gcc"
    try:
        with tempfile.TemporaryDirectory(prefix="toque-kernels-") as name:
            return _compiled(gcc, openmp, Path(name))
    except subprocess.CalledProcessError as error:
        return f"gcc failed: {error.stderr.strip()[:300]}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"compiling failed: {error}"


def _compiled(gcc: str, openmp: Path, folder: Path) -> ctypes.CDLL:
    """Compiled and loaded; the folder is not needed any longer."""
    for words in (
        [*_FLAGS, "-c", *_SOURCES],
        # Without -fopenmp, which would name the compiler's own OpenMP.
        [
            "-shared",
            *(f"{Path(name).stem}.o" for name in _SOURCES),
            str(openmp),
            "-lm",
            "-o",
            "k.so",
        ],
    ):
        subprocess.run(  # noqa: S603  # gcc and files of this package
            [gcc, *words], check=True, capture_output=True, text=True, timeout=_SECONDS, cwd=folder
        )
    return ctypes.CDLL(str(folder / "k.so"))
