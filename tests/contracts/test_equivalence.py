"""One update gives one loss and one gradient, however it is cut up.

The reference is the stock transformers forward of each example alone; everything else (packed or
not, any micro-batch size, smoothing) must agree with it.
"""

import pytest
from torch import nn

from tiny import FAMILIES, Example, model_of, shape_of, stream_of, uneven_examples
from toque.data.loader.batch_stream import Step
from toque.models.forward.loss import loss_sum
from toque.training.runtime import Runtime
from toque.units import Cursor
from toque.workflows.diagnosis.update_ways import (
    FLOAT32,
    compare_updates,
    reference_update,
    training_update,
)


def model(family: str) -> nn.Module:
    return model_of(family, seed=5, shape=shape_of(family, dropout=0.0)).train()


def update(family: str, pairs: list[Example], *, packed: bool) -> Step:
    """The first update of the real plan over these examples: every one of them, once."""
    return stream_of(pairs, family, packed=packed).at(Cursor())


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("family", FAMILIES)
def test_one_update_is_one_update(family: str, smoothing: float) -> None:
    trained, pairs = model(family), uneven_examples(40)
    reference = reference_update(trained, pairs, smoothing=smoothing)
    for packed in (True, False):
        step = update(family, pairs, packed=packed)
        assert (
            step.n_targets
            == step.batch.n_targets
            == sum(len(target) for _, target in pairs)
        )
        for micro in (1, 4, 8, 1000):
            ours = training_update(
                trained,
                step,
                rows_at_once=micro,
                runtime=Runtime(),
                smoothing=smoothing,
            )
            found = compare_updates(ours, reference)
            assert found.within(FLOAT32), (packed, micro, found)


def test_the_comparison_can_fail() -> None:
    """A mean of micro-batch means, the fault this contract exists for, is caught."""
    trained, pairs = model("gpt2"), uneven_examples(40)
    loss = reference_update(trained, pairs, smoothing=0.0)[0]
    parts = update("gpt2", pairs, packed=False).batch.split(4)
    means = [loss_sum(trained, part).item() / part.n_targets for part in parts]
    mean_of_means = sum(means) / len(means)
    assert mean_of_means != pytest.approx(loss, rel=1e-4)
