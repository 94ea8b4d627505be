"""The `prepare` pipeline: raw files to a token store, in parallel, resumable, reused if unchanged.

    sources -> groups of raw blocks -> one shard each (workers) -> global pass over rows -> manifest

A store's fingerprint covers the format, the versions of the code, every source file's content, the
settings and the tokenizer. A killed `prepare` keeps its whole shards and ends with the same bytes.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from toque.data.prepare.finalize import StoreFinalizer
from toque.data.prepare.length_limits import LengthLimits, choose_limits
from toque.data.prepare.near_duplicates import NEAR
from toque.data.prepare.plan import Plan, plan_of
from toque.data.prepare.process_pool import ForkedState
from toque.data.prepare.report import Report
from toque.data.prepare.settings import LIMITS, PrepareSettings
from toque.data.prepare.shards import Engine, ShardWriting, read_sidecar
from toque.data.prepare.tokenizer_sample import learn_tokenizer
from toque.data.prepare.worker import SIDECAR, Job, shard_folder
from toque.data.store.held_store import store_to_write
from toque.data.store.manifest import NAME, StoreManifest, read_manifest
from toque.data.store.token_store import TokenStore, check_files
from toque.data.tokenizer.codec import Codec, load_codec
from toque.data.tokenizer.sameness import tokenizer_differences
from toque.errors import DataError, argument
from toque.sources.records import Source
from toque.storage.atomic import atomic_folder, atomic_write, disk_faults, sweep
from toque.storage.no_follow import refuse_links
from toque.storage.progress import ProgressSink, no_progress

BUILDING = "building.json"
_BEGUN = re.compile(r"\.lock(\.lease)?|\.(building\.json|\.lock\.lease)\.[0-9a-f]{16}\.partial")
"""Files that a start leaves when it ends before `building.json` says whose the folder is."""
_NOT_COMPARED = {"tokenizer", "tokenizer_sha256", "chosen", "room", "max_bad_share"}
"""Recorded settings that are compared otherwise, or change no row."""


@dataclass(frozen=True)
class PrepareResult:
    """The store, its report, and whether it existed already."""

    store: TokenStore
    report: Report
    reused: bool
    older_reader: bool = False
    """Whether an earlier version of a reader wrote it: the same records would be read otherwise
    now, and stay as they are until the store is made anew."""


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

    Args:
        sources: read in this order; the first of equal records is kept.
        store: folder, created if absent.
        settings: everything that decides the rows.
        workers: processes that parse and tokenise; None for the available cores. The result
            does not depend on it.
        progress: called as the sources are read.
        replace: replace a store made from other inputs instead of raising.
        engine: "local" for processes on this machine, "ray" for a cluster; the result is the same.

    Raises:
        DataError: a source, a tokenizer or the store cannot be used; the disk is full.
        ConfigError: the settings contradict each other or the data.
    """
    started = time.perf_counter()
    progress = progress or no_progress
    progress(0, 1, "hashing the sources")
    refuse_links(Path(store), DataError)
    plan = plan_of(sources, Path(store), settings)
    if any(file.coming is not None for file in plan.files):
        _write_ahead(plan, progress, workers=workers, engine=engine)
        plan = plan_of([source.whole() for source in sources], Path(store), settings)
    found = _reusable(plan, progress, replace=replace)
    if found is not None:
        return found
    job = plan.job
    with disk_faults(job.store, "preparing the data"):
        job.store.mkdir(parents=True, exist_ok=True)
        with store_to_write(job.store) as lock:
            _begin(job)
            if lock.note is not None:
                progress(0, 0, lock.note)
            codec = _tokenizer(plan, progress)
            limits = LengthLimits(job.settings, [])
            if job.settings.open_limits:
                progress(0, 0, "measuring the lengths of a sample")
                limits = choose_limits(plan.files, codec, job.settings)
            chosen = limits.settings
            job = dataclasses.replace(job, settings=chosen)
            writing = ShardWriting(job, plan.files, ForkedState(codec, lock.descriptor))
            shards = writing.write(progress, workers=workers, engine=engine)
            # Shards carry the fingerprint of what was asked, the store that of what was chosen.
            job = dataclasses.replace(job, fingerprint=plan.fingerprint(chosen))
            ending = StoreFinalizer(
                job,
                plan.recorded_with(chosen),
                codec,
                plan.files,
                shards,
                writing.not_read,
                limits.sentences,
                plan.left_out,
            )
            progress(0, 0, "finding duplicates, splitting and writing the report")
            report = ending.finish(seconds=time.perf_counter() - started)
            _remove_leftovers(job.store, len(shards))
    return PrepareResult(TokenStore.open(job.store), report, reused=False)


