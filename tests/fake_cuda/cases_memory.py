"""Peak bytes of an update of a preset at its real shapes: the run's own code on the fake card."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from transformers import PreTrainedModel

from fake_cuda.card import FakeCard, fake_card, to_card
from fake_cuda.plan_cases import CARDS, Case, Compared
from toque.config import RunConfig
from toque.models.families import vocabulary_rows
from toque.models.forward.blocks import recompute_blocks
from toque.models.generation.engine import evaluating, resolve_precision
from toque.models.generation.live_rows import LiveRows, Order
from toque.models.generation.options import GenerationOptions
from toque.models.generation.packed_products import with_packed_products
from toque.models.lora.frozen import computing, hold_frozen
from toque.models.lora.quantised import form_named
from toque.runs.estimate import Estimator
from toque.runs.generated_texts import GeneratedTexts, GenerationMemory
from toque.runs.outlined_update import outlining
from toque.training.micro_batch import WorstBatch
from toque.training.objectives.objective import (
    Objective,
    imitation,
    near_reference,
    preference,
)
from toque.training.objectives.policy_gradient import copy_reference
from toque.training.optim.factory import build_optimizer
from toque.training.runtime import Runtime
from toque.workflows.plan.outlined_model import find_vocabulary, outline_model
from toque.workflows.plan.run_estimate import build_estimator

_KNOWN: dict[object, dict[str, int]] = {}  # runs that are the same on several cards


def compared(case: Case) -> Compared:
    """The plan of a case, and what its run takes with as many rows at once."""
    estimator, model_of, _ = build_estimator(case.config, case.card)
    with outlining():
        memory = estimator.memory(model_of(case.config))
    assert memory.recompute == case.recompute
    rows, optimizer = memory.micro_batch_rows, case.config.optim.name
    objective = case.objective.model_dump_json()
    key = (case.preset, case.way, case.recompute, rows, optimizer, objective)
    if key not in _KNOWN:
        _KNOWN[key] = _phases(case, estimator, rows, memory.generation)
    phases = _KNOWN[key]
    generation = None
    if memory.generation is not None:
        generation = memory.generation.total, phases["generation"] - phases["between"]
    return Compared(
        case, rows, optimizer, memory.fits, memory.tensors, phases, generation
    )


def _phases(
    case: Case, planned: Estimator, rows: int, generation: GenerationMemory | None
) -> dict[str, int]:
    """The most bytes in each phase of the second update, when the optimizer has its state."""
    config, work = case.config, planned.work
    adapter = config.adapter
    form = adapter.quantize_base if adapter is not None else None
    if adapter is not None:  # whole first, to be held in few bits by the run's own code
        adapter = adapter.model_copy(update={"quantize_base": None})
    plain = config.model_copy(update={"adapter": adapter})
    with outlining():
        known = find_vocabulary(config, None)
        model = outline_model(plain, known, where="cuda", precision="float32")
    at_once = 2 * rows if rows < work.update_rows else rows
    row = work.row
    n = work.worst_examples
    worst = WorstBatch(
        row.source, row.target, row.source // n, row.target // n, vocabulary_rows(model)
    )
    batch = worst(at_once).counted()
    if config.objective.learns_from_rewards:
        batch = replace(batch, label_weights=torch.ones(batch.labels.shape))
    name, capability = CARDS[case.card]
    with fake_card(name, memory=1 << 50, capability=capability) as card:
        runtime = Runtime.detect(precision=planned.machine.precision)
        to_card(model)
        hold_frozen(model, runtime.dtype, None if form is None else form_named(form))
        if case.recompute:
            recompute_blocks(model, offload=config.train.activation_offload)
        optimizer = build_optimizer(model, name=config.optim.name)
        for parameter in model.parameters():
            parameter.grad = (
                torch.empty_like(parameter) if parameter.requires_grad else None
            )
        runtime.optimizer_step(
            optimizer, lr=1e-4, only_if=torch.ones((), device="cuda") > 0, step=0
        )
        found: dict[str, int] = {}
        objective = _objective(config, model)
        objective.measurements.clear(runtime.device)
        if generation is not None:
            found["between"] = card.now
            with _phase(card, found, "generation"):
                _generate(model, work.texts, generation, runtime)
        model.train()
        batch = batch.to(runtime.device)
        for rows_of_it in batch.split(rows):
            with _phase(card, found, "forward"), runtime.autocast():
                loss = objective.loss_fn(model, rows_of_it)
            with _phase(card, found, "backward"):
                runtime.backward(loss / objective.count(batch))
        with _phase(card, found, "clip"):
            norm = runtime.clip_gradients(optimizer, config.optim.max_grad_norm)
        with _phase(card, found, "step"):
            runtime.optimizer_step(
                optimizer, lr=1e-4, only_if=torch.isfinite(norm), step=0
            )
        return found


def _objective(config: RunConfig, model: PreTrainedModel) -> Objective:
    """The run's own loss function."""
    if config.objective.kind == "dpo":
        return preference(config.objective, np.zeros(2, np.float32))
    if config.objective.kl:
        return near_reference(config.objective, copy_reference(model))
    return imitation(smoothing=config.optim.label_smoothing)


def _generate(
    model: PreTrainedModel,
    texts: GeneratedTexts,
    generation: GenerationMemory,
    runtime: Runtime,
) -> None:
    """Prefill the longest prompts, and generate two tokens of each text."""
    precision = "bf16" if runtime.precision == "bf16" else "float32"
    options = GenerationOptions(temperature=1.0, precision=precision)
    orders = [
        Order([0] * texts.longest_prompt, texts.max_tokens, options, number, 0)
        for number in range(generation.rows)
    ]
    has_encoder = model.config.is_encoder_decoder
    columns = texts.max_tokens + (0 if has_encoder else texts.longest_prompt)
    with torch.inference_mode(), evaluating(model), computing(model):
        core = with_packed_products(model, resolve_precision(precision, model))
        rows = LiveRows(
            core, rows=generation.rows, columns=columns, eos_id=(), pad_id=0
        )
        rows.admit(orders)
        for _ in range(2):
            rows.step()


@contextmanager
def _phase(card: FakeCard, found: dict[str, int], name: str) -> Iterator[None]:
    card.peak = card.now
    yield
    found[name] = max(found.get(name, 0), card.peak)
