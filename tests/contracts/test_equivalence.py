"""One update gives one loss and one gradient, however it is cut up.

The reference is the stock transformers forward of each example alone; everything else (packed or
not, any micro-batch size, smoothing) must agree with it.
"""

import numpy as np
import pytest
from torch import nn

from toque.data.loader.batch_stream import BatchStream, Step
from toque.data.loader.collate import Layout
from toque.data.loader.epoch_plan import EpochPlan
from toque.data.loader.packing import RowShape
from toque.models.forward.loss import loss_sum
from toque.models.loading.pretrained import build_model
from toque.training.runtime import Runtime
from toque.units import Cursor
from toque.workflows.check.reference_update import difference, reference_update, training_update

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


def update(family: str, pairs: list[Pair], *, packed: bool) -> Step:
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
    return BatchStream(plan, layout, prompt_lengths=p, target_lengths=t).at(Cursor())


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("family", SHAPES)
def test_one_update_is_one_update(family: str, smoothing: float) -> None:
    model, pairs = model_of(family), examples()
    reference = reference_update(model, pairs, smoothing=smoothing)
    for packed in (True, False):
        step = update(family, pairs, packed=packed)
        assert step.n_targets == step.batch.n_targets == sum(len(target) for _, target in pairs)
        for micro in (1, 4, 8, 1000):
            ours = training_update(
                model, step, rows_at_once=micro, runtime=Runtime(), smoothing=smoothing
            )
            found = difference(ours, reference)
            assert found.within(loss=1e-5, gradient=1e-4), (packed, micro, found)


def test_the_comparison_can_fail() -> None:
    """A mean of micro-batch means, the fault this contract exists for, is caught."""
    model, pairs = model_of("gpt2"), examples()
    loss = reference_update(model, pairs, smoothing=0.0).loss
    parts = update("gpt2", pairs, packed=False).batch.split(4)
    means = [loss_sum(model, part).item() / part.n_targets for part in parts]
    mean_of_means = sum(means) / len(means)
    assert mean_of_means != pytest.approx(loss, rel=1e-4)
