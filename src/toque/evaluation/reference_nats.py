"""Reference of dpo: the nats of every answer under the model that the run starts from.

They are computed once, before training, so no second model is in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Final, cast

import msgspec
import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from toque.data.array_types import Ints
from toque.data.loader.batch_stream import (
    ExampleLengths,
    usual_rows,
    with_rejected,
)
from toque.data.loader.collate import Layout
from toque.data.loader.epoch_plan import WINDOW_EXAMPLES
from toque.data.loader.packing import RowShape, choose_shape
from toque.data.store.token_store import TokenStore
from toque.errors import CheckpointError, ConfigError
from toque.evaluation.heldout_loss import HeldOut, RowsPerStep, pack_rows
from toque.models.lora import frozen
from toque.reporter import SILENT, Reporter, counting
from toque.storage.atomic import (
    atomic_file,
    atomic_write,
    disk_faults,
    sha256_of,
    write_array,
)
from toque.storage.json_files import read_json
from toque.training.distributed.data_parallel import DataParallel
from toque.training.objectives.objective import imitation
from toque.training.runtime import Runtime

REFERENCE: Final = "reference.npy"
"""File of a run folder with the nats of each store row, float32."""
RECORD: Final = "reference.json"
"""File of a run folder with the hashes of the reference's weights, data and nats."""


def find_reference(
    folder: Path,
    store: TokenStore,
    layout: Layout,
    runtime: Runtime,
    sharing: DataParallel,
    *,
    base_sha256: str | None,
    continues: bool,
    reporter: Reporter = SILENT,
) -> NDArray[np.float32]:
    """Read the reference from the run folder, or compute it with the current weights and write it.

    Every rank calls this function, before the weights of a checkpoint are loaded.

    Args:
        folder: The run folder.
        store: Store with preference pairs.
        layout: Layout of the training batches.
        runtime: Device and precision.
        sharing: The model to train.
        base_sha256: Hash of the weights without an adapter, if it is known.
        continues: Whether the run continues from a checkpoint.
        reporter: Receives the progress.

    Returns:
        The nats of each answer, [store rows]. Rows that are left out have 0.

    Raises:
        ConfigError: The run continues, and its reference is of other weights or data.
        CheckpointError: The file cannot be written.
    """
    ranks = runtime.ranks
    with sharing.full_model() as gathered:
        model = cast("PreTrainedModel", gathered)
        weights = base_sha256 or frozen.base_sha256(model)
        key = _Key(weights, store.fingerprint)
        saved: _Saved | None = _read(folder) if ranks.is_main else None
        saved = ranks.broadcast(saved)
        if saved is not None and saved[0] == key and saved[1] is not None:
            return saved[1]
        if saved is not None and saved[0] != key and continues:
            raise ConfigError(
                f"{folder / REFERENCE} was computed with other weights or data than "
                "model.start_from and data.store have now, so the rewards of this run would "
                "change. Restore them, or choose another run_dir."
            )
        nats = _compute(store, layout, runtime, model, reporter)
    if ranks.is_main:
        with disk_faults(
            folder, "writing the reference", setting="run_dir", error=CheckpointError
        ):
            folder.mkdir(parents=True, exist_ok=True)
            _write(folder, nats, key)
    return nats


class _Key(msgspec.Struct, frozen=True):
    """Content of `RECORD`."""

    weights: str  # SHA-256 of the reference's weights
    store: str  # fingerprint of the store
    nats: str = ""  # SHA-256 of `REFERENCE`


_Saved = tuple[_Key, NDArray[np.float32] | None]
"""Record of a reference, and the reference unless it is missing or damaged."""


def _write(folder: Path, nats: NDArray[np.float32], key: _Key) -> None:
    """Write a reference and, last, its record."""
    path = folder / REFERENCE
    with atomic_file(path) as file:
        write_array(file, nats)
    record = msgspec.structs.replace(key, nats=sha256_of(path))
    atomic_write(folder / RECORD, msgspec.json.encode(record))


def _read(folder: Path) -> _Saved | None:
    """Read a reference and its record. None if the record is missing or damaged."""
    record = read_json(folder / RECORD, _Key)
    if record is None:
        return None
    key = msgspec.structs.replace(record, nats="")
    path = folder / REFERENCE
    if not path.is_file() or sha256_of(path) != record.nats:
        return key, None
    return key, np.load(path, allow_pickle=False)


def _compute(
    store: TokenStore,
    layout: Layout,
    runtime: Runtime,
    model: PreTrainedModel,
    reporter: Reporter,
) -> NDArray[np.float32]:
    """Compute the nats of all answers, divided among the ranks."""
    ranks = runtime.ranks
    splits = [store.pair_rows("train"), store.pair_rows("validation")]
    rows = np.array(with_rejected(np.concatenate(splits).tolist()), np.int64)
    encoder = layout.shape.source > 0
    lengths = ExampleLengths.from_store(store, rows, encoder=encoder)
    shape = choose_shape(*lengths.sample(), encoder=encoder)
    packed = list(_pack(store, rows, shape))
    answers = HeldOut(
        layout=replace(layout, shape=shape, group=1),
        rows=packed[ranks.rank :: ranks.world_size],
        objective=imitation(),
        autocast=runtime.autocast,
        device=runtime.device,
        rows_per_step=RowsPerStep(usual_rows(shape.tokens), reporter.notice),
    )
    with counting(reporter, "computing the reference", "answers") as count:
        local = [(row, nats) for row, nats, _ in answers.by_example(model, count)]

    result = np.zeros(store.n_rows, np.float32)
    for row, nats in chain.from_iterable(ranks.all_gather(local)):
        result[row] = nats
    return result


def _pack(store: TokenStore, rows: Ints, shape: RowShape) -> Iterator[Sequence[int]]:
    """Pack store rows window by window, because the time grows faster than the window."""
    for start in range(0, len(rows), WINDOW_EXAMPLES):
        yield from pack_rows(store, rows[start : start + WINDOW_EXAMPLES], shape)
