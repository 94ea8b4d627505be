"""Epoch plan: the examples of each update, as a pure function of the seed and the cursor.

An epoch is a random permutation of the selected examples, cut into windows. The examples of a
window are packed into rows, and the rows are shuffled. An update is

* `update_rows` consecutive rows, possibly from several windows, if the batch size is in tokens;
* a window, if the batch size is in examples.

The plan does not depend on the number of ranks. The ranks divide the rows of an update later.

With a mixture, an epoch passes w times over a source of weight w: 2 means every example twice, 0.5
means half of the examples in each of two epochs. A source is a stream of passes, and each pass is
a permutation of all its examples. Epoch e takes the positions from e * draws to (e + 1) * draws of
the stream.
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

from toque.config.schema import DataConfig
from toque.data.array_types import Floats, Ints
from toque.data.loader.packing import RowShape, computed_lengths, pack_windows
from toque.data.store.store_manifest import StoreManifest
from toque.data.store.token_column import Ids
from toque.data.store.token_store import TokenStore
from toque.errors import ConfigError
from toque.keyed_random import key_of, keys_of, permute, shuffles
from toque.units import Cursor
from toque.user_paths import named_path

WINDOW_EXAMPLES = 2048
"""Examples per window. With 2,048 recipes, 3 to 4 % of the computed tokens are padding; with 4,096
recipes, 0.1 percentage points less. It takes tens of milliseconds to pack a window, e.g. on resume.
"""

Packed = tuple[Ints, Ints]
"""Examples in row order, and the number of examples per row. Unused rows have 0 examples."""

_CACHED_WINDOWS = 4
_BLOCK = 8192  # number of examples that are permuted and packed together
_ROW_ORDER = 1  # separates the keys of row orders from the keys of epochs


@dataclass(frozen=True)
class Update:
    """Examples of an update: the store rows of each packed row."""

    rows: tuple[tuple[int, ...], ...]
    cursor: Cursor  # cursor of the next update
    epoch: float  # passes over the data after this update


@dataclass
class EpochPlan:
    """Order of a selection of examples in every epoch. Each example must fit into a row."""

    examples: Ints  # [N] store rows
    # [N] computed tokens of the encoder; 0 for a decoder.
    source_lengths: Ints
    target_lengths: Ints  # [N] number of computed decoder tokens
    shape: RowShape
    seed: int
    update_rows: int | None  # number of rows per update; None if an update is a window
    window: int = WINDOW_EXAMPLES
    mixture: Mixture | None = None  # None: an epoch has every example once
    varied: Varied | None = None  # examples that change every epoch

    def __post_init__(self) -> None:
        self._packed: OrderedDict[tuple[int, int], Packed] = OrderedDict()
        self.window_rows = lru_cache(_CACHED_WINDOWS)(self._window_rows)
        self._block = lru_cache(_CACHED_WINDOWS)(self._permute_block)
        if len(self.examples) == 0:
            raise ConfigError(
                "No training examples in the store are selected. Lower data.min_quality or "
                "data.validation_fraction, or prepare more data."
            )
        self._refuse_long_examples()

    def _refuse_long_examples(self) -> None:
        """Refuse examples that do not fit into a row."""
        longest_source = int(self.source_lengths.max())
        longest_target = int(self.target_lengths.max())
        has_source = self.shape.source > 0
        fits = longest_target <= self.shape.target
        if has_source:
            fits = fits and longest_source <= self.shape.source
        if not fits:
            longest = f"{longest_target} tokens"
            if has_source:
                longest = f"{longest_source} source and {longest_target} target tokens"
            raise ConfigError(
                f"train.row_tokens sets the row length to {self.shape.tokens} tokens, but the "
                f"longest example has {longest}. Raise train.row_tokens or set it to auto, or "
                "lower data.max_prompt_tokens or data.max_target_tokens and prepare the data again."
            )

    @property
    def n_drawn(self) -> int:
        """Number of examples per epoch. A mixture may repeat examples."""
        return len(self.examples) if self.mixture is None else sum(self.mixture.draws)

    @property
    def n_tokens(self) -> float:
        """Number of computed tokens per epoch. With a mixture, the number is an average."""
        lengths = self.source_lengths + self.target_lengths
        if self.mixture is None:
            return float(lengths.sum())
        pairs = zip(self.mixture.draws, self.mixture.members, strict=True)
        return sum(n * float(lengths[members].mean()) for n, members in pairs if n)

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
        """Plan the update at `cursor`."""
        rows: list[tuple[int, ...]] = []
        epoch = cursor.epoch
        window = cursor.window
        row = cursor.row
        while True:
            window_rows = self.window_rows(epoch, window)
            n_wanted = len(window_rows)
            if self.update_rows is not None:
                n_wanted = self.update_rows - len(rows)
            rows += window_rows[row : row + n_wanted]
            row += n_wanted
            if row >= len(window_rows):
                window += 1
                row = 0
            # An update does not span two epochs, so the last update of an epoch may be smaller.
            epoch_ends = window * self.window >= self.n_drawn
            is_full = self.update_rows is None or len(rows) == self.update_rows
            if epoch_ends or is_full:
                break

        if epoch_ends:
            return Update(tuple(rows), Cursor(epoch + 1), epoch + 1.0)
        n_seen: float = window * self.window
        if row:
            n_rows = len(self.window_rows(epoch, window))
            n_seen += self._window_size(window) * row / n_rows
        next_cursor = Cursor(epoch, window, row)
        return Update(tuple(rows), next_cursor, epoch + n_seen / self.n_drawn)

    def epoch_key(self, cursor: Cursor) -> int:
        """Return the key of random changes to examples in the epoch of `cursor`."""
        return key_of(self.seed, cursor.epoch)

    def updates_per_epoch(self) -> float:
        """Count the updates per epoch. If the batch size is in tokens, this is an estimate."""
        if self.update_rows is None:
            return float(-(-self.n_drawn // self.window))
        # Assume that all windows have as many rows per example as the first.
        rows = len(self.window_rows(0, 0)) * self.n_drawn / self._window_size(0)
        return float(math.ceil(rows / self.update_rows))

    def _window_rows(self, epoch: int, window: int) -> list[tuple[int, ...]]:
        """List the store rows of each packed row of a window, in training order."""
        ids, counts = self._packed_window(epoch, window)
        ids_left = iter(ids.tolist())
        return [tuple(islice(ids_left, count)) for count in counts.tolist() if count]

    def _packed_window(self, epoch: int, window: int) -> Packed:
        """Return a window from the cache. If it is missing, pack it and possibly the next ones."""
        if (epoch, window) not in self._packed:
            n = self._count_to_pack(epoch, window)
            for number, packed in enumerate(self._pack(epoch, window, n), start=window):
                self._packed[epoch, number] = packed
            while len(self._packed) > _CACHED_WINDOWS + n:
                self._packed.popitem(last=False)
        return self._packed[epoch, window]

    def _count_to_pack(self, epoch: int, window: int) -> int:
        """Choose the number of windows to pack together.

        Packing many windows together takes little longer than packing one, unless examples vary.
        Pack ahead if windows are read in order, but not if a run resumes.
        """
        is_in_order = window == 0 or (epoch, window - 1) in self._packed
        if self.varied is not None or not is_in_order:
            return 1
        n_left = self.n_drawn - window * self.window
        return max(1, min(_BLOCK, n_left) // self.window)

    def _pack(self, epoch: int, window: int, n: int) -> Iterable[Packed]:
        """Pack `n` consecutive windows of equal size, and shuffle their rows."""
        size = self._window_size(window)
        index = self._shuffled_positions(epoch, window * self.window, n * size)
        if self.mixture is not None:
            index = self.mixture.examples_at(index, epoch=epoch)
        ids = self.examples[index]

        epoch_key = self.epoch_key(Cursor(epoch))
        if self.varied is None:
            source = self.source_lengths[index]
            target = self.target_lengths[index]
        else:
            source, target = self.varied.lengths(ids, epoch_key)
        placement = pack_windows(
            source.reshape(n, size), target.reshape(n, size), self.shape
        )

        keys = keys_of(epoch_key, np.arange(window, window + n), _ROW_ORDER)
        row_order = shuffles(placement.n_rows, keys)
        examples, counts = placement.sort_by_row(row_order)
        sorted_ids = np.take_along_axis(ids.reshape(n, size), examples, axis=1)
        return zip(sorted_ids, counts, strict=True)

    def _shuffled_positions(self, epoch: int, start: int, size: int) -> Ints:
        """List `size` positions of the unshuffled epoch in shuffled order, from index `start`.

        Small windows share a permuted block.
        """
        first = start // _BLOCK
        last = (start + size - 1) // _BLOCK
        blocks = [self._block(epoch, block) for block in range(first, last + 1)]
        return np.concatenate(blocks)[start - first * _BLOCK :][:size]

    def _permute_block(self, epoch: int, block: int) -> Ints:
        indices = np.arange(block * _BLOCK, min(self.n_drawn, (block + 1) * _BLOCK))
        return permute(indices, n=self.n_drawn, key=key_of(self.seed, epoch))

    def _window_size(self, window: int) -> int:
        """Count the examples of a window. The last window may be smaller."""
        return max(0, min(self.window, self.n_drawn - window * self.window))


Sides = tuple[Ids, Ids]
Vary = Callable[[int, int], Sides]
"""Pure function of a store row and an epoch key that returns the prompt and target ids."""
_CACHED_EXAMPLES = 16384  # several windows


class Varied:
    """Examples with random changes per epoch, such as augmentation or span corruption."""

    def __init__(self, vary: Vary, *, encoder: bool) -> None:
        self._encoder = encoder
        self.sides = lru_cache(_CACHED_EXAMPLES)(vary)

    def lengths(self, rows: Ints, key: int) -> tuple[Ints, Ints]:
        """Compute source and target lengths as `EpochPlan` counts them."""
        sides = [self.sides(row, key) for row in rows.tolist()]
        prompt = np.array([len(p) for p, _ in sides], np.int64)
        target = np.array([len(t) for _, t in sides], np.int64)
        return computed_lengths(prompt, target, encoder=self._encoder)

    def for_epoch(self, key: int) -> EpochExamples:
        """Return the examples of the epoch with this key."""
        return EpochExamples(self, key)


@dataclass(frozen=True)
class EpochExamples:
    """Varied examples of one epoch."""

    varied: Varied
    key: int

    def prompt(self, row: int, /) -> Ids:
        """Return the prompt ids of a store row."""
        return self.varied.sides(int(row), self.key)[0]

    def target(self, row: int, /) -> Ids:
        """Return the target ids of a store row."""
        return self.varied.sides(int(row), self.key)[1]


Positions = Ints
_PASS = 2  # separates these keys from the keys of epochs


@dataclass(frozen=True)
class Mixture:
    """Groups of examples by source and task, and the number of passes per epoch over each group."""

    group: Positions  # [N] group of each example
    weights: Sequence[float]  # passes per epoch over each group; positive
    seed: int

    @classmethod
    def for_rows(
        cls, data: DataConfig, store: TokenStore, rows: Positions, *, seed: int
    ) -> Self | None:
        """Create the mixture of store rows. None if an epoch has every example once."""
        weights, group = _weigh_groups(data, store, rows, rows)
        if all(weight == 1.0 for weight in weights):
            return None
        return cls(group=group, weights=weights, seed=seed)

    @cached_property
    def members(self) -> list[Positions]:
        """Indices of the examples of each group."""
        return [
            np.flatnonzero(self.group == number) for number in range(len(self.weights))
        ]

    @cached_property
    def draws(self) -> list[int]:
        """Number of examples per epoch from each group, at least one if the group is not empty."""
        return [
            max(1, round(weight * len(examples))) if len(examples) else 0
            for weight, examples in zip(self.weights, self.members, strict=True)
        ]

    def examples_at(self, positions: Positions, *, epoch: int) -> Positions:
        """Look up the examples at positions below `sum(draws)` in the unshuffled epoch."""
        ends = np.cumsum(self.draws)
        group = np.searchsorted(ends, positions, side="right")
        examples = np.empty(len(positions), np.int64)
        for number in np.unique(group).tolist():
            is_member = group == number
            draws = self.draws[number]
            members = self.members[number]
            # The epoch continues in the group's stream of passes at the end of the previous epoch.
            offset = int(ends[number]) - draws
            stream = epoch * draws + positions[is_member] - offset
            index = self._permute_passes(stream, len(members), number)
            examples[is_member] = members[index]
        return examples

    def describe(self, data: DataConfig) -> str:
        """Describe in one line how many examples an epoch takes from each source and task."""
        has_tasks = bool(data.task_weights or data.task_temperature)
        tasks = (*data.task_names, "of no task") if has_tasks else ("",)
        has_sources = len(self.weights) > len(tasks)
        parts = []
        for group, draws in enumerate(self.draws):
            if not draws:
                continue
            # The index of a group is source * number of tasks + task, see `_weigh_groups`.
            source, task = divmod(group, len(tasks))
            names = [data.sources[source].path] if has_sources else []
            if has_tasks:
                names.append(tasks[task])
            n_members = len(self.members[group])
            weight = self.weights[group]
            parts.append(f"{' '.join(names)} {n_members:,} x {weight:.3g} = {draws:,}")
        return f"an epoch draws {sum(self.draws):,} examples: {'; '.join(parts)}"

    def _permute_passes(self, stream: Positions, n: int, group: int) -> Positions:
        """Map positions in a group's stream of passes to its `n` members."""
        passes, offsets = np.divmod(stream, n)
        members = np.empty(len(stream), np.int64)
        for number in np.unique(passes).tolist():
            in_pass = passes == number
            key = key_of(self.seed, number, group, _PASS)
            members[in_pass] = permute(offsets[in_pass], n=n, key=key)
        return members


