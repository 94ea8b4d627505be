"""Epoch plan: which examples each update sees, as a pure function of (seed, cursor).

The epoch's order is a keyed permutation of the selected examples (or of a mixture's draws from
them), cut into windows. A window's examples are packed into rows, and the rows shuffled. An update
is

* `update_rows` consecutive rows, which may span windows (a batch in tokens), or
* one window (a batch in examples: the window *is* the batch).

Neither ranks, which share the rows of an update later, nor packing changes it.

A source of weight w is passed over w times an epoch: 2 is every example twice, 0.5 half of them,
the other half in the next epoch. A source is a stream of passes, each a permutation of all its
examples; epoch e takes the positions from e * draws to (e + 1) * draws of the stream.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cached_property, lru_cache
from itertools import islice
from pathlib import PurePosixPath
from typing import Self

import numpy as np
from numpy.typing import NDArray

from toque.config.schema import DataConfig
from toque.data.loader.packing import RowShape, pack_windows
from toque.data.store.store_manifest import StoreManifest
from toque.data.store.token_column import Ids
from toque.data.store.token_store import TokenStore
from toque.errors import ConfigError
from toque.keyed_random import key_of, keys_of, permute, shuffles
from toque.units import Cursor
from toque.user_paths import named_path

WINDOW_EXAMPLES = 2048
"""Examples packed together. Of 2,048 real recipes 3 to 4 % of the computed tokens are padding, of
4,096 0.1 points less. Packing takes tens of milliseconds: the cost of finding any position."""

Packed = tuple[NDArray[np.int64], NDArray[np.int64]]  # examples in order; per row, 0 if unused

_KEPT_WINDOWS = 4
_BLOCK = 8192  # positions permuted, and examples packed, at once


@dataclass(frozen=True)
class Update:
    """The examples of one update, as store rows by packed row."""

    rows: tuple[tuple[int, ...], ...]
    cursor: Cursor  # cursor of the next update
    epoch: float  # passes over the data after this update


@dataclass
class EpochPlan:
    """The order of one selection of examples, none longer than a row, for every epoch."""

    examples: NDArray[np.int64]  # [N] store rows that take part
    source_lengths: NDArray[np.int64]  # [N] encoder-side tokens; 0 for a decoder
    target_lengths: NDArray[np.int64]  # [N] decoder-side tokens of each, as computed
    shape: RowShape
    seed: int
    update_rows: int | None  # rows an update takes, or None when an update is one window
    window: int = WINDOW_EXAMPLES
    mixture: Mixture | None = None  # draws from each source; None for every example once
    varied: Varied | None = None  # examples that change every epoch; each fits into a row

    def __post_init__(self) -> None:
        self._packed: OrderedDict[tuple[int, int], Packed] = OrderedDict()
        self.window_rows = lru_cache(_KEPT_WINDOWS)(self._window_rows)
        self._block = lru_cache(_KEPT_WINDOWS)(self._permuted_block)
        if len(self.examples) == 0:
            raise ConfigError(
                "No training example is selected from the store. Lower data.min_quality or "
                "data.validation_fraction, or prepare more data."
            )
        longest_s, longest_t = int(self.source_lengths.max()), int(self.target_lengths.max())
        if (self.shape.source and longest_s > self.shape.source) or longest_t > self.shape.target:
            source = f"{longest_s} source and " if self.shape.source else ""
            sides = f"{source}{longest_t}{' target' if source else ''}"
            raise ConfigError(
                f"train.row_tokens gives rows of {self.shape.tokens} tokens, and the longest "
                f"example has {sides} tokens. Raise train.row_tokens (or set it to auto), or lower "
                "data.max_prompt_tokens or data.max_target_tokens and prepare again."
            )

    @property
    def n_drawn(self) -> int:
        """Examples an epoch sees, repeated ones counted each time."""
        return len(self.examples) if self.mixture is None else sum(self.mixture.draws)

    @property
    def n_tokens(self) -> float:
        """Tokens an epoch computes; of a weighted source, what its draws have on average."""
        lengths = self.source_lengths + self.target_lengths
        if self.mixture is None:
            return float(lengths.sum())
        drawn = zip(self.mixture.draws, self.mixture.members, strict=True)
        return sum(n * float(lengths[members].mean()) for n, members in drawn if n)

    @property
    def amounts(self) -> dict[str, float]:
        """Epochs, steps, examples and tokens of one epoch."""
        return {
            "epochs": 1.0,
            "steps": self.updates_per_epoch(),
            "examples": float(self.n_drawn),
            "tokens": self.n_tokens,
        }

    def at(self, cursor: Cursor) -> Update:
        """The update that begins at `cursor`."""
        rows: list[tuple[int, ...]] = []
        epoch, window, row = cursor.epoch, cursor.window, cursor.row
        while True:
            here = self.window_rows(epoch, window)
            take = len(here) if self.update_rows is None else self.update_rows - len(rows)
            rows += here[row : row + take]
            row += take
            if row >= len(here):
                window, row = window + 1, 0
            # An update never spans two epochs: the last one of an epoch may be smaller.
            epoch_ends = window * self.window >= self.n_drawn
            if epoch_ends or self.update_rows is None or len(rows) == self.update_rows:
                break
        if epoch_ends:
            return Update(tuple(rows), Cursor(epoch + 1), epoch + 1.0)
        inside = (
            self._window_size(window) * row / len(self.window_rows(epoch, window)) if row else 0
        )
        passed = epoch + (window * self.window + inside) / self.n_drawn
        return Update(tuple(rows), Cursor(epoch, window, row), passed)

    def epoch_key(self, cursor: Cursor) -> int:
        """Key of the random changes to examples in the epoch of `cursor`."""
        return key_of(self.seed, cursor.epoch)

    def updates_per_epoch(self) -> float:
        """Updates in an epoch, the last of which may be smaller.

        Exact for a batch in examples, else estimated from one window.
        """
        if self.update_rows is None:
            return float(-(-self.n_drawn // self.window))
        rows = len(self.window_rows(0, 0)) * self.n_drawn / self._window_size(0)
        return float(math.ceil(rows / self.update_rows))

    def _window_rows(self, epoch: int, window: int) -> list[tuple[int, ...]]:
        """The packed rows of a window, in training order, as store rows."""
        ids, counts = self._packed_window(epoch, window)
        following = iter(ids.tolist())
        return [tuple(islice(following, count)) for count in counts.tolist() if count]

    def _packed_window(self, epoch: int, window: int) -> Packed:
        if (epoch, window) not in self._packed:
            # Many windows of a size pack at once in little more time than one, but for varied
            # examples. Windows are read in order, except when a position is searched for.
            n = 1
            if self.varied is None and (window == 0 or (epoch, window - 1) in self._packed):
                n = max(1, min(_BLOCK, self.n_drawn - window * self.window) // self.window)
            for number, packed in enumerate(self._pack(epoch, window, n), start=window):
                self._packed[epoch, number] = packed
            while len(self._packed) > _KEPT_WINDOWS + n:
                self._packed.popitem(last=False)
        return self._packed[epoch, window]

    def _pack(self, epoch: int, window: int, n: int) -> Iterable[Packed]:
        size = self._window_size(window)
        chosen = self._drawn(epoch, window * self.window, n * size)
        if self.mixture is not None:
            chosen = self.mixture.examples(chosen, epoch=epoch)
        source, target = self.source_lengths[chosen], self.target_lengths[chosen]
        if self.varied is not None:
            key = self.epoch_key(Cursor(epoch))
            source, target = self.varied.lengths(self.examples[chosen], key)
        placed = pack_windows(source.reshape(n, size), target.reshape(n, size), self.shape)
        keys = keys_of(key_of(self.seed, epoch), np.arange(window, window + n), 1)
        items, counts = placed.by_row(shuffles(placed.n_rows, keys))
        ids = self.examples[chosen].reshape(n, size)
        return zip(np.take_along_axis(ids, items, axis=1), counts, strict=True)

    def _drawn(self, epoch: int, start: int, size: int) -> NDArray[np.int64]:
        """The epoch's examples from position `start`; small windows share one permutation call."""
        first, last = start // _BLOCK, (start + size - 1) // _BLOCK
        images = np.concatenate([self._block(epoch, block) for block in range(first, last + 1)])
        return images[start - first * _BLOCK :][:size]

    def _permuted_block(self, epoch: int, block: int) -> NDArray[np.int64]:
        positions = np.arange(block * _BLOCK, min(self.n_drawn, (block + 1) * _BLOCK))
        return permute(positions, n=self.n_drawn, key=key_of(self.seed, epoch))

    def _window_size(self, window: int) -> int:
        return max(0, min(self.window, self.n_drawn - window * self.window))


