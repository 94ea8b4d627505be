"""Going back: a run that continues from a named older checkpoint instead of its newest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from toque.config import Resolved
from toque.data.store.token_store import TokenStore
from toque.storage.bucket import Bucket
from toque.training.checkpoint.fetch import fetch_step
from toque.training.checkpoint.saved import step_name, verify_checkpoint
from toque.training.checkpoint.set_aside import (
    SET_ASIDE,
    is_done,
    mark_done,
    named_step,
    set_aside,
)
from toque.workflows.run_folder import former_defaults, refuse_another_run, with_values


def go_back(
    resolved: Resolved,
    store: TokenStore,
    name: str,
    say: Callable[[str], None],
    bucket: Bucket | None,
) -> None:
    """Make the checkpoint `name` the run's newest: whatever is newer is set aside.

    Call it on the first rank, with the folder and the bucket claimed.

    Args:
        resolved: of the session that begins.
        store: its data.
        name: of the checkpoint, e.g. step-00000200 or 200.
        say: called with what was set aside.
        bucket: the run's place in a bucket, if it has one.

    Raises:
        CheckpointError: there is none of that name, it is damaged, or it is another run's; nothing
            was moved.
        BucketError: the service refused or stayed away.
    """
    run = Path(resolved.config.run_dir)
    if is_done(run, name):
        say(f"note: started again after going back to {name}; the newest checkpoint is taken")
        return
    step = named_step(name, run, bucket)
    if bucket is not None:
        fetch_step(bucket, run, step, say=say)
    found = verify_checkpoint(run / "checkpoints" / step_name(step))
    config = with_values(resolved, former_defaults(resolved)).config
    refuse_another_run(config, store, found, lambda _sentence: None)  # said when it continues
    moved = set_aside(run, step, bucket=bucket)
    mark_done(run, name)
    if not moved:
        say(f"continuing from {step_name(step)}, the newest there is")
        return
    say(
        f"continuing from {step_name(step)}; set aside in {run / SET_ASIDE}, and no longer part of "
        f"the run: {', '.join(moved)}"
    )
