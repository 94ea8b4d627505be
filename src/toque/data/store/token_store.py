"""Token store: columns of examples on disk, readable with plain numpy.

The folder of a store has three parts and its shards:

    store/manifest.json  written last
    store/split.npy      0 train, 1 validation, 255 left out (uint8 per row)
    store/tokenizer/     Hugging Face tokenizer folder

A shard has a file per column, and two files per side:

    store/shards/00000/prompt_tokens.npy  ids of all prompts, uint16 (65,536 entries) or uint32
    store/shards/00000/prompt_ends.npy    end of each row's prompt, int64
    store/shards/00000/spans_tokens.npy   `TokenStore.spans` of conversations
"""

from __future__ import annotations

import os
import stat
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from toque.data.array_types import Ints
from toque.data.store.store_manifest import StoreFile, StoreManifest, read_manifest
from toque.data.store.token_column import Ids, Pieces, TokenColumn, map_array
from toque.errors import DataError
from toque.sources.preference_pairs import PREFERRED
from toque.storage.atomic import sha256_of
from toque.storage.locks import AcquiredLock, file_lock, is_shared, shared_lock
from toque.storage.no_follow import refuse_links

if TYPE_CHECKING:
    from toque.data.tokenizer.codec import Codec

Split = Literal["train", "validation"]
SPLIT_CODES: dict[Split, int] = {"train": 0, "validation": 1}
LEFT_OUT = 255
SPANS = "spans"
LOCK = ".lock"
"""Lock file. A writer locks it exclusively, and training runs share the lock."""