Sides = tuple[Ids, Ids]
Vary = Callable[[int, int], Sides]  # (row, epoch key) -> prompt and target ids; a pure function
_KEPT = 16384  # examples in the cache: several windows


class Varied:
    """Examples after a random transform, such as augmentation or span corruption."""

    def __init__(self, vary: Vary, *, encoder: bool) -> None:
        self._encoder = encoder
        self.sides = lru_cache(_KEPT)(vary)  # (row, epoch key) -> its sides in that epoch

    def lengths(
        self, rows: NDArray[np.int64], key: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Source and target lengths, as `EpochPlan` counts them."""
        sides = [self.sides(row, key) for row in rows.tolist()]
        prompt = np.array([len(p) for p, _ in sides], np.int64)
        target = np.array([len(t) for _, t in sides], np.int64)
        return (prompt, target) if self._encoder else (0 * prompt, prompt + target - 1)

    def at(self, key: int) -> InEpoch:
        """The examples of the epoch with this key."""
        return InEpoch(self, key)


@dataclass(frozen=True)
class InEpoch:
    """The examples of one epoch."""

    varied: Varied
    key: int

    def prompt(self, row: int, /) -> Ids:
        """Prompt ids of a store row."""
        return self.varied.sides(int(row), self.key)[0]

    def target(self, row: int, /) -> Ids:
        """Target ids of a store row."""
        return self.varied.sides(int(row), self.key)[1]


Positions = NDArray[np.int64]
_PASS = 2  # sets these keys apart from those of the epoch's order


@dataclass(frozen=True)
class Mixture:
    """Sources and how often an epoch passes over each."""

    source: NDArray[np.integer]  # [N] source number of each example
    weights: Sequence[float]  # passes an epoch makes over each source; positive
    seed: int

    @classmethod
    def from_settings(
        cls, data: DataConfig, store: TokenStore, rows: Positions, *, seed: int
    ) -> Self | None:
        """Mixture by the weights of sources and tasks; None when every example comes once."""
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
        """Examples an epoch takes from each source, at least one: of 300 with weight 2, 600."""
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
        by_task = bool(data.task_weights or data.task_temperature)
        kinds = (*data.task_names, "of no task") if by_task else ("",)
        parts = []
        for group, (members, draws) in enumerate(zip(self.members, self.draws, strict=True)):
            if not draws:
                continue
            source, kind = divmod(group, len(kinds))
            named = [data.sources[source].path] if len(self.weights) > len(kinds) else []
            named += [kinds[kind]] if by_task else []
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
    """Weights of held-out rows, as of training examples like them: losses can be compared then."""
    weights, group = _groups(data, store, rows, store.rows("train"))
    return np.asarray(weights, float)[group]


def _groups(
    data: DataConfig, store: TokenStore, rows: Positions, trained: Positions
) -> tuple[list[float], Positions]:
    """Weights of the groups, and the group of each of `rows`; temperatures count `trained`."""
    of_sources = [source.weight for source in data.sources] + [1.0] * len(data.validation)
    of_tasks = [1.0]
    group = np.zeros(len(rows), np.int64)
    if any(weight != 1.0 for weight in of_sources):
        _check_sources(data, store.manifest)
        group = np.asarray(store.column("source"))[rows].astype(np.int64)
    else:
        of_sources = [1.0]
    if data.task_weights or data.task_temperature is not None:
        n_tasks = len(data.task_names)
        # Rows of no task are one kind more, of weight 1.
        tasks = np.minimum(np.asarray(store.column("task")).astype(np.int64), n_tasks)
        counts = np.bincount(tasks[trained], minlength=n_tasks)[:n_tasks]
        of_tasks = [*task_weights(data, counts), 1.0]
        group = group * (n_tasks + 1) + tasks[rows]
    return [one * other for one in of_sources for other in of_tasks], group


def task_weights(data: DataConfig, counts: Positions) -> list[float]:
    """Passes an epoch makes over each task, of which `counts` [tasks] examples are trained on.

    By temperature T a task of n examples has the share n^(1/T) of an epoch that is as long as
    before (Raffel et al. 2020, section 3.5.2, temperature-scaled mixing, without its limit K).
    """
    temperature = data.task_temperature
    if temperature is None:
        return [data.task_weights.get(task, 1.0) for task in data.task_names]
    n = counts.astype(float)
    share = np.where(n > 0, n ** (1.0 / temperature), 0.0)
    drawn = n.sum() * share / share.sum() if n.sum() else n
    return [float(d / c) if c else 1.0 for d, c in zip(drawn, n, strict=True)]


def _check_sources(data: DataConfig, manifest: StoreManifest) -> None:
    """Weights belong to sources by their place in the list, so the lists must be the same."""
    asked = (*data.sources, *data.validation)
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
        name = named_path(source.path).name or "*"  # "." is a folder of any files
        parts = [part for path in there.get(number, []) for part in path.parts]
        if ":" not in source.path and not any(fnmatch(part, name) for part in parts):
            raise ConfigError(
                f"data.sources[{number}] is {source.path}, and source {number} of the store "
                f"{data.store} is {there[number][0]}. {again}"
            )
