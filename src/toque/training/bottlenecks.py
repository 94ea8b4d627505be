"""Bottleneck rules that a run warns by while it trains, and that its verdict is told by afterwards.

Loads nothing heavy: reports read them, too. What other programs take is judged by
`hardware.processor.contended`.
"""

from __future__ import annotations

from typing import Final

DATA_SHARE: Final = 0.2  # share of the time that may go into waiting for batches before a run warns
DATA_ADVICE: Final = (
    "Keep data.store on a local disk; leave a core to the thread that makes batches "
    "(OMP_NUM_THREADS one lower, other programs ended), or where reading waits, as on a network "
    "disk, have several (train.readers=4); augmentation and train.pack=false make batches dearer"
)
SMALL_MEMORY: Final = (
    "train.gradient_checkpointing=true",
    "optim.name=adamw8bit or adafactor",
    "shorter rows (train.row_tokens, data.max_target_tokens)",
    "a smaller model, or an adapter",
)
"""Ways to need less memory once a micro-batch is a single row, the cheapest first (by default a run
halves the rows at once by itself, and the update stays the same)."""
GRAD_NORM: Final = 5.0
"""A gradient norm that stays above it before clipping is no sign of a run that learns steadily."""
GPU_BUSY: Final = 0.8
"""Share of the time in which a GPU computes, below which the rest of the machine holds it up."""
_FEW_UPDATES: Final = 30
"""A guess: with fewer a model from scratch learns next to nothing, and a trained one little."""
RAN_OUT: Final = "ran out of memory"
"""Words in every warning of an update that is computed again with fewer rows."""


def memory_ladder(*, checkpointing: bool, optimizer: str) -> list[str]:
    """Steps to try when one row does not fit, in order, without those that are set already.

    >>> memory_ladder(checkpointing=True, optimizer="adafactor")[0]
    'shorter rows (train.row_tokens, data.max_target_tokens)'
    """
    taken = [checkpointing, optimizer not in {"adamw", "muon"}, False, False]
    return [lever for lever, done in zip(SMALL_MEMORY, taken, strict=True) if not done]


def few_updates(updates: float | None) -> str:
    """A sentence about a run of so few updates that it teaches little; "" for others."""
    if updates is None or updates >= _FEW_UPDATES:
        return ""
    return (
        f"the run has about {max(1, round(updates)):,} updates, which teach little: give more "
        "data, train longer (train.stop_after), or make updates smaller (train.batch)"
    )
