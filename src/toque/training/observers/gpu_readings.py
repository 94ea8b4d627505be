"""GPU figures through NVML (nvidia-ml-py): use, memory, power, temperature, throttling.

NVML sees the GPUs of the whole machine, whichever of them this process computes on. A figure that a
card or the rights of this process do not give is None.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch

_REASONS: Final = {
    "SwPowerCap": "power cap",
    "HwSlowdown": "hardware slowdown",
    "SwThermalSlowdown": "heat",
    "HwThermalSlowdown": "heat (hardware)",
    "HwPowerBrakeSlowdown": "power brake",
}
"""Why clocks are lower than they could be, NVML's words and ours; idling is no throttling."""
_PREFIXES: Final = ("nvmlClocksEventReason", "nvmlClocksThrottleReason")
"""Prefixes of their names in NVML since driver 535, and before."""
_CORE: Final = 0
"""NVML_TEMPERATURE_GPU"""
PACKAGE: Final = "nvidia-ml-py"


class Gpus:
    """The machine's GPUs, one mapping each at every look.

    Args:
        nvml: the module `pynvml` of nvidia-ml-py, or one with its functions.

    Raises:
        Exception: what `nvml.nvmlInit` raises where the driver or the rights are missing.
    """

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        self._gpus = [(self._ask(partial(nvml.nvmlDeviceGetName, h)), h) for h in handles]
        self._bits = _reason_bits(nvml)

    def look(self) -> list[dict[str, Any]]:
        """Figures of each GPU now, in NVML's order."""
        return [self._figures(i, name, handle) for i, (name, handle) in enumerate(self._gpus)]

    def close(self) -> None:
        """Let NVML go."""
        self._ask(self._nvml.nvmlShutdown)

    def _figures(self, index: int, name: str | bytes | None, handle: Any) -> dict[str, Any]:
        nvml, ask = self._nvml, self._ask
        memory = ask(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        return {
            "index": index,
            "name": name.decode() if isinstance(name, bytes) else name,  # bytes before version 12
            "utilisation_percent": ask(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
            "memory_used_bytes": None if memory is None else int(memory.used),
            "memory_total_bytes": None if memory is None else int(memory.total),
            "power_watts": ask(lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000),
            "temperature_celsius": ask(lambda: nvml.nvmlDeviceGetTemperature(handle, _CORE)),
            "throttled": self._throttled(handle),
        }

    def _throttled(self, handle: Any) -> list[str]:
        nvml = self._nvml
        reader = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None) or getattr(
            nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", None
        )
        found = None if reader is None else self._ask(lambda: reader(handle))
        return [words for words, bit in self._bits if found is not None and found & bit]

    def _ask(self, question: Callable[[], Any]) -> Any:
        try:
            return question()
        except self._nvml.NVMLError:  # MIG, old cards and missing rights refuse some of them
            return None


def peak_memory(device: torch.device) -> dict[str, int]:
    """Field of a step event: the most bytes of a GPU that the session has allocated so far."""
    if device.type != "cuda":
        return {}
    return {"peak_memory_bytes": torch.cuda.max_memory_allocated(device)}


def no_gpus() -> tuple[None, None]:
    """Readings of a run that computes on no GPU, whatever GPUs the machine has."""
    return None, None


def gpus_here() -> tuple[Gpus | None, str | None]:
    """The GPUs of this machine, and a sentence for the user where they cannot be looked at."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None, (
            f"the package {PACKAGE} is not installed, so use, memory and heat of the GPU are not "
            "recorded: pip install 'toque[gpu]'. The run goes on"
        )
    try:
        return Gpus(nvml), None
    except Exception as error:  # noqa: BLE001 - NVMLError, and what a broken driver library raises
        return None, (
            f"the GPU's figures cannot be read ({type(error).__name__}: {error}), so they are not "
            "recorded. In a container the driver's library libnvidia-ml.so.1 and the right to "
            "read it may be missing. The run goes on"
        )


def _reason_bits(nvml: Any) -> list[tuple[str, int]]:
    return [
        (words, bit)
        for name, words in _REASONS.items()
        for bit in [
            next((getattr(nvml, p + name) for p in _PREFIXES if hasattr(nvml, p + name)), 0)
        ]
        if bit
    ]
