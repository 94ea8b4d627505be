"""Devices: selection of a device that can compute, or an error with the reason."""

from __future__ import annotations

import os
import platform
import warnings
from typing import Final, NamedTuple

import torch

from toque.errors import ConfigError

# Torch reads the first of these variables that is set.
_ALLOCATORS: Final = (
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_HIP_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
)
# Values of CUDA_VISIBLE_DEVICES that hide every GPU.
_HIDING: Final = ("", "-1", "NoDevFiles")
# torch's messages on a machine without a GPU. Any other message means that a GPU fails.
_NO_GPU: Final = (
    "Found no NVIDIA driver", "GPUs are available", "might not have a CUDA gpu",
    "Cannot re-initialize CUDA",  # in a child of a process that has found no GPU
)  # fmt: skip
_UNTESTED: Final = {
    "mps": "an Apple GPU",
    "xpu": "an Intel GPU",
    "meta": "a device without data",
}
_CPU_HINT: Final = "To use the CPU, write CUDA_VISIBLE_DEVICES= before the command."


def set_cuda_variables() -> None:
    """Set the variables that CUDA reads once, unless the user set them.

    Call it before CUDA is used.
    """
    # Torch reads this variable at the first matmul. Deterministic algorithms need it.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Expandable segments fragment less. Windows drivers before R615 fail (pytorch 192330).
    is_windows = "microsoft" in platform.release().lower()
    if not is_windows and not any(name in os.environ for name in _ALLOCATORS):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def device_named(name: str, *, local_rank: int | None = None) -> torch.device:
    """Return the device of a setting, such as "cpu" or "cuda:1".

    "auto" is the first GPU, or the GPU of the local rank. Without a GPU it is the CPU.

    Raises:
        ConfigError: The device does not exist, cannot compute, or is not tested with Toque.
    """
    set_cuda_variables()
    if name == "auto":
        name = _automatic_device(local_rank)
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(
            f"{name!r} is not a device. Use auto, cpu, cuda or cuda:N."
        ) from None
    if device.type == "cuda":
        _check_cuda_device(device)
    elif device.type != "cpu":
        description = _UNTESTED.get(device.type, "a device type that torch supports")
        raise ConfigError(
            f"Device {name} is {description}. Toque is not tested on it, so losses and texts might "
            "be wrong. Use cpu, or an NVIDIA GPU: auto, cuda or cuda:N."
        )
    return device


def _automatic_device(local_rank: int | None) -> str:
    """Name the GPU of a rank, or the CPU without a GPU. A failing GPU is a ConfigError."""
    if torch.cuda.is_available():
        return "cuda" if local_rank is None else f"cuda:{local_rank}"
    reason, has_failing_gpu = why_no_gpu()
    if has_failing_gpu:
        raise ConfigError(
            f"torch {torch.__version__} cannot use this machine's GPU: {reason}. Update the "
            f"driver, or install a torch build that supports the driver. {_CPU_HINT}"
        )
    return "cpu"


def _check_cuda_device(device: torch.device) -> None:
    """Raise a ConfigError if a CUDA device does not exist or cannot compute."""
    if not torch.cuda.is_available():
        reason, _ = why_no_gpu()
        raise ConfigError(
            f"Device {device} is not available: {reason}. Use cpu or auto."
        )
    count = torch.cuda.device_count()
    if (device.index or 0) >= count:
        raise ConfigError(
            f"Device {device} does not exist: torch finds {count} CUDA devices. Use a lower index, "
            "or auto. Each rank needs its own device."
        )
    if problem := why_unusable(device):
        raise ConfigError(f"{problem}. {_CPU_HINT}")


class NoGpu(NamedTuple):
    """Reason why torch finds no GPU."""

    reason: str
    has_failing_gpu: bool = False
    """True if a GPU exists but fails."""


def why_no_gpu() -> NoGpu:
    """Return the reason why torch finds no GPU."""
    if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        return NoGpu(f"torch {torch.__version__} is a build without CUDA")
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden in _HIDING:
        return NoGpu(f"CUDA_VISIBLE_DEVICES is {hidden!r}, which hides every GPU")
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        message = str(error).partition(". ")[0]
        has_failing_gpu = not any(known in message for known in _NO_GPU)
        return NoGpu(message, has_failing_gpu)
    return NoGpu("CUDA reports no device")


def why_unusable(device: torch.device) -> str:
    """Describe why a CUDA device cannot compute, with advice. Return "" if it can compute."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch prints a dozen lines about such devices
        name = torch.cuda.get_device_name(device)
        capability = torch.cuda.get_device_capability(device)
    architectures = [
        architecture
        for architecture in torch.cuda.get_arch_list()
        if architecture.startswith(("sm_", "compute_"))  # not AMD's "gfx942"
    ]
    is_supported = any(_runs_on(capability, each) for each in architectures)
    if architectures and not is_supported:
        major, minor = capability
        return (
            f"{name} needs kernels for sm_{major}{minor}, but torch {torch.__version__} has only "
            f"kernels for {', '.join(architectures)}. Install a torch build with these kernels "
            "(builds for CUDA 12.6 go back to sm_50), or select another GPU with "
            "CUDA_VISIBLE_DEVICES"
        )
    try:
        torch.cuda.mem_get_info(device)
    except RuntimeError as error:  # in exclusive use, or out of memory
        first_line = str(error).partition("\n")[0]
        return (
            f"{name} cannot be opened: {first_line}. `nvidia-smi` lists the programs "
            "that use it"
        )
    return ""


def _runs_on(capability: tuple[int, int], architecture: str) -> bool:
    """Check whether a GPU runs or compiles code of an architecture.

    The rules are in the CUDA Programming Guide, 3.1.2 to 3.1.4.

    >>> _runs_on((8, 9), "sm_86"), _runs_on((8, 6), "sm_89"), _runs_on((12, 0), "compute_90")
    (True, False, True)
    """
    kind, _, number = architecture.partition("_")
    major, minor = divmod(int(number.rstrip("af")), 10)
    if (major, minor) > capability:
        return False
    # "compute" is intermediate code. Machine code runs only on GPUs with the same major number.
    return kind == "compute" or major == capability[0]
