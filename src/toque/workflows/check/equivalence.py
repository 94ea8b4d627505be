"""Equivalence check: every way an update can be computed gives one loss and one gradient.

On the user's own model, data and settings. What is compared against is in `reference_update.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np
import torch
from transformers import PreTrainedModel

from toque.config import RunConfig
from toque.data.loader.batch_stream import BatchStream, Step
from toque.data.loader.collate import Layout
from toque.data.loader.epoch_plan import EpochPlan
from toque.data.loader.packing import RowShape
from toque.data.loader.row_lengths import ExampleLengths, refuse_longer, row_shape
from toque.data.store.token_store import TokenStore
from toque.errors import CheckFailed
from toque.models.families import family_of, max_positions
from toque.models.forward.activation_checkpointing import recompute_blocks, stop_recomputing
from toque.models.forward.compile import compile_blocks, stop_compiling
from toque.models.forward.cpu_layers import use_cpu_layers
from toque.models.onednn import onednn_is_faster
from toque.training.runtime import Runtime
from toque.units import Cursor
from toque.workflows.build import build_language_model
from toque.workflows.check.reference_update import (
    Difference,
    Measured,
    difference,
    reference_update,
    switch_dropout_off,
    training_update,
)
from toque.workflows.prepared_store import open_store

LOSS: Final = 1e-5
GRADIENT: Final = 1e-4
"""Largest relative differences in float32: sums in another order differ by a tenth of these."""
HALF_LOSS: Final = 1e-2
HALF_GRADIENT: Final = 5e-2
"""The same in 16 bits, whose numbers have 8 (bf16) or 11 bits of precision."""
ALL: Final = 1_000_000
"""More rows at once than there are."""


@dataclass(frozen=True)
class Outcome:
    """One way of computing the update."""

    name: str
    verdict: Literal["same", "DIFFERENT", "skipped"]
    seconds: float = 0.0
    found: Difference | None = None
    reason: str = ""
    """Why it was skipped."""


@dataclass(frozen=True)
class Check:
    """What `check` found."""

    loss: float
    examples: int
    target_tokens: int
    reference_seconds: float
    outcomes: tuple[Outcome, ...]

    @property
    def passed(self) -> bool:
        """Whether nothing that was computed is different."""
        return all(outcome.verdict != "DIFFERENT" for outcome in self.outcomes)

    def raise_if_failed(self) -> None:
        """Refuse to go on with a wrong update.

        Raises:
            CheckFailed: some way of computing gives another loss or gradient.
        """
        wrong = ", ".join(f'"{o.name}"' for o in self.outcomes if o.verdict == "DIFFERENT")
        if wrong:
            raise CheckFailed(
                f"The update computed as {wrong} is not the one that transformers computes, beyond "
                "what rounding explains. Do not trust training with it: avoid that way "
                "(train.pack, train.compile, train.precision), and report this table with your "
                "versions."
            )

    def __str__(self) -> str:
        """The table for people."""
        lines = [
            f"reference: {self.examples} examples with {self.target_tokens:,} target tokens,",
            "each alone through transformers in float32:",
            f"loss {self.loss:.6f} nats a token, {self.reference_seconds:.1f} s",
            "",
            f"{'the same update':44}{'loss':>9}{'norm':>9}{'element':>9}{'seconds':>9}",
        ]
        for outcome in self.outcomes:
            if outcome.found is None:
                continue
            found = outcome.found
            numbers = "".join(f"{x:9.1e}" for x in (found.loss, found.norm, found.element))
            where = f"  worst in {found.where}" if outcome.verdict == "DIFFERENT" else ""
            lines.append(
                f"{outcome.name:44}{numbers}{outcome.seconds:9.1f}  {outcome.verdict}{where}"
            )
        lines += [
            "",
            "Relative differences from the reference; dropout is off. Allowed in float32:",
            f"loss {LOSS:.0e}, gradient {GRADIENT:.0e};",
            f"in 16 bits: loss {HALF_LOSS:.0e}, gradient {HALF_GRADIENT:.0e}.",
        ]
        lines += [f"Skipped: {o.name}: {o.reason}." for o in self.outcomes if o.found is None]
        total = self.reference_seconds + sum(outcome.seconds for outcome in self.outcomes)
        verdict = "One loss and one gradient" if self.passed else "NOT one loss and one gradient"
        return "\n".join([*lines, f"{verdict}; {total:.1f} s."])


def compare_ways(config: RunConfig, examples: int) -> Check:
    """Compute the update of so many examples alone, through transformers, and then in every way."""
    store = open_store(config)
    runtime = Runtime.detect(precision="float32", deterministic=config.train.deterministic)
    model = build_language_model(config, store)
    model.to(runtime.device)  # type: ignore[arg-type]  # transformers annotates it away
    model.train()
    switch_dropout_off(model)
    rows = _chosen(store, examples)
    pairs = [(store.prompt(row).tolist(), store.target(row).tolist()) for row in rows.tolist()]
    began = time.perf_counter()
    reference = reference_update(model, pairs, smoothing=config.optim.label_smoothing)
    seconds = time.perf_counter() - began
    ways = _Ways(config, store, model, runtime, rows, reference)
    return Check(
        loss=reference.loss,
        examples=len(rows),
        target_tokens=ways.step(packed=False).n_targets,
        reference_seconds=seconds,
        outcomes=tuple(ways.outcomes()),
    )


def _chosen(store: TokenStore, examples: int) -> np.ndarray:
    """Training examples from the shortest to the longest, evenly."""
    rows = store.rows("train")
    sizes = store.prompt_lengths[rows].astype(np.int64) + store.target_lengths[rows]
    ordered = rows[np.argsort(sizes, kind="stable")]
    places = np.linspace(0, len(ordered) - 1, min(examples, len(ordered)))
    return np.asarray(ordered[np.unique(places.astype(np.int64))])


@dataclass(frozen=True)
class _Ways:
    """The ways one update of `rows` can be computed."""

    config: RunConfig
    store: TokenStore
    model: PreTrainedModel
    runtime: Runtime
    rows: np.ndarray
    reference: Measured

    def outcomes(self) -> Iterator[Outcome]:
        """Each way, computed when it is asked for."""
        n = len(self.rows)
        yield self.compared("one example a row, all rows at once", packed=False)
        yield self.compared("one example a row, one at a time", packed=False, rows_at_once=1)
        yield self.compared(f"one example a row, {max(2, n // 3)} at a time", packed=False,
                            rows_at_once=max(2, n // 3))  # fmt: skip
        step = self.step(packed=True)
        yield self.compared(f"packed in {step.batch.n_rows} rows, all at once")
        yield self.compared("packed rows, one at a time", rows_at_once=1)
        yield self.compared("packed rows, shared by two ranks", ranks=2)
        with _applied(recompute_blocks, stop_recomputing, self.model):
            yield self.compared("packed rows, activations recomputed")
        yield self.compiled()
        yield self.as_the_run_computes()
        yield Outcome(
            "two processes", "skipped", reason="what each rank would compute is summed above in "
            "one process; the sum over a network is not tried",
        )  # fmt: skip

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
            rank=rank,
            world_size=ranks,
        )
        return stream.at(Cursor())

    def compared(
        self,
        name: str,
        *,
        packed: bool = True,
        rows_at_once: int = ALL,
        ranks: int = 1,
        runtime: Runtime | None = None,
    ) -> Outcome:
        """One way, against the reference."""
        smoothing = self.config.optim.label_smoothing
        half = runtime is not None and runtime.precision != "float32"
        began = time.perf_counter()
        steps = [self.step(packed=packed, rank=rank, ranks=ranks) for rank in range(ranks)]
        shares = [
            training_update(
                self.model,
                step,
                rows_at_once=rows_at_once,
                runtime=runtime or self.runtime,
                smoothing=smoothing,
            )
            for step in steps
            if step.batch.n_rows
        ]
        total = shares[0]
        for share in shares[1:]:
            total = total.plus(share)
        found = difference(total, self.reference)
        same = found.within(
            loss=HALF_LOSS if half else LOSS, gradient=HALF_GRADIENT if half else GRADIENT
        )
        verdict: Literal["same", "DIFFERENT"] = "same" if same else "DIFFERENT"
        return Outcome(name, verdict, time.perf_counter() - began, found)

    def compiled(self) -> Outcome:
        """With torch.compile, when the run asks for it."""
        name = "packed rows, compiled"
        if self.config.train.compile is not True:
            reason = "train.compile is not true, and compiling takes a minute"
            return Outcome(name, "skipped", reason=reason)
        with _applied(compile_blocks, stop_compiling, self.model):
            return self.compared(name)

    def as_the_run_computes(self) -> Outcome:
        """In the number format, and by the products, that the run would choose."""
        runtime = Runtime.from_settings(self.config.train, family_of(self.model.config))
        if runtime.precision == "float32" and not onednn_is_faster():
            return Outcome("packed rows, 16 bits", "skipped", reason="this run is in float32")
        if runtime.scaler is not None:
            runtime = replace(runtime, scaler=None)  # gradients would come scaled
        use_cpu_layers(self.model, runtime.precision)
        how = "float32 by oneDNN" if runtime.precision == "float32" else runtime.precision
        return self.compared(f"packed rows, {how}", runtime=runtime)


@contextmanager
def _applied(
    begin: Callable[[torch.nn.Module], object],
    end: Callable[[torch.nn.Module], object],
    model: torch.nn.Module,
) -> Iterator[None]:
    begin(model)
    try:
        yield
    finally:
        end(model)
