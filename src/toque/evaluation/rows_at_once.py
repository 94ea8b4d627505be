"""Rows computed at once in an evaluation on a GPU, found by measuring: of a loss, and of texts.

A GPU computes few rows in about the time of many, up to a number that depends on the model and the
card. On a CPU the numbers are fixed: they were measured once, and depend on the processor's cache.

What is measured is remembered on this machine, so that a second evaluation, and another run with
the same model and data shape, computes the same sums in the same order, to the last bit.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import nn

from toque.evaluation.heldout_loss import HeldOut, RowsAtOnce
from toque.hardware.memory import BESIDE_TRAINING, free_bytes, peak_of
from toque.models.families import unwrapped
from toque.models.generation.engine import affordable_rows, generate
from toque.models.generation.options import GenerationOptions
from toque.reporter import Count, uncounted
from toque.storage.cache_folder import cache_folder
from toque.training.autotune.machine_cache import MachineCache, machine_facts
from toque.training.autotune.micro_batch import fastest_rows, largest_rows
from toque.version import __version__

FIRST_TEXTS: Final = 64
"""Texts written together that are tried first; fewer are never measured. A guess."""
_TRIED_TOKENS: Final = 8
"""Tokens of every text that are written in a try."""


def rows_by_measuring(
    *,
    total: int,
    guess: int,
    seconds: Callable[[int], float],
    largest: Callable[[], int],
    cache: MachineCache,
    key: Mapping[str, Any],
) -> int:
    """The number of rows at once that computes `total` of them fastest.

    It is doubled from the guess while that gains, up to what memory allows, or halved.

    Args:
        total: rows there are.
        guess: rows tried first.
        seconds: of so many rows at once.
        largest: what memory allows; asked only where nothing is remembered.
        cache: remembers.
        key: what the number depends on.
    """
    known = cache.get(key)
    if known is None:
        rows, _ = fastest_rows(seconds, update_rows=total, guess=guess, largest=largest())
        known = {"rows": rows}
        cache.put(key, known)
    return int(known["rows"])


def with_rows_at_once(
    heldout: HeldOut, model: nn.Module, on_notice: Callable[[str], object]
) -> HeldOut:
    """The same held-out loss, computing as many rows at once as are fastest on the model's device.

    `on_notice` is told where they become fewer.
    """
    return replace(heldout, at_once=RowsAtOnce(loss_rows(heldout, model), on_notice))


def loss_rows(heldout: HeldOut, model: nn.Module) -> int:
    """Rows of the held-out loss at once on a model's GPU; `rows_per_batch` on a CPU.

    Also where ranks compute together, which none of them can measure for itself.
    """
    device, guess = heldout.device, heldout.rows_per_batch
    total = -(-len(heldout.rows) // heldout.share[1])
    if device.type != "cuda" or heldout.in_step or total <= guess:
        return guess

    def compute(rows: int) -> None:
        batch = heldout.layout.batch(heldout.rows[:rows]).to(device)
        with torch.no_grad(), heldout.autocast():
            float(heldout.loss_sum(model, batch))

    def largest() -> int:
        return largest_rows(
            lambda rows: peak_of(lambda: compute(rows), device),
            update_rows=total,
            free=lambda: int(BESIDE_TRAINING * free_bytes(device)),
        )

    shape, was_training = heldout.layout.shape, model.training
    with heldout.autocast():
        key = _key(model, device, heldout.share)
    model.eval()
    try:
        return rows_by_measuring(
            total=total,
            guess=guess,
            seconds=lambda rows: _seconds(lambda: compute(rows)),
            largest=largest,
            cache=MachineCache(cache_folder("measured")),
            key=key
            | {"about": "rows of a loss", "row": [shape.source, shape.target], "rows": total},
        )
    finally:
        model.train(was_training)


def text_rows(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    eos_id: int,
    pad_id: int,
) -> int | None:
    """Texts to write together on a model's GPU; None for the engine's own number on a CPU."""
    device = unwrapped(model).device
    if device.type != "cuda" or len(prompts) <= FIRST_TEXTS:
        return None
    longest = sorted(prompts, key=len, reverse=True)
    most = affordable_rows(model, prompts, max_new_tokens)

    def compute(rows: int) -> None:
        generate(
            model,
            longest[:rows],
            GenerationOptions(max_new_tokens=min(_TRIED_TOKENS, max_new_tokens), batch_rows=rows),
            eos_id=eos_id,
            pad_id=pad_id,
        )

    rows = rows_by_measuring(
        total=len(prompts),
        guess=FIRST_TEXTS,
        seconds=lambda rows: _seconds(lambda: compute(rows)),
        largest=lambda: most,
        cache=MachineCache(cache_folder("measured")),
        key=_key(model, device, (0, 1))
        | {"about": "texts together", "texts": len(prompts), "longest": len(longest[0])},
    )
    return min(rows, most)


def write(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    eos_id: int,
    pad_id: int,
    on_notice: Callable[[str], object],
    on_progress: Count = uncounted,
) -> list[list[int]]:
    """The likeliest texts for an evaluation's prompts; see `engine.generate`."""
    rows = text_rows(model, prompts, max_new_tokens=max_new_tokens, eos_id=eos_id, pad_id=pad_id)
    return generate(
        model,
        prompts,
        GenerationOptions(max_new_tokens=max_new_tokens, batch_rows=rows),
        eos_id=eos_id,
        pad_id=pad_id,
        on_notice=on_notice,
        on_progress=on_progress,
    )


def _seconds(compute: Callable[[], None]) -> float:
    """Seconds of work that waits for its device."""
    started = time.perf_counter()
    compute()
    return time.perf_counter() - started


def _key(model: nn.Module, device: torch.device, share: tuple[int, int]) -> dict[str, Any]:
    shapes = [(name, list(p.shape), str(p.dtype)) for name, p in model.named_parameters()]
    return machine_facts(device) | {
        "toque": __version__,
        "model": hashlib.sha256(repr(shapes).encode()).hexdigest()[:16],
        "autocast": torch.is_autocast_enabled("cuda") and str(torch.get_autocast_dtype("cuda")),
        "share": [*share],
    }
