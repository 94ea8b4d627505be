"""Run folder: its configuration, and the checkpoint that a session begins with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from torch import nn

from toque.config import Difference, Resolved, RunConfig, differences, load_config, resolved_yaml
from toque.config.resolve import DEFAULT, FORMER_DEFAULTS, leaves
from toque.data.store.token_store import TokenStore
from toque.errors import CheckpointError, argument
from toque.storage.atomic import atomic_write
from toque.training.checkpoint.state_tensors import load_model_tensors
from toque.training.checkpoint.store import Checkpoint, CheckpointStore, run_lock, verify_checkpoint


def former_defaults(resolved: Resolved) -> dict[str, str]:
    """Settings left at their default, where the run in the folder began with an earlier one."""
    own = Path(resolved.config.run_dir) / "config.yaml"
    if not own.exists():
        return {}
    begun = dict(leaves(load_config(str(own)).config.model_dump(mode="json")))
    return {
        name: value
        for name, value in FORMER_DEFAULTS.items()
        if resolved.origins[name] == DEFAULT and begun[tuple(name.split("."))] == value
    }


def with_values(resolved: Resolved, values: Mapping[str, str]) -> Resolved:
    """The configuration with some settings as the run's own config.yaml has them."""
    config = resolved.config
    for name, value in values.items():
        section, field = name.split(".")
        changed = load_config("demo", [f"{name}={value}"]).config
        part = getattr(config, section).model_copy(
            update={field: getattr(getattr(changed, section), field)}
        )
        config = config.model_copy(update={section: part})
    return replace(resolved, config=config)


def checkpoint_to_continue(config: RunConfig, store: TokenStore) -> Checkpoint | None:
    """The newest whole checkpoint of the run folder; None where there is not one yet.

    Raises:
        CheckpointError: it belongs to another run, or another process trains there.
    """
    run = Path(config.run_dir)
    if not run.exists():
        return None
    # Held for a moment: a second run is refused before it has read or written anything.
    with run_lock(run / "checkpoints"):
        found = CheckpointStore(run / "checkpoints").newest_valid()
    if found is None:
        return None
    if found.manifest.data_fingerprint != store.fingerprint:
        raise CheckpointError(
            f"{run} was trained on another store (then {found.manifest.data_fingerprint[:12]}, now "
            f"{store.fingerprint[:12]}): the data or the tokenizer changed. Set data.store back, "
            "or begin a new run: run_dir=runs/another."
        )
    old = load_config(str(run / "config.yaml"), []).config
    # Where the data lies may change: the fingerprint above holds it to its content.
    unsafe = [d for d in differences(old, config) if not d.is_safe and not _only_moved(d)]
    if unsafe:
        listed = "; ".join(f"{d.path}: {d.old} -> {d.new}" for d in unsafe)
        raise CheckpointError(
            f"{run} holds a run at step {found.step} with other settings: {listed}. Continuing "
            "with these would be neither run. Set them back to continue, or begin a new run from "
            f"its weights: run_dir=runs/another {argument(f'start={found.path}')}."
        )
    return found


def _only_moved(difference: Difference) -> bool:
    """Whether the data lies elsewhere and is drawn from as before."""
    if difference.path.endswith(".weight"):
        return (difference.old or 1.0) == (difference.new or 1.0)
    return difference.path.startswith(("data.store", "data.sources"))


def write_config(resolved: Resolved) -> None:
    """Write config.yaml of the run.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    run = Path(resolved.config.run_dir)
    try:
        run.mkdir(parents=True, exist_ok=True)
        atomic_write(run / "config.yaml", resolved_yaml(resolved).encode())
    except OSError as error:
        raise CheckpointError(
            f"The run folder {run} cannot be written: {error.strerror}. Choose another with "
            "run_dir=... or mend its permissions."
        ) from error


def load_start(model: nn.Module, path: Path) -> None:
    """Load the weights a new run begins with.

    Args:
        model: of the new run.
        path: a checkpoint folder, or a run folder for its newest.

    Raises:
        CheckpointError: no checkpoint there, or a damaged one.
    """
    folder = path
    if not (folder / "manifest.json").exists():
        newest = CheckpointStore(path / "checkpoints").newest_valid() if path.exists() else None
        if newest is None:
            raise CheckpointError(
                f"{argument(f'start={path}')}: no checkpoint there. Name a folder such as "
                "runs/cookbook/checkpoints/step-00000200, or a run."
            )
        folder = newest.path
    load_weights(model, verify_checkpoint(folder))


def load_weights(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Load the weights of a checkpoint: all of them, or those that are trained."""
    load_model_tensors(model, checkpoint.tensors("model"), where=str(checkpoint.path))
