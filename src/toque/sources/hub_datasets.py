"""Hugging Face datasets: folders written by save_to_disk, and `hf:` paths to hub datasets."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from toque.errors import DataError, ToqueError, needing
from toque.sources.records import Located
from toque.storage.atomic import atomic_file, disk_faults
from toque.storage.download import CACHE_VARIABLE, cache_folder
from toque.storage.json_files import read_json_object
from toque.user_paths import named_path

PREFIX = "hf:"
_FORM = re.compile(
    r"hf:(?P<name>[^:]+)(?::(?P<config>[^:\[\]]+)(?=:))?"
    r"(?::(?P<split>[^:\[\]]+)(?:\[:(?P<rows>[1-9][0-9]*)\])?)?"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_RECORDED = re.compile(r"(hf:.+)/([0-9a-f]{40})/[^/]*")
_STREAM_ROWS = 1000  # number of rows per batch of a stream
_read_json = partial(
    read_json_object, error=DataError, advice="Save the dataset again."
)
# Files of save_to_disk: in the folder of all splits, and in the folder of one split.
_SAVED_MARKERS = ("dataset_dict.json", "state.json")
_MAX_NAME_BYTES = 200  # file systems raise an OSError from 256 bytes


@dataclass(frozen=True)
class HubDataset:
    """Parts of a path `hf:NAME[@REVISION][:CONFIGURATION][:SPLIT[[:ROWS]]]`."""

    name: str  # a folder of data files, or a name on the hub
    revision: str | None
    config: str | None
    split: str | None
    rows: int | None  # rows to stream from the start; None to download all rows

    @classmethod
    def of(cls, path: str) -> HubDataset:
        """Parse the path of a source.

        Raises:
            DataError: The path has another form.
        """
        parts = _FORM.fullmatch(path)
        full_name = parts["name"] if parts else ""
        name, sign, revision = full_name.partition("@")
        if sign and named_path(full_name).is_dir():
            # The name of the folder has an "@", which does not begin a revision.
            name = full_name
            sign = revision = ""
        if parts is None or not name or (sign and not revision):
            raise DataError(
                f"The source {path!r} must have the form hf:NAME, hf:NAME:SPLIT, "
                'hf:NAME:CONFIGURATION:SPLIT or hf:NAME@REVISION:..., e.g. "hf:openai/gsm8k:main:'
                'train". To read only the first rows of a split, write "hf:NAME:train[:5000]".'
            )
        rows = None if parts["rows"] is None else int(parts["rows"])
        return cls(name, revision or None, parts["config"], parts["split"], rows)

    def address(self, *, config: str | None = None, split: str | None = None) -> str:
        """Format the path with another configuration or split. An empty split is omitted."""
        if split is None:
            split = self.split
        address = f"{PREFIX}{self.name}"
        if self.revision:
            address += f"@{self.revision}"
        for part in (config or self.config, split):
            if part:
                address += f":{part}"
        if self.rows and split:
            address += f"[:{self.rows}]"
        return address


def recorded_dataset(path: str) -> tuple[HubDataset, str] | None:
    """Parse a name of `dataset_files` into its dataset and commit. Return None for other names."""
    parts = _RECORDED.fullmatch(path)
    return None if parts is None else (HubDataset.of(parts[1]), parts[2])


def names_a_folder(path: str) -> bool:
    """Check whether a path that begins with `hf:` names a local folder."""
    return named_path(HubDataset.of(path).name).is_dir()


def dataset_files(
    path: str, say: Callable[[str], None] = lambda _: None
) -> tuple[Located, ...]:
    """Return the Arrow files of a path that begins with `hf:`. Each name includes the commit.

    Args:
        path: Path of a source, see `HubDataset`. The name may be a folder of save_to_disk.
        say: Function that reports the commit and the number of streamed rows.

    Raises:
        DataError: The dataset cannot be loaded, or needs its own code, or has no rows.
    """
    dataset = HubDataset.of(path)
    folder = named_path(dataset.name)
    if any((folder / marker).is_file() for marker in _SAVED_MARKERS):
        files = _files_of_saved(path, dataset, folder)
        return tuple(Located(str(file), file) for file in files)

    return _load_files(path, dataset, folder, say)


def _load_files(
    path: str, dataset: HubDataset, folder: Path, say: Callable[[str], None]
) -> tuple[Located, ...]:
    """Load a split with the library, from `folder` if it exists, otherwise from the hub.

    If the path limits the rows, they are streamed into one file. Otherwise the split is downloaded.

    Raises:
        DataError: The library is not installed or cannot load the split, or the split has no rows.
    """
    with needing("data", path, raised=DataError):
        import datasets
    try:
        builder = datasets.load_dataset_builder(
            str(folder) if folder.is_dir() else dataset.name,
            dataset.config,
            revision=dataset.revision,
        )
        commit = _commit_of(builder, dataset)
        split = _split_of(builder, dataset)
        if dataset.rows is not None:
            files = [_stream_rows(builder, dataset, split, commit, say)]
        else:
            builder.download_and_prepare()
            cached = builder.as_dataset(split=split).cache_files
            files = [Path(entry["filename"]) for entry in cached]
    except ToqueError:
        raise
    # The library, its file readers and the network may raise any exception.
    except Exception as error:
        raise _load_error(dataset, error) from error

    if not files:
        raise DataError(f"{path} has no rows. Name another split.")
    address = dataset.address(split=split)
    if commit is not None:
        say(f"{path} is read at commit {commit}.")
        address += f"/{commit}"
    return tuple(Located(f"{address}/{file.name}", file) for file in files)


def _files_of_saved(path: str, dataset: HubDataset, folder: Path) -> list[Path]:
    """Return the files of a dataset that save_to_disk wrote to a folder."""
    files = saved_files(folder / (dataset.split or ""))
    if files is None or dataset.config or dataset.rows:
        raise DataError(
            f"{path}: {folder} was written by save_to_disk and is read in full, but the path "
            "names a configuration, a range of rows or a split that does not exist. Name the "
            f"folder or the folder of one split, such as {folder / 'train'}. To read fewer "
            "examples, set data.max_examples."
        )
    return files


def _stream_rows(
    builder: Any,
    dataset: HubDataset,
    split: str,
    commit: str | None,
    say: Callable[[str], None],
) -> Path:
    """Write the first rows of a split to an Arrow file in the cache, unless the file exists."""
    from pyarrow import ipc

    address = dataset.address(split=split)
    digest = hashlib.sha256(f"{address} {commit}".encode()).hexdigest()
    cache = cache_folder("sources")
    path = cache / "hf" / f"{digest[:16]}.arrow"
    if commit is not None and path.is_file():  # a local folder may have changed
        return path

    n_rows = dataset.rows or 0  # never None here
    n_read = 0
    tables = builder.as_streaming_dataset(split=split).with_format("arrow")
    with disk_faults(cache, "streaming rows", setting=CACHE_VARIABLE):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as file:
            writer = None
            for table in tables.iter(batch_size=min(n_rows, _STREAM_ROWS)):
                rows = table.slice(0, n_rows - n_read)
                writer = writer or ipc.new_stream(file, rows.schema)
                writer.write_table(rows)
                n_read += rows.num_rows
                if n_read == n_rows:
                    break
            if writer is None:
                raise DataError(f"{address} has no rows. Name another split.")
            writer.close()

    if n_read < n_rows:
        say(f"{address}: streamed {n_read:,} rows, the entire split.")
    else:
        say(
            f"{address}: streamed the first {n_read:,} rows, which are not a random sample."
        )
    return path


def _split_of(builder: Any, dataset: HubDataset) -> str:
    """Return the split of a path, or the only split.

    Raises:
        DataError: The split does not exist, or the path names none of several splits.
    """
    splits = list(builder.info.splits or builder.config.data_files)
    if dataset.split not in splits and (dataset.split or len(splits) > 1):
        address = dataset.address(split="")
        raise split_error(address, splits, sign=":", unknown=dataset.split)
    return dataset.split or str(splits[0])


def _commit_of(builder: Any, dataset: HubDataset) -> str | None:
    """Return the commit that a builder reads, or None for a folder.

    Without a network the library uses its last download and ignores the requested revision.

    Raises:
        DataError: The builder reads another commit than the requested one.
    """
    from datasets.packaged_modules.cache.cache import Cache

    commit: str | None = builder.hash if _COMMIT.fullmatch(builder.hash or "") else None
    if dataset.revision in (None, commit):
        return commit
    if commit is None:
        raise DataError(
            f"{dataset.address()} is a folder, and a folder has no revision. Remove the revision."
        )
    if isinstance(builder, Cache):
        raise DataError(
            f"{dataset.address()} is not available at this revision: the hub does not respond, and "
            f"the cache has only {commit}. Name that revision, or check the network."
        )
    return commit


def _load_error(dataset: HubDataset, error: Exception) -> DataError:
    """Convert an error from `datasets` to a DataError.

    If no configuration was given, list the available ones.
    """
    import datasets

    configs: list[str] = []
    with suppress(Exception):  # the original error is more useful
        configs = datasets.get_dataset_config_names(
            dataset.name, revision=dataset.revision
        )
    if len(configs) > 1 and dataset.config not in configs:
        unknown = f", not {dataset.config}" if dataset.config else ""
        config = dataset.split if dataset.split in configs else configs[0]
        split = "train" if dataset.split in (None, config) else dataset.split
        return DataError(
            f"The dataset {dataset.address()} has the configurations {', '.join(configs)}{unknown}."
            ' Name one configuration before the split: data.sources=[{path: "'
            f'{dataset.address(config=config, split=split)}"}}]. For several configurations, add '
            "several sources."
        )

    if isinstance(error, StopIteration):  # the library raises it if the files are empty
        reason = "its files have no rows"
    else:
        message = str(error).strip() or type(error).__name__
        reason = " ".join(message.split())[:300].rstrip(".")
    return DataError(
        f"The dataset {dataset.address()} cannot be loaded: {reason}. The name must be a folder of "
        "data files or a dataset on huggingface.co/datasets. A private dataset needs HF_TOKEN. "
        "Without a network, or with HF_HUB_OFFLINE=1, only cached datasets can be read. Toque does "
        "not run the code of a dataset: save such a dataset with save_to_disk and name its folder."
    )


def saved_splits(folder: Path) -> list[Path]:
    """Return the split folders of a DatasetDict saved in `folder`, or [] for any other folder."""
    splits = _read_json(folder / "dataset_dict.json").get("splits")
    if not isinstance(splits, list):
        return []
    return [_listed_path(folder, name, "dataset_dict.json") for name in splits]


def saved_files(folder: Path) -> list[Path] | None:
    """Return the Arrow files of a dataset saved in `folder`, or None for any other folder."""
    if splits := saved_splits(folder):
        if len(splits) > 1:
            raise split_error(str(folder), [split.name for split in splits], sign="/")
        return saved_files(splits[0])
    required_names = ("dataset_info.json", "state.json")
    if not all((folder / name).is_file() for name in required_names):
        return None
    entries = _read_json(folder / "state.json").get("_data_files")
    if not isinstance(entries, list) or not entries:
        raise DataError(
            f"{folder} is a saved dataset, but its state.json lists no files. Save the dataset "
            "again with dataset.save_to_disk(folder)."
        )
    names = [
        entry.get("filename") if isinstance(entry, dict) else None for entry in entries
    ]
    return [_listed_path(folder, name, "state.json") for name in names]


def _listed_path(folder: Path, name: Any, list_name: str) -> Path:
    """Return the path of a name in an untrusted list of a saved dataset.

    Raises:
        DataError: The name leads out of the folder or does not exist.
    """
    if isinstance(name, str) and "\0" not in name:
        n_bytes = len(name.encode("utf-8", "replace"))
        is_in_folder = name != ".." and Path(name).name == name
        is_valid = 0 < n_bytes < _MAX_NAME_BYTES and is_in_folder
        if is_valid and (folder / name).exists():
            return folder / name
    shown = f"{name!r}"[:80]
    raise DataError(
        f"{folder} is a saved dataset, and its {list_name} lists {shown}, which is not in the "
        "folder. Copy the entire folder, or save the dataset again."
    )


def split_error(
    name: str, splits: list[Any], *, sign: str, unknown: str | None = None
) -> DataError:
    """Return the error for a dataset with several splits if no split or an unknown one is named."""
    suffix = f", not {unknown}" if unknown else ""
    return DataError(
        f"The dataset {name} has the splits {', '.join(map(str, splits))}{suffix}. Name one split, "
        "so that test data does not end up in training: data.sources=[{path: "
        f'"{name}{sign}{splits[0]}"}}]. For several splits, add several sources.'
    )
