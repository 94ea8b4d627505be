"""Mismatches between a checkpoint's tensors and the model or optimizer that loads them."""

from __future__ import annotations

from collections.abc import Iterable

from toque.errors import CheckpointError


def refuse(wrong: Iterable[str], *, where: str, what: str) -> None:
    """Raise when there is anything in `wrong`.

    Raises:
        CheckpointError: naming the first few differences.
    """
    found = sorted(wrong)
    if not found:
        return
    shown = "; ".join(found[:5]) + (f"; and {len(found) - 5} more" if len(found) > 5 else "")
    raise CheckpointError(
        f"{where} does not fit {what}: {shown}. It belongs to another model or configuration; "
        "start a new run folder, or restore the configuration it was made with."
    )
