"""Mixture of sources and tasks by weight, assembled and checked against the store."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray

from toque.config import RunConfig
from toque.cooking.prompts import TASKS
from toque.data.loader.curriculum import StagedPlan
from toque.data.loader.epoch_plan import EpochPlan
from toque.data.loader.mixture import Mixture
from toque.data.store.manifest import StoreManifest
from toque.data.store.token_store import TokenStore
from toque.errors import ConfigError


def mixture_of(config: RunConfig, store: TokenStore, rows: NDArray[np.int64]) -> Mixture | None:
    """How often an epoch over `rows` of the store draws from each source and task.

    None when every example comes once.

    The groups of the mixture are the pairs (source, task); a pair's weight is the product of its
    source's and its task's.

    Raises:
        ConfigError: the store was made from other sources, or in another order.
    """
    weights, group = _groups(config, store, rows, rows)
    if all(weight == 1.0 for weight in weights):
        return None
    return Mixture(source=group, weights=weights, seed=config.seed)


def held_out_weights(
    config: RunConfig, store: TokenStore, rows: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Passes an epoch makes over training examples of the source and task of each of `rows`.

    A held-out loss weighted so is the loss that training lowers, and can be compared with it.
    """
    weights, group = _groups(config, store, rows, store.rows("train"))
    return np.asarray(weights, float)[group]


def _groups(
    config: RunConfig, store: TokenStore, rows: NDArray[np.int64], trained: NDArray[np.int64]
) -> tuple[list[float], NDArray[np.int64]]:
    """Weights of the groups, and the group of each of `rows`; temperatures count `trained`."""
    of_sources = [source.weight for source in config.data.sources]
    of_tasks = [1.0]
    group = np.zeros(len(rows), np.int64)
    if any(weight != 1.0 for weight in of_sources):
        _check_sources(config, store.manifest)
        group = np.asarray(store.column("source"))[rows].astype(np.int64)
    else:
        of_sources = [1.0]
    if config.data.task_weights or config.data.task_temperature is not None:
        tasks = np.asarray(store.column("task"))
        counts = np.bincount(tasks[trained].astype(np.int64), minlength=len(TASKS))
        of_tasks = task_weights(config, counts)
        group = group * len(TASKS) + tasks[rows].astype(np.int64)
    return [one * other for one in of_sources for other in of_tasks], group


def task_weights(config: RunConfig, counts: NDArray[np.int64]) -> list[float]:
    """Passes an epoch makes over each task of `TASKS`.

    By temperature T a task of n examples has the share n^(1/T) of an epoch that is as long as
    before (Raffel et al. 2020, section 3.5.2, temperature-scaled mixing, without its limit K).

    Args:
        config: names weights or a temperature.
        counts: [tasks] training examples of each; documents and pairs count as the first.
    """
    temperature = config.data.task_temperature
    if temperature is None:
        return [config.data.task_weights.get(task, 1.0) for task in TASKS]
    n = counts.astype(float)
    share = np.where(n > 0, n ** (1.0 / temperature), 0.0)
    drawn = n.sum() * share / share.sum() if n.sum() else n
    return [float(d / c) if c else 1.0 for d, c in zip(drawn, n, strict=True)]


def mixture_in_words(config: RunConfig, plan: EpochPlan | StagedPlan) -> str:
    """A line on what an epoch draws from each source and task; "" without weights."""
    if isinstance(plan, StagedPlan):  # each has its own; the first speaks for them
        plan = plan.stages[0]
    if plan.mixture is None:
        return ""
    mixture, parts = plan.mixture, []
    n_tasks = len(TASKS) if config.data.task_weights or config.data.task_temperature else 1
    for group, (members, draws) in enumerate(zip(mixture.members, mixture.draws, strict=True)):
        if not draws:
            continue
        source, task = divmod(group, n_tasks)
        named = [config.data.sources[source].path] if len(mixture.weights) > n_tasks else []
        named += [TASKS[task]] if n_tasks > 1 else []
        weight = mixture.weights[group]
        parts.append(f"{' '.join(named)} {len(members):,} x {weight:.3g} = {draws:,}")
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
