"""Weights of the configuration's sources to a mixture, checked against the store."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray

from toque.config import RunConfig
from toque.data.manifest import StoreManifest
from toque.data.mixing import Mixture
from toque.data.plan import EpochPlan
from toque.data.store import TokenStore
from toque.errors import ConfigError


def mixture_of(config: RunConfig, store: TokenStore, rows: NDArray[np.int64]) -> Mixture | None:
    """How often an epoch draws from each source; None when all weights are 1.

    Args:
        config: its sources carry the weights.
        store: made from those sources.
        rows: store rows to train on.

    Raises:
        ConfigError: the store was made from other sources, or in another order.
    """
    weights = [source.weight for source in config.data.sources]
    if all(weight == 1.0 for weight in weights):
        return None
    _check_sources(config, store.manifest)
    source = np.asarray(store.column("source"))[rows].astype(np.int64)
    return Mixture(source=source, weights=weights, seed=config.seed)


def mixture_in_words(config: RunConfig, plan: EpochPlan) -> str:
    """A line on what an epoch draws from each source; "" without weights."""
    if plan.mixture is None:
        return ""
    parts = [
        f"{source.path} {len(members):,} x {source.weight:g} = {draws:,}"
        for source, members, draws in zip(
            config.data.sources, plan.mixture.members, plan.mixture.draws, strict=True
        )
    ]
    return f"an epoch draws {plan.n_drawn:,} examples: {'; '.join(parts)}\n"


def _check_sources(config: RunConfig, manifest: StoreManifest) -> None:
    """Weights belong to sources by their place in the list, so the lists must be the same."""
    asked = config.data.sources
    there: dict[int, list[PurePosixPath]] = {}
    for entry in manifest.sources:
        there.setdefault(entry.source, []).append(PurePosixPath(entry.path))
    listed = "; ".join(str(paths[0]) for _, paths in sorted(there.items()))
    again = (
        "Weights belong to sources by their place in data.sources, so list there what the store "
        "was prepared from, in that order, or prepare again."
    )
    if len(there) != len(asked):
        raise ConfigError(
            f"data.sources gives weights to {len(asked)} sources, and the store "
            f"{config.data.store} was prepared from {len(there)} (files such as {listed}). {again}"
        )
    for number, source in enumerate(asked):
        name = Path(source.path).name
        known = any(
            any(fnmatch(part, name) for part in path.parts) for path in there.get(number, [])
        )
        if ":" not in source.path and not known:
            raise ConfigError(
                f"data.sources[{number}] is {source.path}, and source {number} of the store "
                f"{config.data.store} is {there[number][0]}. {again}"
            )
