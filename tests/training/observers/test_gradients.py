"""Gradients by layer group: right numbers, the same run, the same after a restart."""

from __future__ import annotations

import math

import pytest
import torch

from toque.training.observers.gradients import Gradients, layer_groups


class Heard:
    def __init__(self):
        self.events = []

    def __call__(self, event, **fields):
        assert event == "gradients"
        self.events.append(fields)


@pytest.fixture
def watched(make_run):
    """A run with the observer; the weights around every update."""

    def make(every=2, **options):
        heard = Heard()
        gradients = Gradients(heard, every, torch.nn.Module(), phases=None)
        run = make_run(callbacks=(gradients,), save_every="2 steps", **options)
        run.trainer.loss_fn = run.trainer.runtime.phases.around("forward", run.trainer.loss_fn)
        gradients.model, gradients.phases = run.trainer.model, run.trainer.runtime.phases
        return run, heard

    return make


@pytest.mark.parametrize("micro_batch_rows", [4, 1])
def test_groups_add_up_to_the_updates_own_norm_and_the_run_is_the_same(
    make_run,
    watched,
    tmp_path,
    micro_batch_rows,
):
    plain = make_run(folder=tmp_path / "plain", steps=6, micro_batch_rows=micro_batch_rows)
    plain.trainer.fit()
    run, heard = watched(folder=tmp_path / "watched", steps=6, micro_batch_rows=micro_batch_rows)
    run.trainer.fit()
    assert run.losses == plain.losses
    for name, weight in plain.weights().items():
        assert torch.equal(weight, run.weights()[name]), name
    assert [event["step"] for event in heard.events] == [2, 4, 6]
    norms = {info.progress.step: float(info.grad_norm) for info in run.recorder.steps}
    for event in heard.events:
        assert set(event["groups"]) == {"embedding", "other"}
        whole = math.hypot(*(group["grad_norm"] for group in event["groups"].values()))
        assert whole == pytest.approx(norms[event["step"]], rel=1e-5)
    assert run.trainer.runtime.phases.watchers == []


def test_a_restart_measures_the_same_updates(watched, tmp_path):
    whole, expected = watched(every=3, steps=9, folder=tmp_path / "whole")
    whole.trainer.fit()
    first, heard = watched(every=3, steps=9, folder=tmp_path / "cut", stop_after="9 steps")
    first.trainer.schedule = type(first.trainer.schedule)(
        first.trainer.schedule.stop_after.parse("4 steps"), None, None
    )
    first.trainer.fit()
    second, again = watched(every=3, steps=9, folder=tmp_path / "cut")
    second.trainer.fit()
    assert [e["step"] for e in heard.events + again.events] == [3, 6, 9]
    assert (heard.events + again.events)[1:] == expected.events[1:]


def test_frozen_weights_are_in_no_group(watched):
    run, heard = watched(every=1, steps=1, freeze=("embed.weight",))
    run.trainer.fit()
    assert set(heard.events[0]["groups"]) == {"other"}


def test_groups_of_every_family_and_of_an_adapter():
    names = {
        "shared.weight": "embedding",
        "encoder.block.0.layer.0.SelfAttention.q.weight": "encoder block 0",
        "decoder.block.1.layer.1.EncDecAttention.k.weight": "decoder block 1",
        "decoder.final_layer_norm.weight": "other",
        "gpt_neox.layers.1.mlp.dense_h_to_4h.weight": "block 1",
        "gpt_neox.embed_in.weight": "embedding",
        "embed_out.weight": "head",
        "model.embed_tokens.weight": "embedding",
        "model.layers.0.self_attn.q_proj.lora_A.default.weight": "adapter block 0",
        "lm_head.weight": "head",
    }
    groups = layer_groups(list(names))
    assert {list(names)[i]: g for g, places in groups.items() for i in places} == names
    many = layer_groups([f"model.layers.{i}.w" for i in range(30)])
    assert list(many) == [f"blocks {i}-{i + 2}" for i in range(0, 30, 3)]
