"""Hugging Face Accelerate: processes that it did not start, and settings of it that are not read.

Its launcher passes settings on as variables of the environment (accelerate/utils/launch.py). On a
CPU it starts one process whatever number of processes it is given, unless MPI is to start them.
"""

from __future__ import annotations

import os
from typing import Final

from toque.errors import ConfigError, argument

_MPI: Final = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
"""Numbers of processes as Open MPI, Intel MPI and MVAPICH give them; their ranks are not read."""
_MEETING: Final = ("MASTER_ADDR", "MASTER_PORT")
"""Where processes meet; on a CPU Accelerate sets both if it was told to start several."""
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
"""Settings with the same effect in Toque, by variable."""
_OFF: Final = ("", "no", "none", "false", "0")  # values that change nothing, in small letters
_ONE_STEP: Final = ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")  # nor does this


def refuse_lone_process(strategy: str) -> None:
    """Refuse to train alone in a process that was to be one of several; `single` does so anyway."""
    if strategy == "single" or "WORLD_SIZE" in os.environ:
        return
    starts = (
        f"Start them with `toque train CONFIG {argument('gpus=2')}`, which takes a machine without "
        "GPUs too, or with `torchrun -m toque train CONFIG`. To train in one "
        "process set train.strategy=single."
    )
    for name in _MPI:
        if os.environ.get(name, "1") != "1":
            raise ConfigError(
                f"MPI started {os.environ[name]} processes ({name}), and each would train alone: "
                f"the ranks of MPI are not read. {starts}"
            )
    if _PRECISION in os.environ and all(name in os.environ for name in _MEETING):
        raise ConfigError(
            "`accelerate launch` was told to start several processes (it set MASTER_ADDR and "
            "MASTER_PORT) and started one, as it does without GPUs. This process would train "
            f"alone. {starts}"
        )


def unread_settings(precision: str) -> list[str]:
    """Sentences about settings of Accelerate that a run of this train.precision does not follow."""
    notes = []
    wanted = os.environ.get(_PRECISION, "").lower()
    if wanted not in (*_OFF, precision):
        known = wanted in ("bf16", "fp16")
        how = f"use train.precision={wanted}" if known else "Toque does not train in it"
        notes.append(f"{_PRECISION}={wanted} is not read: {how}")
    for name, how in _SETTINGS.items():
        value = os.environ.get(name, "").lower()
        if value not in _OFF and (name, value) != _ONE_STEP:
            notes.append(f"{name}={value} is not read: {how}")
    return notes
