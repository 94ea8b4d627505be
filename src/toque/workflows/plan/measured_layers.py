"""Measured layers: seconds of an update on this machine's CPU, from models of one and two layers.

The layers of a model are alike, so an update takes what its embeddings and head take, and so much
for each layer: seconds(L) = seconds(1) + (L - 1) * (seconds(2) - seconds(1)). Both are real updates
of the run's own kind: its widths, vocabulary, adapter, layers of this processor, micro-batch and
optimizer, with random weights and the texts of its first updates. So nothing is assumed of what
operations cost. An encoder-decoder has two depths, which are told apart by a third model.

Every update has texts of other lengths, and kernels for sizes not seen before are made once for
all layers. So every round takes another batch: the model of one layer first, whose time has the
kernels in it, then all models, for the layers' difference in the same moment.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import repeat
from typing import Final

import torch
from transformers import PretrainedConfig, PreTrainedModel

from toque.batch import Batch
from toque.config import RunConfig
from toque.models.families import family_of, vocabulary_rows
from toque.models.forward.activation_checkpointing import recompute_blocks
from toque.models.loading.from_scratch import fresh_model, fuse_activations
from toque.models.loading.pretrained import grow_vocabulary
from toque.models.loading.to_train import add_adapter
from toque.models.lora.frozen import hold_frozen
from toque.models.lora.quantised import form_named
from toque.training.autotune.micro_batch import WorstBatch
from toque.training.optim.factory import build_optimizer
from toque.training.optimisations import optimise, training_loss
from toque.training.planning.outlined_update import outlining
from toque.training.runtime import Runtime
from toque.workflows.plan.ahead import Ahead
from toque.workflows.plan.memory import Memory
from toque.workflows.plan.outlined_model import Vocabulary, base_outline

_BUDGET_SECONDS: Final = 10.0
"""Guess: a wait nobody minds. No further round begins after it."""
_LEAST_ROUNDS: Final = 3
_MOST_ROUNDS: Final = 25
"""Of a model whose layers take next to nothing."""
_LONG_SECONDS: Final = 2.0
"""A micro-batch that would take longer is measured by one of its rows."""


@dataclass
class _Shallow:
    """A model of few layers, and the seconds its updates took."""

    config: RunConfig
    model: PreTrainedModel
    runtime: Runtime
    recompute: bool
    computing: list[float] = field(default_factory=list)
    """Forward and backward of the micro-batch."""
    updating: list[float] = field(default_factory=list)
    """Clipping and the optimizer's step."""

    def __post_init__(self) -> None:
        optimise(self.model, self.config.train.optimisations, self.runtime)
        if self.recompute:
            recompute_blocks(self.model)
        self.model.train()
        optim = self.config.optim
        self._optimizer = build_optimizer(
            self.model, name=optim.name, weight_decay=optim.weight_decay
        )
        self._loss = training_loss(self.config.train.optimisations, smoothing=optim.label_smoothing)

    def update(self, batch: Batch) -> None:
        """Time an update of one micro-batch."""
        begun = time.perf_counter()
        with self.runtime.autocast():
            loss = self._loss(self.model, batch)
        self.runtime.backward(loss / batch.n_tokens)
        computed = time.perf_counter()
        norm = self.runtime.clip_gradients(self._optimizer, self.config.optim.max_grad_norm)
        # The weights stay as they are: what is random may diverge, and takes the same time.
        self.runtime.optimizer_step(self._optimizer, lr=0.0, only_if=norm.isfinite())
        self.computing.append(computed - begun)
        self.updating.append(time.perf_counter() - computed)

    def forget(self) -> None:
        """Leave out what was measured while kernels were loaded and chosen."""
        self.computing.clear()
        self.updating.clear()