def _write_ahead(
    plan: Plan, progress: ProgressSink, *, workers: int | None, engine: Engine
) -> None:
    """Write shards as their files come, before there is a plan that counts.

    They are what a killed `prepare` leaves: the real one, which begins when all files are here and
    known, keeps those that are right and writes the others. So a store cannot depend on which file
    came when, and what goes wrong here is met again there, where it can be said.
    """
    job = plan.job
    if not plan.can_begin or (job.store / NAME).is_file():
        return
    _reusable(plan, progress, replace=False)  # refuses a folder of something else
    with disk_faults(job.store, "preparing the data"), suppress(DataError):
        job.store.mkdir(parents=True, exist_ok=True)
        with store_to_write(job.store) as lock:
            _begin(job)
            codec = _tokenizer(plan, progress)
            if job.settings.open_limits:  # which no file decides, or this would not begin
                job = dataclasses.replace(
                    job, settings=choose_limits([], codec, job.settings).settings
                )
            writing = ShardWriting(job, plan.files, ForkedState(codec, lock.descriptor))
            writing.write(progress, workers=workers, engine=engine)


def _reusable(plan: Plan, progress: ProgressSink, *, replace: bool) -> PrepareResult | None:
    """The existing store, if it is whole and of the same fingerprint.

    Raises:
        DataError: another store, or other files, are in the way.
    """
    folder = plan.job.store
    there = next((p for p in (folder, *folder.parents) if p.exists() or p.is_symlink()), None)
    if there is not None and not there.is_dir():
        what = "is a file" if there.exists() else "is a link to nothing"
        raise DataError(
            f"data.store is {folder}, and {there} {what}: a store is a folder. Choose another "
            "data.store, e.g. stores/mine."
        )
    if not folder.is_dir():
        return None
    if not (folder / NAME).is_file():
        foreign = any(not _BEGUN.fullmatch(path.name) for path in folder.iterdir())
        if foreign and not (folder / BUILDING).is_file():
            raise DataError(
                f"{folder} is not empty and holds no token store. Choose an empty or new folder "
                "for data.store, so that nothing of yours is overwritten."
            )
        return None
    manifest = read_manifest(folder)
    same = _is_of(manifest, plan)
    older = not same and not replace and _is_of(manifest, plan, older_readers=True)
    if not (same or older):
        if not replace:
            raise DataError(
                f"{folder} holds a token store made from something else: "
                f"{'; '.join(_differences(manifest, plan))}. Choose another data.store, or run "
                f"prepare with {argument('replace=True')} to make it anew."
            )
        return None
    report = Report.read_from(folder)
    try:
        check_files(folder, [*manifest.shards, *manifest.files], verify=False)
    except DataError as error:
        if older:
            raise DataError(
                f"{error} An earlier release wrote this store, and this one would read its sources "
                "otherwise. Restore it from a copy, or run prepare with "
                f"{argument('replace=True')} to make it anew."
            ) from error
        progress(0, 0, f"repairing the store: {error}")
        return None
    if report is None:
        return None
    if float(manifest.settings.get("max_bad_share", 1.0)) > plan.job.settings.max_bad_share:
        _refuse_bad_sources(plan, manifest)
    if (folder / BUILDING).exists():  # killed after the manifest was written
        with (
            suppress(DataError),
            store_to_write(folder),
        ):  # or another day
            _remove_leftovers(folder, len({entry.file.split("/")[1] for entry in manifest.shards}))
    return PrepareResult(TokenStore(folder, manifest), report, reused=True, older_reader=older)


def _is_of(manifest: StoreManifest, plan: Plan, *, older_readers: bool = False) -> bool:
    """Whether a store is the planned one, though its tokenizer may have been saved again since.

    Args:
        manifest: of the store.
        plan: what is asked for.
        older_readers: whether it may be of an earlier version of its readers. What a release wrote
            stays usable, and a run on it can be continued: only `replace` reads anew.
    """
    changed: dict[str, object] = {}
    if older_readers:
        there, here = manifest.settings.get("reader_versions"), plan.recorded["reader_versions"]
        if not isinstance(there, list) or len(there) != len(here):
            return False
        pairs = zip(there, here, strict=True)
        if not all(isinstance(old, int) and old <= new for old, new in pairs):
            return False
        changed = {"reader_versions": there}
    settings = plan.job.settings.filled_from(manifest.settings)
    if manifest.fingerprint == plan.fingerprint(settings, **changed):
        return True
    digest = manifest.settings.get("tokenizer_sha256")
    if plan.tokenizer is None or digest == plan.recorded["tokenizer_sha256"]:
        return False
    changed["tokenizer_sha256"] = digest
    only_tokenizer = manifest.fingerprint == plan.fingerprint(settings, **changed)
    return only_tokenizer and not _tokenizer_differences(plan)


