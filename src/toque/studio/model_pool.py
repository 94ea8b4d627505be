"""Models that a studio generates with. They are opened on request, and closed when not used."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, final

import psutil
from starlette.concurrency import run_in_threadpool

from toque.errors import ToqueError
from toque.hardware.ending_thread import call_in_ending_thread
from toque.reporter import size_text
from toque.serving.batcher import Batcher
from toque.serving.page_routes import describe_model
from toque.serving.request_errors import RequestError
from toque.studio.records import record_of
from toque.studio.workplace import Workplace
from toque.workflows.inference.open_served import open_models

_MAX_OPEN: Final = 2
"""Maximum number of open models: two are compared side by side."""
_MEMORY_PER_BYTE: Final = 2.5
"""Memory of an open model per byte of its weights: float32 weights of a bf16 file, and a cache."""


@final
class ModelPool:
    """Open models of a studio.

    Args:
        workplace: Folder of the studio.
        batcher: Batch of the open models.
    """

    def __init__(self, workplace: Workplace, batcher: Batcher) -> None:
        self._workplace = workplace
        self._batcher = batcher
        self._versions: dict[str, tuple[int, ...]] = {}
        """Version of the files of each open model, the least recently used first."""
        self._lock = asyncio.Lock()

    async def open(self, name: str) -> None:
        """Open a model, or read it again if its files have changed.

        Raises:
            RequestError: The model does not exist, is damaged, or needs too much memory.
        """
        async with self._lock:
            folder = self._workplace.path(name)
            try:
                version = await run_in_threadpool(_version_of, folder)
                if self._versions.get(name) == version:
                    self._versions[name] = self._versions.pop(name)  # now the newest
                    return
                await self._make_room(name)
                await run_in_threadpool(self._load, name, folder)
            except ToqueError as error:
                raise RequestError(409, str(error), param="model") from error
            except OSError as error:  # a run that trains replaces its checkpoints
                message = f"{name} cannot be read: {error.strerror}. Try again."
                raise RequestError(409, message, param="model") from error
            self._versions[name] = version

    async def _make_room(self, name: str) -> None:
        """Close the older version of a model, or the model that was not used for the longest time.

        Raises:
            RequestError: All open models are generating texts.
        """
        is_open = name in self._versions
        if not is_open and len(self._versions) < _MAX_OPEN:
            return
        for other in [name] if is_open else [*self._versions]:
            if await self._batcher.remove(other):
                del self._versions[other]
                return
        raise RequestError(
            503,
            f"{_MAX_OPEN} models are writing at the moment. Wait until a text has ended.",
            headers={"Retry-After": "5"},
        )

    def _load(self, name: str, folder: Path) -> None:
        """Open a model and add it to the batch."""
        _refuse_large(name, folder)
        served = call_in_ending_thread(lambda: open_models({name: folder}))
        self._batcher.add(served[name])


def describe_models(workplace: Workplace, names: Sequence[str]) -> list[dict[str, Any]]:
    """Describe models for the page: their name, kind of training data, and tasks.

    Args:
        workplace: Folder of the studio.
        names: Names of runs with a checkpoint or model, and of model folders.
    """
    described = []
    for name in names:
        record = record_of(workplace.folder / name)
        if record is not None:  # removed meanwhile, or damaged
            described.append(describe_model(name, record, record.form))
    return described


def _weights_in(folder: Path) -> list[Path]:
    """List the files with the weights of a run or model."""
    names = (
        "model/*.safetensors",
        "*.safetensors",
        "best/*/*.safetensors",
        "checkpoints/*/*.safetensors",
    )
    for pattern in names:
        if files := sorted(folder.glob(pattern)):
            return files
    return []


def _version_of(folder: Path) -> tuple[int, ...]:
    """Return the times of the last changes of the weights."""
    return tuple(file.stat().st_mtime_ns for file in _weights_in(folder))


def _refuse_large(name: str, folder: Path) -> None:
    """Refuse a model that needs more memory than is free.

    Raises:
        RequestError: The model does not fit.
    """
    sizes: defaultdict[Path, int] = defaultdict(int)
    for file in _weights_in(folder):
        sizes[file.parent] += file.stat().st_size
    needed = _MEMORY_PER_BYTE * max(sizes.values(), default=0)
    available = psutil.virtual_memory().available
    if needed > available:
        raise RequestError(
            409,
            f"{name} needs about {size_text(needed)} of memory, but only "
            f"{size_text(available)} are free. Close other programs, or wait until the run that "
            "is training has ended.",
            param="model",
        )
