"""Rows of an evaluation are halved where memory runs out."""

from contextlib import nullcontext

import pytest
import torch

from tiny import model_of, stream_of, uneven_examples
from toque.errors import ConfigError
from toque.evaluation.heldout_loss import HeldOut, RowsPerStep
from toque.models.forward.loss import loss_sum
from toque.training.objectives.objective import Objective


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_where_memory_runs_out_the_loss_is_that_of_fewer_rows(family):
    layout, rows = (
        stream_of(uneven_examples(12), family).layout,
        [(i,) for i in range(12)],
    )
    model, said, sizes = model_of(family), [], []

    def short(model, batch):
        sizes.append(batch.n_rows)
        if batch.n_rows > 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return loss_sum(model, batch)

    def heldout(loss, at_once):
        device = torch.device("cpu")
        objective = Objective(loss)
        return HeldOut(
            layout, rows, objective, nullcontext, device, 2, rows_per_step=at_once
        )

    found = heldout(short, RowsPerStep(8, said.append))
    assert found(model) == heldout(loss_sum, None)(model)
    assert sizes == [8, 4, 2, 2, 2, 2, 2, 2]
    assert len(said) == 2
    assert "continues with 4 rows" in said[0]
    sizes.clear()
    found(model)
    assert set(sizes) == {2}, "what was found out holds for the next evaluation"


def test_a_single_row_that_does_not_fit_is_refused():
    layout = stream_of(uneven_examples(2), "gpt2").layout

    def none(_model, _batch):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    device = torch.device("cpu")
    heldout = HeldOut(layout, [(0,), (1,)], Objective(none), nullcontext, device, 2)
    with pytest.raises(ConfigError, match=r"One row of held-out examples.*2 GiB"):
        heldout(model_of("gpt2"))
