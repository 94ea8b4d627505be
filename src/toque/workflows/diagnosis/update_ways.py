"""Ways of computing one update, and the reference that each of them must equal.

The reference takes each example alone through transformers' stock forward and `F.cross_entropy`,
training's own is `Trainer.step` at a learning rate of 0; both divide once, by the target tokens.
With dropout the reference is training's own, of one example at a time.
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
    refuse_longer,
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
from toque.training.micro_batch import OomFallback
from toque.training.runtime import Runtime
from toque.training.trainer import Schedule, Trainer
from toque.training.update_guard import UpdateGuard
from toque.units import Cursor, Duration
from toque.workflows.build import build_language_model
from toque.workflows.prepared_store import open_store

Pair = tuple[Sequence[int], Sequence[int]]  # prompt and target of an example, as token ids


FLOAT32: Final = (1e-5, 1e-4)
"""Largest relative differences of loss and gradient that rounding explains in float32; sums in
another order differ by a tenth of these."""
HALF: Final = (1e-2, 5e-2)
"""The same in 16 bits, whose numbers have 8 (bf16) or 11 bits of precision."""


class UpdateWay(NamedTuple):
    """One way of computing the update with its differences from the reference, or why not."""

    name: str
    verdict: Literal["same", "DIFFERENT", "skipped"]
    seconds: float = 0.0
    found: UpdateDifference | None = None
    reason: str = ""


@dataclass(frozen=True)
class UpdateCheck:
    """The ways of computing an update, beside the reference."""

    loss: float
    examples: int
    target_tokens: int
    reference_seconds: float
    outcomes: tuple[UpdateWay, ...]

    @property
    def passed(self) -> bool:
        """True where nothing that was computed is different."""
        return all(outcome.verdict != "DIFFERENT" for outcome in self.outcomes)

    def raise_if_failed(self) -> None:
        """Raise a CheckFailed that names the ways which give another loss or gradient."""
        if not self.passed:
            wrong = ", ".join(f'"{o.name}"' for o in self.outcomes if o.verdict == "DIFFERENT")
            raise CheckFailed(
                f"The update computed as {wrong} is not the one that transformers computes, beyond "
                "what rounding explains. Do not trust training with it: avoid that way "
                "(train.pack, train.compile, train.precision), and report this table with your "
                "versions."
            )

    def __str__(self) -> str:
        """The table for people."""
        rows, skipped = [], []
        for way in self.outcomes:
            if way.found is None:
                skipped.append(f"\nSkipped: {way.name}: {way.reason}.")
                continue
            numbers = "".join(f"{number:9.1e}" for number in way.found[:3])
            where = f"  worst in {way.found.where}" if way.verdict == "DIFFERENT" else ""
            rows.append(f"{way.name:44}{numbers}{way.seconds:9.1f}  {way.verdict}{where}\n")
        total = self.reference_seconds + sum(outcome.seconds for outcome in self.outcomes)
        verdict = "One loss and one gradient" if self.passed else "NOT one loss and one gradient"
        return (
            f"reference: {self.examples} examples with {self.target_tokens:,} target tokens,\n"
            "each alone through transformers in float32:\n"
            f"loss {self.loss:.6f} nats a token, {self.reference_seconds:.1f} s\n\n"
            f"{'the same update':44}{'loss':>9}{'norm':>9}{'element':>9}{'seconds':>9}\n"
            f"{''.join(rows)}\n"
            "Relative differences from the reference, in which dropout is off; with dropout from\n"
            "one example a row, one at a time. Allowed in float32:\n"
            f"loss {FLOAT32[0]:.0e}, gradient {FLOAT32[1]:.0e};\n"
            f"in 16 bits: loss {HALF[0]:.0e}, gradient {HALF[1]:.0e}.{''.join(skipped)}\n"
            f"{verdict}; {total:.1f} s."
        )


class UpdateDifference(NamedTuple):
    """Distance of an update from the reference, each as a share of the reference's."""

    loss: float
    norm: float  # of the whole gradient
    element: float  # the largest, as a share of the largest element
    where: str  # the parameter that holds it

    def within(self, allowed: tuple[float, float]) -> bool:
        """True where all of it is; what is not a number is not."""
        loss, gradient = allowed
        return self.loss <= loss and self.norm <= gradient and self.element <= gradient


Gradient = dict[str, Tensor]
LossAndGradient = tuple[float, Gradient]
"""Nats per target token of an update, and its gradient by parameter, on the model's device."""


def difference(found: LossAndGradient, reference: LossAndGradient) -> UpdateDifference:
    """The distance of an update from another; infinite where a gradient is missing or added."""
    (loss, gradient), (true_loss, true_gradient) = found, reference
    if gradient.keys() != true_gradient.keys():
        odd = min(gradient.keys() ^ true_gradient.keys())
        return UpdateDifference(math.inf, math.inf, math.inf, odd)
    largest = max(float(g.abs().max()) for g in true_gradient.values()) or 1.0
    elements = {
        name: float((gradient[name] - expected).abs().max()) / largest
        for name, expected in true_gradient.items()
    }
    # A NaN is the worst there is, and max() would pass over it.
    elements = {name: math.inf if math.isnan(x) else x for name, x in elements.items()}
    where = max(elements, key=elements.__getitem__)
    norm, true_norm = (
        math.sqrt(sum(float(g.double().pow(2).sum()) for g in of.values()))
        for of in (gradient, true_gradient)
    )
    return UpdateDifference(
        loss=abs(loss - true_loss) / abs(true_loss),
        norm=abs(norm - true_norm) / (true_norm or 1.0),
        element=elements[where],
        where=where,
    )


