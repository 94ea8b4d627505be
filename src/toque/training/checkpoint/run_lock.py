"""The lock of a run's folder: one training process writes there at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from toque.errors import CheckpointError
from toque.storage.locks import file_lock


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Hold `folder`, which is made when missing, for this process.

    Raises:
        CheckpointError: another process holds it, or the folder cannot be written.
    """

    def refuse(holder: str) -> None:
        raise CheckpointError(
            f"{folder} is in use by another training process (id {holder}). Two runs in one folder "
            "would overwrite each other: wait for it, stop it, or choose another run_dir."
        )

    with ExitStack() as stack:
        try:
            stack.enter_context(file_lock(folder / ".lock", refuse))
        except OSError as error:
            raise CheckpointError(
                f"{folder} cannot be written: {error.strerror}. Checkpoints are kept there; choose "
                "another run_dir, or give yourself the right to write."
            ) from error
        yield
