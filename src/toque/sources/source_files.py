"""Source files: those that paths, patterns and saved data sets name, their checksums and blocks."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from toque.errors import DataError
from toque.sources.records import Block, Located, RecordReader, Source
from toque.storage.atomic import sha256_of
from toque.storage.bucket import is_remote

GROUP_BYTES = 8 << 20  # raw bytes per shard: about 6,000 recipes
_GZIP = b"\x1f\x8b"
_DOCUMENTATION = re.compile(
    r"(?:readme|licen[cs]e|copying|copyright|notice|change(?:s|log)|history|news|authors|credits"
    r"|contribut(?:ors|ing)|code[_-]of[_-]conduct|citation|security|install)"
    r"(?:[_-][\w-]*)?(?:\.(?:md|rst|txt|adoc|html?|cff))?|.*\.(?:md|markdown|rst|adoc)",
    re.IGNORECASE,
)
PREFIX = "hf:"
_LONGEST_NAME = 200  # bytes; a file system refuses 256 with an error of its own


@dataclass(frozen=True)
class SourceFile:
    """One file to read."""

    path: Path
    name: str  # its name in reports and errors: its path, or the address it was fetched from
    source: int
    reader: RecordReader
    sha256: str
    bytes: int


def find_files(sources: Sequence[Source]) -> list[SourceFile]:
    """The files of all sources in order, hashed; each must be there, readable and not empty."""
    if not sources:
        raise DataError("data.sources is empty. Name at least one file, folder or pattern.")
    files: list[SourceFile] = []
    for number, source in enumerate(sources):
        for file in source.files if source.files is not None else located(source.path):
            reader = source.readers.get(file.name, source.reader)
            try:
                size, digest = file.path.stat().st_size, file.sha256 or sha256_of(file.path)
            except OSError as error:
                raise DataError(
                    f"The source {file.name} cannot be read ({error.strerror}). Check data.sources "
                    "and the file's permissions."
                ) from error
            if size == 0:
                raise DataError(
                    f"The source {file.name} is empty (0 bytes). Fetch it again, or take it out of "
                    "data.sources."
                )
            files.append(SourceFile(file.path, file.name, number, reader, digest, size))
    return files


def is_documentation(name: str) -> bool:
    """True if a file is documentation by its name: README.md, LICENSE, CHANGELOG.txt, notes.rst."""
    return _DOCUMENTATION.fullmatch(name.rpartition("/")[2]) is not None


def located(pattern: str) -> tuple[Located, ...]:
    """The files that a source's path names: itself, those of a folder, a pattern or a data set."""
    if pattern.startswith(PREFIX):
        return dataset_files(pattern)
    saved = saved_files(Path(pattern).expanduser())
    paths = _files_of(pattern) if saved is None else saved
    return tuple(Located(str(path), path) for path in paths)


def _files_of(pattern: str) -> list[Path]:
    path = Path(pattern).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        inside = path.rglob("*")
        found = [p for p in inside if "/." not in f"/{p.relative_to(path).as_posix()}"]
        lacks = f"The source folder {path} holds no files. Correct data.sources."
    else:
        anchor = Path(path.anchor)
        found = list(anchor.glob(str(path.relative_to(anchor))))
        lacks = f"No file matches the source {pattern!r}. Correct data.sources."
    if path.is_dir() or any(sign in pattern for sign in "*?["):
        if found := sorted(p for p in found if p.is_file()):
            return found
        raise DataError(lacks)
    near = sorted(p.name for p in path.parent.iterdir())[:8] if path.parent.is_dir() else []
    beside = f" Beside it: {', '.join(near)}." if near else ""
    raise DataError(
        f"There is no source file {path}. Give a file, a folder or a pattern such as "
        f'"recipes/*.jsonl.gz" in data.sources.{beside}'
    )


def is_here(path: str) -> bool:
    """True if a source can be read on this machine without fetching anything."""
    if path.startswith(PREFIX):
        return Path(path.removeprefix(PREFIX).partition(":")[0]).expanduser().is_dir()
    if is_remote(path):
        return False
    try:
        return bool(_files_of(path))
    except DataError:
        return False


def blocks_of(file: SourceFile) -> Iterator[Block]:
    """The file's blocks, with its name and the index of its source."""
    try:
        with named(file.path, file.name):
            for block in file.reader.blocks(file.path):
                yield replace(block, source=file.source, path=file.name)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"The source {file.name} cannot be read to its end: {error}. It may be cut short or "
            "damaged; fetch it again."
        ) from error


