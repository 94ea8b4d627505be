"""Hugging Face datasets: a folder written by `save_to_disk`, or `hf:NAME[:SPLIT]`.

Either is a list of Arrow files, which `columnar` reads. The `datasets` library is
needed only to download or build a dataset by name, never in a worker.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from toque.errors import DataError
from toque.storage.located import Located

PREFIX = "hf:"
_LONGEST_NAME = 200
"""Bytes, of a file; a file system would refuse one of 256 bytes with an error of its own."""


def saved_files(folder: Path) -> list[Path] | None:
    """The Arrow files of a dataset saved in `folder`, in order; None when there is none.

    Raises:
        DataError: it has several splits, or its own list of files is wrong.
    """
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
    files = []
    for entry in listed:
        name = entry.get("filename") if isinstance(entry, dict) else None
        files.append(_inside(folder, name, "state.json"))
    return files


def _inside(folder: Path, name: Any, listed_in: str) -> Path:
    """A file or folder of a saved dataset; its lists may come from anyone.

    Raises:
        DataError: it is not there, or `name` is not the plain name of something in the folder.
    """
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
    """The Arrow files of `hf:NAME[:SPLIT]`; NAME is a folder or a name on the hub.

    Raises:
        DataError: `datasets` is missing, the name is unknown or cannot be fetched, or the split
            is ambiguous.
    """
    name, _, split = path.removeprefix(PREFIX).partition(":")
    if not name or "[" in split:
        raise DataError(
            f"The source {path!r} is not of the form hf:NAME or hf:NAME:SPLIT, e.g. "
            '"hf:corbt/all-recipes:train". For a part of a split, use data.max_examples.'
        )
    folder = Path(name).expanduser()
    if folder.is_dir():
        saved = saved_files(folder / split)
        if saved is not None:
            return tuple(Located(str(file), file) for file in saved)
    return _built(path, str(folder) if folder.is_dir() else name, split)


def _built(path: str, name: str, split: str) -> tuple[Located, ...]:
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
        raise _not_loaded(path, name, error) from error
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


def _not_loaded(path: str, name: str, error: Exception) -> DataError:
    said = (str(error).strip() or type(error).__name__).splitlines()[0][:300].rstrip(".")
    return DataError(
        f"The dataset {path} cannot be loaded: {said}. A name is one on huggingface.co/datasets "
        "(HF_TOKEN for a private one; without a network, or with HF_HUB_OFFLINE=1, only what was "
        f"fetched before is there), or a folder of data files. A dataset with several "
        f"configurations is saved first: datasets.load_dataset({name!r}, CONFIGURATION)"
        ".save_to_disk(FOLDER), and the folder named."
    )


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