class TokenStore:
    """Rows of prompt and target ids. Each file of the store is opened when it is first read."""

    def __init__(self, folder: Path, manifest: StoreManifest) -> None:
        self.path = folder
        self.manifest = manifest
        self.fingerprint = manifest.fingerprint
        self.n_rows = manifest.rows
        rows_of_shard = {f.file.split("/")[1]: f.examples for f in manifest.shards}
        self._shards = [folder / "shards" / name for name in rows_of_shard]
        # First row of each shard, then the number of all rows.
        self._bounds = [0, *accumulate(rows_of_shard.values())]
        self._files = {f.file for f in manifest.shards}

    @classmethod
    def open(cls, folder: Path | str, *, verify: bool = False) -> TokenStore:
        """Open the store at `folder`, and check its files: sizes, and with `verify` hashes."""
        folder = Path(folder)
        refuse_links(folder, DataError)
        manifest = read_manifest(folder)
        check_files(folder, [*manifest.shards, *manifest.files], verify=verify)
        store = cls(folder, manifest)
        if store._bounds[-1] != manifest.rows:
            raise DataError(
                f"{folder}/manifest.json has {manifest.rows} rows, but its shards have "
                f"{store._bounds[-1]}. It is damaged. Prepare the data again."
            )
        return store

    @property
    def prompt_lengths(self) -> NDArray[np.int32]:
        """Number of prompt tokens per row, int32 [n_rows]."""
        return self._sides[0].lengths

    @property
    def target_lengths(self) -> NDArray[np.int32]:
        """Number of target tokens per row, int32 [n_rows]."""
        return self._sides[1].lengths

    @cached_property
    def split(self) -> NDArray[np.uint8]:
        """Split of each row (0 train, 1 validation, 255 left out), uint8 [n_rows]."""
        return _read_column(self.path / "split.npy", np.dtype(np.uint8), self.n_rows)

    def rows(self, split: Split) -> Ints:
        """List the rows of a split in ascending order."""
        return np.flatnonzero(self.split == SPLIT_CODES[split])

    def wanted_rows(self, split: Split) -> Ints:
        """List the rows of a split without the rejected answers of pairs."""
        return self.pair_rows(split) if self.has_pairs else self.rows(split)

    def prompt(self, row: int, /) -> Ids:
        """Read the prompt ids of a row."""
        return self._read_row(self._sides[0], row)

    def target(self, row: int, /) -> Ids:
        """Read the target ids of a row."""
        return self._read_row(self._sides[1], row)

    def sides(self, rows: Ints) -> tuple[Pieces, Pieces]:
        """Read the prompts and targets of many rows.

        Raises:
            IndexError: A row does not exist.
        """
        if len(rows) and not 0 <= rows.min() <= rows.max() < self.n_rows:
            raise IndexError(
                f"The store has {self.n_rows} rows, but rows {rows.tolist()} were requested."
            )
        shards = (np.searchsorted(self._bounds, rows, side="right") - 1).tolist()
        prompts, targets = self._sides
        return prompts.pieces(rows, shards), targets.pieces(rows, shards)

    @property
    def has_spans(self) -> bool:
        """True for a store of conversations. Some of its target tokens may have no loss."""
        return self._spans is not None

    def spans(self, row: int, /) -> list[int]:
        """Read the lengths of a target's spans, alternately with and without loss.

        [] means that the entire target has a loss. Only conversations with several answers have
        spans.
        """
        if self._spans is None:
            return []
        lengths: list[int] = self._read_row(self._spans, row).tolist()
        return lengths

    @property
    def has_pairs(self) -> bool:
        """True for a store of preference pairs. Each pair has two adjacent rows, chosen first."""
        return PREFERRED in self.manifest.columns

    def pair_rows(self, split: Split) -> Ints:
        """List the rows of the chosen answers of a split in ascending order.

        The rejected answer of a pair is in the next row.

        Raises:
            DataError: The store has no pairs, or a chosen answer has no rejected answer.
        """
        preferred = self.column(PREFERRED)
        in_split = self.split == SPLIT_CODES[split]
        chosen = np.flatnonzero(in_split & (preferred == 1))
        rejected = np.flatnonzero(in_split & (preferred == 0))
        if 2 * len(chosen) != in_split.sum() or not np.array_equal(
            chosen + 1, rejected
        ):
            raise DataError(
                f"The store {self.path} has {split} rows that are not pairs of a chosen answer and "
                "the rejected answer after it. The store is damaged. Prepare the data again."
            )
        return chosen

    def prompt_and_answer(self, row: int, /) -> tuple[Ids, Ids]:
        """Read the prompt and answer of a row.

        The prompt of a conversation is everything before its last answer.
        """
        prompt = self.prompt(row)
        target = self.target(row)
        spans = self.spans(row)
        if not spans:
            return prompt, target
        answer_length = spans[-1]
        earlier = target[:-answer_length]
        return np.concatenate([prompt, earlier]), target[-answer_length:]

    def learnt_ids(self, row: int, /) -> Ids:
        """Read the target ids of a row that have a loss."""
        target = self.target(row)
        has_loss = np.ones(len(target), np.bool_)
        for start, stop in unlearnt_spans(self.spans(row)):
            has_loss[start:stop] = False
        ids: Ids = target[has_loss]
        return ids

    @cached_property
    def learnt_lengths(self) -> NDArray[np.int32]:
        """Number of target tokens with loss per row, int32 [n_rows]."""
        if self._spans is None:
            return self.target_lengths
        unlearnt = [_unlearnt_lengths(shard) for shard in self._shards]
        lengths: NDArray[np.int32] = self.target_lengths - np.concatenate(unlearnt)
        return lengths

    def column(self, name: str) -> NDArray[np.generic]:
        """Read a per-example column of all rows, with NaN for rows without a value.

        Raises:
            DataError: The store does not have the column, or it is damaged.
        """
        if name not in self.manifest.columns:
            raise DataError(
                f"The store {self.path} has no column {name!r}. Its columns are "
                f"{', '.join(sorted(self.manifest.columns))}."
            )
        dtype = np.dtype(self.manifest.columns[name])
        counts = np.diff(self._bounds).tolist()
        parts: list[NDArray[Any]] = [np.empty(0, dtype)]
        for shard, count in zip(self._shards, counts, strict=True):
            if f"shards/{shard.name}/{name}.npy" in self._files:
                parts.append(_read_column(shard / f"{name}.npy", dtype, count))
            else:
                parts.append(np.full(count, np.nan, np.float32))
        return np.concatenate(parts)

    def codec(self) -> Codec:
        """Load the store's codec once, and return it."""
        return self._codec

    @cached_property
    def _codec(self) -> Codec:
        from toque.data.tokenizer.codec import load_codec

        return load_codec(self.path / "tokenizer")

    def _token_column(self, name: str, dtype: np.dtype[np.generic]) -> TokenColumn:
        return TokenColumn(name, self._shards, self._bounds, dtype)

    @cached_property
    def _sides(self) -> tuple[TokenColumn, TokenColumn]:
        dtype: np.dtype[np.generic] = np.dtype(np.uint32)
        if self._shards:
            dtype = map_array(self._shards[0] / "prompt_tokens.npy").dtype
        return self._token_column("prompt", dtype), self._token_column("target", dtype)

    @cached_property
    def _spans(self) -> TokenColumn | None:
        if not self._shards:
            return None
        if f"shards/{self._shards[0].name}/{SPANS}_ends.npy" not in self._files:
            return None
        return self._token_column(SPANS, np.dtype(np.uint32))

    def _read_row(self, column: TokenColumn, row: int) -> Ids:
        """Read the ids of a row.

        Raises:
            IndexError: The row does not exist.
        """
        if not 0 <= row < self.n_rows:
            raise IndexError(
                f"The store has {self.n_rows} rows, but row {row} was requested."
            )
        return column.row(int(row), bisect_right(self._bounds, row) - 1)


def span_bounds(spans: Sequence[int]) -> list[tuple[int, int]]:
    """Convert the lengths of spans to pairs of start and stop."""
    return list(pairwise(accumulate(spans, initial=0)))


def unlearnt_spans(spans: Sequence[int]) -> list[tuple[int, int]]:
    """List the start and stop of each span without loss, from the lengths of all spans.

    >>> unlearnt_spans([6, 14, 4])
    [(6, 20)]
    """
    return span_bounds(spans)[1::2]