def measured_seconds(
    config: RunConfig,
    known: Vocabulary | None,
    ahead: Ahead,
    memory: Memory,
) -> float:
    """Seconds of an update, as the medians of a few rounds have it; takes some seconds.

    Args:
        config: of the run.
        known: the tokenizer's vocabulary.
        ahead: its rows and updates.
        memory: for the rows that are computed at once.
    """
    with outlining():
        base = base_outline(config, known)
    depths = depths_of(base.config)
    runtime = Runtime.from_settings(config.train, family_of(base.config))

    def of(more: str | None) -> _Shallow:
        layers = {name: 2 if name == more else 1 for name in depths}
        model = shallow_model(config, known, base.config, layers, runtime)
        return _Shallow(config, model, runtime, memory.recompute)

    one, deeper = of(None), {name: of(name) for name in depths}
    models = (one, *deeper.values())
    batches = _batches(ahead, vocabulary_rows(one.model))
    rows = _warmed_rows(next(batches), memory.micro_batch_rows, models)
    # Seconds of a row; each from a batch of its own.
    fresh: list[float] = []
    again: list[float] = []
    layers: dict[str, list[float]] = {name: [] for name in deeper}
    begun = time.perf_counter()
    while len(fresh) < _LEAST_ROUNDS or (
        len(fresh) < _MOST_ROUNDS and time.perf_counter() - begun < _BUDGET_SECONDS
    ):
        batch = next(batches).split(rows)[0]
        for model in (one, *models):  # in turn, so that what disturbs one disturbs all
            model.update(batch)
        fresh.append(one.computing[-2] / batch.n_rows)
        again.append(one.computing[-1] / batch.n_rows)
        for name, model in deeper.items():
            layers[name].append(model.computing[-1] / batch.n_rows - again[-1])

    # Some sizes are met again in a run, and some are not.
    row = (statistics.median(fresh) + statistics.median(again)) / 2
    updating = updating_of_one = statistics.median(one.updating)
    for name, model in deeper.items():
        more = depths[name] - 1
        row += more * max(0.0, statistics.median(layers[name]))
        updating += more * max(0.0, statistics.median(model.updating) - updating_of_one)
    return row * ahead.update_rows + updating


def _batches(ahead: Ahead, vocabulary: int) -> Iterator[Batch]:
    """Of the run's updates, without end; where no store is, of the longest texts allowed."""
    if ahead.batches is not None:
        return ahead.batches()
    row = ahead.row
    longest = WorstBatch(row.source, row.target, row.source, row.target, vocabulary)
    return repeat(longest(ahead.update_rows))


def _warmed_rows(batch: Batch, rows: int, models: tuple[_Shallow, ...]) -> int:
    """Rows that are measured: the micro-batch's, or one where that takes long."""
    one = batch.split(1)[0]
    for model in models:
        model.update(one)  # loads and chooses kernels
        model.forget()
        model.update(one)
    slow = max(model.computing[0] for model in models) * rows > _LONG_SECONDS
    if not slow:
        for model in models:
            model.update(batch.split(rows)[0])
    for model in models:
        model.forget()
    return 1 if slow else rows


def depths_of(shape: PretrainedConfig) -> Mapping[str, int]:
    """Numbers of layers, by the names the config has for them."""
    encoder = family_of(shape).is_encoder_decoder
    names = ["num_layers", "num_decoder_layers"] if encoder else ["num_hidden_layers"]
    return {name: int(getattr(shape, name)) for name in names}


def shallow_model(
    config: RunConfig,
    known: Vocabulary | None,
    shape: PretrainedConfig,
    layers: Mapping[str, int],
    runtime: Runtime,
) -> PreTrainedModel:
    """The run's model with so many layers, adapter and all."""
    own = copy.deepcopy(shape)
    for name, n in layers.items():
        setattr(own, name, n)
    kinds = getattr(own, "layer_types", None)
    if kinds is not None:
        own.layer_types = kinds[: layers["num_hidden_layers"]]
    with torch.random.fork_rng(devices=[]):
        model = fresh_model(own)
    fuse_activations(model)
    if config.model.start_from == "scratch":
        return model
    rows = vocabulary_rows(model)
    seen = known or Vocabulary(rows)
    grow_vocabulary(model, seen.vocab_size)
    adapter = config.adapter
    if adapter is not None:
        start = config.model.start_from
        add_adapter(adapter, model, seen, base=start, base_rows=rows, seed=config.seed)
        asked = adapter.quantize_base
        hold_frozen(model, runtime.dtype, None if asked is None else form_named(asked))
    return model
