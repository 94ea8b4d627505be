"""Hugging Face datasets: folders written by save_to_disk, and those of the hub that `hf:` names."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from toque.errors import DataError, ToqueError, needing
from toque.sources.records import Located
from toque.storage.atomic import atomic_file, disk_faults
from toque.storage.download import CACHE_VARIABLE, cache_folder
from toque.storage.json_files import json_object
from toque.user_paths import named_path

PREFIX: Final = "hf:"
_FORM: Final = re.compile(
    r"hf:(?P<name>[^:]+)(?::(?P<config>[^:\[\]]+)(?=:))?"
    r"(?::(?P<split>[^:\[\]]+)(?:\[:(?P<rows>[1-9][0-9]*)\])?)?"
)
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_RECORDED: Final = re.compile(r"(hf:.+)/([0-9a-f]{40})/[^/]*")
_AT_ONCE: Final = 1000  # rows taken from a stream at a time
_object: Final = partial(json_object, error=DataError, todo="Save the dataset again.")
_LONGEST_NAME = 200  # bytes; a file system refuses 256 with an error of its own


@dataclass(frozen=True)
class HubDataset:
    """A dataset as `hf:NAME[@REVISION][:CONFIGURATION][:SPLIT[[:ROWS]]]` names it."""

    name: str  # a folder of data files, or a name on the hub
    revision: str | None
    config: str | None
    split: str | None
    rows: int | None  # number of first rows that are streamed; None for all, downloaded

    @classmethod
    def of(cls, path: str) -> HubDataset:
        """The dataset of a source's path; DataError where it is not of that form."""
        parts = _FORM.fullmatch(path)
        name, sign, revision = "", "", ""
        if parts is not None:
            name, sign, revision = parts["name"].partition("@")
            if sign and named_path(parts["name"]).is_dir():
                name, sign = parts["name"], ""
        if parts is None or not name or (sign and not revision):
            raise DataError(
                f"The source {path!r} is not of the form hf:NAME, hf:NAME:SPLIT, "
                'hf:NAME:CONFIGURATION:SPLIT or hf:NAME@REVISION:..., e.g. "hf:openai/gsm8k:main:'
                'train". Of a split the first rows can be read alone, e.g. "hf:NAME:train[:5000]".'
            )
        rows = None if parts["rows"] is None else int(parts["rows"])
        return cls(name, revision if sign else None, parts["config"], parts["split"], rows)

    def address(self, *, config: str | None = None, split: str | None = None) -> str:
        """The path again, with another configuration or split; an empty split leaves it out."""
        config, split = config or self.config, self.split if split is None else split
        parts = [f"{PREFIX}{self.name}" + (f"@{self.revision}" if self.revision else "")]
        parts += [part for part in (config, split) if part]
        return ":".join(parts) + (f"[:{self.rows}]" if self.rows and split else "")


def recorded_dataset(path: str) -> tuple[HubDataset, str] | None:
    """Dataset and commit of a file that `dataset_files` named; None for files of other kinds."""
    parts = _RECORDED.fullmatch(path)
    return None if parts is None else (HubDataset.of(parts[1]), parts[2])


def names_a_folder(path: str) -> bool:
    """True if a path that begins with `hf:` names a folder of this machine."""
    return named_path(HubDataset.of(path).name).is_dir()


def dataset_files(path: str, say: Callable[[str], None] = lambda _: None) -> tuple[Located, ...]:
    """The Arrow files of a source's path that begins with `hf:`, each named with its commit.

    Of a path with a number of rows these are streamed into a file, and the rest is not downloaded.
    `say` hears what was read. No code of a dataset is run: the library refuses those that bring it.
    """
    asked = HubDataset.of(path)
    folder = named_path(asked.name)
    if any((folder / name).is_file() for name in ("dataset_dict.json", "state.json")):
        saved = saved_files(folder / (asked.split or ""))
        if saved is None or asked.config or asked.rows:
            raise DataError(
                f"{path}: {folder} was written by save_to_disk, and is read whole, by its path or "
                f"that of a split in it, such as {folder / 'train'}. data.max_examples limits it."
            )
        return tuple(Located(str(file), file) for file in saved)
    with needing("data", path, raised=DataError):
        import datasets
    try:
        where = str(folder) if folder.is_dir() else asked.name
        builder = datasets.load_dataset_builder(where, asked.config, revision=asked.revision)
        commit = _commit_of(builder, asked)
        splits = list(builder.info.splits or builder.config.data_files)
        if asked.split not in splits and (asked.split or len(splits) > 1):
            raise several_splits(asked.address(split=""), splits, sign=":", no=asked.split)
        split = asked.split or splits[0]
        if asked.rows is not None:
            files = [_streamed(builder, asked, split, commit, say)]
        else:
            builder.download_and_prepare()
            cached = builder.as_dataset(split=split).cache_files
            files = [Path(entry["filename"]) for entry in cached]
    except ToqueError:
        raise
    except Exception as error:  # of the library, its readers of files, or the network
        raise _not_loaded(asked, error) from error
    where = asked.address(split=split) + (f"/{commit}" if commit else "")
    if not files:
        raise DataError(f"{path} has no row on disk. Name another split.")
    if commit is not None:
        say(f"{path} is read at the commit {commit}.")
    return tuple(Located(f"{where}/{file.name}", file) for file in files)


