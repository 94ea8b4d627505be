"""Update guard: the one place that decides whether an update is finite, and so applied.

The decision is a tensor on the device, so that CUDA need not be waited for; `check` reads the
decisions of several updates at once. An update that is not applied changes nothing, so hearing of
it a few steps later harms nothing, provided nothing was saved in between.

Without `skip_step` a NaN or an infinity ends the run. With it (`optim.outliers`) it is skipped, and
so is an outlier, whose gradient Adam would remember for a thousand updates: the rule is that of
OLMo's SkipStepAdamW (six standard deviations over 128 updates). Going back to a checkpoint and
passing over the data in between is what PaLM did (Chowdhery et al. 2022, section 5.1).
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, final

import torch
from torch import Tensor

from toque.batch import Batch
from toque.errors import NonFiniteError
from toque.storage.atomic import atomic_write
from toque.storage.json_files import append_json_lines
from toque.training.callbacks import Callbacks
from toque.training.nan_tracer import NonFiniteOrigin
from toque.training.runtime import Runtime
from toque.training.state_values import count_in, number_in
from toque.units import Progress

NON_FINITE_FILE: Final = "non_finite.json"
SKIPPED_FILE: Final = "skipped_updates.jsonl"
_IDS_SHOWN: Final = 12
_LEAST_SPREAD: Final = 1e-3
"""Least share of the mean: numbers that hardly vary make no outlier of a hair's breadth."""


