"""Arithmetic of data parallelism: bytes and seconds of an update on many GPUs, as tables.

Bytes of a collective over S bytes, n GPUs and m machines of 8 GPUs (Patarasuk & Yuan 2009 for
all-reduce; Rajbhandari et al. 2020, ZeRO, section 7, for sharded weights):

    all-gather, reduce-scatter    (n - 1) / n * S in and out of each GPU
                                  (m - 1) / m * S / 8 of it over the network card of each GPU
    all-reduce                    a reduce-scatter, then an all-gather

`toque.training.distributed.exchange` computes the bytes of an update. tests/fake_cuda compares them
with counted collectives. The seconds are those of the slower link, plus a latency per hop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

import torch

from toque.training.distributed.exchange import Exchange, exchange_of, ring_bytes

Strategy = Literal["ddp", "fsdp"]
STRATEGIES: Final[tuple[Strategy, ...]] = ("ddp", "fsdp")
GPUS: Final = (8, 64, 512, 4096)
STATE_BYTES: Final = 16
"""Bytes per weight in training: float32 weight and gradient, two averages of AdamW."""
SAVED_BYTES: Final = 12
"""Bytes per weight in a checkpoint."""
STORED_TOKEN_BYTES: Final = 2
"""Bytes per stored token for vocabularies up to 65,536."""


@dataclass(frozen=True)
class Machine:
    """One machine of a cluster. Bandwidths are per GPU and direction, in bytes per second."""

    flops_per_second: float = 989.5e12
    """bf16 FLOP/s, NVIDIA H100 SXM data sheet."""
    utilisation: float = 0.40
    """MFU. Guess: published runs have 0.38 to 0.46 (Llama 3, PaLM)."""
    gpus: int = 8
    inside: float = 0.8 * 450e9
    """NVLink 4: 900 GB/s in both directions (H100 data sheet). The factor 0.8 is a guess."""
    between: float = 0.8 * 50e9
    """One 400 Gb/s network card per GPU (DGX H100 data sheet). The factor 0.8 is a guess."""
    hop_seconds: float = 5e-6
    """Guess: latency per hop between machines. Hops inside a machine are not counted."""
    disk: float = 2e9
    """Guess: write speed per machine."""


@dataclass(frozen=True)
class Model:
    """Facts of a model that determine its traffic."""

    name: str
    exchange: Callable[[Strategy, int], Exchange]
    """Bytes of one micro-batch per GPU, by strategy and number of GPUs."""
    weights: int
    layers: int
    flops_per_token: float
    tokens: int
    """Tokens per GPU and update."""


@dataclass(frozen=True)
class Update:
    """One update on `gpus` GPUs. Bytes are sent bytes per GPU."""

    gpus: int
    strategy: Strategy
    state_bytes: float
    inside_bytes: float
    between_bytes: float
    compute_seconds: float
    gather_seconds: float
    reduce_seconds: float
    seconds: float
    save_seconds: float

    @property
    def efficiency(self) -> float:
        """Share of the time in which the GPUs compute."""
        return self.compute_seconds / self.seconds


@dataclass(frozen=True)
class _Traffic:
    inside: float = 0.0
    between: float = 0.0
    hops: float = 0.0

    def __add__(self, other: _Traffic) -> _Traffic:
        return _Traffic(
            self.inside + other.inside,
            self.between + other.between,
            self.hops + other.hops,
        )

    def seconds(self, machine: Machine) -> float:
        slower = max(self.inside / machine.inside, self.between / machine.between)
        return slower + self.hops * machine.hop_seconds


def _gathered(total: float, gpus: int, machine: Machine, calls: int = 1) -> _Traffic:
    """Return the traffic of an all-gather or reduce-scatter of `total` bytes in `calls` calls."""
    machines = max(1, gpus // machine.gpus)
    between = ring_bytes(total, machines) / machine.gpus
    return _Traffic(ring_bytes(total, gpus), between, calls * (machines - 1))


def update(
    model: Model, strategy: Strategy, gpus: int, machine: Machine | None = None
) -> Update:
    """Compute bytes and seconds of one update."""
    machine = machine or Machine()
    machines = max(1, gpus // machine.gpus)
    moved, shards = model.exchange(strategy, gpus), gpus
    if strategy == "ddp":
        shards, gather = 1, _Traffic()
        reduce = _gathered(moved.reduced, gpus, machine)
        reduce = reduce + reduce
    else:
        gather = _gathered(moved.gathered, gpus, machine, 2 * model.layers)
        reduce = _gathered(moved.scattered, gpus, machine, model.layers)
    rate = machine.flops_per_second * machine.utilisation
    compute = model.flops_per_token * model.tokens / rate
    gather_seconds, reduce_seconds = gather.seconds(machine), reduce.seconds(machine)
    shown = moved.exposed_seconds(gather_seconds + reduce_seconds, compute)
    writers = machines if shards > 1 else 1
    return Update(
        gpus=gpus,
        strategy=strategy,
        state_bytes=model.weights * STATE_BYTES / shards,
        inside_bytes=gather.inside + reduce.inside,
        between_bytes=gather.between + reduce.between,
        compute_seconds=compute,
        gather_seconds=gather_seconds,
        reduce_seconds=reduce_seconds,
        seconds=compute + shown,
        save_seconds=model.weights * SAVED_BYTES / writers / machine.disk,
    )


def table(model: Model, machine: Machine | None = None) -> list[str]:
    """Return a Markdown table of the updates of a model."""
    heads = (
        "GPUs", "strategy", "state, GB per GPU", "sent inside, GB", "sent between, GB",
        "compute, s", "all-gather, s", "reduce, s", "update, s", "computing", "tokens per second",
        "read, MB/s", "save, s",
    )  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for gpus in GPUS:
        for strategy in STRATEGIES:
            u = update(model, strategy, gpus, machine)
            tokens = gpus * model.tokens / u.seconds
            cells = (
                f"{gpus:,}", strategy, f"{u.state_bytes / 1e9:.2f}", f"{u.inside_bytes / 1e9:.2f}",
                f"{u.between_bytes / 1e9:.2f}", f"{u.compute_seconds:.3f}",
                f"{u.gather_seconds:.3f}", f"{u.reduce_seconds:.3f}", f"{u.seconds:.3f}",
                f"{u.efficiency:.0%}", f"{tokens:,.0f}",
                f"{tokens * STORED_TOKEN_BYTES / gpus * 8 / 1e6:.2f}", f"{u.save_seconds:.1f}",
            )  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def models() -> list[Model]:
    """Count the GPT-NeoX of the preset and a 7B Llama from their outlines."""
    from toque.config import load_config
    from toque.models.flops import flops_per_token, parameter_counts
    from toque.runs.outlined_update import outlining
    from toque.workflows.plan.outlined_model import find_vocabulary, outline_model

    llama = (
        "model.family=llama",
        "model.tokenizer=trained:32000",
        (
            "model.shape={hidden_size: 4096, num_hidden_layers: 32, num_attention_heads: 32, "
            "num_key_value_heads: 32, intermediate_size: 11008, max_position_embeddings: 2048}"
        ),
    )
    counted = []
    for name, rows, overrides in (
        ("GPT-NeoX 1.2B, 16,384 tokens a GPU", 8, ()),
        ("GPT-NeoX 1.2B, 2,048 tokens a GPU", 1, ()),
        ("Llama 7B, 8,192 tokens a GPU", 4, llama),
    ):
        config = load_config("neox-1.2b", overrides=overrides).config
        with outlining():
            model = outline_model(
                config, find_vocabulary(config, None), where="cuda", precision="bf16"
            )
            counts = parameter_counts(model)
            flops = flops_per_token(model, context=1024)
        layers = int(model.config.num_hidden_layers)
        exchange = partial(exchange_of, model, dtype=torch.bfloat16)
        counted.append(Model(name, exchange, counts.total, layers, flops, rows * 2048))
    return counted
