"""Disk and bucket traffic of a plan."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel

from toque.config import RunConfig
from toque.workflows.plan.ahead import Ahead
from toque.workflows.plan.duration import times
from toque.workflows.plan.memory import Memory


@dataclass(frozen=True)
class Disk:
    """Bytes on the disk, and those that go to a bucket."""

    checkpoint: int
    kept: int
    """The checkpoints kept, and one of each kind that is being written besides."""
    model: int
    """The finished model."""
    store: int
    """The prepared data, where it is there."""
    saves: float
    uploaded: float
    """To the bucket over the whole run; 0 without one."""
    upload_bytes_per_second: float | None
    """That saving as often asks of the way to the bucket; None without one, or without a time."""

    @property
    def total(self) -> int:
        """All that lies on the disk at once."""
        return self.kept + self.model + self.store


def disk_of(
    config: RunConfig, model: PreTrainedModel, ahead: Ahead, memory: Memory, seconds: float | None
) -> Disk:
    """Of the run that lasts so many seconds, if that is known."""
    train, update = config.train, memory.update
    trained = update.gradients  # as many bytes as what is trained has, float32 both
    averages = memory.parts["averages of weights"]
    checkpoint = trained + update.optimizer + averages
    best = trained * (train.keep_best + 1) if train.keep_best else 0
    whole = sum(4 * p.numel() for p in model.parameters())
    finished = trained if config.adapter is not None else whole
    saves = times(train.save_every, ahead, config)
    remote = config.checkpoint.upload is not None or config.run_dir.startswith(("gs://", "s3://"))
    uploaded = saves * checkpoint + finished if remote else 0.0
    return Disk(
        checkpoint=checkpoint,
        kept=checkpoint * (train.keep_last + 1) + best,
        model=finished,
        store=_size_of(Path(config.data.store)),
        saves=saves,
        uploaded=uploaded,
        upload_bytes_per_second=uploaded / seconds if remote and seconds else None,
    )


def _size_of(folder: Path) -> int:
    if not (folder / "manifest.json").exists():
        return 0
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