@final
@dataclass
class SkipStep:
    """Limits for loss and gradient norm, computed on the device.

    Each is its mean over the last `window` updates plus `sigma` standard deviations. There is no
    limit until half of the window has been seen. A value above its limit counts as the limit in
    later means, so that a lasting change of level is accepted in the end. After so many skipped in
    a row the run goes back to a checkpoint.
    """

    sigma: float = 6.0
    window: int = 128
    roll_back_after: int = 4
    skipped: int = 0  # updates not applied, over the whole run
    in_a_row: int = 0
    rolled_back_at: int | None = None
    _seen: int = 0
    _past: Tensor | None = None
    """[window, 2] float64, a ring buffer; NaN where an update was not finite."""

    def limits(self, values: Tensor) -> Tensor:
        """[2] limits for an update's `values`, [2] float64, which then enter the window."""
        if self._past is None:
            self._past = values.new_full((self.window, 2), math.nan)
        past = self._past = self._past.to(values.device)
        n = min(self._seen, self.window)
        limits = torch.full_like(values, math.nan)
        if n >= self.window // 2:
            mean = past[:n].nanmean(0)  # NaN while nothing was finite
            spread = (past[:n] - mean).square().nanmean(0).sqrt()
            limits = mean + self.sigma * torch.maximum(spread, _LEAST_SPREAD * mean.abs())
        past[self._seen % self.window] = torch.where(
            torch.isfinite(values), torch.fmin(values, limits), math.nan
        )
        self._seen += 1
        return limits

    def state_dict(self) -> dict[str, Any]:
        """JSON that a restart cannot recompute."""
        past = [] if self._past is None else self._past.tolist()
        return {
            "seen": self._seen,
            "past": [[_finite_or_none(value) for value in row] for row in past],
            "skipped": self.skipped,
            "in_a_row": self.in_a_row,
            "rolled_back_at": self.rolled_back_at,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`'s result; ValueError where it is of another window."""
        rows = [
            [math.nan if value is None else number_in({"past": value}, "past") for value in row]
            for row in state["past"]
        ]
        if any(len(row) != 2 for row in rows):
            raise ValueError("outliers that are not pairs of loss and gradient norm")
        if rows and len(rows) != self.window:
            raise ValueError(f"outliers over {len(rows)} updates, not {self.window}")
        self._past = torch.tensor(rows, dtype=torch.float64) if rows else None
        self._seen, self.skipped = count_in(state, "seen"), count_in(state, "skipped")
        self.in_a_row = count_in(state, "in_a_row")
        went_back = state["rolled_back_at"] is not None
        self.rolled_back_at = count_in(state, "rolled_back_at") if went_back else None


def _finite_or_none(value: float) -> float | None:
    """`value` as JSON can write it."""
    return value if math.isfinite(value) else None


@dataclass(frozen=True)
class PendingUpdate:
    """An update since the last check. Its tensors stay on the device, its batch in memory."""

    step: int
    lr: float
    batch: Batch
    values: Tensor  # [2] float64, loss and gradient norm
    limits: Tensor  # [2] what they may be at most; NaN for no limit
    applied: Tensor  # [] bool


@final
@dataclass
class UpdateGuard:
    """Keeps updates that are not finite, or are outliers, from being applied.

    With a float16 loss scaler an infinite norm is ordinary: it is skipped and the scale is halved.
    """

    runtime: Runtime
    callbacks: Callbacks = field(default_factory=Callbacks)
    skip_step: SkipStep | None = None
    run_folder: Path | None = None
    _pending: list[PendingUpdate] = field(default_factory=list)

    def should_apply(
        self, step: int, lr: float, loss: Tensor, grad_norm: Tensor, batch: Batch
    ) -> Tensor:
        """[] bool on the device; to be called once for each update, in order."""
        values = torch.stack([loss, grad_norm.to(loss.device)]).detach().double()
        applied = torch.isfinite(values).all()
        limits = torch.full_like(values, math.nan)
        if self.skip_step is not None:
            limits = self.skip_step.limits(values)
            applied = applied & ((values <= limits) | torch.isnan(limits)).all()
        self._pending.append(PendingUpdate(step, lr, batch, values, limits, applied))
        return applied

    def check(self, at: Progress) -> PendingUpdate | None:
        """Judge the updates since the last call; the first that has to end the run is for `error`.

        Waits for the device. A NonFiniteError where float16 overflows at every loss scale.
        """
        pending, self._pending = self._pending, []
        applied = torch.stack([update.applied for update in pending]).tolist() if pending else []
        for update, was_applied in zip(pending, applied, strict=True):
            if was_applied:
                if self.skip_step is not None:
                    self.skip_step.in_a_row = 0
                continue
            loss, norm = update.values.tolist()
            if self.runtime.scaler is not None and math.isfinite(loss) and not math.isfinite(norm):
                continue  # the loss scaler's business
            if self.skip_step is None:
                return update
            self.callbacks.on_warning(at, self._skipped(self.skip_step, update))
        if self.runtime.scale_is_hopeless:
            raise NonFiniteError(
                f"Step {at.step} overflows float16 at every loss scale. Use precision bf16 or "
                "float32."
            )
        return None

    def error(
        self, update: PendingUpdate, origin: NonFiniteOrigin | None, *, traced: bool = True
    ) -> NonFiniteError:
        """The error that ends the run, in `non_finite.json`; `origin` is of this rank's share.

        `traced` is False where memory had no room to look for the origin.
        """
        own = asdict(origin) if origin is not None else None
        share = {"rows": update.batch.example_ids, "origin": own, "traced": traced}
        shares = self.runtime.ranks.all_gather(share)
        rows = [row for share in shares for row in share["rows"]]
        found = next(filter(None, (share["origin"] for share in shares)), None)
        loss, norm = update.values.tolist()
        path = self._write(
            NON_FINITE_FILE,
            {
                "step": update.step,
                "loss": repr(loss),  # JSON has no word for NaN
                "grad_norm": repr(norm),
                "lr": update.lr,
                "first_non_finite": found["where"] if found else None,
                "first_example_ids": found["example_ids"] if found else None,
                "example_ids": rows,
            },
        )
        first = "Computed again, every value is finite."
        if not all(share["traced"] for share in shares):
            first = "Memory ran out where it was computed again, so where that began is not known."
        if found is not None:
            ids = found["example_ids"]
            first = f"First not finite: {found['where']}"
            first += f", in examples {_listed(ids)}." if ids else "."
        ids = [i for row in rows for i in row]
        return NonFiniteError(
            f"Step {update.step} has loss {loss:g} and gradient norm {norm:g} at learning rate "
            f"{update.lr:.3g}, over {len(ids)} examples: {_listed(ids)}"
            f"{f' (all in {path})' if path else ''}. {first} The update was not applied and the "
            "last checkpoint stands. Lower optim.peak_lr or lengthen optim.warmup; if precision is "
            "fp16, use bf16; if it returns at the same step, look at those examples."
        )

    @property
    def in_a_row(self) -> int:
        """Updates that were not applied since the last that was."""
        return self.skip_step.in_a_row if self.skip_step is not None else 0

    @property
    def should_roll_back(self) -> bool:
        """True if so many were skipped in a row that the weights themselves are in doubt."""
        return self.skip_step is not None and self.in_a_row >= self.skip_step.roll_back_after

    def roll_back(self, step: int, to_step: int | None) -> str:
        """A sentence on going back to a step; a NonFiniteError where that is not possible."""
        skip_step = self.skip_step
        assert skip_step is not None
        n_skipped, before = skip_step.in_a_row, skip_step.rolled_back_at
        if to_step is None:
            why = "there is no checkpoint to go back to"
        elif before is not None and step - before <= skip_step.window:
            why = f"it went back to a checkpoint at step {before} already"
        else:
            skip_step.rolled_back_at, skip_step.in_a_row = step, 0
            return (
                f"{n_skipped} updates in a row were outliers: the weights are those of step "
                f"{to_step} again, and the examples since then are passed over"
            )
        record = self.run_folder / SKIPPED_FILE if self.run_folder is not None else None
        names = f" Their examples are in {record}." if record is not None else ""
        raise NonFiniteError(
            f"By step {step}, {n_skipped} updates in a row were outliers or not finite, and {why}. "
            f"None of them was applied and the last checkpoint stands.{names} Lower optim.peak_lr "
            "or lengthen optim.warmup; if the loss has a new level that is right, raise "
            "optim.outliers.sigma."
        )

    @property
    def n_skipped(self) -> int:
        """Outliers that were not applied, over the whole run."""
        return self.skip_step.skipped if self.skip_step is not None else 0

    def state_dict(self) -> dict[str, Any] | None:
        """The outliers' statistics; None without `skip_step`."""
        return self.skip_step.state_dict() if self.skip_step is not None else None

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restore `state_dict`'s result; a run that has just been told to skip starts afresh."""
        if self.skip_step is not None and state:
            self.skip_step.load_state_dict(state)

    def _skipped(self, skip_step: SkipStep, update: PendingUpdate) -> str:
        skip_step.in_a_row += 1
        skip_step.skipped += 1
        loss, norm = update.values.tolist()
        loss_limit, norm_limit = update.limits.tolist()
        own = [i for row in update.batch.example_ids for i in row]
        ids = [i for share in self.runtime.ranks.all_gather(own) for i in share]
        limits = {"loss": _finite_or_none(loss_limit), "grad_norm": _finite_or_none(norm_limit)}
        record = {"step": update.step, "loss": repr(loss), "grad_norm": repr(norm)}
        self._write(SKIPPED_FILE, record | {"limits": limits, "example_ids": ids})
        why = f"the limits are {loss_limit:.4g} and {norm_limit:.4g}"
        if not (math.isfinite(loss) and math.isfinite(norm)):
            why = "that is not a number to go by"
        return (
            f"update {update.step} is not applied: loss {loss:.4g} and gradient norm {norm:.4g}; "
            f"{why} (optim.outliers). Skipped so far: {skip_step.skipped}, {skip_step.in_a_row} in "
            f"a row. Its examples: {_listed(ids)}"
        )

    def _write(self, name: str, record: Mapping[str, Any]) -> Path | None:
        """The file that holds `record` now: a .jsonl is appended to."""
        if self.run_folder is None or not self.runtime.ranks.is_main:
            return None
        path = self.run_folder / name
        # On a full disk the record is lost; the message says the same.
        if path.suffix == ".jsonl":
            refused = append_json_lines(path, [json.dumps(record).encode()])
            return path if refused is None else None
        with contextlib.suppress(OSError):
            atomic_write(path, (json.dumps(record, indent=1) + "\n").encode())
            return path
        return None


def _listed(ids: Sequence[int]) -> str:
    return ", ".join(map(str, ids[:_IDS_SHOWN])) + (", …" if len(ids) > _IDS_SHOWN else "")
