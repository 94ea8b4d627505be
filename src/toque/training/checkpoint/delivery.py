"""Delivery: a run's checkpoints between machines that share no folder, through its bucket.

    machine of rank 0:  checkpoints/step-00000200/{shard-00000-of-00002..., shards.json, state.json,
                        manifest.json}
    another machine:    delivery/checkpoints/step-00000200/shard-00001-of-00002.safetensors
    the bucket:         checkpoints/step-00000200/ with all of them, the manifest last

A checkpoint is what the bucket holds whole. A file that lies on a machine saves fetching it again,
once its SHA-256 is found to be the manifest's; a machine that lies empty fetches what its ranks
read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, final

from toque.errors import CheckpointError
from toque.storage.atomic import FileEntry, atomic_path, atomic_write, remove_folder, sweep_files
from toque.storage.bucket import Bucket
from toque.storage.checksums import sha256_of
from toque.training.checkpoint.manifest import MANIFEST, Manifest, is_tensors
from toque.training.checkpoint.saved import Checkpoint, step_folders, step_name
from toque.training.distributed.collectives import Ranks
from toque.training.distributed.side_by_side import do_all

DELIVERY: Final = "delivery"
"""Folder of a run on machines that do not see rank 0's: shards on their way out and in."""


@final
@dataclass(frozen=True)
class Delivery:
    """The bucket's part in the checkpoints of ranks that do not all see one run folder.

    Args:
        bucket: the run's place there.
        run: its folder on this machine.
        ranks: the processes that share the run.
        first: the lowest rank that sees `run` as this one does, which fetches for all that do.
        lost: whether another process has taken the run's place over; asked on rank 0.
    """

    bucket: Bucket
    run: Path
    ranks: Ranks
    first: int
    lost: Callable[[], bool] = lambda: False

    def folder(self, kind: str, step: int, main: Path) -> Path:
        """Where this rank writes and reads files of a checkpoint; `main` where rank 0 does."""
        return main if self.first == 0 else self.run / DELIVERY / kind / step_name(step)

    def begin(self, kind: str, step: int) -> None:
        """Make no checkpoint of what the bucket has of this step, before any of it is replaced.

        Raises:
            CheckpointError: the service refused or stayed away, as for all here; or another process
                has taken the run over.
        """
        self._refuse_lost()
        self.bucket.remove([f"{kind}/{step_name(step)}/{MANIFEST}"])

    def send(self, kind: str, step: int, path: Path) -> None:
        """Upload this rank's shard."""
        self.bucket.put_file(path, f"{kind}/{step_name(step)}/{path.name}")

    def seal(self, kind: str, step: int, folder: Path) -> None:
        """Upload what rank 0 writes beside the shards, and last the manifest, once all are there.

        Raises:
            CheckpointError: as for `begin`.
        """
        place = f"{kind}/{step_name(step)}"
        small = [path for path in folder.iterdir() if not is_tensors(path.name)]
        for path in sorted(small, key=lambda path: path.name == MANIFEST):
            self._refuse_lost()
            self.bucket.put(f"{place}/{path.name}", path.read_bytes())

    def refuse_half(self, found: Checkpoint) -> None:
        """Refuse rank 0's part of a checkpoint that is not in the bucket.

        Raises:
            CheckpointError: naming what is missing.
            BucketError: the service refused or stayed away.
        """
        if found.lacking and self.bucket.read(_manifest_of(found)) != _text_of(found):
            raise CheckpointError(
                f"{found.path} is not whole: it lacks {found.lacking[0]}, and "
                f"{self.bucket.address} does not hold this save."
            )

    def prune(self, kind: str, step: int) -> None:
        """Remove what lies here of steps other than the one that is whole now."""
        if self.first == self.ranks.rank != 0:
            for path in step_folders(self.run / DELIVERY / kind):
                if path.name != step_name(step):
                    remove_folder(path)

    def stop(self) -> None:
        """Repeat no request: the run ends by an error."""
        self.bucket.retry.stop.set()

    def shared(self, found: Checkpoint | None) -> Checkpoint | None:
        """Rank 0's checkpoint for every rank, with its small files here; all ranks call this.

        Raises:
            CheckpointError: on every rank: it is not whole, or the bucket refused.
        """
        told: tuple[Path, Manifest] | None = self.ranks.broadcast(
            None if found is None else (found.path, found.manifest)
        )
        if told is None:
            return None
        main, manifest = told
        kind, skipped = main.parent.name, () if found is None else found.skipped
        here = Checkpoint(self.folder(kind, manifest.step, main), manifest, skipped, rest=self)
        do_all(self.ranks, partial(self._give, here) if self.ranks.is_main else _nothing)
        small = [e.file for e in manifest.files if not is_tensors(e.file)]
        self.bring(here.path, manifest, small)
        return here

    def bring(self, folder: Path, manifest: Manifest, files: Collection[str]) -> None:
        """Fetch those of a checkpoint's files that ranks on this machine need and it lacks.

        Args:
            folder: of the checkpoint on this machine.
            manifest: of the checkpoint.
            files: that this rank needs; every rank calls this with its own.

        Raises:
            CheckpointError: on every rank: the bucket refused, or what it holds is damaged.
        """
        asked: list[tuple[int, list[str]]] = self.ranks.all_gather((self.first, sorted(files)))
        needed = {name for first, names in asked if first == self.ranks.rank for name in names}
        entries = [entry for entry in manifest.files if entry.file in needed]
        do_all(self.ranks, partial(self._fetch, folder, entries))

    def _give(self, found: Checkpoint) -> None:
        """Have the bucket hold a checkpoint of this machine whole."""
        self.refuse_half(found)
        text, place = _text_of(found), _manifest_of(found)
        if self.bucket.read(place) == text:
            return
        for entry in found.manifest.files:
            name = place.replace(MANIFEST, entry.file)
            self.bucket.put_file(found.path / entry.file, name)
        self.bucket.put(place, text)

    def _refuse_lost(self) -> None:
        if self.lost():
            raise CheckpointError(f"another process has taken {self.bucket.address} over")

    def _fetch(self, folder: Path, entries: Collection[FileEntry]) -> None:
        if not entries:
            return
        folder.mkdir(parents=True, exist_ok=True)
        sweep_files(folder)
        for entry in entries:
            path = folder / entry.file
            if path.is_file() and sha256_of(path) == entry.sha256:
                continue
            place = f"{folder.parent.name}/{folder.name}"
            with atomic_path(path) as temporary:
                self.bucket.get_file(f"{place}/{entry.file}", temporary, most=entry.bytes)
                if sha256_of(temporary) != entry.sha256:
                    raise CheckpointError(
                        f"{self.bucket.address}/{place}/{entry.file} is damaged: its SHA-256 is "
                        "not the one in its manifest. Put a whole copy in its place, or continue "
                        "from a checkpoint before it by its name."
                    )


