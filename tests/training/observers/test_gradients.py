"""Gradients by layer group: right numbers, the same run."""

import math

import pytest
import torch

from toque.training.observers.gradients import Gradients, layer_groups


@pytest.mark.parametrize("micro_batch_rows", [4, 1])
def test_groups_add_up_to_the_updates_own_norm_and_the_run_is_the_same(
    make_run, tmp_path, micro_batch_rows
):
    events, options = [], {"steps": 6, "micro_batch_rows": micro_batch_rows}
    plain = make_run(folder=tmp_path / "plain", **options)
    plain.trainer.fit()
    gradients = Gradients(
        lambda event, **fields: events.append((event, fields)),
        2,
        torch.nn.Module(),
        phases=None,
    )
    run = make_run(folder=tmp_path / "watched", callbacks=(gradients,), **options)
    gradients.model, gradients.phases = run.trainer.model, run.trainer.runtime.phases
    run.trainer.fit()
    assert run.losses == plain.losses
    for name, weight in plain.weights().items():
        assert torch.equal(weight, run.weights()[name]), name
    assert [(event, fields["step"]) for event, fields in events] == [
        ("gradients", step) for step in (2, 4, 6)
    ]
    norms = {info.progress.step: float(info.grad_norm) for info in run.recorder.steps}
    for _, fields in events:
        assert set(fields["groups"]) == {"embedding", "other"}
        whole = math.hypot(*(group["grad_norm"] for group in fields["groups"].values()))
        assert whole == pytest.approx(norms[fields["step"]], rel=1e-5)
    assert run.trainer.runtime.phases.watchers == []


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
