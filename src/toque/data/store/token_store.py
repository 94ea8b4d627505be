"""Token store: columns of examples on disk, readable with plain numpy.

What lies in its folder:

    store/manifest.json                   written last; a folder without it is no store
    store/shards/00000/prompt_tokens.npy  uint16 (vocabularies up to 65,536) or uint32, joined
    store/shards/00000/prompt_ends.npy    int64: where each row's prompt ends
    store/shards/00000/target_tokens.npy, target_ends.npy, and one file per column
    store/shards/00000/spans_tokens.npy, spans_ends.npy   of conversations: see `TokenStore.spans`
    store/split.npy                       uint8 per row: 0 train, 1 validation, 255 left out
    store/tokenizer/                      a Hugging Face tokenizer folder
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
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from toque.data.store.store_manifest import StoreFile, StoreManifest, read_manifest
from toque.data.store.token_column import Pieces, TokenColumn, mapped_array
from toque.errors import DataError
from toque.storage.atomic import sha256_of
from toque.storage.locks import AcquiredLock, file_lock, is_shared, shared_lock
from toque.storage.no_follow import refuse_links

if TYPE_CHECKING:
    from toque.data.tokenizer.codec import Codec

Split = Literal["train", "validation"]
SPLIT_CODES: dict[Split, int] = {"train": 0, "validation": 1}
LEFT_OUT = 255
SPANS: Final = "spans"
LOCK: Final = ".lock"  # held alone by who writes the store, and together by those who train on it


class TokenStore:
    """Rows of prompt and target ids; `TokenStore.open` makes one. Files open when first read."""

    def __init__(self, folder: Path, manifest: StoreManifest) -> None:
        self.path = folder
        self.manifest = manifest
        self.fingerprint = manifest.fingerprint
        self.n_rows = manifest.rows
        rows_of = {f.file.split("/")[1]: f.examples for f in manifest.shards}
        self._shards = list(rows_of)
        counts = np.array(list(rows_of.values()), np.int64)
        self._starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        self._bounds = self._starts.tolist()
        self._files = {f.file for f in manifest.shards}

    @classmethod
    def open(cls, folder: Path | str, *, verify: bool = False) -> TokenStore:
        """The store at `folder`; every file's size is checked, with `verify` its hash too."""
        folder = Path(folder)
        refuse_links(folder, DataError)
        manifest = read_manifest(folder)
        check_files(folder, [*manifest.shards, *manifest.files], verify=verify)
        store = cls(folder, manifest)
        if int(store._starts[-1]) != manifest.rows:
            raise DataError(
                f"{folder}/manifest.json speaks of {manifest.rows} rows and lists shards with "
                f"{int(store._starts[-1])}. It is damaged; prepare the data again."
            )
        return store

    @property
    def prompt_lengths(self) -> NDArray[np.int32]:
        """Prompt tokens of every row, int32 [n_rows]."""
        return self._sides[0].lengths

    @property
    def target_lengths(self) -> NDArray[np.int32]:
        """Target tokens of every row, int32 [n_rows]."""
        return self._sides[1].lengths

    @cached_property
    def split(self) -> NDArray[np.uint8]:
        """0 train, 1 validation, 255 left out; uint8 [n_rows]."""
        return _numbers(self.path / "split.npy", np.dtype(np.uint8), self.n_rows)

    def rows(self, split: Split) -> NDArray[np.int64]:
        """Rows of a split, ascending."""
        return np.flatnonzero(self.split == SPLIT_CODES[split])

    def prompt(self, row: int, /) -> NDArray[np.generic]:
        """Prompt ids of a row, read-only."""
        return self._sides[0].row(int(row), self._shard_of(int(row)))

    def target(self, row: int, /) -> NDArray[np.generic]:
        """Target ids of a row, read-only."""
        return self._sides[1].row(int(row), self._shard_of(int(row)))

    def sides(self, rows: NDArray[np.int64]) -> tuple[Pieces, Pieces]:
        """Prompts and targets of many rows; IndexError where one is not there."""
        if len(rows) and not 0 <= rows.min() <= rows.max() < self.n_rows:
            raise IndexError(f"rows {rows.tolist()} of a store with {self.n_rows} rows")
        shards = [0] * len(rows)
        if len(self._shards) > 1:
            shards = (np.searchsorted(self._starts, rows, side="right") - 1).tolist()
        prompts, targets = self._sides
        return prompts.pieces(rows, shards), targets.pieces(rows, shards)

    @property
    def has_spans(self) -> bool:
        """True if the store holds conversations, of whose targets a part may only be read."""
        return self._spans is not None

    def spans(self, row: int, /) -> list[int]:
        """Lengths of what is learnt of a row's target and of what is only read, in turns.

        [] where all of it is learnt, as everywhere but in conversations of several answers.
        """
        found = None if self._spans is None else self._spans.row(int(row), self._shard_of(int(row)))
        return [] if found is None else [int(n) for n in found]

    def asked(self, row: int, /) -> tuple[NDArray[np.generic], NDArray[np.generic]]:
        """Prompt and answer of a row; of a conversation, all before its last answer, and that."""
        prompt, target = self.prompt(row), self.target(row)
        if not (spans := self.spans(row)):
            return prompt, target
        return np.concatenate([prompt, target[: -spans[-1]]]), target[-spans[-1] :]

    def learnt(self, row: int, /) -> NDArray[np.generic]:
        """Target ids of a row that are learnt."""
        target, is_learnt = self.target(row), np.ones(int(self.target_lengths[row]), np.bool_)
        for first, behind in only_read(self.spans(row)):
            is_learnt[first:behind] = False
        found: NDArray[np.generic] = target[is_learnt]
        return found

    @cached_property
    def learnt_lengths(self) -> NDArray[np.int32]:
        """Target tokens of every row that are learnt, int32 [n_rows]."""
        lengths = self.target_lengths
        if self._spans is None:
            return lengths
        read = [self._read_tokens(index) for index in range(len(self._shards))]
        found: NDArray[np.int32] = lengths - np.concatenate([np.empty(0, np.int32), *read])
        return found

    def _read_tokens(self, shard: int) -> NDArray[np.int32]:
        """Tokens of each target of a shard that are only read: every other span's."""
        spans = mapped_array(self._shard(shard) / f"{SPANS}_tokens.npy").astype(np.int64)
        ends = mapped_array(self._shard(shard) / f"{SPANS}_ends.npy").astype(np.int64)
        starts = np.repeat(ends - np.diff(ends, prepend=0), np.diff(ends, prepend=0))
        spans[(np.arange(len(spans)) - starts) % 2 == 0] = 0
        sums = np.append(0, spans.cumsum())
        return np.diff(sums[ends], prepend=0).astype(np.int32)

    def column(self, name: str) -> NDArray[np.generic]:
        """A per-example column of all rows; NaN where a row's source has no such number."""
        if name not in self.manifest.columns:
            raise DataError(
                f"The store {self.path} has no column {name!r}; it has "
                f"{', '.join(sorted(self.manifest.columns))}."
            )
        dtype, counts = np.dtype(self.manifest.columns[name]), np.diff(self._starts).tolist()
        parts = [
            _numbers(self._shard(i) / f"{name}.npy", dtype, counts[i])
            if f"shards/{shard}/{name}.npy" in self._files
            else np.full(counts[i], np.nan, np.float32)
            for i, shard in enumerate(self._shards)
        ]
        return np.concatenate([np.empty(0, dtype), *parts])

    def codec(self) -> Codec:
        """The tokenizer of the ids, loaded once."""
        return self._codec

    @cached_property
    def _codec(self) -> Codec:
        from toque.data.tokenizer.codec import load_codec

        return load_codec(self.path / "tokenizer")

    def _shard(self, index: int) -> Path:
        return self.path / "shards" / self._shards[index]

    @cached_property
    def _sides(self) -> tuple[TokenColumn, TokenColumn]:
        shards = [self._shard(index) for index in range(len(self._shards))]
        first = shards[0] / "prompt_tokens.npy" if shards else None
        dtype = np.dtype(np.uint32) if first is None else mapped_array(first).dtype
        prompts = TokenColumn("prompt", shards, self._bounds, dtype)
        return prompts, TokenColumn("target", shards, self._bounds, dtype)

    @cached_property
    def _spans(self) -> TokenColumn | None:
        shards = [self._shard(index) for index in range(len(self._shards))]
        if not shards or f"shards/{self._shards[0]}/{SPANS}_ends.npy" not in self._files:
            return None
        return TokenColumn(SPANS, shards, self._bounds, np.dtype(np.uint32))

    def _shard_of(self, row: int) -> int:
        if not 0 <= row < self.n_rows:
            raise IndexError(f"row {row} of a store with {self.n_rows} rows")
        return bisect_right(self._bounds, row) - 1


