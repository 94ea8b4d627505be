"""Update guard: the decision whether to apply an update.

The decision is a tensor on the device, so that training does not wait for CUDA. `check` reads the
decisions of several updates together. An update that is not applied changes nothing, so it may be
reported a few steps later, but before the next checkpoint is saved.

Without `skip_step` a NaN or an infinity ends the run. With `skip_step` (`optim.outliers`) such an
update is skipped. Outliers are skipped too, because their gradients would affect Adam's averages
for a thousand updates. The limit follows OLMo's SkipStepAdamW: six standard deviations over 128
updates. After too many outliers the run loads a checkpoint and skips the data since then, as PaLM
did (Chowdhery et al. 2022, section 5.1).
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
_MAX_IDS_SHOWN: Final = 12
_MIN_SPREAD: Final = 1e-3
"""Lower bound of the standard deviation, as a fraction of the mean. Without it, tiny changes after
a constant phase would be outliers."""


@final
@dataclass
class SkipStep:
    """Limits for loss and gradient norm, computed on the device.

    A limit is the mean over the last `window` updates plus `sigma` standard deviations. There are
    no limits during the first half window. A value above its limit is added to the window as the
    limit itself, so that a lasting change in level is accepted after some updates. After
    `roll_back_after` skipped updates in a row the run loads an earlier checkpoint.
    """

    sigma: float = 6.0
    window: int = 128
    roll_back_after: int = 4
    skipped: int = 0  # number of updates not applied, over the entire run
    in_a_row: int = 0  # number of updates not applied since the last applied update
    rolled_back_at: int | None = None  # step of the last rollback
    _seen: int = 0
    _past: Tensor | None = None
    """Ring buffer of losses and norms, [window, 2] float64. NaN replaces values that are not
    finite.
    """

    def add(self, values: Tensor) -> Tensor:
        """Add an update's `values` to the window, and return their limits by earlier updates.

        Values and limits are [2] float64: loss and gradient norm. NaN means no limit.
        """
        if self._past is None:
            self._past = values.new_full((self.window, 2), math.nan)
        past = self._past = self._past.to(values.device)

        n = min(self._seen, self.window)
        limits = torch.full_like(values, math.nan)
        if n >= self.window // 2:
            mean = past[:n].nanmean(0)  # NaN if no value was finite
            spread = (past[:n] - mean).square().nanmean(0).sqrt()
            limits = mean + self.sigma * torch.maximum(spread, _MIN_SPREAD * mean.abs())

        clipped = torch.fmin(values, limits)
        past[self._seen % self.window] = torch.where(
            torch.isfinite(values), clipped, math.nan
        )
        self._seen += 1
        return limits

    def state_dict(self) -> dict[str, Any]:
        """Return the window and the counts as JSON."""
        past = [] if self._past is None else self._past.tolist()
        return {
            "seen": self._seen,
            "past": [[_finite_or_none(value) for value in row] for row in past],
            "skipped": self.skipped,
            "in_a_row": self.in_a_row,
            "rolled_back_at": self.rolled_back_at,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`.

        Raises:
            ValueError: The state has another window or is damaged.
        """
        rows = [[_number_or_nan(value) for value in row] for row in state["past"]]
        if any(len(row) != 2 for row in rows):
            raise ValueError("outliers are not pairs of loss and gradient norm")
        if rows and len(rows) != self.window:
            raise ValueError(
                f"outliers are over {len(rows)} updates, not {self.window}"
            )

        self._past = torch.tensor(rows, dtype=torch.float64) if rows else None
        self._seen = count_in(state, "seen")
        self.skipped = count_in(state, "skipped")
        self.in_a_row = count_in(state, "in_a_row")
        self.rolled_back_at = None
        if state["rolled_back_at"] is not None:
            self.rolled_back_at = count_in(state, "rolled_back_at")


def _finite_or_none(value: float) -> float | None:
    """Replace a NaN or an infinity, which JSON does not have, by None."""
    return value if math.isfinite(value) else None


def _number_or_nan(value: Any) -> float:
    """Check a value from JSON, and replace None by NaN.

    Raises:
        ValueError: The value is not a finite number.
    """
    return math.nan if value is None else number_in({"past": value}, "past")


@dataclass(frozen=True)
class PendingUpdate:
    """Update that has not been checked yet. Its tensors stay on the device."""

    step: int
    lr: float
    batch: Batch
    values: Tensor  # loss and gradient norm, [2] float64
    limits: Tensor  # largest allowed values, [2] float64; NaN for no limit
    applied: Tensor  # [] bool


