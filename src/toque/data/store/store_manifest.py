"""Manifest of a token store, `manifest.json`, with the hash of each file. It is written last."""

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
from toque.storage.json_files import KEY, add_seal, check_seal, decode_json

FORMAT = 1
"""Version of the format. It increases when older code cannot read new stores."""
NAME = "manifest.json"
# Limit on the size of untrusted manifests. A manifest of a million files is smaller.
_MAX_BYTES = 1 << 28
_SIDES = ("prompt", "target")
_COLUMN_TYPES = ("float32", "uint8", "uint16", "uint64")
_END_BYTES = 8  # bytes of an int64, the end of a row
_MAX_SHOWN = 5  # maximum number of names in a message
_PREPARE = "prepare the data again with `toque prepare CONFIG`"

Count = Annotated[int, msgspec.Meta(ge=0)]


class TokenizerEntry(msgspec.Struct, frozen=True):
    """Tokenizer of the store's ids. Its folder is `tokenizer/` in the store."""

    name: str
    sha256: str
    vocab_size: int


class StoreFile(msgspec.Struct, frozen=True):
    """File of the store."""

    file: str
    bytes: Count
    sha256: str
    examples: Count = 0
    """Number of rows in the shard or split. 0 for the tokenizer's files."""


class SourceEntry(msgspec.Struct, frozen=True):
    """Source file, with the counts of its records before duplicates and limits."""

    path: str
    reader: str
    source: int
    sha256: str
    bytes: int
    read: int
    kept: int


class TokenCounts(msgspec.Struct, frozen=True):
    """Numbers of tokens in the rows in use."""

    prompt: int
    target: int


class Splits(msgspec.Struct, frozen=True):
    """Numbers of examples in each split."""

    train: int
    validation: int


class Records(msgspec.Struct, frozen=True):
    """Counts of records. `read` is `kept` plus the sum of the manifest's `dropped`."""

    read: int
    kept: int


class StoreManifest(msgspec.Struct, frozen=True, kw_only=True):
    """Content of a store on disk."""

    format: int
    fingerprint: str
    family_kind: str
    tokenizer: TokenizerEntry
    examples: Count  # rows in use
    rows: Count  # number of all rows, including duplicates and rows beyond the limits
    tokens: TokenCounts
    splits: Splits
    records: Records
    dropped: dict[str, int]
    sources: list[SourceEntry]
    shards: list[StoreFile]
    files: list[StoreFile]  # files outside the shards: the split and the tokenizer
    columns: dict[str, str]  # numpy dtypes of the per-example columns, by name
    settings: dict[str, Any]
    # Number of sides that were cut to their limit, and of the tokens that were cut.
    cut: dict[str, int]
    self_sha256: str  # SHA-256 of this file without these digits


def read_manifest(folder: Path) -> StoreManifest:
    """Read and check the manifest of the store at `folder`.

    Raises:
        DataError: The manifest is missing, damaged, malicious or of a newer format.
    """
    path = folder / NAME
    if not path.is_file():
        if (folder / "building.json").is_file():
            raise DataError(
                f"The token store {folder} is unfinished. Finish it with `toque prepare CONFIG`."
            )
        problem = "has no manifest.json" if folder.is_dir() else "does not exist"
        raise DataError(
            f"The token store {folder} {problem}. Write it with `toque prepare CONFIG`, or correct "
            "data.store."
        )

    try:
        manifest = _decode_manifest(path)
    except (msgspec.DecodeError, OSError) as error:
        raise DataError(
            f"{path} is not the manifest of a token store: {error}. Remove it and {_PREPARE}."
        ) from error
    for problem in _find_problems(manifest):
        raise DataError(
            f"{path} {problem}. The store is damaged or malicious. Remove it and {_PREPARE}."
        )
    return manifest


def _decode_manifest(path: Path) -> StoreManifest:
    """Read a manifest, and check its size, format and hash."""
    size = path.stat().st_size
    if size > _MAX_BYTES:
        raise DataError(
            f"{path} has {size:,} bytes, but the limit is {_MAX_BYTES:,}. Remove it and {_PREPARE}."
        )
    data = path.read_bytes()
    # Check the format first, because a newer format may have other fields.
    content: Any = decode_json(data, object)
    version = content.get("format") if isinstance(content, dict) else None
    if not isinstance(version, int) or version > FORMAT:
        raise DataError(
            f"{path} has format {version!r}, but this version of toque reads formats up to "
            f"{FORMAT}. Use the version of toque that wrote the store, or {_PREPARE}."
        )
    manifest = decode_json(data, StoreManifest)
    if check_seal(data) != "whole":
        raise DataError(
            f"{path} is damaged: its {KEY} does not match. Restore it, or remove it and "
            f"{_PREPARE}."
        )
    return manifest


def _find_problems(manifest: StoreManifest) -> Iterator[str]:
    """Yield problems of an untrusted manifest: files outside the store and false numbers."""
    names = [entry.file for entry in [*manifest.shards, *manifest.files]]
    for name in names:
        leaves_folder = not {"", ".", ".."}.isdisjoint(name.split("/"))
        if leaves_folder or "\0" in name or "\\" in name:
            yield f"lists the file {name!r}, which is not in the store's folder"
    for entry in manifest.shards:
        if len(entry.file.split("/")) != 3 or not entry.file.startswith("shards/"):
            yield f"lists {entry.file!r} as a file of a shard, which must be shards/NAME/FILE"
    if repeated := sorted(name for name, count in Counter(names).items() if count > 1):
        yield f"lists {', '.join(repeated[:_MAX_SHOWN])} more than once"

    wrong = {
        name: kind
        for name, kind in manifest.columns.items()
        if kind not in _COLUMN_TYPES
    }
    if wrong:
        yield f"has columns of types other than {', '.join(_COLUMN_TYPES)}: {wrong}"

    # Arrays are allocated for the rows, so the files must be large enough for their ends.
    n_bytes = {entry.file: entry.bytes for entry in manifest.shards}
    for entry in manifest.shards:
        shard = entry.file.rpartition("/")[0]
        ends_bytes = min(n_bytes.get(f"{shard}/{side}_ends.npy", 0) for side in _SIDES)
        if entry.examples * _END_BYTES > ends_bytes:
            yield (
                f"lists {entry.examples:,} rows in {entry.file}, but the ends of the rows have "
                f"only {ends_bytes:,} bytes"
            )


def manifest_bytes(manifest: StoreManifest) -> bytes:
    """Encode a manifest as indented JSON, with its own hash last."""
    blank = msgspec.structs.replace(manifest, self_sha256="")
    content = msgspec.json.encode(blank, order="deterministic")
    return add_seal(msgspec.json.format(content, indent=1))


def form_of(readers: Iterable[str]) -> Form:
    """Derive the form of a store from the recorded names of its readers.

    If the readers have several forms, the first in this order counts: recipes, conversations,
    pairs, documents.
    """
    # A recorded name may end with an encoding, so compare its start.
    documents = (TextReader().recorded_name, TokenReader.recorded_name, DOCUMENTS)
    names = list(readers)
    others = [name for name in names if not name.startswith(documents)]
    if names and not others:
        return "documents"
    is_of_texts = [name.startswith((PAIRS, CONVERSATIONS)) for name in others]
    if not others or not all(is_of_texts):
        return "recipes"
    has_conversations = any(name.startswith(CONVERSATIONS) for name in others)
    return "conversations" if has_conversations else "pairs"
