"""Small real checkpoints, and a session that uploads them."""

from __future__ import annotations

from pathlib import Path

import torch

from toque.train.checkpoint import CheckpointStore, RunIdentity
from toque.train.remote_lock import RemoteLock
from toque.train.remote_store import RemoteFolder
from toque.train.upload import Uploads


def address(service, name: str) -> str:
    return f"{service.scheme}://pantry/{name}"


def made(run_folder: Path, *steps: int, keep_last: int = 2) -> CheckpointStore:
    """A run folder with small real checkpoints."""
    store = CheckpointStore(
        run_folder / "checkpoints",
        keep_last=keep_last,
        identity=RunIdentity(data_fingerprint="the same"),
    )
    for step in steps:
        tensors = {"model": {"w": torch.full((300,), float(step))}}
        store.save(step, tensors, {"progress": {"step": step}})
    run_folder.mkdir(exist_ok=True)
    (run_folder / "config.yaml").write_text("seed: 1\n")
    return store


def upload(run_folder: Path, remote: RemoteFolder, *, keep_last: int = 2) -> Uploads:
    with RemoteLock(remote) as lock, Uploads(run_folder, remote, lock, keep_last=keep_last) as up:
        pass
    return up
