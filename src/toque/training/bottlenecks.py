"""Rules of bottlenecks that a run warns of, and that the reports about a run share.

`hardware.processor.is_contended` has the rule for other programs. This module imports nothing slow,
because reports need it.
"""

from __future__ import annotations

from typing import Final

DATA_SHARE: Final = 0.2
"""Largest share of the time that may go into waiting for batches without a warning."""
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
"""Ways to save memory if a micro-batch is a single row, the cheapest first. Before that, a run
halves its micro-batch automatically, and the update stays the same."""
GRAD_NORM: Final = 5.0
"""Gradient norm before clipping above which a run is probably not learning steadily."""
GPU_BUSY: Final = 0.8
"""Share of the time below which a GPU is not busy, because the rest of the machine is slower."""
_MIN_UPDATES: Final = 30
"""Fewer updates teach a model from scratch nothing, and a pretrained model little. A guess."""
RAN_OUT: Final = "ran out of memory"
"""Text that every warning about a smaller micro-batch contains. Reports search for it."""


def memory_ladder(*, checkpointing: bool, optimizer: str) -> list[str]:
    """List the ways to save memory, in order, except the ways that are already in use.

    >>> memory_ladder(checkpointing=True, optimizer="adafactor")[0]
    'shorter rows (train.row_tokens, data.max_target_tokens)'
    """
    has_small_optimizer = optimizer not in {"adamw", "muon"}
    in_use = (checkpointing, has_small_optimizer, False, False)
    return [
        way for way, is_used in zip(SMALL_MEMORY, in_use, strict=True) if not is_used
    ]


def few_updates(updates: float | None) -> str:
    """Return a warning if a run has too few updates to teach much, else ""."""
    if updates is None or updates >= _MIN_UPDATES:
        return ""
    return (
        f"the run has about {max(1, round(updates)):,} updates, which teach little: give more "
        "data, train longer (train.stop_after), or make updates smaller (train.batch)"
    )