def places_of(spans: Sequence[int]) -> list[tuple[int, int]]:
    """First id of each span of a target and the place behind its last, learnt and read in turns."""
    return list(pairwise(accumulate(spans, initial=0)))


def only_read(spans: Sequence[int]) -> list[tuple[int, int]]:
    """Places of a target that are read and not learnt.

    >>> only_read([6, 14, 4])
    [(6, 20)]
    """
    return places_of(spans)[1::2]


def _numbers(path: Path, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    found = mapped_array(path)
    if found.dtype != dtype or len(found) != count:
        raise DataError(
            f"{path} holds {len(found):,} numbers of {found.dtype} where the store has {count:,} "
            f"rows and writes {dtype}. The store is damaged; prepare the data again."
        )
    return found


def check_files(folder: Path, entries: list[StoreFile], *, verify: bool) -> None:
    """Check every file's size, with `verify` its hash: reading past a map's end kills a process."""
    again = "Restore the file, or remove the store and prepare the data again."
    inside = folder.resolve()
    # Of thousands of files in hundreds of folders; a `Path` for each would take half a second.
    places = {entry.file: f"{folder}/{entry.file}" for entry in entries}
    parents = {place.rpartition("/")[0] for place in places.values()}
    linked = {p for p in parents if not Path(p).resolve().is_relative_to(inside)}
    for entry in entries:
        path = places[entry.file]
        try:
            found = os.lstat(path)
        except OSError as error:
            raise DataError(
                f"{path} is missing from the store ({error.strerror}). {again}"
            ) from error
        if not stat.S_ISREG(found.st_mode) or path.rpartition("/")[0] in linked:
            raise DataError(
                f"{path} is not a plain file of the store: a link, or a folder in its place. A "
                f"store's files lie in its own folder. {again}"
            )
        if found.st_size != entry.bytes:
            raise DataError(
                f"{path} has {found.st_size:,} bytes where the manifest says {entry.bytes:,}: it "
                f"was cut short or replaced. {again}"
            )
        if verify and sha256_of(Path(path)) != entry.sha256:
            raise DataError(
                f"{path} has the right size and the wrong content: its SHA-256 is not the "
                f"manifest's {entry.sha256[:12]}…. {again}"
            )


@contextmanager
def held_store(folder: Path) -> Iterator[None]:
    """Keep `prepare` from replacing the store; `refuse_replaced` helps where there are no locks."""

    def refuse(holder: str) -> None:
        raise DataError(
            f"The store {folder} is being written by process {holder}: start again when it is done."
        )

    with shared_lock(folder / LOCK, refuse):
        yield


@contextmanager
def store_to_write(store: Path) -> Iterator[AcquiredLock]:
    """Hold the store's lock, so that two commands do not write one store."""
    lock = store / LOCK

    def refuse(holder: str) -> None:
        if is_shared(lock):
            raise DataError(
                f"{store} cannot be replaced now: a run trains on it, in another process or in "
                "this one. Wait for it to end, stop it, or choose another data.store."
            )
        raise DataError(
            f"Another process is preparing {store} (id {holder}). Wait for it to end, or choose "
            "another data.store."
        )

    with file_lock(lock, refuse) as held:
        yield held


def check_tokenizer(store: TokenStore) -> None:
    """Compare the files of the store's tokenizer with its manifest."""
    words = [entry for entry in store.manifest.files if entry.file.startswith("tokenizer/")]
    check_files(store.path, words, verify=True)


def refuse_replaced(store: TokenStore) -> None:
    """Raise if the folder of an open store holds another one now: columns are read by and by."""
    try:
        found, own = read_manifest(store.path), store.manifest
        if (found.fingerprint, found.tokenizer) == (own.fingerprint, own.tokenizer):
            check_tokenizer(store)
            return
        now = f"it holds another one now ({found.fingerprint[:12]})"
    except DataError as error:
        now = str(error).rstrip(".")
    raise DataError(
        f"The store {store.path} was replaced while this run trained on it (it began with "
        f"{store.fingerprint[:12]}): {now}. Nothing was saved since it was last seen whole. Put "
        "the store back, or prepare the same data again, and start the same command: the run goes "
        "on from its newest checkpoint. Or begin a new run: run_dir=runs/another."
    )