def reference_update(
    model: nn.Module,
    pairs: Sequence[Pair],
    *,
    smoothing: float,
    spans: Sequence[Sequence[int]] = (),
) -> LossAndGradient:
    """The update of examples that go alone through transformers' forward, in the model's dtype.

    `spans` are those of each target, if any (`TokenStore.spans`). The model's dropout must be off;
    its gradients are cleared.
    """
    core: Any = unwrapped(model)
    encoder = family_of(core.config).is_encoder_decoder
    counts = [len(target) - (not encoder and not prompt) for prompt, target in pairs]
    spans = spans or [()] * len(pairs)
    total, n_targets = 0.0, sum(counts) - sum(sum(each[1::2]) for each in spans)
    model.zero_grad(set_to_none=True)
    for (prompt, target), lengths in zip(pairs, spans, strict=True):
        if encoder:
            labels = torch.tensor([list(target)], device=core.device)
            source = torch.tensor([list(prompt)], device=core.device)
            logits = core(input_ids=source, labels=labels).logits
        else:
            ids = torch.tensor([[*prompt, *target]], device=core.device)
            labels = torch.full_like(ids, IGNORE)
            # Position i predicts token i + 1.
            first = max(len(prompt) - 1, 0)
            labels[0, first:-1] = ids[0, first + 1 :]
            for begin, behind in unlearnt_spans(lengths):
                labels[0, first + begin : first + behind] = IGNORE
            # Without a mask GPT-2 would warn of padding, which one example has none of.
            logits = core(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        loss = functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum",
            label_smoothing=smoothing,
        )  # fmt: skip
        torch.autograd.backward(loss / n_targets)
        total += loss.item()
    gradient = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return total / n_targets, gradient


def training_update(
    model: nn.Module, step: Step, *, rows_at_once: int, runtime: Runtime, smoothing: float
) -> LossAndGradient:
    """The update that `Trainer.step` computes, nothing of it applied.

    Of several ranks `step` is this rank's share.
    """
    kept: Gradient = {}

    def keep(*_: object) -> None:
        named = model.named_parameters()
        kept.update({n: p.grad.clone() for n, p in named if p.grad is not None})

    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    optimizer.register_step_pre_hook(keep)
    trainer = Trainer(
        model=model,
        optimizer=optimizer,
        batches=cast("BatchStream", None),  # those of `fit`, which is not called
        loss_fn=partial(objective.loss_sum, smoothing=smoothing),
        lr_at=lambda _: 0.0,
        evaluator=dict,
        checkpoints=CheckpointStore(Path("unused")),
        callbacks=Callbacks([]),
        runtime=runtime,
        schedule=Schedule(Duration(1, "steps")),
        oom_fallback=OomFallback(rows_at_once),
        guard=UpdateGuard(runtime),
        max_grad_norm=None,
        seed=0,
    )
    return float(trainer.step(step).loss), kept


def compare_ways(config: RunConfig, examples: int) -> UpdateCheck:
    """Compute the update of so many examples alone, through transformers, and then in every way."""
    store = open_store(config)
    runtime = Runtime.detect(precision="float32", deterministic=config.train.deterministic)
    model = build_language_model(config, store)
    model.to(runtime.device)  # type: ignore[arg-type]  # transformers annotates it away
    model.train()
    if config.train.optimisations.dropout:
        use_keyed_dropout(model)
    dropout = dropout_settings(model)
    _turn_off(dropout)
    # Training examples from the shortest to the longest, evenly.
    rows = store.rows("train")
    sizes = store.prompt_lengths[rows].astype(np.int64) + store.target_lengths[rows]
    places = np.linspace(0, len(rows) - 1, min(examples, len(rows)))
    rows = rows[np.argsort(sizes, kind="stable")][np.unique(places.astype(np.int64))]
    pairs = [(store.prompt(row).tolist(), store.target(row).tolist()) for row in rows.tolist()]
    began = time.perf_counter()
    spans = [store.spans(row) for row in rows.tolist()]
    smoothing = config.optim.label_smoothing
    reference = reference_update(model, pairs, smoothing=smoothing, spans=spans)
    seconds = time.perf_counter() - began
    ways = _Ways(config, store, model, runtime, rows, reference, dropout)
    n_targets = ways.step(packed=False).n_targets
    return UpdateCheck(reference[0], len(rows), n_targets, seconds, tuple(ways.outcomes()))


def _turn_off(dropout: list[tuple[nn.Module, str, float]]) -> None:
    for module, name, _ in dropout:
        setattr(module, name, 0.0)


