"""The hooks that let torch differentiate tensors of a CUDA device that is not there.

Imports no torch: `install` works only in a process that has not imported it yet.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock

_SOURCE = Path(__file__).with_name("hooks.cpp")


def install() -> None:
    """Compile the hooks, once for each torch, and load them before torch is imported."""
    assert "torch" not in sys.modules, "the hooks of a fake card load before torch"
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).parent
    library = _compiled(root)
    ctypes.CDLL(str(root / "lib" / "libtorch_cpu.so"), mode=ctypes.RTLD_GLOBAL)
    answer = ctypes.CDLL(str(library)).install()
    assert answer == 1, {0: "this torch has CUDA", -1: "the hooks came too late"}[
        answer
    ]


class OnCardError(Exception):
    """An error of the process with the fake card, as text: torch's own cannot be sent."""


def run(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call `function` in this process; what it raises becomes an `OnCardError`."""
    try:
        return function(*args, **kwargs)
    except Exception as error:
        raise OnCardError(f"{type(error).__name__}: {error}") from error


def _compiled(root: Path) -> Path:
    version = (root / "version.py").read_bytes()
    name = hashlib.sha256(_SOURCE.read_bytes() + version).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"toque-fake-cuda-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / f"{name}.so"
    with FileLock(folder / f"{name}.lock"):
        if not library.exists():
            made = library.with_suffix(".new")
            subprocess.run(
                [
                    "g++", "-O1", "-fPIC", "-shared", "-std=c++20", str(_SOURCE), "-o", str(made),
                    f"-I{root}/include", f"-L{root}/lib", "-lc10", "-ltorch_cpu",
                ],
                check=True,
            )  # fmt: skip
            made.rename(library)
    return library
