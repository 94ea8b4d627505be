"""Training updates, batches of random tokens, and matrix-product rates of this machine."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from toque.batch import Batch, DecoderBatch, EncoderDecoderBatch
from toque.models.forward.loss import loss_sum
from toque.runs.peak import Products, measure_peak
from toque.training.runtime import Runtime

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SECONDS = 0.5
"""Duration of one rate measurement, in seconds."""


def update(
    model: torch.nn.Module,
    batch: Batch,
    runtime: Runtime,
    optimizer: torch.optim.Optimizer,
    *,
    lr: float,
    rows: int | None = None,
) -> float:
    """Compute one update in micro-batches of `rows` rows. Return its mean loss in nats.

    `rows=None` computes all rows at once. The device has finished when this returns.
    """
    total = torch.zeros((), device=runtime.device)
    for micro in batch.split(rows or batch.n_rows):
        with runtime.autocast():
            loss = loss_sum(model, micro)
        runtime.backward(loss / batch.n_targets)
        total += loss.detach()
    norm = runtime.clip_gradients(optimizer, 1.0)
    runtime.optimizer_step(optimizer, lr=lr, only_if=torch.isfinite(norm), step=0)
    synchronize(runtime.device)
    return float(total) / batch.n_targets


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def batch_of(
    family: str,
    *,
    rows: int,
    source: int,
    target: int,
    vocabulary: int,
    examples: int = 1,
) -> Batch:
    """Make full rows of equal examples with a label at every target position.

    `source` is the prompt length of a T5; other families ignore it.
    """
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(2, vocabulary, (rows, target), generator=generator)
    ids = tuple(tuple(range(i * examples, (i + 1) * examples)) for i in range(rows))
    labels = tokens.roll(-1, 1)
    segments = segment_numbers(rows, target, examples)
    if family == "t5":
        prompt = torch.randint(2, vocabulary, (rows, source), generator=generator)
        return EncoderDecoderBatch(
            labels=labels,
            example_ids=ids,
            source_tokens=prompt,
            source_segments=segment_numbers(rows, source, examples),
            target_tokens=tokens,
            target_segments=segments,
        )
    columns = torch.arange(target).expand_as(tokens)
    segment_starts = torch.searchsorted(segments, segments)
    return DecoderBatch(labels, ids, tokens, segments, columns - segment_starts)


def segment_numbers(rows: int, length: int, examples: int) -> Tensor:
    """Number equal examples in each row: a tensor [rows, length]."""
    numbers = 1 + torch.arange(length) * examples // length
    return numbers.int().expand(rows, length).contiguous()


class Rates:
    """Matrix-product rates of this machine at a model's shapes, in each precision.

    A utilisation divides the operations of a run by the rate in the precision of that run, because
    a machine with AMX multiplies bf16 several times as fast as float32. Sample between pairs: the
    clock of a shared machine changes.

    Args:
        products: The matrices of the model and the FLOPs spent in each, including the head.
        threads: CPU threads.
    """

    def __init__(self, products: Products, *, threads: int) -> None:
        torch.set_num_threads(threads)
        self.products = products
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        # A CPU does not train in fp16, and its fp16 products take minutes.
        names = [
            name for name in DTYPES if name != "fp16" or self.device.type == "cuda"
        ]
        self.sampled: dict[str, list[float]] = {name: [] for name in names}

    def sample(self) -> None:
        """Measure every precision now."""
        for name, rates in self.sampled.items():
            peak = measure_peak(
                self.device, DTYPES[name], self.products, seconds=SECONDS
            )
            rates.append(peak.flops_per_second)

    def utilisation(self, flops_per_second: float, precision: str) -> float:
        """Return the share of the median rate in `precision`."""
        return round(flops_per_second / statistics.median(self.sampled[precision]), 4)

    def gflops(self) -> dict[str, dict[str, float]]:
        """Return the median and the best rate of each precision, in GFLOP/s."""
        return {
            name: {
                "median": round(statistics.median(rates) / 1e9, 1),
                "best": round(max(rates) / 1e9, 1),
            }
            for name, rates in self.sampled.items()
        }


def products_of_run(config: Any) -> Mapping[tuple[int, int], float]:
    """Return the products per token of a prepared run, given its configuration file."""
    from toque.config import load_config
    from toque.training.arithmetic import count_flops
    from toque.workflows.build import build_language_model, build_stream
    from toque.workflows.prepared_store import open_store

    loaded = load_config(config, []).config
    store = open_store(loaded)
    model = build_language_model(loaded, store)
    return count_flops(model, build_stream(loaded, store, model)).products
