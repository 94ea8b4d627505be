"""Uploads of files from the browser, streamed to the disk."""

from __future__ import annotations

import asyncio
import filecmp
import os
import secrets
import shutil
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Final, final

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request

from toque.reporter import size_text
from toque.serving.request_errors import RequestError
from toque.sources.archives import is_archive
from toque.sources.decompress import packed_as
from toque.storage.atomic import link_or_rename
from toque.storage.no_follow import new_file, open_plain
from toque.studio.workplace import Workplace, file_name

_MAX_UPLOADS: Final = 4
"""Maximum number of uploads at the same time."""
_RESERVE_BYTES: Final = 256 << 20
"""Space on the disk that uploads leave free."""
_BLOCK_BYTES: Final = 1 << 20
"""Bytes that are written at a time, in another thread."""
_PICTURES: Final = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8")
_PAUSE_SECONDS: Final = 60.0
"""Maximum time without data from the browser."""


@final
class Uploads:
    """Receiver of the uploads of a studio."""

    def __init__(self, workplace: Workplace) -> None:
        self._workplace = workplace
        self._folder = workplace.state / "uploads"
        # Remove uploads to a server that was killed. rmtree does not follow a link.
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._n_open = 0

    async def receive(self, request: Request, name: str) -> tuple[Path, bool]:
        """Write the body of a request to a new file. Return its path, and whether it is new.

        The file appears only when it is complete.

        Raises:
            RequestError: The length is unknown, the disk is full, too many uploads are running, or
                the connection ended early.
        """
        n_bytes = _content_length(request)
        self._refuse_full_disk(n_bytes)
        if self._n_open >= _MAX_UPLOADS:
            raise RequestError(
                503,
                f"{_MAX_UPLOADS} uploads are running. Wait until one of them has ended.",
                headers={"Retry-After": "5", "Connection": "close"},
            )
        self._n_open += 1
        part = self._folder / secrets.token_hex(8)
        try:
            await self._write(request, part, n_bytes)
            return await run_in_threadpool(self._publish, part, name)
        except OSError as error:
            raise RequestError(
                507, f"The file cannot be written: {error.strerror}. Nothing was saved."
            ) from error
        finally:
            self._n_open -= 1
            part.unlink(missing_ok=True)

    async def _write(self, request: Request, part: Path, n_bytes: int) -> None:
        n_received = 0
        with new_file(part) as file:
            async for block in _blocks(request):
                # Other uploads may have filled the disk since the start of this one.
                self._refuse_full_disk(n_bytes - n_received)
                n_received += len(block)
                await run_in_threadpool(file.write, block)
            await run_in_threadpool(os.fsync, file.fileno())
        if n_received != n_bytes:
            raise RequestError(
                400,
                f"The upload ended after {size_text(n_received)} of {size_text(n_bytes)}. Nothing "
                "was saved. Try again.",
            )

    def _publish(self, part: Path, name: str) -> tuple[Path, bool]:
        """Give a complete upload its name. An existing file is never replaced.

        The same file is stored once.
        """
        name = file_name(name)
        kind = _kind_without_text(part)
        if kind:
            raise RequestError(
                415, f"{name} is {kind}. It was not saved.", param="name"
            )
        existing = self._workplace.folder / name
        is_plain = existing.is_file() and not existing.is_symlink()
        if is_plain and filecmp.cmp(part, existing, shallow=False):
            return existing, False
        while True:
            path = self._workplace.new_file(name)
            with suppress(FileExistsError):
                link_or_rename(part, path)
                return path, True

    def _refuse_full_disk(self, n_bytes: int) -> None:
        available = self._workplace.free_bytes - _RESERVE_BYTES
        if n_bytes > available:
            raise RequestError(
                507,
                f"The upload needs {size_text(n_bytes)}, but uploads may use only "
                f"{size_text(max(0, available))} of this disk. Remove files, or move the file to "
                f"{self._workplace.folder} yourself.",
                headers={"Connection": "close"},
            )


def _kind_without_text(part: Path) -> str:
    """Describe a file that cannot be read, and its conversion. "" for any other file."""
    with open_plain(part) as file:
        if file.read(8).startswith(_PICTURES):
            return "a picture. Type its text into a .txt file"
    return "" if is_archive(part) else packed_as(part)


def _content_length(request: Request) -> int:
    """Return the length of the body, which browsers always send.

    Raises:
        RequestError: The header is missing or is not a number.
    """
    header = request.headers.get("content-length", "")
    if not header.isdecimal():
        raise RequestError(
            411,
            "An upload needs the header Content-Length.",
            headers={"Connection": "close"},
        )
    return int(header)


async def _blocks(request: Request) -> AsyncIterator[bytes]:
    """Yield the body in blocks of about `_BLOCK_BYTES`.

    Raises:
        RequestError: The browser disconnected, or sent nothing for `_PAUSE_SECONDS`.
    """
    stream = request.stream().__aiter__()
    block = bytearray()
    try:
        while True:
            async with asyncio.timeout(_PAUSE_SECONDS):
                piece = await anext(stream, None)
            if piece is None:
                break
            block += piece
            if len(block) >= _BLOCK_BYTES:
                yield bytes(block)
                block.clear()
    except TimeoutError:
        message = f"The upload stood still for {_PAUSE_SECONDS:g} seconds, so it ended."
        raise RequestError(408, message, headers={"Connection": "close"}) from None
    except ClientDisconnect:
        raise RequestError(400, "The browser ended the upload.") from None
    if block:
        yield bytes(block)
