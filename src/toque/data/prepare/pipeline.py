"""The `prepare` pipeline: raw files to a token store, in parallel, resumable, reused if unchanged.

    sources -> groups of raw blocks -> one shard each (workers) -> global pass over rows -> manifest

A killed `prepare` keeps its whole shards, and ends with the same bytes when it is started again.
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

from toque.data.prepare.conversation_rows import with_template
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
_BEGUN = re.compile(
    r"\.lock(\.lease(\.break\.[0-9]+\.[0-9a-f]{32})?)?|\.building\.json\.[0-9a-f]{16}\.partial"
    rf"|{ROWS}"
)
"""Files that a start leaves when it ends before `building.json` says whose the folder is, and the
folder of a program's rows, which are there before it."""


class _Mark(msgspec.Struct):
    """The content of `building.json`, by which an unfinished folder is a store's."""

    fingerprint: str


@dataclass(frozen=True)
class PrepareResult:
    """The store, its report, and whether it existed already."""

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
    """Write the store of `sources` at `store`, or reuse the one that is there.

    Of equal records the first is kept. Neither `workers` (processes; None for the available cores)
    nor the engine changes the result; `replace` replaces a store made from other inputs.

    Raises:
        DataError: a source, a tokenizer or the store cannot be used; the disk is full.
        ConfigError: the settings contradict each other or the data.
    """
    started = time.perf_counter()
    progress = progress or no_progress
    progress(0, 1, "hashing the sources")
    refuse_links(Path(store), DataError)
    plan = plan_of(sources, Path(store), settings)
    existing = _reusable(plan, progress, replace=replace)
    if existing is not None:
        return existing
    with disk_faults(plan.store, "preparing the data"):
        plan.store.mkdir(parents=True, exist_ok=True)
        with store_to_write(plan.store) as lock:
            # Shards carry the fingerprint of what was asked, the store that of what was chosen.
            fingerprint = plan.fingerprint(settings)
            kept = _begin(plan.store, fingerprint)
            if lock.note is not None:
                progress(0, 0, lock.note)
            codec = _tokenizer(plan, kept, progress)
            limited, limits = settings, list[str]()
            if settings.open_limits:
                progress(0, 0, "measuring the lengths of a sample")
                limited, limits, _ = choose_limits(plan.files, codec, settings)
            readers = {(file.source, file.name): file.reader for file in plan.files}
            writer = ShardWriter(plan.store, fingerprint, readers, limited, codec)
            writing = ShardWriting(writer, plan.files)
            shards = writing.write(progress, workers=workers, engine=engine)
            progress(0, 0, "finding duplicates, splitting and writing the report")
            finalizer = StoreFinalizer(
                plan, codec, limited, limits, shards, writing.not_read, started
            )
            report = finalizer.finish()
            _remove_leftovers(plan.store, len(shards))
    return PrepareResult(TokenStore.open(plan.store), report, reused=False)


def _reusable(plan: StorePlan, progress: ProgressSink, *, replace: bool) -> PrepareResult | None:
    folder = plan.store
    if not holds_a_store(folder):
        return None
    manifest = read_manifest(folder)
    differences = plan.differences(manifest)
    if differences and not replace:
        raise DataError(
            f"{folder} holds a token store made from something else: {'; '.join(differences)}. "
            f"Choose another data.store, or run prepare with {argument('replace=True')} to make it "
            "anew."
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
        places = [folder / "shards" / name / SIDECAR for name in names]
        shards = [read_json(place, ShardResult) for place in places]
        refuse_bad_sources(plan, [shard for shard in shards if shard is not None])
    if (folder / BUILDING).exists():  # killed after the manifest was written
        with suppress(DataError), store_to_write(folder):  # or left for another day
            _remove_leftovers(folder, len(names))
    return PrepareResult(TokenStore(folder, manifest), report, reused=True)


def holds_a_store(folder: Path) -> bool:
    """True if there is a finished store; what else may be there is one that is not finished.

    Raises:
        DataError: the folder holds something else, or is none.
    """
    above = next((p for p in (folder, *folder.parents) if p.exists() or p.is_symlink()), None)
    if above is not None and not above.is_dir():
        what = "is a file" if above.exists() else "is a link to nothing"
        raise DataError(f"data.store is {folder}, and {above} {what}. Choose a folder for a store.")
    if not folder.is_dir():
        return False
    if (folder / NAME).is_file():
        return True
    foreign = any(not _BEGUN.fullmatch(path.name) for path in folder.iterdir())
    if foreign and read_json(folder / BUILDING, _Mark) is None:
        raise DataError(
            f"{folder} is not empty and holds no token store. Choose an empty or new folder for "
            "data.store, so that nothing of yours is overwritten."
        )
    return False


def _begin(store: Path, fingerprint: str) -> list[ShardResult]:
    """Mark the folder as unfinished, and keep and return the shards that belong to these inputs."""
    sweep(store)
    sweep(store / "shards")
    mark = msgspec.json.encode(_Mark(fingerprint))
    building = store / BUILDING
    shards = [read_json(path, ShardResult) for path in store.glob(f"shards/*/{SIDECAR}")]
    kept = [each for each in shards if each is not None and each.fingerprint == fingerprint]
    if not kept and (not building.is_file() or building.read_bytes() != mark):
        for name in ("shards", "tokenizer"):
            shutil.rmtree(store / name, ignore_errors=True)
    atomic_write(building, mark)
    (store / NAME).unlink(missing_ok=True)  # after the mark: one of them says whose the folder is
    (store / "shards").mkdir(exist_ok=True)
    return kept


def _tokenizer(plan: StorePlan, kept: Sequence[ShardResult], progress: ProgressSink) -> Codec:
    """The codec, copied or trained into the store; one that an earlier start trained is kept.

    It is trained again where it is not the one of the shards that are `kept`.
    """
    folder, settings = plan.store / "tokenizer", plan.settings
    if plan.tokenizer is not None:
        codec = load_codec(plan.tokenizer)
    else:
        with suppress(DataError):  # absent or damaged: training again gives the same one
            codec = load_codec(folder)
            if {shard.tokenizer for shard in kept} <= {hash_of_folder(folder)}:
                return codec
        size = settings.trained_vocab_size or 0
        progress(0, 0, f"learning a tokenizer of {size} entries")
        codec = learn_tokenizer(
            plan.trained,
            vocab_size=size,
            family_kind=settings.family_kind,
            max_examples=settings.max_examples,
        )
    if "chat_template" in plan.recorded:
        with_template(codec, settings)
    with atomic_folder(folder) as writer:
        codec.save(writer.folder)
    return codec


def _remove_leftovers(store: Path, n_shards: int) -> None:
    """Remove temporary files; after the manifest, so that a kill leaves a whole store."""
    known = {shard_folder(store, number).name for number in range(n_shards)}
    for folder in (store / "shards").iterdir():
        if folder.name in known:
            (folder / f"{NEAR}.npy").unlink(missing_ok=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    (store / BUILDING).unlink(missing_ok=True)