def _streamed(
    builder: Any, asked: HubDataset, split: str, commit: str | None, say: Callable[[str], None]
) -> Path:
    """An Arrow file of the first rows of a split, written in the cache unless it is there."""
    from pyarrow import ipc

    address, rows, n_read = asked.address(split=split), asked.rows or 0, 0
    digest = hashlib.sha256(f"{address} {commit}".encode()).hexdigest()
    cache = cache_folder("sources")
    place = cache / "hf" / f"{digest[:16]}.arrow"
    if commit is not None and place.is_file():  # a folder's content may have changed
        return place
    tables = builder.as_streaming_dataset(split=split).with_format("arrow")
    with disk_faults(cache, "streaming rows", setting=CACHE_VARIABLE):
        place.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(place) as file:
            writer = None
            for table in tables.iter(batch_size=min(rows, _AT_ONCE)):
                taken = table.slice(0, rows - n_read)
                writer = writer or ipc.new_stream(file, taken.schema)
                writer.write_table(taken)
                n_read += taken.num_rows
                if n_read == rows:
                    break
            if writer is None:
                raise DataError(f"{address} has no row. Name another split.")
            writer.close()
    whole = "all of them" if n_read < rows else "in its own order, which is no sample of the whole"
    say(f"{address}: {n_read:,} rows were streamed, {whole}.")
    return place


def _commit_of(builder: Any, asked: HubDataset) -> str | None:
    """The commit that a builder reads; None for a folder. DataError where it is another's.

    Without a network the library takes what it fetched last, whatever revision was asked for.
    """
    from datasets.packaged_modules.cache.cache import Cache

    commit = builder.hash if _COMMIT.fullmatch(builder.hash or "") else None
    if asked.revision not in (None, commit) and (commit is None or isinstance(builder, Cache)):
        why = f"the hub does not answer, and {commit} is what was fetched before. Name that"
        why = "a folder has none. Leave it out" if commit is None else why
        raise DataError(f"{asked.address()} cannot be had at its revision: {why}.")
    return commit


def _not_loaded(asked: HubDataset, error: Exception) -> DataError:
    """The error for what the library refused; it lists the configurations where one is missing."""
    import datasets

    configs: list[str] = []
    with suppress(Exception):  # the first error says why
        configs = datasets.get_dataset_config_names(asked.name, revision=asked.revision)
    if len(configs) > 1 and asked.config not in configs:
        told = f"no {asked.config} among them" if asked.config else "which to read is not said"
        meant = asked.split if asked.split in configs else configs[0]
        split = "train" if asked.split in (None, meant) else asked.split
        return DataError(
            f"The dataset {asked.address()} has the configurations {', '.join(configs)}, and "
            f'{told}. Name one before the split: data.sources=[{{path: "'
            f'{asked.address(config=meant, split=split)}"}}]. Several are several sources.'
        )
    why = " ".join((str(error).strip() or type(error).__name__).split())[:300].rstrip(".")
    if isinstance(error, StopIteration):  # of a reader that waits for a first row
        why = "no file of it that was asked for holds a row"
    return DataError(
        f"The dataset {asked.address()} cannot be loaded: {why}. A name is a folder of data files "
        "or one on huggingface.co/datasets (HF_TOKEN for a private one; without a network, or with "
        "HF_HUB_OFFLINE=1, only what was fetched before). No code of a dataset is run: one that "
        "needs its own is saved first, with save_to_disk, and its folder named."
    )


def saved_splits(folder: Path) -> list[Path]:
    """The folders of the splits of datasets saved together in `folder`; [] when there are none."""
    splits = _object(folder / "dataset_dict.json").get("splits")
    named = splits if isinstance(splits, list) else []
    return [_inside(folder, name, "dataset_dict.json") for name in named]


def saved_files(folder: Path) -> list[Path] | None:
    """The Arrow files of a dataset saved in `folder`, in order; None when there is none."""
    if splits := saved_splits(folder):
        if len(splits) > 1:
            raise several_splits(str(folder), [split.name for split in splits], sign="/")
        return saved_files(splits[0])
    if not (folder / "dataset_info.json").is_file() or not (folder / "state.json").is_file():
        return None
    listed = _object(folder / "state.json").get("_data_files")
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


def several_splits(name: str, splits: list[Any], *, sign: str, no: str | None = None) -> DataError:
    """The error for a dataset of which no split is named, or one that it does not have."""
    missing = f"no {no} among them" if no else "which to read is not said"
    return DataError(
        f"The dataset {name} has the splits {', '.join(map(str, splits))}, and {missing}: test "
        "data must not end up in training. Name one: data.sources=[{path: "
        f'"{name}{sign}{splits[0]}"}}]. Several are several sources.'
    )
