"""What the tests run in the process with the fake card; results are plain Python."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from fake_cuda.card import fake_card, to_card
from fixtures.trainers import small_trainer
from tiny import model_of, shape_of, stream_of, uneven_examples
from toque.config.schema_methods import AdapterConfig
from toque.models.forward.blocks import recompute_blocks
from toque.models.forward.flex_attention import Asked, attention_of, use_attention
from toque.models.lora.frozen import hold_frozen
from toque.models.lora.layers import attach
from toque.models.lora.quantised import FormName, form_named
from toque.training.optim.factory import build_optimizer
from toque.training.runtime import PrecisionChoice, Runtime
from toque.training.trainer import Schedule
from toque.units import Cursor, Duration


@dataclass(frozen=True)
class Updated:
    """Facts of two updates on the card."""

    attention: str
    waits: dict[str, int]  # in the updates themselves
    state_on: set[str]  # devices of the optimizer's state
    peak: int


def small_model(family: str, *, adapter: bool = False) -> torch.nn.Module:
    """A model with heads of 32 and dropout; drawn outside of the card, as it has no numbers."""
    model = model_of(
        family, seed=5, shape=shape_of(family, width=64, heads=2, inner=96, dropout=0.1)
    )
    if adapter:
        attach(model, AdapterConfig(r=4), base="nowhere", seed=3)
    return model


def two_updates(
    family: str,
    *,
    adapter: bool = False,
    form: FormName | None = None,
    recompute: bool = False,
    offload: bool = False,
    precision: PrecisionChoice = "bf16",
    attention: Asked = "auto",
    optimizer: str = "adamw",
) -> Updated:
    """Two whole updates, in which a wait of the host raises; devices of all that they made."""
    model = small_model(family, adapter=adapter)
    stream = stream_of(uneven_examples(38), family, update_rows=5)
    step = stream.at(Cursor())
    with tempfile.TemporaryDirectory() as folder, fake_card() as card:
        runtime = Runtime.detect(precision=precision)
        assert (runtime.device.type, runtime.precision) == ("cuda", precision)
        to_card(model)
        if adapter:
            hold_frozen(model, runtime.dtype, None if form is None else form_named(form))
        use_attention(model, attention)
        if recompute:
            recompute_blocks(model, offload=offload)
        with runtime.autocast():
            chosen = attention_of(model, runtime.device)
        trainer = small_trainer(
            model,
            stream,
            folder=Path(folder),
            runtime=runtime,
            schedule=Schedule(Duration(6, "steps"), None, None),
        )
        trainer.optimizer = build_optimizer(model, name=optimizer)
        batch = step.batch.to(runtime.device)
        card.waits.clear()
        with card.waiting_is_an_error():
            for _ in range(2):
                info = trainer.step(step, batch)
                trainer.progress = info.progress
        assert info.loss.device.type == info.grad_norm.device.type == "cuda"
        state = (t for of in trainer.optimizer.state.values() for t in of.values())
        on = {t.device.type for t in state if isinstance(t, torch.Tensor)}
        return Updated(chosen.name, dict(card.waits), on, card.peak)


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
