"""Thresholds and advice for bottlenecks, shared by a run's warnings and the reports about it.

`hardware.processor.is_contended` has the rule for other programs. This module imports nothing slow,
because reports import it.
"""

from __future__ import annotations

from typing import Final

DATA_SHARE: Final = 0.2
"""Fraction of the time spent waiting for batches above which a run warns."""
DATA_ADVICE: Final = (
    "Keep data.store on a local disk. Leave a core to the thread that makes batches (lower "
    "OMP_NUM_THREADS by one, end other programs). If reading is slow, e.g. from a network disk, "
    "use several readers (train.readers=4). Augmentation and train.pack=false make batches more "
    "expensive"
)
SMALL_MEMORY: Final = (
    "train.gradient_checkpointing=true",
    "optim.name=adamw8bit or adafactor",
    "shorter rows (train.row_tokens, data.max_target_tokens)",
    "a smaller model, or an adapter",
)
"""Ways to save memory when a micro-batch has only one row, the cheapest first. A larger micro-batch
is halved automatically, which does not change the update."""
GRAD_NORM: Final = 5.0
"""Gradient norm before clipping above which training is probably unstable."""
GPU_BUSY: Final = 0.8
"""GPU utilisation below which the rest of the machine is the bottleneck."""
_MIN_UPDATES: Final = 30
"""Number of updates below which even a pretrained model learns little. A guess."""
RAN_OUT: Final = "ran out of memory"
"""Text that every warning about a smaller micro-batch contains. Reports search for it."""


def memory_ladder(*, checkpointing: bool, optimizer: str) -> list[str]:
    """List the ways to save memory that are not in use, the cheapest first.

    >>> memory_ladder(checkpointing=True, optimizer="adafactor")[0]
    'shorter rows (train.row_tokens, data.max_target_tokens)'
    """
    has_small_optimizer = optimizer not in {"adamw", "muon"}
    # In the order of SMALL_MEMORY. Shorter rows and smaller models are always possible.
    in_use = (checkpointing, has_small_optimizer, False, False)
    return [
        way for way, is_used in zip(SMALL_MEMORY, in_use, strict=True) if not is_used
    ]


def few_updates(updates: float | None) -> str:
    """Return a warning if a run has too few updates to teach much, else ""."""
    if updates is None or updates >= _MIN_UPDATES:
        return ""
    return (
        f"the run has only about {max(1, round(updates)):,} updates, so the model learns little: "
        "add data, train longer (train.stop_after), or make updates smaller (train.batch)"
    )
