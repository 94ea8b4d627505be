"""Updates on the fake card, as the tests run them in its process; results are plain Python."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from fake_cuda.card import FakeCard, fake_card, to_card
from fixtures.trainers import small_trainer
from tiny import KINDS, make, model_of, shape_of, stream_of, uneven_examples
from toque.config.schema_methods import AdapterConfig
from toque.data.loader.batch_stream import BatchStream
from toque.models.forward.attention import AttentionSetting, attention_of, use_attention
from toque.models.forward.blocks import recompute_blocks
from toque.models.forward.loss import loss_sum
from toque.models.lora.frozen import hold_frozen
from toque.models.lora.layers import attach
from toque.models.lora.quantised import FormName, form_named
from toque.training.optim.factory import build_optimizer
from toque.training.runtime import PrecisionChoice, Runtime
from toque.training.trainer import Schedule, Trainer
from toque.units import Cursor, Duration


def small_model(family: str, *, adapter: bool = False) -> PreTrainedModel:
    """A model with heads of 32 and dropout; drawn outside of the card, as it has no numbers."""
    shape = shape_of(family, width=64, heads=2, inner=96, dropout=0.1)
    return _adapted(model_of(family, seed=5, shape=shape), adapter=adapter)


def smallest_model(kind: str, *, adapter: bool = False) -> PreTrainedModel:
    """A model of `tiny.EVERY_KIND` with heads of 32 and dropout, or of 8 and none.

    One layer, of T5's decoder two, which share a bias: each operation takes half a millisecond.
    """
    if kind not in KINDS:
        return _adapted(make(kind), adapter=adapter)
    family, shape = KINDS[kind]
    shape = shape | shape_of(family, width=64, layers=1, heads=2, inner=96, dropout=0.1)
    shape |= {"t5": {"num_decoder_layers": 2}, "llama": {"num_key_value_heads": 1}}.get(
        family, {}
    )
    return _adapted(model_of(family, seed=5, shape=shape), adapter=adapter)


def _adapted(model: PreTrainedModel, *, adapter: bool) -> PreTrainedModel:
    if adapter:
        attach(model, AdapterConfig(r=4), base="nowhere", seed=3)
    return model


@dataclass(frozen=True)
class Setup:
    """What is trained on the card, and how."""

    kind: str = "gpt2"  # one of `tiny.EVERY_KIND`
    adapter: bool = False
    form: FormName | None = None
    recompute: bool = False
    offload: bool = False
    precision: PrecisionChoice = "bf16"
    attention: AttentionSetting = "auto"
    optimizer: str = "adamw"
    smoothing: float = 0.1
    rows: int = 5  # of a micro-batch, of the five of an update

    def model(self) -> PreTrainedModel:
        """A model with heads of 32 and dropout; to be drawn before there is a card."""
        return smallest_model(self.kind, adapter=self.adapter)

    def stream(self) -> BatchStream:
        """Updates of five rows."""
        family = "t5" if self.kind.startswith("t5") else "gpt2"
        return stream_of(uneven_examples(38), family, update_rows=5)

    def trainer(
        self, model: PreTrainedModel, stream: BatchStream, folder: Path, **more: Any
    ) -> Trainer:
        """A trainer of `model` on the card, which continues what is in the folder."""
        runtime = Runtime.detect(precision=self.precision)
        assert (runtime.device.type, runtime.precision) == ("cuda", self.precision)
        to_card(model)
        if self.adapter:
            hold_frozen(
                model,
                runtime.dtype,
                None if self.form is None else form_named(self.form),
            )
        use_attention(model, self.attention)
        if self.recompute:
            recompute_blocks(model, offload=self.offload)
        more = {
            "schedule": Schedule(Duration(6, "steps"), None, None),
            "rows": self.rows,
        } | more
        loss_fn = more.pop("loss_fn", partial(loss_sum, smoothing=self.smoothing))
        optimizer = build_optimizer(model, name=self.optimizer)
        return small_trainer(
            model,
            stream,
            folder=folder,
            runtime=runtime,
            loss_fn=loss_fn,
            optimizer=optimizer,
            **more,
        )


@contextlib.contextmanager
def card_and_trainer(setup: Setup, **more: Any) -> Iterator[tuple[FakeCard, Trainer]]:
    """A card with a trainer that begins on it."""
    model, stream = setup.model(), setup.stream()
    with tempfile.TemporaryDirectory() as folder, fake_card(content=True) as card:
        yield card, setup.trainer(model, stream, Path(folder), **more)
        card.settle()


@dataclass(frozen=True)
class Updated:
    """Facts of two updates on the card."""

    attention: str
    waits: dict[str, int]  # in the second update; the first may set things up
    state_on: dict[str, str]  # device of the optimizer's state, by entry
    peak: int
    weights: int  # trained ones
    matrices: int  # those that are neither tables nor vectors


def two_updates(kind: str, *, may_wait: bool = False, **setup: Any) -> Updated:
    """Two whole updates, in which a wait of the host raises unless it may be."""
    how = Setup(kind, **setup)
    with card_and_trainer(how) as (card, trainer):
        with trainer.runtime.autocast():
            chosen = attention_of(trainer.model, trainer.runtime.device)
        step = trainer.batches.at(Cursor())
        batch = step.batch.pin().to(trainer.runtime.device)
        with contextlib.nullcontext() if may_wait else card.waiting_is_an_error():
            for _ in range(2):
                card.waits.clear()
                info = trainer.step(step, batch)
                trainer.progress = info.progress
        assert info.loss.device.type == info.grad_norm.device.type == "cuda"
        assert {p.device.type for p in trainer.model.parameters()} == {"cuda"}
        assert not card.pageable
        return Updated(
            chosen.name,
            dict(card.waits),
            state_on(trainer),
            card.peak,
            sum(len(group["params"]) for group in trainer.optimizer.param_groups),
            len(trainer.optimizer.param_groups[0]["params"]),
        )


def state_on(trainer: Trainer) -> dict[str, str]:
    """The device of each entry of the optimizer's state."""
    return {
        name: value.device.type
        for of in trainer.optimizer.state.values()
        for name, value in of.items()
        if isinstance(value, torch.Tensor)
    }


def reads_a_number() -> None:
    """A control: `bool` of a tensor on the card."""
    with fake_card(on_wait="raise"):
        bool(torch.empty((), device="cuda") > 0)


def copies_and_waits() -> None:
    """A control: a copy to the card for which the host waits."""
    with fake_card(on_wait="raise"):
        torch.empty(3).to("cuda")


def adds_across_devices() -> None:
    """A control: a sum of a tensor on the card and one that is not."""
    with fake_card():
        torch.empty(3, device="cuda") + torch.empty(3)
