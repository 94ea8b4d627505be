"""Tasks, weights, stages and augmentation at once: continued to the bit, the same run unpacked."""

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fixtures.kitchens import kitchen_in
from tiny import shape_of
from toque.cli import main
from toque.config import load_config
from toque.config.schema_methods import AugmentationConfig
from toque.cooking.augmentation import Rewriting
from toque.keyed_random import key_of
from toque.workflows.prepared_store import open_store

SECTIONS = {
    "data": {"max_prompt_tokens": 96, "tasks": ["write", "nutrition", "next_step"],
             "task_weights": {"nutrition": 0.5}},
    "curriculum": {"stages": [{"from": "0 %", "max_ingredients": 9}, {"from": "40 %"}]},
    "augmentation": {"prompt_formats": True, "instructions": 0.5, "paraphrase": 0.5,
                     "substitute": 0.5, "tips": 0.3},
    "optim": {"peak_lr": 1e-3},
    "train": {"stop_after": "10 steps", "batch": "2048 tokens", "save_every": "1 steps",
              "evaluate_every": "5 steps", "keep_last": 20},
}  # fmt: skip


@pytest.fixture(params=[pytest.param("t5", marks=pytest.mark.slow), "gpt2"])
def kitchen(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    shape = shape_of(request.param, layers=1, positions=512, dropout=0.0)
    model = {"family": request.param, "tokenizer": "trained:600", "shape": shape}
    return kitchen_in(tmp_path, n=60, model=model, **SECTIONS).parent


def train(kitchen: Path, name: str, *words: str) -> list[dict[str, float]]:
    run = kitchen / name
    assert main(["train", str(kitchen / "run.yaml"), f"run_dir={run}", *words]) == 0
    events = [
        json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()
    ]
    return [event for event in events if event["event"] == "step"]


def test_what_augmentation_does_is_counted(kitchen: Path) -> None:
    config = load_config(str(kitchen / "run.yaml"), []).config
    store, encoder = open_store(config), config.model.family == "t5"
    rows = store.rows("train")
    assert config.augmentation is not None
    rewriting = Rewriting(config.augmentation, store, rows, encoder=encoder)
    varied = rewriting.varied
    key = key_of(config.seed, 0)
    changed = sum(
        not all(
            map(
                np.array_equal,
                varied.sides(row, key),
                (store.prompt(row), store.target(row)),
            )
        )
        for row in rows.tolist()
    )
    told = rewriting.describe_effect(rows, seed=config.seed)
    assert f"{changed} of {len(rows)} sampled examples are changed" in told
    assert (
        main(["train", str(kitchen / "run.yaml"), f"run_dir={kitchen / 'told'}"]) == 0
    )
    assert told.splitlines()[0] in (kitchen / "told" / "training.log").read_text()
    # Beside the shortest example alone, what augmentation lengthens does not fit.
    lengths = store.prompt_lengths + store.target_lengths
    rules = AugmentationConfig(prompt_formats=True, tips=1.0)
    shortest = rows[lengths[rows].argmin() :][:1]
    narrow, wide = (
        Rewriting(rules, store, r, encoder=encoder) for r in (shortest, rows)
    )
    fitting, left = narrow.counts(rows, key)
    assert fitting + left == sum(wide.counts(rows, key))
    assert left > wide.counts(rows, key)[1]


def test_a_run_with_every_technique_on_the_data(kitchen: Path) -> None:
    whole = train(kitchen, "whole")
    assert [event["stage"] for event in whole] == [1] * 4 + [2] * 6
    # A slow disk may have skipped some; stage 2 begins after step 4.
    saved = [int(p.name[5:]) for p in (kitchen / "whole/checkpoints").glob("step-*")]
    choice = random.Random(kitchen.name)
    early, late = [n for n in saved if n <= 4], [n for n in saved if 4 < n < 10]
    for at in [choice.choice(sorted(some)) for some in (early, late) if some]:
        part, folder = kitchen / f"part-{at}", f"step-{at:08d}"
        shutil.copytree(
            kitchen / "whole/checkpoints" / folder, part / "checkpoints" / folder
        )
        shutil.copy(kitchen / "whole/config.yaml", part / "config.yaml")
        again = train(kitchen, part.name)
        assert [e["loss"] for e in again] == [e["loss"] for e in whole[at:]]
        for name in ("model", "optimizer"):
            files = [
                load_file(
                    kitchen / run / f"checkpoints/step-00000010/{name}.safetensors"
                )
                for run in ("whole", part.name)
            ]
            assert files[0].keys() == files[1].keys()
            assert all(torch.equal(t, files[1][key]) for key, t in files[0].items())

    alone = train(kitchen, "alone", "train.pack=false")
    assert [e["target_tokens"] for e in alone] == [e["target_tokens"] for e in whole]
    assert [e["tokens"] for e in alone] == [e["tokens"] for e in whole]
    assert [e["loss"] for e in alone] == pytest.approx(
        [e["loss"] for e in whole], rel=1e-4
    )


@pytest.mark.parametrize(
    "stages",
    [
        '[{from: "10 %"}]',
        '[{from: "0 %"}, {from: "2 epochs"}]',
        '[{from: "0 %"}, {from: "0 %"}]',
    ],
)
def test_stages_that_make_no_run_are_refused(
    stages: str, capfd: pytest.CaptureFixture[str]
) -> None:
    words = [f"curriculum={{stages: {stages}}}", "train.stop_after=10 steps"]
    assert main(["show", "demo", *words]) == 2
    assert "the stages start at" in capfd.readouterr().err


def test_a_stage_that_selects_nothing_is_refused_with_counts(
    kitchen: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    empty = 'curriculum={stages: [{from: "0 %"}, {from: "50 %", max_ingredients: 1}]}'
    assert (
        main(["train", str(kitchen / "run.yaml"), f"run_dir={kitchen / 'run'}", empty])
        == 2
    )
    said = " ".join(capfd.readouterr().err.split())
    assert "Stage 2 of the curriculum (up to 1 ingredients) selects none of the" in said
    assert "stage 2: 0" in said
    assert main(["train", str(kitchen / "run.yaml"), "augmentation={tips: 1.5}"]) == 2
