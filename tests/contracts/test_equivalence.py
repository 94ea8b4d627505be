"""One update gives one loss and one gradient, however it is cut up.

The reference is the stock transformers forward of each example alone; everything else (packed or
not, any micro-batch size, smoothing) must agree with it.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from toque.batch import IGNORE, Batch
from toque.data.layout import Layout
from toque.data.packing import RowShape
from toque.data.plan import EpochPlan
from toque.models.load import build_model
from toque.models.objective import loss_sum
from toque.units import Cursor

VOCAB, PAD, EOS = 61, 0, 1
ROTARY = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
SHAPES: dict[str, dict[str, object]] = {
    "t5": {
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 2,
        "num_heads": 4,
        "dropout_rate": 0.0,
    },
    "gpt2": {
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    "neox": ROTARY,
    "llama": ROTARY | {"num_key_value_heads": 2},
}
Pair = tuple[list[int], list[int]]
Gradients = dict[str, Tensor]


class Listed:
    def __init__(self, pairs: list[Pair]) -> None:
        self.pairs = pairs

    def prompt(self, row: int, /) -> np.ndarray:
        return np.array(self.pairs[row][0], np.int64)

    def target(self, row: int, /) -> np.ndarray:
        return np.array(self.pairs[row][1], np.int64)


def examples(n: int = 40) -> list[Pair]:
    rng = np.random.default_rng(7)

    def ids(low: int, high: int) -> list[int]:
        return rng.integers(3, VOCAB, rng.integers(low, high)).tolist()

    return [([*ids(1, 12), EOS], [*ids(2, 24), EOS]) for _ in range(n)]


def model_of(family: str) -> nn.Module:
    return build_model(
        family=family,
        shape=SHAPES[family],
        vocab_size=VOCAB,
        pad_id=PAD,
        eos_id=EOS,
        bos_id=None,
        seed=5,
    ).train()


def update(family: str, pairs: list[Pair], *, packed: bool) -> Batch:
    """The first update of the real plan over these examples: every one of them, once."""
    encoder = family == "t5"
    p, t = (np.array([len(pair[side]) for pair in pairs]) for side in (0, 1))
    shape = RowShape(24, 48) if encoder else RowShape(0, 56)
    plan = EpochPlan(
        examples=np.arange(len(pairs)),
        source_lengths=p if encoder else np.zeros_like(p),
        target_lengths=t if encoder else p + t - 1,
        shape=shape,
        seed=2,
        update_rows=None,
        window=len(pairs),
    )
    layout = Layout(Listed(pairs), shape=shape, pad_id=PAD, start_id=PAD, packed=packed)
    return layout.batch(plan.at(Cursor()).rows)


def gradients(model: nn.Module) -> Gradients:
    taken = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return taken


def stock(
    family: str, model: nn.Module, pairs: list[Pair], smoothing: float
) -> tuple[float, Gradients]:
    """transformers' own forward, one example at a time, its logits into torch's cross-entropy."""
    total, n_targets = 0.0, sum(len(target) for _, target in pairs)
    for prompt, target in pairs:
        if family == "t5":
            labels = torch.tensor([target])
            logits = model(input_ids=torch.tensor([prompt]), labels=labels).logits
        else:
            ids = torch.tensor([prompt + target])
            labels = torch.full_like(ids, IGNORE)
            labels[0, len(prompt) - 1 : -1] = torch.tensor(target)
            logits = model(input_ids=ids).logits
        loss = F.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum",
            label_smoothing=smoothing,
        )  # fmt: skip
        (loss / n_targets).backward()
        total += loss.item()
    return total / n_targets, gradients(model)


def ours(model: nn.Module, batch: Batch, micro: int, smoothing: float) -> tuple[float, Gradients]:
    """As `Trainer.step` does it: sums, divided once by the targets of the whole update."""
    total = 0.0
    for part in batch.split(micro):
        loss = loss_sum(model, part, smoothing=smoothing)
        (loss / batch.n_targets).backward()
        total += loss.item()
    return total / batch.n_targets, gradients(model)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("family", SHAPES)
def test_one_update_is_one_update(family: str, smoothing: float) -> None:
    model, pairs = model_of(family), examples()
    loss, gradient = stock(family, model, pairs, smoothing)
    scale = max(float(g.abs().max()) for g in gradient.values())
    for packed in (True, False):
        batch = update(family, pairs, packed=packed)
        assert batch.n_targets == sum(len(target) for _, target in pairs)
        for micro in (1, 4, 8, 1000):
            our_loss, our_gradient = ours(model, batch, micro, smoothing)
            assert our_loss == pytest.approx(loss, rel=1e-5), (packed, micro)
            assert our_gradient.keys() == gradient.keys()
            for name, expected in gradient.items():
                worst = float((our_gradient[name] - expected).abs().max())
                assert worst <= 1e-4 * scale, (name, packed, micro, worst)


def test_the_comparison_can_fail() -> None:
    """A mean of micro-batch means, the fault this contract exists for, is caught."""
    model, pairs = model_of("gpt2"), examples()
    loss, _ = stock("gpt2", model, pairs, 0.0)
    parts = update("gpt2", pairs, packed=False).split(4)
    means = [loss_sum(model, part).item() / part.n_targets for part in parts]
    mean_of_means = sum(means) / len(means)
    assert mean_of_means != pytest.approx(loss, rel=1e-4)
