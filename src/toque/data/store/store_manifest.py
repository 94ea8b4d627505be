"""Store manifest: `manifest.json`, written last, with a checksum of every file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec

from toque.errors import DataError
from toque.models.loading.provenance import Form
from toque.sources.conversations import CONVERSATIONS
from toque.sources.documents import DOCUMENTS, PAIRS, TextReader
from toque.sources.token_arrays import TokenReader
from toque.storage.json_files import KEY, decode_json, seal_of, sealed

FORMAT = 1  # format version; goes up when older code could not read a newly written store
NAME = "manifest.json"
_MOST_BYTES = 1 << 28  # more than of a million files; a crafted one must not make us read more
_SIDES = ("prompt", "target")
_COLUMN_TYPES = ("float32", "uint8", "uint16", "uint64")
_END_BYTES = 8  # bytes of an int64 that says where a row ends

Count = Annotated[int, msgspec.Meta(ge=0)]


class TokenizerEntry(msgspec.Struct, frozen=True):
    """The tokenizer whose ids the store holds; its folder is `tokenizer/` in the store."""

    name: str
    sha256: str
    vocab_size: int


class StoreFile(msgspec.Struct, frozen=True):
    """One file of the store; `examples` is the rows it describes, 0 when it has none."""

    file: str
    bytes: Count
    sha256: str
    examples: Count = 0


class SourceEntry(msgspec.Struct, frozen=True):
    """One source file and what became of its records (before duplicates and limits)."""

    path: str
    reader: str
    source: int
    sha256: str
    bytes: int
    read: int
    kept: int


class TokenCounts(msgspec.Struct, frozen=True):
    """Tokens of the rows in use."""

    prompt: int
    target: int


class Splits(msgspec.Struct, frozen=True):
    """Examples in each split."""

    train: int
    validation: int


class Records(msgspec.Struct, frozen=True):
    """Records met and used; `read == kept + sum of the manifest's dropped`."""

    read: int
    kept: int


class StoreManifest(msgspec.Struct, frozen=True, kw_only=True):
    """The contract of a store on disk; of its `rows`, `examples` are in use, the rest left out."""

    format: int
    fingerprint: str
    family_kind: str
    tokenizer: TokenizerEntry
    examples: Count
    rows: Count
    tokens: TokenCounts
    splits: Splits
    records: Records
    dropped: dict[str, int]
    sources: list[SourceEntry]
    shards: list[StoreFile]
    files: list[StoreFile]  # files outside the shards: the split and the tokenizer
    columns: dict[str, str]  # per-example columns and their numpy dtypes
    settings: dict[str, Any]
    cut: dict[str, int]  # sides cut to their limit and tokens lost by it
    self_sha256: str  # SHA-256 of this file's bytes with these digits left out


def read_manifest(folder: Path) -> StoreManifest:
    """The manifest of the store at `folder`; DataError for none, a damaged or a newer one."""
    path, again = folder / NAME, "write the store again with `toque prepare CONFIG`"
    if (folder / "building.json").is_file() and not path.is_file():
        raise DataError(
            f"{folder} holds an unfinished token store; finish it with `toque prepare CONFIG`."
        )
    if not path.is_file():
        how = f"{folder} holds no token store (no {NAME})"
        how = how if folder.is_dir() else f"There is no token store at {folder}"
        raise DataError(f"{how}. Write one with `toque prepare CONFIG`, or correct data.store.")
    try:
        if (size := path.stat().st_size) > _MOST_BYTES:
            raise DataError(f"{path} has {size:,} bytes, too many. Remove it, and {again}.")
        data = path.read_bytes()
        found: Any = decode_json(data, object)
        version = found.get("format") if isinstance(found, dict) else None
        if not isinstance(found, dict) or not isinstance(version, int) or version > FORMAT:
            raise DataError(
                f"{path} is of format {version!r}; this toque reads up to {FORMAT}. Use the toque "
                "that wrote it or a newer one, or prepare the data again."
            )
        manifest = decode_json(data, StoreManifest)
        if seal_of(data) != "whole":
            raise DataError(
                f"{path} is damaged: its {KEY} does not fit. Restore it, or remove it and {again}."
            )
    except (msgspec.DecodeError, OSError) as error:
        raise DataError(
            f"{path} is not a token store's description: {error}. Remove it, and {again}."
        ) from error
    for fault in _faults(manifest):
        raise DataError(f"{path} {fault}. The store is damaged or made to harm: prepare it again.")
    return manifest


def _faults(manifest: StoreManifest) -> Iterator[str]:
    """Faults of a manifest, which may come from anyone: foreign files, false numbers."""
    names = [entry.file for entry in [*manifest.shards, *manifest.files]]
    for name in names:
        if not {"", ".", ".."}.isdisjoint(name.split("/")) or "\0" in name or "\\" in name:
            yield f"names the file {name!r}; only files in the store's own folder are allowed"
    for entry in manifest.shards:
        if len(entry.file.split("/")) != 3 or not entry.file.startswith("shards/"):
            yield f"names {entry.file!r} as a shard's file, which is shards/NAME/FILE"
    if doubled := sorted(name for name, count in Counter(names).items() if count > 1):
        yield f"lists {', '.join(doubled[:5])} more than once"
    wrong = {name: kind for name, kind in manifest.columns.items() if kind not in _COLUMN_TYPES}
    if wrong:
        yield f"has columns of other types than {', '.join(_COLUMN_TYPES)}: {wrong}"
    ends = {e.file: e.bytes for e in manifest.shards if e.file.endswith("_ends.npy")}
    for entry in manifest.shards:
        rooms = [ends.get(f"{entry.file.rpartition('/')[0]}/{side}_ends.npy", 0) for side in _SIDES]
        if entry.examples * _END_BYTES > min(rooms):
            yield (
                f"speaks of {entry.examples:,} rows in {entry.file}, and the files that say where "
                f"they end have {min(rooms):,} bytes"
            )


def manifest_bytes(manifest: StoreManifest) -> bytes:
    """The manifest's file content: indented JSON, keys in the declared order, its own hash last."""
    blank = msgspec.structs.replace(manifest, self_sha256="")
    return sealed(msgspec.json.format(msgspec.json.encode(blank, order="deterministic"), indent=1))


def form_of(readers: Iterable[str]) -> Form:
    """The form by readers' recorded names: recipes if there are any, then conversations, pairs."""
    # An encoding that was given stands behind the name.
    texts = (TextReader().recorded_name, TokenReader.recorded_name, DOCUMENTS)
    names = list(readers)
    others = [name for name in names if not name.startswith(texts)]
    if names and not others:
        return "documents"
    if not others or not all(name.startswith((PAIRS, CONVERSATIONS)) for name in others):
        return "recipes"
    talks = any(name.startswith(CONVERSATIONS) for name in others)
    return "conversations" if talks else "pairs"
