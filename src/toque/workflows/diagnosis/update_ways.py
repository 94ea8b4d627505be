"""Ways of computing one update, and the reference that each must equal.

The reference computes one example at a time with transformers' forward pass and `F.cross_entropy`.
Toque computes the update with `Trainer.step` at a learning rate of 0. Both divide once, by the
number of target tokens. With dropout, the reference is Toque's update of one example at a time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from toque.batch import IGNORE
from toque.config import RunConfig
from toque.data.loader.batch_stream import (
    BatchStream,
    ExampleLengths,
    Step,
    refuse_overlong,
    row_shape,
)
from toque.data.loader.collate import Layout
from toque.data.loader.epoch_plan import EpochPlan
from toque.data.loader.packing import RowShape
from toque.data.store.token_store import TokenStore, unlearnt_spans
from toque.errors import CheckFailed
from toque.hardware.onednn import onednn_is_faster
from toque.models.config_values import max_positions
from toque.models.families import family_of, unwrapped
from toque.models.forward import loss as objective
from toque.models.forward.blocks import (
    compile_blocks,
    recompute_blocks,
    stop_compiling,
    stop_recomputing,
)
from toque.models.forward.cpu_layers import use_cpu_layers
from toque.models.forward.keyed_dropout import dropout_settings, use_keyed_dropout
from toque.training.callbacks import Callbacks
from toque.training.checkpoint.store import CheckpointStore
from toque.training.distributed.data_parallel import LossFn
from toque.training.micro_batch import OomFallback
from toque.training.runtime import Runtime
from toque.training.trainer import Schedule, Trainer
from toque.training.update_guard import UpdateGuard
from toque.units import Cursor, Duration
from toque.workflows.build import build_language_model
from toque.workflows.prepared_store import open_store

Pair = tuple[Sequence[int], Sequence[int]]
"""Token ids of the prompt and target of an example."""
FLOAT32: Final = (1e-5, 1e-4)
"""Maximum relative differences in loss and gradient in float32. The order of the sums alone causes
a tenth of these differences."""
HALF: Final = (1e-2, 5e-2)
"""Maximum relative differences in 16 bits. bf16 has 8 bits of precision, and fp16 has 11."""
_LEGEND: Final = f"""\
The numbers are relative differences from the reference without dropout. With
dropout, the reference is one example per row, one row at a time. Limits in float32:
loss {FLOAT32[0]:.0e}, gradient {FLOAT32[1]:.0e};
in 16 bits: loss {HALF[0]:.0e}, gradient {HALF[1]:.0e}."""
"""Explanation below the table."""


class UpdateWay(NamedTuple):
    """A way of computing the update, with its differences from the reference."""

    name: str
    verdict: Literal["same", "DIFFERENT", "skipped"]
    seconds: float = 0.0
    found: UpdateDifference | None = None
    reason: str = ""
    """Reason why the variant is skipped."""

    def row(self) -> str:
        """Return the differences as a row of a table. The variant must not be skipped."""
        assert self.found is not None
        numbers = "".join(f"{number:9.1e}" for number in self.found[:3])
        row = f"{self.name:44}{numbers}{self.seconds:9.1f}  {self.verdict}"
        if self.verdict == "DIFFERENT":
            row += f"  worst in {self.found.where}"
        return row


@dataclass(frozen=True)
class UpdateCheck:
    """Comparison of all ways of computing an update with the reference."""

    loss: float
    examples: int
    target_tokens: int
    reference_seconds: float
    outcomes: tuple[UpdateWay, ...]

    @property
    def passed(self) -> bool:
        """True if no variant differs."""
        return all(outcome.verdict != "DIFFERENT" for outcome in self.outcomes)

    def raise_if_failed(self) -> None:
        """Raise CheckFailed naming every variant with a loss or gradient that differs."""
        names = [f'"{way.name}"' for way in self.outcomes if way.verdict == "DIFFERENT"]
        if names:
            raise CheckFailed(
                f"The update computed as {', '.join(names)} differs from transformers by more than "
                "rounding error. Do not train this way (see train.pack, train.compile, "
                "train.precision), and please report this table with your versions."
            )

    def __str__(self) -> str:
        """Return the comparison as a table."""
        verdict = "One loss and one gradient"
        if not self.passed:
            verdict = f"NOT {verdict.lower()}"
        seconds = self.reference_seconds + sum(way.seconds for way in self.outcomes)
        lines = [
            f"reference: {self.examples} examples with {self.target_tokens:,} target tokens,",
            "one at a time through transformers in float32:",
            f"loss {self.loss:.6f} nats per token, {self.reference_seconds:.1f} s",
            "",
            f"{'the same update':44}{'loss':>9}{'norm':>9}{'element':>9}{'seconds':>9}",
            *(way.row() for way in self.outcomes if way.found is not None),
            "",
            _LEGEND,
            *(
                f"Skipped: {way.name}: {way.reason}."
                for way in self.outcomes
                if way.found is None
            ),
            f"{verdict}; {seconds:.1f} s.",
        ]
        return "\n".join(lines)


class UpdateDifference(NamedTuple):
    """Relative differences of an update from the reference."""

    loss: float
    norm: float
    """Relative difference in the gradient's norm."""
    element: float
    """Largest difference in a gradient element, divided by the reference's largest element."""
    where: str
    """Parameter with the largest difference."""

    def within(self, limits: tuple[float, float]) -> bool:
        """Check whether the differences in loss and gradient are within limits. NaN is not."""
        loss, gradient = limits
        return self.loss <= loss and self.norm <= gradient and self.element <= gradient


