"""Distributed evaluation: text samples and peak FLOPS of all ranks of a run together."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from torch import nn

from toque.errors import Interrupted
from toque.evaluation.heldout_loss import LEFT
from toque.evaluation.text_samples import Sample, Sampler
from toque.reporter import Count, uncounted
from toque.training.distributed.collectives import Ranks
from toque.training.peak_flops import Peak


def sample_on_all_ranks(
    sampler: Sampler, model: nn.Module, ranks: Ranks, on_progress: Count = uncounted
) -> list[Sample]:
    """One sample for each prompt, in their order; each rank writes every n-th of them.

    Raises:
        Interrupted: `on_progress` raised it, on any rank.
    """
    own = replace(sampler, prompts=sampler.prompts[ranks.rank :: ranks.world_size])
    n = len(sampler.prompts)

    def count(done: int, total: int, share: float | None = None) -> None:
        on_progress(round(n * done / max(1, total)), n, share)  # the others do about as many

    written: list[dict[str, Any]] | None = None
    with suppress(Interrupted):
        written = [asdict(sample) for sample in own(model, count)]
    shares = ranks.all_gather(written)
    found: list[Sample | None] = [None] * len(sampler.prompts)
    for rank, share in enumerate(shares):
        if share is None:
            raise Interrupted(LEFT)
        found[rank :: ranks.world_size] = [Sample(**sample) for sample in share]
    return [sample for sample in found if sample is not None]


def total_peak(peak: Peak, ranks: Ranks) -> Peak:
    """What all ranks together could reach, each on a device of its own."""
    if not ranks.is_distributed:
        return peak
    origin = f"{ranks.world_size} ranks of {peak.flops_per_second:.3g}; {peak.origin}"
    return Peak(peak.flops_per_second * ranks.world_size, origin)


def rank_summary(ranks: Ranks, device: str, rows: int, strategy: str) -> str:
    """A shared run's first line, with the `rows` of a rank in an update; "" for one process."""
    if not ranks.is_distributed:
        return ""
    library = "nccl" if device.startswith("cuda") else "gloo"
    return (
        f"{ranks.world_size} ranks over {library} share each update by {strategy}, about {rows} of "
        "its rows each\n"
    )