def held_out_weights(data: DataConfig, store: TokenStore, rows: Positions) -> Floats:
    """Weigh held-out rows like the training examples of their group, for comparable losses."""
    weights, group = _weigh_groups(data, store, rows, store.rows("train"))
    return np.asarray(weights, float)[group]


def _weigh_groups(
    data: DataConfig, store: TokenStore, rows: Positions, train_rows: Positions
) -> tuple[list[float], Positions]:
    """Compute the weight of each group, and the group of each of `rows`.

    A group is a pair of a source and a task. Its index is source * number of tasks + task, and its
    weight is the product of both weights. The weights of a temperature depend on the counts of
    `train_rows`.
    """
    source_weights, source = _weigh_sources(data, store, rows)
    weights_of_tasks, task = _weigh_tasks(data, store, rows, train_rows)
    group = source * len(weights_of_tasks) + task
    weights = [
        source_weight * task_weight
        for source_weight in source_weights
        for task_weight in weights_of_tasks
    ]
    return weights, group


def _weigh_sources(
    data: DataConfig, store: TokenStore, rows: Positions
) -> tuple[list[float], Positions]:
    """Return the weight of each source, and the source of each of `rows`.

    If all weights are 1, all rows count as one source.
    """
    weights = [source.weight for source in data.sources]
    weights += [1.0 for _ in data.validation]  # these sources have no weight
    if all(weight == 1.0 for weight in weights):
        return [1.0], np.zeros(len(rows), np.int64)
    _check_sources(data, store.manifest)
    return weights, np.asarray(store.column("source"))[rows].astype(np.int64)


