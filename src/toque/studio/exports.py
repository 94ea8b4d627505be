"""Exports of a studio: models for other programs, and their download as a zip file."""

from __future__ import annotations

import asyncio
import io
import sys
import zipfile
from asyncio.subprocess import DEVNULL, PIPE, STDOUT
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from toque.serving.request_errors import RequestError
from toque.storage.no_follow import open_plain
from toque.studio.workplace import Workplace, free_path
from toque.workflows.trained_model.folders import finished_model

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

EXPORTS: Final = "exports"
"""Folder of the exports in the folder of the studio."""
_BLOCK_BYTES: Final = 1 << 20


async def export_model(workplace: Workplace, model: str, form: str) -> dict[str, Any]:
    """Export a model in a process of its own, which compares the export with the model.

    Returns:
        The name of the new folder, and the result of the comparison.

    Raises:
        RequestError: The model does not exist, or the export failed.
    """
    source = workplace.name_of(workplace.path(model))
    with suppress(FileExistsError):
        (workplace.folder / EXPORTS).mkdir()
    parent = workplace.path(EXPORTS)  # refuses a link out of the folder
    target = free_path(parent, f"{Path(source).name}-{form}")
    to = workplace.name_of(target)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "toque", "export",
        "--to", to, "--format", form, "--", source,
        cwd=workplace.folder, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT,
    )  # fmt: skip
    output, _ = await process.communicate()
    message = output.decode("utf-8", "replace").strip()
    if process.returncode:
        reason = message.rpartition("toque: ")[2]
        raise RequestError(409, reason or "The export failed without a message.")
    return {"name": to, "message": message}


def describe_export(workplace: Workplace, model: str) -> dict[str, Any]:
    """Return the model card of a run or model folder, and whether it has an adapter.

    Without a card, the text is empty.

    Raises:
        RequestError: The model does not exist.
    """
    folder = finished_model(workplace.path(model))
    text = ""
    card = folder / "README.md"
    if card.is_file() and not card.is_symlink():
        with open_plain(card) as file:
            text = file.read(_BLOCK_BYTES).decode("utf-8", "replace")
    return {"card": text, "has_adapter": (folder / "adapter_config.json").is_file()}


def zip_export(workplace: Workplace, name: str) -> Iterator[bytes]:
    """Yield a zip file with an exported folder. It is not compressed: weights hardly shrink.

    Raises:
        RequestError: The folder does not exist, or is not an export.
    """
    folder = workplace.path(name)
    if folder.parent != workplace.folder / EXPORTS or not folder.is_dir():
        raise RequestError(404, f"{name[:100]!r} is not an export of this studio.")
    return _zip_blocks(folder)


def _zip_blocks(folder: Path) -> Iterator[bytes]:
    output = _Output()
    with zipfile.ZipFile(output, "w", zipfile.ZIP_STORED) as archive:
        for path in sorted(folder.rglob("*")):
            if path.is_symlink() or not path.is_file():
                continue
            info = zipfile.ZipInfo.from_file(
                path, path.relative_to(folder.parent), strict_timestamps=False
            )
            with (
                open_plain(path) as source,
                archive.open(info, "w", force_zip64=True) as target,
            ):
                while block := source.read(_BLOCK_BYTES):
                    target.write(block)
                    yield output.take()
    yield output.take()


class _Output(io.RawIOBase):
    """File that only collects the bytes that are written to it."""

    def __init__(self) -> None:
        super().__init__()
        self._blocks: list[bytes] = []

    def writable(self) -> bool:
        """Return True. The file cannot seek, so zipfile never returns to earlier bytes."""
        return True

    def write(self, data: ReadableBuffer, /) -> int:
        """Collect bytes."""
        block = bytes(data)
        self._blocks.append(block)
        return len(block)

    def take(self) -> bytes:
        """Return the bytes since the last call."""
        data = b"".join(self._blocks)
        self._blocks.clear()
        return data
