"""Texts written on the device are those of transformers, and the verbs work there."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from gpu_run import model_on
from tiny import EOS, FAMILIES, PAD, shape_yaml, stream_of, uneven_examples
from tiny import examples as some_examples
from toque.cli import main
from toque.evaluation.heldout_loss import HeldOut, RowsPerStep
from toque.training.objectives.objective import imitation
from written import generate

CONFIG = """
run_dir: {folder}/run
model: {{family: gpt2, tokenizer: "trained:512", shape: {shape}}}
data: {{sources: [{{path: "{folder}/cookbook.jsonl"}}], store: {folder}/store}}
train: {{stop_after: "4 steps", batch: "2048 tokens", compile: false}}
evaluation: {{max_examples: 8, generate: 2}}
observe: {{log_every: "1 step"}}
"""


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_texts_are_those_of_transformers(device, family):
    model = model_on(device, family, dropout=0.0).eval()
    prompts = [prompt for prompt, _ in some_examples(6)]
    ours = generate(model, prompts, max_new_tokens=12, eos_id=EOS, pad_id=PAD)
    for prompt, written in zip(prompts, ours, strict=True):
        ids = torch.tensor([prompt], device=device)
        stock = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12
        )[0].tolist()
        new = stock[1:] if family == "t5" else stock[len(prompt) :]
        assert (
            list(written) == new[: new.index(EOS)]
            if EOS in new
            else list(written) == new
        )


@pytest.mark.usefixtures("device")
def test_from_recipes_to_texts(tmp_path):
    from toque.cooking.cookbook.recipes import write_cookbook

    write_cookbook(tmp_path / "cookbook.jsonl", n=40, seed=3)
    shape = shape_yaml("gpt2", width=64, heads=2, positions=512)
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG.format(folder=tmp_path, shape=shape))
    assert main(["train", str(path)]) == 0
    events = [
        json.loads(e) for e in (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    ]
    start = next(e for e in events if e["event"] == "start")
    # What `auto` takes; the CPU variant sees a GPU too, where there is one.
    gpu = torch.cuda.is_available()
    assert start["attention"] == ("flex" if gpu else "segments")
    assert len([e for e in events if e["event"] == "step"]) == 4
    assert (
        main(["generate", str(tmp_path / "run"), "--prompt", "pancakes: flour, milk"])
        == 0
    )


def test_rows_of_an_evaluation_change_nothing(device):
    """More rows go together on a GPU; the loss stays that of few."""
    model = model_on(device, "gpt2", dropout=0.0).eval()
    layout, rows = (
        stream_of(uneven_examples(96), "gpt2").layout,
        [(i,) for i in range(96)],
    )
    few = HeldOut(layout, rows, imitation(), nullcontext, device, rows_per_batch=2)
    many = replace(few, rows_per_step=RowsPerStep(64))
    assert many(model)["loss"] == pytest.approx(few(model)["loss"], rel=1e-6)