def _weigh_tasks(
    data: DataConfig, store: TokenStore, rows: Positions, train_rows: Positions
) -> tuple[list[float], Positions]:
    """Return the weight of each task, and the task of each of `rows`.

    Without weights of tasks, all rows count as one task.
    """
    if not data.task_weights and data.task_temperature is None:
        return [1.0], np.zeros(len(rows), np.int64)
    n_tasks = len(data.task_names)
    # Rows without a task count as one more task, of weight 1.
    task = np.minimum(np.asarray(store.column("task")).astype(np.int64), n_tasks)
    counts = np.bincount(task[train_rows], minlength=n_tasks)[:n_tasks]
    return [*task_weights(data, counts), 1.0], task[rows]


def task_weights(data: DataConfig, counts: Positions) -> list[float]:
    """Compute the passes per epoch over each task from the tasks' example `counts` [tasks].

    With temperature T, the share of a task with n examples is proportional to n^(1/T), and an epoch
    keeps its length (temperature-scaled mixing without the limit K, Raffel et al. 2020, section
    3.5.2).
    """
    temperature = data.task_temperature
    if temperature is None:
        return [data.task_weights.get(task, 1.0) for task in data.task_names]
    n = counts.astype(float)
    if not n.sum():
        return [1.0 for _ in n]
    share = np.where(n > 0, n ** (1.0 / temperature), 0.0)
    draws = n.sum() * share / share.sum()
    return [float(d / c) if c else 1.0 for d, c in zip(draws, n, strict=True)]


