"""Folder of a studio, and the paths in it that requests may use."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Final, final

from toque.serving.request_errors import RequestError

_STATE: Final = ".studio"
"""Folder with the queue, logs, uploads in progress, and removed runs."""
_MAX_NAME: Final = 200
"""Maximum length of the name of a file, in bytes. File systems allow 255."""
_PROGRAMS: Final = frozenset({".py", ".pyc", ".pyd", ".so", ".pth", ".sh"})
_WORD: Final = re.compile(r"[a-z0-9]+")
_UNSAFE: Final = re.compile(r"[^\w.()+ -]+")
"""Characters that a new file does not get."""


@final
class Workplace:
    """Folder of a studio.

    Args:
        folder: The folder, which exists.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.state = self.folder / _STATE

    @property
    def free_bytes(self) -> int:
        """Free space on the disk of the folder."""
        return shutil.disk_usage(self.folder).free

    def path(self, name: str) -> Path:
        """Return the path of an existing file or folder.

        Args:
            name: Path relative to the folder, with slashes.

        Raises:
            RequestError: The path does not exist, is hidden, or leads out of the folder.
        """
        parts = name.split("/")
        is_hidden = any(part.startswith(".") or not part for part in parts)
        if is_hidden or any(char in name for char in "\0\\"):
            raise _missing(name)
        path = self.folder.joinpath(*parts)
        try:
            # A link may lead out of the folder.
            is_inside = path.resolve(strict=True).is_relative_to(self.folder)
        except (OSError, RuntimeError):  # missing, or a circle of links
            raise _missing(name) from None
        if not is_inside:
            raise _missing(name)
        return path

    def name_of(self, path: Path) -> str:
        """Return the name of a path in the folder, as for `path`."""
        return path.relative_to(self.folder).as_posix()

    def new_file(self, name: str) -> Path:
        """Return the path of a new file in the folder, with a free name.

        Args:
            name: Result of `file_name`.
        """
        stem, dot, suffix = name.partition(".")
        return free_path(self.folder, stem or "file", f"{dot}{suffix}")

    def new_run(self, name: str) -> str:
        """Return a free name for a configuration, its run and its store.

        >>> import tempfile
        >>> Workplace(Path(tempfile.mkdtemp())).new_run("My Recipes (2).jsonl")
        'my-recipes-2'
        """
        words = _WORD.findall(name.lower().partition(".")[0])
        stem = "-".join(words)[:40] or "run"
        for path in _numbered(self.folder, stem, ".yaml"):
            runs = self.folder / "runs" / path.stem
            store = self.folder / "stores" / path.stem
            if not any(map(os.path.lexists, (path, runs, store))):
                return path.stem
        raise AssertionError("the numbers do not end")


def file_name(name: str) -> str:
    """Return the name of a new file.

    Args:
        name: Name that a browser sent. Unsafe characters are replaced.

    Raises:
        RequestError: The file is a program, which Python may import.
    """
    base = name.replace("\\", "/").rpartition("/")[2]
    base = _UNSAFE.sub("-", base).strip(" .") or "file"
    if Path(base).suffix.lower() in _PROGRAMS:
        raise RequestError(
            415,
            f"{base[:100]} is a program. Toque reads data files, such as JSON, CSV, Parquet and "
            "text.",
            param="name",
        )
    return base.encode()[-_MAX_NAME:].decode(errors="ignore")


def free_path(folder: Path, stem: str, suffix: str = "") -> Path:
    """Return the first path that does not exist: `stem`, or `stem-2` and so on, with the suffix."""
    paths = _numbered(folder, stem, suffix)
    return next(path for path in paths if not os.path.lexists(path))


def _numbered(folder: Path, stem: str, suffix: str) -> Iterator[Path]:
    """Yield `stem`, and then `stem-2`, `stem-3` and so on, with the suffix."""
    yield folder / f"{stem}{suffix}"
    for number in count(2):
        yield folder / f"{stem}-{number}{suffix}"


def _missing(name: str) -> RequestError:
    # A link out of the folder gets the same answer as a missing file.
    return RequestError(
        404, f"{name[:100]!r} is not a file or folder of this studio.", param="name"
    )