@dataclass(frozen=True)
class _Ways:
    """The ways one update of `rows` can be computed."""

    config: RunConfig
    store: TokenStore
    model: PreTrainedModel
    runtime: Runtime
    rows: np.ndarray
    reference: LossAndGradient
    dropout: list[tuple[nn.Module, str, float]]  # layers with the names and values of what is off

    def outcomes(self) -> Iterator[UpdateWay]:
        """Each way, computed when it is asked for."""
        some = max(2, len(self.rows) // 3)
        yield self.compared("one example a row, all rows at once", packed=False)
        yield self.compared("one example a row, one at a time", packed=False, rows_at_once=1)
        name = f"one example a row, {some} at a time"
        yield self.compared(name, packed=False, rows_at_once=some)
        yield self.compared(f"packed in {self.step(packed=True).batch.n_rows} rows, all at once")
        yield self.compared("packed rows, one at a time", rows_at_once=1)
        # The sum over a network is not tried: each rank's share is computed here, one by one.
        yield self.compared("packed rows, shared by two ranks", ranks=2)
        recompute_blocks(self.model)
        yield self.compared("packed rows, activations recomputed")
        stop_recomputing(self.model)
        if self.config.train.compile is True:
            compile_blocks(self.model)
            yield self.compared("packed rows, compiled")
            stop_compiling(self.model)
        else:
            reason = "train.compile is not true, and compiling takes a minute"
            yield UpdateWay("packed rows, compiled", "skipped", reason=reason)
        yield from self.with_dropout()
        # The number format, and the products, that the run would choose.
        runtime = Runtime.from_settings(self.config.train, family_of(self.model.config))
        if runtime.precision == "float32" and not onednn_is_faster():
            yield UpdateWay("packed rows, 16 bits", "skipped", reason="this run is in float32")
            return
        use_cpu_layers(self.model)
        how = "float32 by oneDNN" if runtime.precision == "float32" else runtime.precision
        # With a loss scale, gradients would come scaled.
        yield self.compared(f"packed rows, {how}", runtime=replace(runtime, scaler=None))

    def with_dropout(self) -> Iterator[UpdateWay]:
        """The ways with the model's own dropout."""
        reason = ""
        if not self.config.train.optimisations.dropout:
            reason = "train.optimisations.dropout is false, so that masks depend on the way"
        elif not self.dropout:
            reason = "the model has none"
        if reason:
            yield UpdateWay("dropout on", "skipped", reason=reason)
            return
        for module, name, p in self.dropout:
            setattr(module, name, p)
        alone = training_update(
            self.model,
            self.step(packed=False),
            rows_at_once=1,
            runtime=self.runtime,
            smoothing=self.config.optim.label_smoothing,
        )
        yield self.compared("dropout on, packed rows, all at once", reference=alone)
        yield self.compared("dropout on, one row at a time", rows_at_once=1, reference=alone)
        yield self.compared("dropout on, shared by two ranks", ranks=2, reference=alone)
        recompute_blocks(self.model)
        yield self.compared("dropout on, activations recomputed", reference=alone)
        stop_recomputing(self.model)
        _turn_off(self.dropout)

    def step(self, *, packed: bool, rank: int = 0, ranks: int = 1) -> Step:
        """The update, through the plan and the layout of training."""
        encoder = bool(self.model.config.is_encoder_decoder)
        everything = ExampleLengths.of(self.store, self.store.rows("train"), encoder=encoder)
        refuse_longer(everything, max_positions(self.model.config))
        shape = row_shape(self.config.train, everything)
        # Where rows hold one long example each, training hardly packs; here they shall hold two.
        shape = RowShape(2 * shape.source, 2 * shape.target)
        lengths = ExampleLengths.of(self.store, self.rows, encoder=encoder)
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
            layout=Layout.for_model(self.store, self.model.config, shape, packed=packed),
            prompt_lengths=self.store.prompt_lengths,
            target_lengths=self.store.target_lengths,
            learnt_lengths=self.store.learnt_lengths,
            rank=rank,
            world_size=ranks,
        )
        return stream.at(Cursor())

    def compared(
        self,
        name: str,
        *,
        packed: bool = True,
        rows_at_once: int | None = None,
        ranks: int = 1,
        runtime: Runtime | None = None,
        reference: LossAndGradient | None = None,
    ) -> UpdateWay:
        """One way, against a reference; all rows at once unless a number is given."""
        runtime = runtime or self.runtime
        began = time.perf_counter()
        shares = [
            training_update(
                self.model,
                step,
                rows_at_once=rows_at_once or step.batch.n_rows,
                runtime=runtime,
                smoothing=self.config.optim.label_smoothing,
            )
            for step in (self.step(packed=packed, rank=rank, ranks=ranks) for rank in range(ranks))
            if step.batch.n_rows
        ]
        gradient: Gradient = {}
        for _, share in shares:
            gradient |= {n: g + gradient[n] if n in gradient else g for n, g in share.items()}
        update = sum(loss for loss, _ in shares), gradient
        found = difference(update, reference or self.reference)
        same = found.within(FLOAT32 if runtime.precision == "float32" else HALF)
        seconds = time.perf_counter() - began
        return UpdateWay(name, "same" if same else "DIFFERENT", seconds, found)
