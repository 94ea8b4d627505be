"""Preparation of a token store from raw files.

    sources -> groups of raw blocks -> a shard per group (workers) -> split -> report -> manifest

If the inputs are unchanged, an existing store is used again. If `prepare` is killed, its complete
shards remain, and the next start continues with them. The store is then bitwise identical to the
store of an uninterrupted start.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from toque.data.prepare.conversation_rows import set_chat_template
from toque.data.prepare.data_report import Report
from toque.data.prepare.duplicates import NEAR
from toque.data.prepare.finalize import StoreFinalizer, refuse_bad_sources
from toque.data.prepare.shards import (
    SIDECAR,
    Engine,
    ShardResult,
    ShardWriter,
    ShardWriting,
    shard_folder,
)
from toque.data.prepare.source_sample import choose_limits, learn_tokenizer
from toque.data.prepare.store_plan import PrepareSettings, StorePlan, plan_of
from toque.data.store.store_manifest import NAME, read_manifest
from toque.data.store.token_store import TokenStore, check_files, store_to_write
from toque.data.tokenizer.codec import Codec, load_codec
from toque.data.tokenizer.tokenizer_folder import hash_of_folder
from toque.errors import DataError, argument
from toque.reporter import ProgressSink, no_progress
from toque.sources.memory_rows import ROWS
from toque.sources.records import Source
from toque.storage.atomic import atomic_folder, atomic_write, disk_faults, sweep
from toque.storage.json_files import read_json
from toque.storage.no_follow import refuse_links

BUILDING = "building.json"
_EARLY_FILES = re.compile(
    r"\.lock(\.lease(\.break\.[0-9]+\.[0-9a-f]{32})?)?|\.building\.json\.[0-9a-f]{16}\.partial"
    rf"|{ROWS}"
)
"""Files that may exist before `building.json`: locks, a partial `building.json`, and the folder
with the rows of a Python program."""


class _Mark(msgspec.Struct):
    """Content of `building.json`, which marks the folder of an unfinished store."""

    fingerprint: str


@dataclass(frozen=True)
class PrepareResult:
    """Store, its data report, and whether the store existed already."""

    store: TokenStore
    report: Report
    reused: bool


def prepare(
    sources: Sequence[Source],
    *,
    store: Path,
    settings: PrepareSettings,
    workers: int | None = None,
    progress: ProgressSink | None = None,
    replace: bool = False,
    engine: Engine = "local",
) -> PrepareResult:
    """Write the store of `sources`, or use an existing store of the same inputs.

    Of equal records, the first is used. The result depends on neither `workers` nor `engine`.

    Args:
        sources: Sources to read.
        store: The folder of the store.
        settings: The settings that change the store's content.
        workers: Number of processes. None means the number of available cores.
        progress: Function that receives the progress.
        replace: Whether to replace a store of other inputs.
        engine: "local" or "ray".

    Raises:
        DataError: A source, the tokenizer or the store cannot be used, or the disk is full.
        ConfigError: The settings contradict each other or the data.
    """
    started = time.perf_counter()
    progress = progress or no_progress
    progress(0, 1, "hashing the sources")
    refuse_links(Path(store), DataError)
    plan = plan_of(sources, Path(store), settings)
    existing = _open_existing(plan, progress, replace=replace)
    if existing is not None:
        return existing

    with disk_faults(plan.store, "preparing the data"):
        plan.store.mkdir(parents=True, exist_ok=True)
        with store_to_write(plan.store) as lock:
            # Shards have the fingerprint of the settings before limits are chosen.
            fingerprint = plan.fingerprint(settings)
            old_shards = _mark_unfinished(plan.store, fingerprint)
            if lock.note is not None:
                progress(0, 0, lock.note)
            codec = _save_tokenizer(plan, old_shards, progress)

            limits: list[str] = []
            if settings.open_limits:
                progress(0, 0, "measuring the text lengths of a sample")
                settings, limits, _ = choose_limits(plan.files, codec, settings)
            readers = {(file.source, file.name): file.reader for file in plan.files}
            writer = ShardWriter(plan.store, fingerprint, readers, settings, codec)
            writing = ShardWriting(writer, plan.files)
            shards = writing.write(progress, workers=workers, engine=engine)

            progress(0, 0, "finding duplicates, splitting and writing the report")
            finalizer = StoreFinalizer(
                plan, codec, settings, limits, shards, writing.not_read, started
            )
            report = finalizer.finish()
            _remove_leftovers(plan.store, len(shards))
    return PrepareResult(TokenStore.open(plan.store), report, reused=False)


def _open_existing(
    plan: StorePlan, progress: ProgressSink, *, replace: bool
) -> PrepareResult | None:
    """Open an existing store with the same inputs. Return None if the store must be written."""
    folder = plan.store
    if not check_store_folder(folder):
        return None

    manifest = read_manifest(folder)
    differences = plan.differences(manifest)
    if differences and not replace:
        raise DataError(
            f"{folder} contains a token store prepared from other inputs: "
            f"{'; '.join(differences)}. Choose another data.store, or replace the store: run "
            f"prepare with {argument('replace=True')}."
        )

    report = None if differences else Report.read_from(folder)
    if report is None:
        return None

    try:
        check_files(folder, [*manifest.shards, *manifest.files], verify=False)
    except DataError as error:
        progress(0, 0, f"repairing the store: {error}")
        return None

    names = sorted({entry.file.split("/")[1] for entry in manifest.shards})
    if float(manifest.settings.get("max_bad_share", 1.0)) > plan.settings.max_bad_share:
        sidecars = [folder / "shards" / name / SIDECAR for name in names]
        shards = [read_json(sidecar, ShardResult) for sidecar in sidecars]
        refuse_bad_sources(plan, [shard for shard in shards if shard is not None])

    if (folder / BUILDING).exists():
        # `prepare` was killed after it wrote the manifest. If another process uses the store, the
        # leftovers stay.
        with suppress(DataError), store_to_write(folder):
            _remove_leftovers(folder, len(names))
    return PrepareResult(TokenStore(folder, manifest), report, reused=True)


def check_store_folder(folder: Path) -> bool:
    """Check that a store may be written to a folder. Return whether it has a finished store.

    Raises:
        DataError: The path is not a folder, or the folder has other files.
    """
    ancestors = (folder, *folder.parents)
    existing = next((p for p in ancestors if p.exists() or p.is_symlink()), None)
    if existing is not None and not existing.is_dir():
        kind = "a file" if existing.exists() else "a broken link"
        raise DataError(
            f"data.store is {folder}, but {existing} is {kind}. Choose a folder for the store."
        )
    if not folder.is_dir():
        return False
    if (folder / NAME).is_file():
        return True
    has_other_files = any(
        not _EARLY_FILES.fullmatch(path.name) for path in folder.iterdir()
    )
    if has_other_files and read_json(folder / BUILDING, _Mark) is None:
        raise DataError(
            f"{folder} has files but no token store. Choose an empty or new folder for data.store, "
            "so that no file is overwritten."
        )
    return False


def _mark_unfinished(store: Path, fingerprint: str) -> list[ShardResult]:
    """Mark the folder as unfinished, and return the shards of an earlier start with these inputs.

    Without such shards, remove the shards and the tokenizer of other inputs.
    """
    sweep(store)
    sweep(store / "shards")
    mark = msgspec.json.encode(_Mark(fingerprint))
    building = store / BUILDING
    sidecars = store.glob(f"shards/*/{SIDECAR}")
    results = [read_json(path, ShardResult) for path in sidecars]
    shards = [shard for shard in results if shard and shard.fingerprint == fingerprint]
    has_same_mark = building.is_file() and building.read_bytes() == mark
    if not shards and not has_same_mark:
        for name in ("shards", "tokenizer"):
            shutil.rmtree(store / name, ignore_errors=True)
    atomic_write(building, mark)
    # Remove the manifest after the mark is written, because one of the two must always identify
    # the folder as a store.
    (store / NAME).unlink(missing_ok=True)
    (store / "shards").mkdir(exist_ok=True)
    return shards


def _save_tokenizer(
    plan: StorePlan, old_shards: Sequence[ShardResult], progress: ProgressSink
) -> Codec:
    """Copy or train the tokenizer into the store. If an earlier start trained it, use it again."""
    folder = plan.store / "tokenizer"
    settings = plan.settings
    if plan.tokenizer is not None:
        codec = load_codec(plan.tokenizer)
    else:
        trained = _load_trained(folder, old_shards)
        if trained is not None:
            return trained
        size = settings.trained_vocab_size or 0
        progress(0, 0, f"training a tokenizer of {size} entries")
        codec = learn_tokenizer(
            plan.train_files,
            vocab_size=size,
            family_kind=settings.family_kind,
            max_examples=settings.max_examples,
        )
    if "chat_template" in plan.recorded:
        set_chat_template(codec, settings)
    with atomic_folder(folder) as writer:
        codec.save(writer.folder)
    return codec


def _load_trained(folder: Path, old_shards: Sequence[ShardResult]) -> Codec | None:
    """Load the tokenizer that an earlier start trained. Return None if `old_shards` differ."""
    # If the tokenizer is missing or damaged, training gives the same tokenizer again.
    with suppress(DataError):
        codec = load_codec(folder)
        if {shard.tokenizer for shard in old_shards} <= {hash_of_folder(folder)}:
            return codec
    return None


def _remove_leftovers(store: Path, n_shards: int) -> None:
    """Remove temporary files of a finished store. Call it after the manifest was written."""
    in_use = {shard_folder(store, number).name for number in range(n_shards)}
    for folder in (store / "shards").iterdir():
        if folder.name in in_use:
            (folder / f"{NEAR}.npy").unlink(missing_ok=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    (store / BUILDING).unlink(missing_ok=True)
