import json

import pytest
import torch
from torch import nn

from toque.errors import NonFiniteError
from toque.training.nan_tracer import find_nonfinite_origin
from toque.training.runtime import Runtime
from toque.units import Cursor


def blame(model, batch, loss_fn, rows=4):
    torch.manual_seed(0)
    return find_nonfinite_origin(model, loss_fn, batch.split(rows), Runtime())


def mean_of_logits(model, batch):
    return model(batch.tokens).float().mean()


@pytest.fixture
def batch(row_stream):
    return row_stream.at(Cursor()).batch


def test_a_sound_update_has_none(tiny_model, batch):
    assert blame(tiny_model, batch, mean_of_logits) is None
    assert all(p.grad is None for p in tiny_model.parameters())
    assert not any(
        m._forward_hooks or m._forward_pre_hooks for m in tiny_model.modules()
    )


def test_a_weight_is_named_before_what_it_spoils(tiny_model, batch):
    with torch.no_grad():
        tiny_model.norm.bias[3] = torch.nan
    assert blame(tiny_model, batch, mean_of_logits).where == "the weight norm.bias"


def test_the_module_and_the_rows_are_named(tiny_model, batch):
    class Spoil(nn.Module):
        def forward(self, hidden):
            hidden = hidden.clone()
            hidden[1, 0, 0] = torch.inf
            return hidden

    tiny_model.dropout = Spoil()
    found = blame(tiny_model, batch, mean_of_logits)
    assert found.where == "the output of dropout (Spoil)"
    assert found.example_ids == batch.example_ids[1]
    found = blame(tiny_model, batch, mean_of_logits, rows=3)
    assert found.example_ids == batch.example_ids[1]


def test_what_happens_between_two_parts_is_the_owners(tiny_model, batch):
    tiny_model.scale.fill_(torch.nan)  # a buffer, applied between dropout and head
    found = blame(tiny_model, batch, mean_of_logits)
    assert found.where == "the input that the model passes to its head"


def test_the_loss_and_a_gradient_are_named(tiny_model, batch):
    found = blame(tiny_model, batch, lambda m, b: m(b.tokens).sum() * torch.nan)
    assert found.where.startswith("the loss, although every")
    assert found.example_ids == tuple(i for row in batch.example_ids for i in row)
    # 0 * log: finite forward, 0 * inf backward.
    found = blame(tiny_model, batch, lambda m, b: (m(b.tokens) * 0.0).sum().sqrt())
    assert found.where.startswith("the gradient of ")


def test_the_error_of_a_run_names_it(make_run):
    run = make_run(save_every=None)
    norm, calls = run.trainer.model.norm, []

    def spoil(_module, _args, output):
        calls.append(1)
        return output * torch.nan if len(calls) > 2 else None

    norm.register_forward_hook(spoil)
    with pytest.raises(
        NonFiniteError, match=r"First not finite: the output of norm \(LayerNorm\)"
    ):
        run.trainer.fit()
    record = json.loads((make_run.folder / "non_finite.json").read_text())
    assert record["first_non_finite"] == "the output of norm (LayerNorm)"
    assert len(record["first_example_ids"]) == 4


def test_weights_that_no_rank_has_room_to_gather_are_not_gathered(
    make_run, monkeypatch
):
    trainer = make_run(save_every=None).trainer
    trainer._sharing.is_sharded = True
    monkeypatch.setattr(trainer._sharing, "full_model", lambda: pytest.fail("gathered"))
    monkeypatch.setattr("toque.training.trainer.free_bytes", lambda _: 9999)
    plain = trainer.loss_fn
    trainer.loss_fn = lambda model, batch: plain(model, batch) * torch.nan
    with pytest.raises(
        NonFiniteError, match="Memory ran out when the update was computed again"
    ):
        trainer.fit()


@pytest.mark.parametrize(
    ("fits", "words"),
    [
        (1, r"First not finite: the output of norm \(LayerNorm\), in examples \d+\."),
        (
            0,
            "Memory ran out when the update was computed again, so its origin is unknown",
        ),
    ],
)
def test_memory_that_runs_out_while_it_is_traced_costs_at_most_its_name(
    make_run, fits, words
):
    """As on a GPU: the update was compiled, and what is traced is not."""
    run = make_run(save_every=None, micro_batch_rows=4)
    trainer, losses = run.trainer, []
    plain = trainer.loss_fn
    trainer.model.norm.register_forward_hook(
        lambda *args: args[-1] * torch.nan if len(losses) > 2 else None
    )

    def limited(model, batch):
        losses.append(batch.n_rows)
        if len(losses) > 3 and batch.n_rows > fits:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return plain(model, batch)

    trainer.loss_fn = limited
    with pytest.raises(NonFiniteError, match=words):
        trainer.fit()
    assert losses[:5] == [4, 4, 4, 4, 1]
    record = json.loads((make_run.folder / "non_finite.json").read_text())
    assert (record["first_non_finite"] is None) == (fits == 0)
    assert len(record["example_ids"]) == 4
    assert all(p.grad is None for p in trainer.model.parameters())