Gradient = dict[str, Tensor]
LossAndGradient = tuple[float, Gradient]
"""An update's loss in nats per target token, and its gradient by parameter."""


def compare_updates(
    update: LossAndGradient, reference: LossAndGradient
) -> UpdateDifference:
    """Return the differences between two updates. They are infinite if the parameters differ."""
    loss, gradient = update
    true_loss, true_gradient = reference
    if gradient.keys() != true_gradient.keys():
        parameter = min(gradient.keys() ^ true_gradient.keys())
        return UpdateDifference(math.inf, math.inf, math.inf, parameter)

    # A gradient of 0 everywhere is compared absolutely.
    largest = max(float(g.abs().max()) for g in true_gradient.values()) or 1.0
    elements = {}
    for name, expected in true_gradient.items():
        element = float((gradient[name] - expected).abs().max()) / largest
        # max() would ignore NaN.
        elements[name] = math.inf if math.isnan(element) else element
    where = max(elements, key=elements.__getitem__)
    norm = _norm(gradient)
    true_norm = _norm(true_gradient)
    return UpdateDifference(
        loss=abs(loss - true_loss) / abs(true_loss),
        norm=abs(norm - true_norm) / (true_norm or 1.0),
        element=elements[where],
        where=where,
    )


def _norm(gradient: Gradient) -> float:
    return math.sqrt(
        sum(float(part.double().pow(2).sum()) for part in gradient.values())
    )