def _manifest_of(found: Checkpoint) -> str:
    return f"{found.path.parent.name}/{step_name(found.step)}/{MANIFEST}"


def _text_of(found: Checkpoint) -> bytes:
    return (found.path / MANIFEST).read_bytes()


def _nothing() -> None:
    """What the others do meanwhile."""


def first_to_see(folder: Path, ranks: Ranks) -> list[int]:
    """The lowest rank that sees each rank's `folder` as its own; zeros where all share it.

    Raises:
        CheckpointError: on every rank, when one cannot write there.
    """
    probe = f"probe-{os.urandom(8).hex()}"
    fault = ""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        atomic_write(folder / probe, b"Which ranks see this?\n")
    except OSError as error:
        fault = error.strerror or str(error)
    told: list[tuple[str, str]] = ranks.all_gather((probe, fault))
    faults = [f"rank {rank}: {why}" for rank, (_, why) in enumerate(told) if why]
    if faults:
        raise CheckpointError(
            f"{folder} cannot be written ({'; '.join(faults)}). Choose another run_dir, or mend "
            "its permissions."
        )
    own = next(n for n, (name, _) in enumerate(told) if (folder / name).exists())
    found: list[int] = ranks.all_gather(own)
    (folder / probe).unlink(missing_ok=True)
    return found