@contextmanager
def named(path: Path, name: str) -> Iterator[None]:
    """Put a fetched file's address into errors, in place of its path in the cache."""
    try:
        yield
    except DataError as error:
        if str(path) == name:
            raise
        raise DataError(str(error).replace(str(path), name)) from error


def plain_bytes(file: SourceFile) -> int:
    """Bytes of the uncompressed file; for gzip the size in its trailer (modulo 4 GiB)."""
    with file.path.open("rb") as stream:
        if stream.read(2) != _GZIP or file.bytes < 18:
            return file.bytes
        stream.seek(-4, 2)
        return max(file.bytes, int.from_bytes(stream.read(4), "little"))


def saved_files(folder: Path) -> list[Path] | None:
    """The Arrow files of a dataset saved in `folder`, in order; None when there is none."""
    splits = _json(folder / "dataset_dict.json").get("splits")
    if isinstance(splits, list) and splits:
        if len(splits) > 1:
            raise several_splits(str(folder), splits, sign="/")
        return saved_files(_inside(folder, splits[0], "dataset_dict.json"))
    if not (folder / "dataset_info.json").is_file() or not (folder / "state.json").is_file():
        return None
    listed = _json(folder / "state.json").get("_data_files")
    if not isinstance(listed, list) or not listed:
        raise DataError(
            f"{folder} is a saved dataset whose state.json lists no files. Save it again with "
            "dataset.save_to_disk(folder)."
        )
    names = [entry.get("filename") if isinstance(entry, dict) else None for entry in listed]
    return [_inside(folder, name, "state.json") for name in names]


def _inside(folder: Path, name: Any, listed_in: str) -> Path:
    """A file or folder of a saved dataset; its lists may come from anyone."""
    plain = isinstance(name, str) and "\0" not in name
    plain = plain and 0 < len(name.encode("utf-8", "replace")) < _LONGEST_NAME
    if not plain or name == ".." or Path(name).name != name or not (folder / name).exists():
        shown = f"{name!r}"[:80]
        raise DataError(
            f"{folder} is a saved dataset, and its {listed_in} lists {shown}, which is not in the "
            "folder. Copy the folder whole, or save it again."
        )
    return folder / str(name)


def several_splits(name: str, splits: list[Any], *, sign: str) -> DataError:
    """The error for a dataset with several splits when none is named."""
    words = ", ".join(str(split) for split in splits)
    return DataError(
        f"The dataset {name} has the splits {words}, and which to read is not said: test data must "
        f'not end up in training. Name one: data.sources=[{{path: "{name}{sign}{splits[0]}"}}]. '
        "Several are several sources."
    )


def dataset_files(path: str) -> tuple[Located, ...]:
    """The Arrow files of `hf:NAME[:SPLIT]`; NAME is a folder or a name on the hub."""
    name, _, split = path.removeprefix(PREFIX).partition(":")
    if not name or "[" in split:
        raise DataError(
            f"The source {path!r} is not of the form hf:NAME or hf:NAME:SPLIT, e.g. "
            '"hf:corbt/all-recipes:train". For a part of a split, use data.max_examples.'
        )
    folder = Path(name).expanduser()
    if folder.is_dir():
        name = str(folder)
        if (saved := saved_files(folder / split)) is not None:
            return tuple(Located(str(file), file) for file in saved)
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"{path} needs the datasets library, which is not installed. Run: pip install "
            "'toque[data]'."
        ) from error
    try:
        found = datasets.load_dataset(name, split=split or None)
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        why = (str(error).strip() or type(error).__name__).splitlines()[0][:300].rstrip(".")
        raise DataError(
            f"The dataset {path} cannot be loaded: {why}. A name is a folder of data files or one "
            "on huggingface.co/datasets (HF_TOKEN for a private one; without a network, or with "
            "HF_HUB_OFFLINE=1, only what was fetched before). One with several configurations is "
            f"saved first: datasets.load_dataset({name!r}, CONFIGURATION).save_to_disk(FOLDER)."
        ) from error
    if isinstance(found, dict):
        if len(found) > 1:
            raise several_splits(f"{PREFIX}{name}", list(found), sign=":")
        split, found = next(iter(found.items()))
    files = [Path(entry["filename"]) for entry in found.cache_files]
    if not files:
        raise DataError(
            f"{path} holds no rows on disk. Save it with dataset.save_to_disk(folder) and name the "
            "folder."
        )
    return tuple(Located(f"{PREFIX}{name}:{split}/{file.name}", file) for file in files)


def _json(path: Path) -> dict[str, Any]:
    try:
        if not path.is_file():
            return {}
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            f"{path} of a saved dataset cannot be read: {error}. Save it again."
        ) from error
    return found if isinstance(found, dict) else {}
