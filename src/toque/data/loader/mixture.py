"""Mixture of sources by weight: the examples an epoch draws, without state.

A source of weight w is passed over w times an epoch: 1 is every example once, 2 twice, 0.5 half of
them, the other half in the next epoch. A source is a stream of passes, each a permutation of all
its examples; epoch e takes the positions from e * draws to (e + 1) * draws of the stream. So after
any number of epochs, two examples of a source differ by at most one in how often they were seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Final, Self, get_args

import numpy as np
from numpy.typing import NDArray

from toque.config.field_types import TaskName
from toque.config.schema import DataConfig
from toque.data.store.store_manifest import StoreManifest
from toque.data.store.token_store import TokenStore
from toque.errors import ConfigError
from toque.keyed_random import key_of, permute

Positions = NDArray[np.int64]
_PASS = 2
"""Sets these keys apart from those of the epoch's order."""
_TASKS: Final = get_args(TaskName)
"""Codes of a store's column `task`."""


@dataclass(frozen=True)
class Mixture:
    """Sources and how often an epoch passes over each.

    Args:
        source: [N] source number of each example.
        weights: passes an epoch makes over each source; positive.
        seed: of the run.
    """

    source: NDArray[np.integer]
    weights: Sequence[float]
    seed: int

    @classmethod
    def from_settings(
        cls, data: DataConfig, store: TokenStore, rows: Positions, *, seed: int
    ) -> Self | None:
        """Mixture of an epoch over `rows` of the store by the weights of sources and tasks.

        None when every example comes once. The groups of the mixture are the pairs (source, task);
        a pair's weight is the product of its source's and its task's.

        Raises:
            ConfigError: the store was made from other sources, or in another order.
        """
        weights, group = _groups(data, store, rows, rows)
        if all(weight == 1.0 for weight in weights):
            return None
        return cls(source=group, weights=weights, seed=seed)

    @cached_property
    def members(self) -> list[Positions]:
        """The examples of each source."""
        return [np.flatnonzero(self.source == number) for number in range(len(self.weights))]

    @cached_property
    def draws(self) -> list[int]:
        """Examples an epoch takes from each source; at least one where there are any.

        300 examples of weight 2 and 101 of weight 0.5:

            [600, 50]
        """
        return [
            max(1, round(weight * len(examples))) if len(examples) else 0
            for weight, examples in zip(self.weights, self.members, strict=True)
        ]

    def examples(self, positions: Positions, *, epoch: int) -> Positions:
        """The examples at `positions`, each below sum(draws), of an epoch not yet shuffled."""
        ends = np.cumsum(self.draws)
        number = np.searchsorted(ends, positions, side="right")
        out = np.empty(len(positions), np.int64)
        for source in np.unique(number).tolist():
            here = number == source
            draws, members = self.draws[source], self.members[source]
            stream = epoch * draws + positions[here] - (int(ends[source]) - draws)
            out[here] = members[self._passed_over(stream, len(members), source)]
        return out

    def in_words(self, data: DataConfig) -> str:
        """A line on what an epoch draws from each source and task."""
        n_tasks = len(_TASKS) if data.task_weights or data.task_temperature else 1
        parts = []
        for group, (members, draws) in enumerate(zip(self.members, self.draws, strict=True)):
            if not draws:
                continue
            source, task = divmod(group, n_tasks)
            named = [data.sources[source].path] if len(self.weights) > n_tasks else []
            named += [_TASKS[task]] if n_tasks > 1 else []
            weight = self.weights[group]
            parts.append(f"{' '.join(named)} {len(members):,} x {weight:.3g} = {draws:,}")
        return f"an epoch draws {sum(self.draws):,} examples: {'; '.join(parts)}"

    def _passed_over(self, stream: Positions, n: int, source: int) -> Positions:
        passes, offsets = np.divmod(stream, n)
        out = np.empty(len(stream), np.int64)
        for number in np.unique(passes).tolist():
            here = passes == number
            key = key_of(self.seed, number, source, _PASS)
            out[here] = permute(offsets[here], n=n, key=key)
        return out


def held_out_weights(data: DataConfig, store: TokenStore, rows: Positions) -> NDArray[np.float64]:
    """Passes an epoch makes over training examples of the source and task of each of `rows`.

    A held-out loss weighted so is the loss that training lowers, and can be compared with it.
    """
    weights, group = _groups(data, store, rows, store.rows("train"))
    return np.asarray(weights, float)[group]


def _groups(
    data: DataConfig, store: TokenStore, rows: Positions, trained: Positions
) -> tuple[list[float], Positions]:
    """Weights of the groups, and the group of each of `rows`; temperatures count `trained`."""
    of_sources = [source.weight for source in data.sources]
    of_tasks = [1.0]
    group = np.zeros(len(rows), np.int64)
    if any(weight != 1.0 for weight in of_sources):
        _check_sources(data, store.manifest)
        group = np.asarray(store.column("source"))[rows].astype(np.int64)
    else:
        of_sources = [1.0]
    if data.task_weights or data.task_temperature is not None:
        tasks = np.asarray(store.column("task"))
        counts = np.bincount(tasks[trained].astype(np.int64), minlength=len(_TASKS))
        of_tasks = task_weights(data, counts)
        group = group * len(_TASKS) + tasks[rows].astype(np.int64)
    return [one * other for one in of_sources for other in of_tasks], group


def task_weights(data: DataConfig, counts: Positions) -> list[float]:
    """Passes an epoch makes over each task.

    By temperature T a task of n examples has the share n^(1/T) of an epoch that is as long as
    before (Raffel et al. 2020, section 3.5.2, temperature-scaled mixing, without its limit K).

    Args:
        data: names weights or a temperature.
        counts: [tasks] training examples of each; documents and pairs count as the first.
    """
    temperature = data.task_temperature
    if temperature is None:
        return [data.task_weights.get(task, 1.0) for task in _TASKS]
    n = counts.astype(float)
    share = np.where(n > 0, n ** (1.0 / temperature), 0.0)
    drawn = n.sum() * share / share.sum() if n.sum() else n
    return [float(d / c) if c else 1.0 for d, c in zip(drawn, n, strict=True)]


def _check_sources(data: DataConfig, manifest: StoreManifest) -> None:
    """Weights belong to sources by their place in the list, so the lists must be the same."""
    asked = data.sources
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
            f"{data.store} was prepared from {len(there)} (files such as {listed}). {again}"
        )
    for number, source in enumerate(asked):
        name = Path(source.path).name
        known = any(
            any(fnmatch(part, name) for part in path.parts) for path in there.get(number, [])
        )
        if ":" not in source.path and not known:
            raise ConfigError(
                f"data.sources[{number}] is {source.path}, and source {number} of the store "
                f"{data.store} is {there[number][0]}. {again}"
            )
