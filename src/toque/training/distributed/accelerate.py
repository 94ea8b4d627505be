"""Checks of a launch by Hugging Face Accelerate: missing processes and unsupported settings.

Accelerate's launcher sets environment variables (accelerate/utils/launch.py). On a CPU it starts a
single process, regardless of the requested number, unless MPI starts the processes.
"""

from __future__ import annotations

import os
from typing import Final

from toque.errors import ConfigError, argument

_MPI: Final = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
"""Variables in which Open MPI, Intel MPI and MVAPICH store the number of processes."""
_RENDEZVOUS: Final = ("MASTER_ADDR", "MASTER_PORT")
"""Variables that Accelerate sets on a CPU if several processes are requested."""
_PRECISION: Final = "ACCELERATE_MIXED_PRECISION"
_SETTINGS: Final = {
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "train.batch is the entire update, however many "
    "micro-batches it takes",
    "ACCELERATE_GRADIENT_CLIPPING": "use optim.max_grad_norm",
    "ACCELERATE_DYNAMO_BACKEND": "use train.compile=true",
    "ACCELERATE_USE_FSDP": "use train.strategy=fsdp",
    "ACCELERATE_USE_DEEPSPEED": "train.strategy=fsdp divides the weights, as ZeRO does",
    "ACCELERATE_USE_MEGATRON_LM": "train.strategy=fsdp divides the weights",
}
"""Advice about the equivalent Toque setting, by variable."""
_OFF: Final = ("", "no", "none", "false", "0")
"""Values that turn a setting off, in lower case."""
_ONE_STEP: Final = ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
"""Variable and value that mean no gradient accumulation."""


def refuse_lone_process(strategy: str) -> None:
    """Refuse to train in a process that does not know the remaining requested processes.

    Raises:
        ConfigError: MPI or Accelerate was asked for several processes.
    """
    if strategy == "single" or "WORLD_SIZE" in os.environ:
        return
    advice = (
        f"Start the processes with `toque train CONFIG {argument('gpus=2')}`, which also works "
        "without GPUs, or with `torchrun -m toque train CONFIG`. To train in one process, set "
        "train.strategy=single."
    )
    for name in _MPI:
        n_processes = os.environ.get(name, "1")
        if n_processes != "1":
            raise ConfigError(
                f"MPI started {n_processes} processes ({name}). Each would train alone, because "
                f"Toque does not use the ranks of MPI. {advice}"
            )
    if _PRECISION in os.environ and all(name in os.environ for name in _RENDEZVOUS):
        raise ConfigError(
            "`accelerate launch` should have started several processes (MASTER_ADDR and "
            "MASTER_PORT are set), but without GPUs it starts only one. This process would train "
            f"alone. {advice}"
        )


def ignored_settings(precision: str) -> list[str]:
    """List messages about Accelerate settings that a run with `precision` ignores."""
    notes = []
    setting = os.environ.get(_PRECISION, "").lower()
    if setting not in (*_OFF, precision):
        advice = "Toque does not train in it"
        if setting in ("bf16", "fp16"):
            advice = f"use train.precision={setting}"
        notes.append(f"{_PRECISION}={setting} is ignored: {advice}")
    for name, advice in _SETTINGS.items():
        value = os.environ.get(name, "").lower()
        if value not in _OFF and (name, value) != _ONE_STEP:
            notes.append(f"{name}={value} is ignored: {advice}")
    return notes