def _tokenizer_differences(plan: Plan) -> list[str]:
    """How the tokenizer of the existing store differs from the planned one, in words."""
    if plan.tokenizer is None:
        return []
    try:
        there = load_codec(plan.job.store / "tokenizer")
    except DataError as error:
        return [str(error)]
    return tokenizer_differences(there, load_codec(plan.tokenizer))


def _refuse_bad_sources(plan: Plan, manifest: StoreManifest) -> None:
    """Refuse to reuse a store that was made when more bad records were allowed."""
    folder = plan.job.store
    names = sorted({entry.file.split("/")[1] for entry in manifest.shards})
    shards = [read_sidecar(folder / "shards" / name / SIDECAR) for name in names]
    known = [shard for shard in shards if shard is not None]
    codec = load_codec(folder / "tokenizer")
    StoreFinalizer(plan.job, plan.recorded, codec, plan.files, known).refuse_bad_sources()


def _differences(manifest: StoreManifest, plan: Plan) -> list[str]:
    """How an existing store differs from the requested one, in words."""
    there, here = manifest.settings, msgspec.to_builtins(plan.recorded)
    found = []
    digest, asked = here["tokenizer_sha256"], here["tokenizer"]
    if (there.get("tokenizer_sha256") or digest) is None:
        if there["tokenizer"] != asked:
            found.append(f"its tokenizer is {there['tokenizer']}, not {asked}")
    elif there.get("tokenizer_sha256") != digest:
        how = "; ".join(_tokenizer_differences(plan))
        if how or digest is None:
            is_not = f"is {there.get('tokenizer')}, not {asked}"
            is_not = f"{asked} has changed since" if there.get("tokenizer") == asked else is_not
            how = f" ({how}, where one is the store's)" if how else ""
            found.append(f"its tokenizer {is_not}{how}")
    wish = msgspec.to_builtins(plan.job.settings.filled_from(there).as_recorded())
    here |= {name: "auto" if wish[name] is None else wish[name] for name in LIMITS}
    found += [
        f"{name} is {there.get(name)} there and {here.get(name)} here"
        for name in sorted((set(there) | set(here)) - _NOT_COMPARED)
        if there.get(name) != here.get(name)
    ]
    known = {entry.sha256 for entry in manifest.sources}
    wanted = {file.sha256 for file in plan.files}
    found += [f"{Path(f.name).name} is new or changed" for f in plan.files if f.sha256 not in known]
    gone = [entry.path for entry in manifest.sources if entry.sha256 not in wanted]
    found += [f"{Path(path).name} as it was then is not among the sources" for path in gone]
    return found or ["its sources are in another order or read by another reader"]


def _begin(job: Job) -> None:
    """Mark the folder as unfinished, keeping shards that belong to these inputs."""
    store = job.store
    sweep(store)
    sweep(store / "shards")
    mark = msgspec.json.encode({"fingerprint": job.fingerprint})
    building = store / BUILDING
    found = map(read_sidecar, store.glob(f"shards/*/{SIDECAR}"))
    kept = any(shard is not None and shard.fingerprint == job.fingerprint for shard in found)
    if not kept and (not building.is_file() or building.read_bytes() != mark):
        for name in ("shards", "tokenizer"):
            shutil.rmtree(store / name, ignore_errors=True)
    atomic_write(building, mark)
    (store / NAME).unlink(missing_ok=True)  # after the mark: one of them says whose the folder is
    (store / "shards").mkdir(exist_ok=True)


def _tokenizer(plan: Plan, progress: ProgressSink) -> Codec:
    """The codec, copied or trained into the store; one that an earlier start trained is kept."""
    folder = plan.job.store / "tokenizer"
    settings = plan.job.settings
    if plan.tokenizer is not None:
        codec = load_codec(plan.tokenizer)
    else:
        with suppress(DataError):  # absent or damaged: training again gives the same one
            return load_codec(folder)
        size = settings.trained_vocab_size or 0
        progress(0, 0, f"learning a tokenizer of {size} entries")
        codec = learn_tokenizer(plan.files, vocab_size=size, family_kind=settings.family_kind)
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
