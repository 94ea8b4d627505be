"""Bucket runs: checkpoints uploaded to a bucket, or a bucket as the run folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from toque.config import Resolved, RunConfig
from toque.errors import ConfigError
from toque.storage.bucket import Bucket, is_remote, open_bucket
from toque.storage.bucket_access import RUNS, BucketError
from toque.storage.bucket_lock import BucketLock
from toque.storage.download import cache_folder
from toque.training.checkpoint.fetch import fetch_run
from toque.training.checkpoint.upload import Uploads


def on_this_machine(resolved: Resolved) -> Resolved:
    """The same run in a folder of this machine: `run_dir: gs://...` becomes `checkpoint.upload`.

    Raises:
        ConfigError: the address cannot be a run's, or two different ones are given.
    """
    config = resolved.config
    try:
        remote = is_remote(config.run_dir)
    except BucketError as error:
        raise ConfigError(
            f"run_dir is {config.run_dir.partition('://')[0]}://..., a kind of address that "
            "cannot hold a run. Use a folder, gs://BUCKET/FOLDER or s3://BUCKET/FOLDER."
        ) from error
    if not remote:
        return resolved
    address = config.run_dir.rstrip("/")
    if config.checkpoint.upload not in (None, address):
        raise ConfigError(
            f"run_dir is {address} and checkpoint.upload is {config.checkpoint.upload}: a run has "
            "one place in a bucket. Leave checkpoint.upload out."
        )
    scheme, _, rest = address.partition("://")
    parts = rest.split("/")
    if len(parts) < 2 or any(part in ("", ".", "..") for part in parts):
        raise ConfigError(
            f"run_dir is {address}, which names no folder in a bucket. Write it as "
            "gs://BUCKET/FOLDER, e.g. gs://my-bucket/runs/cookbook."
        )
    folder = cache_folder("runs").joinpath(scheme, *parts)
    checkpoint = config.checkpoint.model_copy(update={"upload": address})
    here = config.model_copy(update={"run_dir": str(folder), "checkpoint": checkpoint})
    return replace(resolved, config=here)


@contextmanager
def uploading(
    config: RunConfig,
    *,
    say: Callable[[str], None],
    on: bool = True,
    go_back: Callable[[Bucket | None], None] | None = None,
) -> Iterator[Uploads | None]:
    """Hold the run's place in its bucket, fetch what is newer there, and upload until the end.

    With `go_back` that is called instead of fetching, with the place, or None without a bucket.

    Raises:
        CheckpointError: another process trains there, it holds another run, or the store refuses.
    """
    if config.checkpoint.upload is None or not on:
        if go_back is not None:
            go_back(None)
        yield None
        return
    run = Path(config.run_dir)
    bucket = open_bucket(config.checkpoint.upload.rstrip("/"), RUNS)
    with BucketLock(bucket) as lock:
        if go_back is None:
            fetch_run(bucket, run, say=say)
        else:
            go_back(bucket)
        uploads = Uploads(run, bucket, lock, keep_last=config.train.keep_last)
        try:
            with uploads:
                yield uploads
                say(f"uploading what is left to {bucket.address}")
        finally:
            for sentence in uploads.messages():
                say(f"warning: {sentence}")
            say(f"checkpoint.upload={bucket.address}: {uploads.counts.in_words()}")