def _check_sources(data: DataConfig, manifest: StoreManifest) -> None:
    """Check that the store was prepared from the configured sources in the same order."""
    sources = (*data.sources, *data.validation)
    store_paths: dict[int, list[PurePosixPath]] = {}
    for entry in manifest.sources:
        store_paths.setdefault(entry.source, []).append(PurePosixPath(entry.path))
    todo = (
        "Weights apply to sources by their position, so list the sources of the store in the same "
        "order, or prepare the data again."
    )
    if len(store_paths) != len(sources):
        examples = "; ".join(str(paths[0]) for _, paths in sorted(store_paths.items()))
        raise ConfigError(
            f"data.sources has weights for {len(sources)} sources, but the store {data.store} was "
            f"prepared from {len(store_paths)} (files such as {examples}). {todo}"
        )
    for number, source in enumerate(sources):
        if ":" in source.path:  # not a path on this machine, so names may differ
            continue
        pattern = named_path(source.path).name or "*"  # "." is a folder of any files
        parts = [part for path in store_paths.get(number, []) for part in path.parts]
        if not any(fnmatch(part, pattern) for part in parts):
            raise ConfigError(
                f"data.sources[{number}] is {source.path}, but source {number} of the store "
                f"{data.store} is {store_paths[number][0]}. {todo}"
            )
