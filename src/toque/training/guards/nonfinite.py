"""Stopping at a loss or gradient that is not a number, with what is needed to replay it."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from toque.batch import Batch
from toque.errors import NonFiniteError
from toque.training.guards.nan_tracer import NonFiniteOrigin

DUMP: Final = "non_finite.json"
_SHOWN: Final = 12


@dataclass(frozen=True)
class _Update:
    step: int
    lr: float
    loss: Tensor
    grad_norm: Tensor
    batch: Batch


@dataclass
class NonFiniteGuard:
    """Collects updates and judges them together, so that CUDA is waited for rarely.

    An update that is not finite has not been applied (see `Runtime.update`): being told of it a few
    steps later harms nothing, provided nothing was saved in between.
    """

    run_folder: Path | None = None
    norm_may_be_infinite: bool = False
    """With a float16 loss scaler an overflow is ordinary: the step is skipped, the scale halved."""
    locate: Callable[[int, Batch], NonFiniteOrigin | None] | None = None
    """(step, its batch) -> where the first such value appears, by computing it again."""
    gather: Callable[[Any], list[Any]] = lambda own: [own]
    """Every rank's share of what is said; each of them finds the same update bad."""
    _waiting: list[_Update] = field(default_factory=list)

    def add(
        self,
        *,
        step: int,
        lr: float,
        loss: Tensor,
        grad_norm: Tensor,
        batch: Batch,
    ) -> None:
        """Take note of one update; its batch is held until the next check."""
        self._waiting.append(_Update(step, lr, loss, grad_norm, batch))

    def check(self) -> None:
        """Judge every update since the last check.

        Raises:
            NonFiniteError: naming the first bad one; it is described in `non_finite.json`.
        """
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        losses = torch.stack([u.loss for u in waiting]).tolist()
        norms = torch.stack([u.grad_norm.to(u.loss.device) for u in waiting]).tolist()
        for update, loss, norm in zip(waiting, losses, norms, strict=True):
            if not math.isfinite(loss) or not (self.norm_may_be_infinite or math.isfinite(norm)):
                raise self._error(update, loss, norm)

    def _error(self, update: _Update, loss: float, norm: float) -> NonFiniteError:
        blame = self.locate(update.step, update.batch) if self.locate is not None else None
        found = asdict(blame) if blame is not None else None
        shares = self.gather({"rows": update.batch.example_ids, "blame": found})
        rows = [row for share in shares for row in share["rows"]]
        ids = tuple(i for row in rows for i in row)
        found = next(filter(None, (share["blame"] for share in shares)), None)
        blame = (
            NonFiniteOrigin(found["where"], tuple(found["example_ids"]))
            if found is not None
            else None
        )
        first = "Computed again, every value is finite."
        if blame is not None:
            held = f", in examples {_listed(blame.example_ids)}" if blame.example_ids else ""
            first = f"First not finite: {blame.where}{held}."
        where = ""
        if self.run_folder is not None:
            path = self.run_folder / DUMP
            with contextlib.suppress(OSError):  # the error itself matters more than its record
                path.write_text(_record(update, loss, norm, blame, rows), encoding="utf-8")
                where = f" (all in {path})"
        return NonFiniteError(
            f"Step {update.step} has loss {loss:g} and gradient norm {norm:g} at learning rate "
            f"{update.lr:.3g}, over {len(ids)} examples: {_listed(ids)}{where}. {first} The update "
            "was not applied and the last checkpoint stands. Lower optim.peak_lr or lengthen "
            "optim.warmup; if precision is fp16, use bf16; if it returns at the same step, look "
            "at those examples."
        )


def _listed(ids: tuple[int, ...]) -> str:
    return ", ".join(map(str, ids[:_SHOWN])) + (", …" if len(ids) > _SHOWN else "")


def _record(
    update: _Update,
    loss: float,
    norm: float,
    blame: NonFiniteOrigin | None,
    rows: Sequence[Sequence[int]],
) -> str:
    record = {
        "step": update.step,
        "loss": repr(loss),  # JSON has no word for NaN
        "grad_norm": repr(norm),
        "lr": update.lr,
        "first_non_finite": blame.where if blame else None,
        "first_example_ids": blame.example_ids if blame else None,
        "example_ids": rows,
    }
    return json.dumps(record, indent=1) + "\n"