def reference_update(
    model: nn.Module,
    pairs: Sequence[Pair],
    *,
    smoothing: float,
    spans: Sequence[Sequence[int]] = (),
) -> LossAndGradient:
    """Compute the update from one example at a time with transformers' forward pass.

    The model's dropout must be off. Its gradients are cleared.

    Args:
        model: The model, in any dtype.
        pairs: The prompts and targets.
        smoothing: Label smoothing.
        spans: Spans of each target (`TokenStore.spans`), for conversations.
    """
    core: Any = unwrapped(model)
    encoder = family_of(core.config).is_encoder_decoder
    spans = spans or [() for _ in pairs]

    # The first token of a decoder's text without a prompt is not predicted.
    counts = [len(target) - (not encoder and not prompt) for prompt, target in pairs]
    n_unlearnt = sum(sum(lengths[1::2]) for lengths in spans)
    n_targets = sum(counts) - n_unlearnt

    total = 0.0
    model.zero_grad(set_to_none=True)
    for (prompt, target), lengths in zip(pairs, spans, strict=True):
        if encoder:
            labels = torch.tensor([list(target)], device=core.device)
            source = torch.tensor([list(prompt)], device=core.device)
            logits = core(input_ids=source, labels=labels).logits
        else:
            logits, labels = _forward_decoder(core, prompt, target, lengths)
        loss = functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum",
            label_smoothing=smoothing,
        )  # fmt: skip
        torch.autograd.backward(loss / n_targets)
        total += loss.item()

    gradient = {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    model.zero_grad(set_to_none=True)
    return total / n_targets, gradient


def _forward_decoder(
    core: Any, prompt: Sequence[int], target: Sequence[int], spans: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Return a decoder's logits, [1, tokens, vocabulary], and the labels, [1, tokens]."""
    ids = torch.tensor([[*prompt, *target]], device=core.device)
    labels = torch.full_like(ids, IGNORE)
    # Position i predicts token i + 1.
    first = max(len(prompt) - 1, 0)
    labels[0, first:-1] = ids[0, first + 1 :]
    for begin, behind in unlearnt_spans(spans):
        labels[0, first + begin : first + behind] = IGNORE
    # Without a mask, GPT-2 warns about padding.
    logits = core(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    return logits, labels


def training_update(
    model: nn.Module,
    step: Step,
    *,
    rows_at_once: int,
    runtime: Runtime,
    smoothing: float,
) -> LossAndGradient:
    """Compute an update, or one rank's part of it, with `Trainer.step` at a learning rate of 0."""
    gradient: Gradient = {}

    def copy_gradient(*_: object) -> None:
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                gradient[name] = parameter.grad.clone()

    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=0.0)
    # The trainer clears the gradients after the optimizer's step.
    optimizer.register_step_pre_hook(copy_gradient)
    loss_fn = partial(objective.loss_sum, smoothing=smoothing)
    trainer = _build_step_trainer(model, optimizer, loss_fn, runtime, rows_at_once)
    return float(trainer.step(step).loss), gradient


def _build_step_trainer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: LossFn,
    runtime: Runtime,
    rows_at_once: int,
) -> Trainer:
    """Build a trainer for calling `step` only.

    Placeholders replace what only `fit` uses: the batches, the evaluator, the checkpoints and the
    schedule.
    """
    return Trainer(
        model=model,
        optimizer=optimizer,
        loss_fn=loss_fn,
        lr_at=lambda _: 0.0,
        runtime=runtime,
        oom_fallback=OomFallback(rows_at_once),
        guard=UpdateGuard(runtime),
        max_grad_norm=None,
        seed=0,
        callbacks=Callbacks([]),
        batches=cast("BatchStream", None),
        evaluator=dict,
        checkpoints=CheckpointStore(Path("unused")),
        schedule=Schedule(Duration(1, "steps")),
    )


def compare_ways(config: RunConfig, examples: int) -> UpdateCheck:
    """Compute an update with transformers and in each of Toque's ways, and compare them."""
    store = open_store(config)
    runtime = Runtime.detect(
        precision="float32", deterministic=config.train.deterministic
    )
    model = build_language_model(config, store)
    model.to(runtime.device)  # type: ignore[arg-type]  # transformers hides its annotation
    model.train()
    if config.train.optimisations.dropout:
        use_keyed_dropout(model)
    dropout = dropout_settings(model)
    _turn_off(dropout)

    rows = _select_rows(store, examples)
    row_numbers = rows.tolist()
    pairs = [
        (store.prompt(row).tolist(), store.target(row).tolist()) for row in row_numbers
    ]
    spans = [store.spans(row) for row in row_numbers]
    smoothing = config.optim.label_smoothing
    began = time.perf_counter()
    reference = reference_update(model, pairs, smoothing=smoothing, spans=spans)
    seconds = time.perf_counter() - began

    ways = _UpdateWays(config, store, model, runtime, rows, reference, dropout)
    n_targets = ways.build_step(packed=False).n_targets
    outcomes = tuple(ways.compare_all())
    return UpdateCheck(reference[0], len(rows), n_targets, seconds, outcomes)


def _select_rows(store: TokenStore, n: int) -> np.ndarray:
    """Select training rows, spread evenly from the shortest to the longest example."""
    rows = store.rows("train")
    lengths = store.prompt_lengths[rows].astype(np.int64) + store.target_lengths[rows]
    by_length = rows[np.argsort(lengths, kind="stable")]
    positions = np.linspace(0, len(rows) - 1, min(n, len(rows)))
    return by_length[np.unique(positions.astype(np.int64))]


def _turn_off(dropout: list[tuple[nn.Module, str, float]]) -> None:
    for module, name, _ in dropout:
        setattr(module, name, 0.0)


@dataclass(frozen=True)
class _UpdateWays:
    """Ways of computing one update of `rows`."""

    config: RunConfig
    store: TokenStore
    model: PreTrainedModel
    runtime: Runtime
    rows: np.ndarray
    reference: LossAndGradient
    dropout: list[tuple[nn.Module, str, float]]
    """Layers with dropout turned off, and the name and value of their dropout attribute."""

    def compare_all(self) -> Iterator[UpdateWay]:
        """Compute and compare each way."""
        third = max(2, len(self.rows) // 3)
        n_packed = self.build_step(packed=True).batch.n_rows
        yield self.compare("one example per row, all rows together", packed=False)
        yield self.compare(
            "one example per row, one at a time", packed=False, rows_at_once=1
        )
        name = f"one example per row, {third} at a time"
        yield self.compare(name, packed=False, rows_at_once=third)
        yield self.compare(f"packed in {n_packed} rows, all together")
        yield self.compare("packed rows, one at a time", rows_at_once=1)

        # One process computes the parts of both ranks, so the network is not tested.
        yield self.compare("packed rows, shared by two ranks", ranks=2)

        recompute_blocks(self.model)
        yield self.compare("packed rows, activations recomputed")
        stop_recomputing(self.model)

        if self.config.train.compile is True:
            compile_blocks(self.model)
            yield self.compare("packed rows, compiled")
            stop_compiling(self.model)
        else:
            reason = "train.compile is not true, and compiling takes a minute"
            yield UpdateWay("packed rows, compiled", "skipped", reason=reason)

        yield from self._compare_dropout()
        yield self._compare_run_precision()

    def _compare_run_precision(self) -> UpdateWay:
        """Compare an update in the run's precision and with its matmuls.

        This must be the last variant, because the model's CPU layers cannot be removed.
        """
        runtime = Runtime.from_settings(self.config.train, family_of(self.model.config))
        name = f"packed rows, {runtime.precision}"
        if runtime.precision == "float32":
            if not onednn_is_faster():
                reason = "this run is in float32"
                return UpdateWay("packed rows, 16 bits", "skipped", reason=reason)
            name += " by oneDNN"
        use_cpu_layers(self.model)
        # A loss scale would scale the gradients.
        return self.compare(name, runtime=replace(runtime, scaler=None))

    def _compare_dropout(self) -> Iterator[UpdateWay]:
        """Compute and compare the ways with the model's dropout."""
        reason = ""
        if not self.config.train.optimisations.dropout:
            reason = "train.optimisations.dropout is false, so dropout masks depend on the way"
        elif not self.dropout:
            reason = "the model has no dropout"
        if reason:
            yield UpdateWay("dropout on", "skipped", reason=reason)
            return

        for module, name, rate in self.dropout:
            setattr(module, name, rate)
        reference = self._compute_update(
            packed=False, rows_at_once=1, ranks=1, runtime=self.runtime
        )
        compare = partial(self.compare, reference=reference)
        yield compare("dropout on, packed rows, all together")
        yield compare("dropout on, one row at a time", rows_at_once=1)
        yield compare("dropout on, shared by two ranks", ranks=2)
        recompute_blocks(self.model)
        yield compare("dropout on, activations recomputed")
        stop_recomputing(self.model)
        _turn_off(self.dropout)

    def build_step(self, *, packed: bool, rank: int = 0, ranks: int = 1) -> Step:
        """Build the update with the plan and the layout of training."""
        encoder = bool(self.model.config.is_encoder_decoder)
        all_lengths = ExampleLengths.from_store(
            self.store, self.store.rows("train"), encoder=encoder
        )
        refuse_overlong(all_lengths, max_positions(self.model.config))
        shape = row_shape(self.config.train, all_lengths)
        # Double the length of a row, so that even the longest examples share a row.
        shape = RowShape(2 * shape.source, 2 * shape.target)
        lengths = ExampleLengths.from_store(self.store, self.rows, encoder=encoder)
        stream = BatchStream(
            plan=EpochPlan(
                examples=self.rows,
                source_lengths=lengths.source,
                target_lengths=lengths.target,
                shape=shape,
                seed=self.config.seed,
                update_rows=None,
                window=len(self.rows),
            ),
            layout=Layout.for_model(
                self.store, self.model.config, shape, packed=packed
            ),
            prompt_lengths=self.store.prompt_lengths,
            target_lengths=self.store.target_lengths,
            learnt_lengths=self.store.learnt_lengths,
            rank=rank,
            world_size=ranks,
        )
        return stream.at(Cursor())

    def compare(
        self,
        name: str,
        *,
        packed: bool = True,
        rows_at_once: int | None = None,
        ranks: int = 1,
        runtime: Runtime | None = None,
        reference: LossAndGradient | None = None,
    ) -> UpdateWay:
        """Compute one variant of an update, and compare it with a reference.

        By default all rows are computed together, and the reference is transformers' update.
        """
        runtime = runtime or self.runtime
        began = time.perf_counter()
        update = self._compute_update(
            packed=packed, rows_at_once=rows_at_once, ranks=ranks, runtime=runtime
        )
        result = compare_updates(update, reference or self.reference)
        limits = FLOAT32 if runtime.precision == "float32" else HALF
        verdict: Literal["same", "DIFFERENT"] = (
            "same" if result.within(limits) else "DIFFERENT"
        )
        return UpdateWay(name, verdict, time.perf_counter() - began, result)

    def _compute_update(
        self, *, packed: bool, rows_at_once: int | None, ranks: int, runtime: Runtime
    ) -> LossAndGradient:
        """Compute the parts of all ranks, one after another, and return their sum."""
        total_loss = 0.0
        total: Gradient = {}
        for rank in range(ranks):
            step = self.build_step(packed=packed, rank=rank, ranks=ranks)
            if not step.batch.n_rows:
                continue  # fewer rows than ranks
            loss, gradient = training_update(
                self.model,
                step,
                rows_at_once=rows_at_once or step.batch.n_rows,
                runtime=runtime,
                smoothing=self.config.optim.label_smoothing,
            )
            total_loss += loss
            for name, part in gradient.items():
                total[name] = part + total[name] if name in total else part
        return total_loss, total