def _unlearnt_lengths(shard: Path) -> NDArray[np.int32]:
    """Count the target tokens without loss per row of a shard: every second span."""
    spans = map_array(shard / f"{SPANS}_tokens.npy").astype(np.int64)
    ends = map_array(shard / f"{SPANS}_ends.npy").astype(np.int64)
    n_spans = np.diff(ends, prepend=0)
    starts = np.repeat(ends - n_spans, n_spans)
    # The first span of a row has a loss, the second does not, and so on.
    has_loss = (np.arange(len(spans)) - starts) % 2 == 0
    spans[has_loss] = 0
    sums = np.append(0, spans.cumsum())
    return np.diff(sums[ends], prepend=0).astype(np.int32)


def _read_column(path: Path, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    """Read a column, and check its type and length."""
    column = map_array(path)
    if column.dtype != dtype or len(column) != count:
        raise DataError(
            f"{path} must have {count:,} numbers of type {dtype}, not {len(column):,} of type "
            f"{column.dtype}. The store is damaged. Prepare the data again."
        )
    return column


def check_files(folder: Path, entries: list[StoreFile], *, verify: bool) -> None:
    """Check the size of every file, because reading past the end of a map kills the process.

    Args:
        folder: The folder of the store.
        entries: The manifest's entries of the files to check.
        verify: Whether to check the hashes too.

    Raises:
        DataError: A file is missing, damaged or outside the folder.
    """
    again = "Restore the file, or remove the store and prepare the data again."
    inside = folder.resolve()

    # Work on text, because a `Path` for each of thousands of files takes half a second.
    paths = {entry.file: f"{folder}/{entry.file}" for entry in entries}
    parents = {path.rpartition("/")[0] for path in paths.values()}
    linked = {p for p in parents if not Path(p).resolve().is_relative_to(inside)}

    for entry in entries:
        path = paths[entry.file]
        try:
            status = os.lstat(path)
        except OSError as error:
            raise DataError(
                f"{path} is missing from the store ({error.strerror}). {again}"
            ) from error

        if not stat.S_ISREG(status.st_mode) or path.rpartition("/")[0] in linked:
            raise DataError(
                f"{path} must be a regular file in the store's folder, not a folder or a link. "
                f"{again}"
            )
        if status.st_size != entry.bytes:
            raise DataError(
                f"{path} has {status.st_size:,} bytes, but {entry.bytes:,} in the manifest. It was "
                f"truncated or replaced. {again}"
            )
        if verify and sha256_of(Path(path)) != entry.sha256:
            raise DataError(
                f"{path} has the right size but the wrong content: its SHA-256 is not "
                f"{entry.sha256[:12]}…, the hash in the manifest. {again}"
            )


@contextmanager
def pinned_store(folder: Path) -> Iterator[None]:
    """Prevent `prepare` from replacing the store.

    On a file system without locks, `refuse_replaced` detects a replaced store.
    """

    def refuse(holder: str) -> None:
        raise DataError(
            f"Process {holder} is writing the store {folder}. Wait until it has finished, then "
            "start again."
        )

    with shared_lock(folder / LOCK, refuse):
        yield


@contextmanager
def store_to_write(store: Path) -> Iterator[AcquiredLock]:
    """Lock the store, so that no other command writes it and no training run reads it."""
    lock_file = store / LOCK

    def refuse(holder: str) -> None:
        if is_shared(lock_file):
            raise DataError(
                f"{store} cannot be replaced while a run trains on it, in this or another process. "
                "Wait until the run has ended, stop it, or choose another data.store."
            )
        raise DataError(
            f"Another process is preparing {store} (id {holder}). Wait until it has ended, or "
            "choose another data.store."
        )

    with file_lock(lock_file, refuse) as lock:
        yield lock


def check_tokenizer(store: TokenStore) -> None:
    """Check that the files of the store's tokenizer equal their hashes in the manifest."""
    entries = [
        entry for entry in store.manifest.files if entry.file.startswith("tokenizer/")
    ]
    check_files(store.path, entries, verify=True)


def refuse_replaced(store: TokenStore) -> None:
    """Check that an open store was not replaced, because training still reads its columns.

    Raises:
        DataError: The store was replaced or damaged.
    """
    original = store.manifest
    try:
        current = read_manifest(store.path)
        is_same_data = current.fingerprint == original.fingerprint
        if is_same_data and current.tokenizer == original.tokenizer:
            check_tokenizer(store)
            return
        problem = f"its fingerprint is now {current.fingerprint[:12]}"
    except DataError as error:
        problem = str(error).rstrip(".")
    raise DataError(
        f"The store {store.path} was replaced while this run trained on it (its fingerprint was "
        f"{store.fingerprint[:12]}): {problem}. Nothing has been saved since the last check. "
        "Restore the store or prepare the same data again, then start the same command: the run "
        "continues from its newest checkpoint. Or begin a new run: run_dir=runs/another."
    )
