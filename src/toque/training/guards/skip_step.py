"""Updates that are not applied because their loss or gradient is far outside what came before.

Off unless asked for. A single broken batch can undo hours: its gradient, though clipped, points
anywhere, and Adam remembers it for a thousand updates. Skipping is that of OLMo's SkipStepAdamW
(six standard deviations over 128 updates); going back to a checkpoint and passing over the data in
between is what PaLM did (Chowdhery et al. 2022, section 5.1).
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, final

import torch
from torch import Tensor

from toque.batch import Batch
from toque.errors import NonFiniteError

RECORD: Final = "skipped_updates.jsonl"
_LEAST_SPREAD: Final = 1e-3
"""Of the mean: numbers that hardly vary make no outlier of a hair's breadth."""
_SHOWN: Final = 8


@dataclass(frozen=True)
class _Judged:
    step: int
    values: Tensor
    """[2] loss and gradient norm."""
    limits: Tensor
    """[2] NaN while there is too little to compare with."""
    applied: Tensor
    batch: Batch


@final
@dataclass
class Outliers:
    """Judges every update by those before it; on CUDA without waiting for the device.

    An update is applied when its loss and its gradient norm are finite and at most `sigma`
    standard deviations above their means over the last `window` updates; until half of these have
    been seen, being finite is enough. What lies above a limit counts as the limit in later means,
    so that a lasting change of level is accepted in the end.

    Args:
        sigma: standard deviations.
        window: updates compared with.
        roll_back_after: skipped in a row, then the caller should go back to a checkpoint.
        record: file that names the examples of every skipped update; None for none.
        overflow_is_ordinary: with a float16 loss scaler an infinite norm is the scaler's business.
        gather: every rank's share of what is recorded.
    """

    sigma: float = 6.0
    window: int = 128
    roll_back_after: int = 4
    record: Path | None = None
    overflow_is_ordinary: bool = False
    gather: Callable[[Any], list[Any]] = lambda own: [own]
    skipped: int = 0
    """Updates not applied, over the whole run."""
    in_a_row: int = 0
    rolled_back_at: int | None = None
    """The step at which the run last went back."""
    _seen: int = 0
    _past: Tensor | None = None
    """[window, 2] float64, a ring; NaN where an update was not finite."""
    _waiting: list[_Judged] = field(default_factory=list)

    def accepts(self, *, step: int, loss: Tensor, grad_norm: Tensor, batch: Batch) -> Tensor:
        """[] bool: whether the update is to be applied. It is part of what later ones meet."""
        values = torch.stack([loss, grad_norm.to(loss.device)]).detach().double()
        past = self._ring(values)
        n = min(self._seen, self.window)
        limits = torch.full_like(values, math.nan)
        applied = torch.isfinite(values).all()
        if n >= self.window // 2:
            mean = past[:n].nanmean(0)
            spread = (past[:n] - mean).square().nanmean(0).sqrt()
            limits = mean + self.sigma * torch.maximum(spread, _LEAST_SPREAD * mean.abs())
            # Nothing finite so far: nothing to compare with.
            applied = applied & ((values <= limits) | torch.isnan(limits)).all()
        past[self._seen % self.window] = torch.where(
            torch.isfinite(values) & (values > limits),
            limits,
            torch.where(torch.isfinite(values), values, math.nan),
        )
        self._seen += 1
        self._waiting.append(_Judged(step, values, limits, applied, batch))
        return applied

    def _ring(self, like: Tensor) -> Tensor:
        if self._past is None:
            self._past = like.new_full((self.window, 2), math.nan)
        self._past = self._past.to(like.device)
        return self._past

    def told(self) -> list[str]:
        """Sentences about the updates skipped since the last call; waits for the device."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return []
        verdicts = torch.stack([judged.applied for judged in waiting]).tolist()
        sentences = []
        for judged, applied in zip(waiting, verdicts, strict=True):
            loss, norm = judged.values.tolist()
            if applied:
                self.in_a_row = 0
            elif not (
                self.overflow_is_ordinary and math.isfinite(loss) and not math.isfinite(norm)
            ):
                self.in_a_row += 1
                self.skipped += 1
                sentences.append(self._told(judged, loss, norm))
        return sentences

    @property
    def exhausted(self) -> bool:
        """Whether so many were skipped in a row that the weights themselves are in doubt."""
        return self.in_a_row >= self.roll_back_after

    def going_back(self, step: int, to_step: int | None) -> str:
        """What to tell the user when the run goes back; the examples since are passed over.

        Args:
            step: where the run is.
            to_step: of the checkpoint there is; None for none.

        Raises:
            NonFiniteError: there is none, or it went back less than `window` updates ago.
        """
        before = self.rolled_back_at
        if to_step is None or (before is not None and step - before <= self.window):
            why = "there is no checkpoint to go back to"
            if to_step is not None:
                why = f"it went back to a checkpoint at step {before} already"
            names = f" Their examples are in {self.record}." if self.record is not None else ""
            raise NonFiniteError(
                f"By step {step}, {self.in_a_row} updates in a row were outliers or not finite, "
                f"and {why}. None of them was applied and the last checkpoint stands.{names} Lower "
                "optim.peak_lr or lengthen optim.warmup; if the loss has a new level that is "
                "right, raise optim.outliers.sigma."
            )
        skipped, self.rolled_back_at, self.in_a_row = self.in_a_row, step, 0
        return (
            f"{skipped} updates in a row were outliers: the weights are those of step {to_step} "
            "again, and the examples since then are passed over"
        )

    def _told(self, judged: _Judged, loss: float, norm: float) -> str:
        of_loss, of_norm = judged.limits.tolist()
        shares = self.gather([i for row in judged.batch.example_ids for i in row])
        ids = [i for share in shares for i in share]
        self._keep({
            "step": judged.step,
            "loss": repr(loss),  # JSON has no word for NaN
            "grad_norm": repr(norm),
            "limits": {"loss": _number(of_loss), "grad_norm": _number(of_norm)},
            "example_ids": ids,
        })  # fmt: skip
        what = f"loss {loss:.4g} and gradient norm {norm:.4g}"
        why = f"the limits are {of_loss:.4g} and {of_norm:.4g}"
        if not (math.isfinite(loss) and math.isfinite(norm)):
            why = "that is not a number to go by"
        listed = ", ".join(map(str, ids[:_SHOWN])) + (", …" if len(ids) > _SHOWN else "")
        return (
            f"update {judged.step} is not applied: {what}; {why} (optim.outliers). Skipped so far: "
            f"{self.skipped}, {self.in_a_row} in a row. Its examples: {listed}"
        )

    def _keep(self, record: Mapping[str, Any]) -> None:
        if self.record is None:
            return
        # What a full disk costs here is a record; the warning says the same.
        with contextlib.suppress(OSError), self.record.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def state_dict(self) -> dict[str, Any]:
        """What a restart cannot recompute."""
        past = [] if self._past is None else self._past.tolist()
        return {
            "seen": self._seen,
            "past": [[_number(value) for value in row] for row in past],
            "skipped": self.skipped,
            "in_a_row": self.in_a_row,
            "rolled_back_at": self.rolled_back_at,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave.

        Raises:
            ValueError: it is of another window.
        """
        rows = [[math.nan if value is None else value for value in row] for row in state["past"]]
        if rows and len(rows) != self.window:
            raise ValueError(f"outliers over {len(rows)} updates, not {self.window}")
        self._past = torch.tensor(rows, dtype=torch.float64) if rows else None
        self._seen, self.skipped = int(state["seen"]), int(state["skipped"])
        self.in_a_row, self.rolled_back_at = int(state["in_a_row"]), state["rolled_back_at"]


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
