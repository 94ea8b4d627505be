"""Devices: selection of a device that can compute, or an error with the reason."""

from __future__ import annotations

import os
import platform
import warnings
from typing import Final

import torch

from toque.errors import ConfigError

# Torch reads the first of these variables that is set.
_ALLOCATORS: Final = (
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_HIP_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
)
# Values of CUDA_VISIBLE_DEVICES that hide every GPU.
_HIDING: Final = (
    "",
    "-1",
    "NoDevFiles",
)
# torch's messages on a machine without a GPU. Any other message means that a GPU fails.
_NO_GPU: Final = (
    "Found no NVIDIA driver", "GPUs are available", "might not have a CUDA gpu",
    "Cannot re-initialize CUDA",  # in a child of a process that has found no GPU
)  # fmt: skip
_UNTRIED: Final = {
    "mps": "Apple's GPU",
    "xpu": "Intel's GPU",
    "meta": "a device without numbers",
}
_WITHOUT: Final = "CUDA_VISIBLE_DEVICES= before the command continues on the processor"


def settle_cuda() -> None:
    """Set the variables that CUDA reads once, unless the user did. Call it before CUDA is used."""
    # Torch reads it at the first matmul. Deterministic updates raise an error without it.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Expandable segments fragment less. Windows drivers before R615 fail (pytorch 192330).
    is_windows = "microsoft" in platform.release().lower()
    if not is_windows and not any(name in os.environ for name in _ALLOCATORS):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def device_named(name: str, *, local_rank: int | None = None) -> torch.device:
    """Return the device of a setting. auto is the GPU (of each rank) if there is one, else the CPU.

    Raises:
        ConfigError: The device does not exist, cannot compute, or was never tested with Toque.
    """
    settle_cuda()
    cuda_available = torch.cuda.is_available()
    why, fails = ("", False) if cuda_available else no_gpu()
    if name == "auto":
        if fails:
            raise ConfigError(
                f"A GPU is there, and torch {torch.__version__} cannot use it: {why}. Update the "
                f"driver, or install a build of torch that it is new enough for; {_WITHOUT}."
            )
        gpu = "cuda" if local_rank is None else f"cuda:{local_rank}"
        name = gpu if cuda_available else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(
            f"{name!r} is not a device. Use auto, cpu, cuda or cuda:N."
        ) from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"Device {name} is {_UNTRIED.get(device.type, 'of a kind that torch knows')}, and no "
            "loss or text of Toque's was ever computed on one and compared, so that it might be "
            "wrong without a word. Use cpu, or an NVIDIA GPU: auto, cuda or cuda:N."
        )
    if device.type == "cuda":
        count = torch.cuda.device_count() if cuda_available else 0
        if (device.index or 0) >= count:
            why = (
                f": {why}. Use cpu"
                if why
                else ". Use a lower number (each rank needs its own)"
            )
            raise ConfigError(
                f"Device {name} was asked for and torch sees {count} CUDA devices{why}, or auto."
            )
        if refused := unusable(device):
            raise ConfigError(f"{refused}; {_WITHOUT}.")
    return device


def no_gpu() -> tuple[str, bool]:
    """Find the reason why torch sees no GPU, and whether there is a GPU with a failing driver."""
    if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        return f"torch {torch.__version__} is a build without CUDA", False
    if (hidden := os.environ.get("CUDA_VISIBLE_DEVICES")) in _HIDING:
        return f"CUDA_VISIBLE_DEVICES is {hidden!r}, which hides every GPU", False
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        words = str(error).partition(". ")[0]
        return words, not any(message in words for message in _NO_GPU)
    return "none answers", False


def unusable(device: torch.device) -> str:
    """Find the reason why a CUDA device cannot compute, with advice. Return "" if it can."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch prints a dozen lines about such devices
        name = torch.cuda.get_device_name(device)
        capability = torch.cuda.get_device_capability(device)
    codes = [
        code
        for code in torch.cuda.get_arch_list()
        if code.startswith(("sm_", "compute_"))
    ]
    if codes and not any(_runs_on(capability, code) for code in codes):
        major, minor = capability
        return (
            f"{name} needs kernels for sm_{major}{minor}, and torch {torch.__version__} has them "
            f"for {', '.join(codes)}. Install a build of torch that has them (those for CUDA 12.6 "
            "go back to sm_50), or choose another GPU by CUDA_VISIBLE_DEVICES"
        )
    try:
        torch.cuda.mem_get_info(device)
    except RuntimeError as error:  # in exclusive use, or out of memory
        first = str(error).partition("\n")[0]
        return f"{name} cannot be opened: {first}. `nvidia-smi` lists the programs that use it"
    return ""


def _runs_on(card: tuple[int, int], code: str) -> bool:
    """Check whether a GPU runs or compiles code of an architecture.

    The rules are in CUDA's guide, 3.1.2 to 3.1.4.

    >>> _runs_on((8, 9), "sm_86"), _runs_on((8, 6), "sm_89"), _runs_on((12, 0), "compute_90")
    (True, False, True)
    """
    kind, _, number = code.partition("_")
    major, minor = divmod(int(number.rstrip("af")), 10)
    return (major, minor) <= card and (kind == "compute" or major == card[0])