@final
@dataclass
class UpdateGuard:
    """Guard that does not apply updates that are outliers or not finite.

    With a float16 loss scaler an infinite norm is normal: the scaler skips it and halves the scale.
    """

    runtime: Runtime
    callbacks: Callbacks = field(default_factory=Callbacks)
    skip_step: SkipStep | None = None
    run_folder: Path | None = None
    _pending: list[PendingUpdate] = field(default_factory=list)

    def should_apply(
        self, step: int, lr: float, loss: Tensor, grad_norm: Tensor, batch: Batch
    ) -> Tensor:
        """Decide on the device whether to apply an update, as a [] bool.

        Call it once per update, in order.
        """
        values = torch.stack([loss, grad_norm.to(loss.device)]).detach().double()
        applied = torch.isfinite(values).all()
        limits = torch.full_like(values, math.nan)
        if self.skip_step is not None:
            limits = self.skip_step.add(values)
            applied = applied & ((values <= limits) | torch.isnan(limits)).all()
        self._pending.append(PendingUpdate(step, lr, batch, values, limits, applied))
        return applied

    def check(self, at: Progress) -> PendingUpdate | None:
        """Read the decisions since the last call, count skipped updates and warn about each.

        This waits for the device.

        Returns:
            The first update that must end the run, if there is one. Pass it to `record_error`.

        Raises:
            NonFiniteError: float16 overflows at every loss scale.
        """
        pending = self._pending
        self._pending = []
        decisions: list[bool] = []
        if pending:
            decisions = torch.stack([update.applied for update in pending]).tolist()

        for update, was_applied in zip(pending, decisions, strict=True):
            if was_applied:
                if self.skip_step is not None:
                    self.skip_step.in_a_row = 0
            elif self._is_scale_overflow(update):
                continue
            elif self.skip_step is None:
                return update
            else:
                warning = self._record_skipped(self.skip_step, update)
                self.callbacks.on_warning(at, warning)

        if self.runtime.scale_is_hopeless:
            raise NonFiniteError(
                f"Step {at.step} overflows float16 at every loss scale. Set train.precision to "
                "bf16 or float32."
            )
        return None

    def _is_scale_overflow(self, update: PendingUpdate) -> bool:
        """Check whether the loss scaler skipped the update to lower its scale, which is normal."""
        loss, norm = update.values.tolist()
        has_scaler = self.runtime.scaler is not None
        return has_scaler and math.isfinite(loss) and not math.isfinite(norm)

    def record_error(
        self,
        update: PendingUpdate,
        origin: NonFiniteOrigin | None,
        *,
        traced: bool = True,
    ) -> NonFiniteError:
        """Record an update that ends the run in `non_finite.json`, and return the error to raise.

        All ranks must call it.

        Args:
            update: The update that is not finite.
            origin: The first value that is not finite on this rank.
            traced: False if memory was too small to look for the origin.
        """
        ranks = self.runtime.ranks
        rows = [
            row for part in ranks.all_gather(update.batch.example_ids) for row in part
        ]
        origins: list[NonFiniteOrigin | None] = ranks.all_gather(origin)
        first_origin = next(filter(None, origins), None)
        were_traced = all(ranks.all_gather(traced))

        cause = "Every value was finite when the update was computed again."
        where = origin_ids = None
        if first_origin is not None:
            where, origin_ids = first_origin.where, first_origin.example_ids
            examples = f", in examples {_list_ids(origin_ids)}" if origin_ids else ""
            cause = f"First not finite: {where}{examples}."
        elif not were_traced:
            cause = "Memory ran out when the update was computed again, so its origin is unknown."

        loss, norm = update.values.tolist()
        record = {
            "step": update.step,
            "loss": repr(loss),  # JSON does not have NaN
            "grad_norm": repr(norm),
            "lr": update.lr,
            "first_non_finite": where,
            "first_example_ids": origin_ids,
            "example_ids": rows,
        }
        path = self._write(NON_FINITE_FILE, record)
        ids = [i for row in rows for i in row]
        all_ids_in = f" (all in {path})" if path else ""
        return NonFiniteError(
            f"Step {update.step} has loss {loss:g} and gradient norm {norm:g} at learning rate "
            f"{update.lr:.3g}, over {len(ids)} examples: {_list_ids(ids)}{all_ids_in}. {cause} The "
            "update was not applied, and the last checkpoint is unchanged. Lower optim.peak_lr or "
            "lengthen optim.warmup. If train.precision is fp16, use bf16. If the error returns at "
            "the same step, check these examples."
        )

    @property
    def in_a_row(self) -> int:
        """Number of skipped updates since the last applied update."""
        return self.skip_step.in_a_row if self.skip_step is not None else 0

    @property
    def should_roll_back(self) -> bool:
        """True if so many updates in a row were skipped that the weights may be bad."""
        return (
            self.skip_step is not None
            and self.in_a_row >= self.skip_step.roll_back_after
        )

    def record_rollback(self, step: int, to_step: int | None) -> str:
        """Record that the run returns to the checkpoint of `to_step`, and describe the rollback.

        Raises:
            NonFiniteError: `to_step` is None, or the run has rolled back within the last window.
        """
        skip_step = self.skip_step
        assert skip_step is not None
        n_skipped = skip_step.in_a_row
        previous = skip_step.rolled_back_at
        obstacle = ""
        if to_step is None:
            obstacle = "there is no checkpoint to go back to"
        elif previous is not None and step - previous <= skip_step.window:
            obstacle = f"the run already went back to a checkpoint at step {previous}"

        if obstacle:
            examples = ""
            if self.run_folder is not None:
                examples = f" Their examples are in {self.run_folder / SKIPPED_FILE}."
            raise NonFiniteError(
                f"By step {step}, {n_skipped} updates in a row were outliers or not finite, and "
                f"{obstacle}. These updates were not applied, and the last checkpoint is unchanged."
                f"{examples} Lower optim.peak_lr or lengthen optim.warmup. If the new level of the "
                "loss is right, raise optim.outliers.sigma."
            )
        skip_step.rolled_back_at = step
        skip_step.in_a_row = 0
        return (
            f"{n_skipped} updates in a row were outliers: the run continues with the weights "
            f"of step {to_step} and skips the examples since then"
        )

    @property
    def n_skipped(self) -> int:
        """Number of skipped updates over the entire run."""
        return self.skip_step.skipped if self.skip_step is not None else 0

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state of `skip_step`, or None without it."""
        return self.skip_step.state_dict() if self.skip_step is not None else None

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restore the result of `state_dict`. Without a state the window starts empty."""
        if self.skip_step is not None and state:
            self.skip_step.load_state_dict(state)

    def _record_skipped(self, skip_step: SkipStep, update: PendingUpdate) -> str:
        """Count and record a skipped update, and describe it."""
        skip_step.in_a_row += 1
        skip_step.skipped += 1
        loss, norm = update.values.tolist()
        loss_limit, norm_limit = update.limits.tolist()
        rank_ids = [i for row in update.batch.example_ids for i in row]
        ids = [i for share in self.runtime.ranks.all_gather(rank_ids) for i in share]

        limits = {
            "loss": _finite_or_none(loss_limit),
            "grad_norm": _finite_or_none(norm_limit),
        }
        record = {"step": update.step, "loss": repr(loss), "grad_norm": repr(norm)}
        self._write(SKIPPED_FILE, record | {"limits": limits, "example_ids": ids})

        rule = f"the limits are {loss_limit:.4g} and {norm_limit:.4g}"
        if not (math.isfinite(loss) and math.isfinite(norm)):
            rule = "both must be finite"
        return (
            f"update {update.step} is not applied: loss {loss:.4g} and gradient norm {norm:.4g}; "
            f"{rule} (optim.outliers). Skipped so far: {skip_step.skipped}, {skip_step.in_a_row} "
            f"in a row. Its examples: {_list_ids(ids)}"
        )

    def _write(self, name: str, record: Mapping[str, Any]) -> Path | None:
        """Write `record` as JSON on the main rank. A `.jsonl` file is appended to.

        Returns:
            The path of the file, or None if this rank writes no file or the disk is full.
        """
        if self.run_folder is None or not self.runtime.ranks.is_main:
            return None
        path = self.run_folder / name
        # On a full disk the record is lost, but the message contains the same facts.
        if path.suffix == ".jsonl":
            problem = append_json_lines(path, [json.dumps(record).encode()])
            return path if problem is None else None
        with contextlib.suppress(OSError):
            atomic_write(path, (json.dumps(record, indent=1) + "\n").encode())
            return path
        return None


def _list_ids(ids: Sequence[int]) -> str:
    text = ", ".join(map(str, ids[:_MAX_IDS_SHOWN]))
    return f"{text}, …" if len(ids) > _MAX_IDS_SHOWN else text
