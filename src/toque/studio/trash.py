"""Removed runs of a studio, which can be restored."""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path
from typing import final

from toque.runs.places import RunFinder
from toque.serving.request_errors import RequestError
from toque.storage.atomic import move_into
from toque.studio.workplace import Workplace


@final
class Trash:
    """Folder for removed runs."""

    def __init__(self, workplace: Workplace) -> None:
        self._workplace = workplace
        self._folder = workplace.state / "trash"

    def remove(self, run: str) -> str:
        """Move the folder of a run to the trash. Return the id for `restore`.

        Raises:
            RequestError: The run does not exist, or cannot be moved.
        """
        folder = self._workplace.path(run)
        id_ = secrets.token_hex(6)
        self._move(folder, self._folder / id_ / Path(run).parent)
        return id_

    def contents(self) -> list[dict[str, str]]:
        """List the ids and names of the runs in the trash, the newest first."""
        folders = [
            folder for folder in self._folder.glob("*/") if not folder.is_symlink()
        ]
        folders.sort(key=lambda folder: -folder.stat().st_mtime)
        return [
            {"id": folder.name, "run": run}
            for folder in folders
            for run in RunFinder(folder).places()
        ]

    def empty(self) -> None:
        """Delete the runs in the trash.

        Raises:
            RequestError: A file cannot be deleted.
        """
        try:
            shutil.rmtree(self._folder)  # does not follow links
        except FileNotFoundError:
            return
        except OSError as error:
            raise RequestError(
                409, f"The trash cannot be emptied: {error.strerror}."
            ) from error

    def restore(self, id_: str, run: str) -> None:
        """Move a run back to its place.

        Raises:
            RequestError: The run is not in the trash, or its place is taken.
        """
        folder = self._folder / id_ / run
        # The first part of an absolute path is empty.
        is_relative = not any(part in ("", "..") for part in run.split("/"))
        if not id_.isalnum() or not is_relative or not folder.is_dir():
            raise RequestError(404, "This run is not in the trash any more.")
        target = self._workplace.folder / run
        if target.exists():
            raise RequestError(
                409,
                f"{run} exists again. Rename that folder before you restore this one.",
            )
        self._move(folder, target.parent)

    def _move(self, folder: Path, parent: Path) -> None:
        try:
            move_into(folder, parent, folder.name)
        except OSError as error:
            raise RequestError(
                409, f"{folder.name} cannot be moved: {error.strerror}."
            ) from error
