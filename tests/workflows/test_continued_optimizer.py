"""A run that continues an adapter with the state of its optimizer."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import toque
from fixtures.kitchens import Notices, StopAt, adapter_config
from toque.data.loader import batch_stream
from toque.data.loader.curriculum import stage_seed
from toque.errors import CheckpointError
from toque.models.lora.adapter_files import WEIGHTS
from toque.storage.atomic import sha256_of

FEW_INGREDIENTS = {"from": "0 %", "max_ingredients": 5}


@pytest.fixture(
    scope="module", params=["gpt2", pytest.param("t5", marks=pytest.mark.slow)]
)
def settings(request: pytest.FixtureRequest, tmp_path_factory: Any) -> toque.RunConfig:
    """A base with dropout, and the settings of an adapter that is trained for 4 updates."""
    return adapter_config(
        tmp_path_factory.mktemp(request.param),
        request.param,
        adapter={"r": 4, "dropout": 0.1},
        curriculum={"stages": [FEW_INGREDIENTS]},
        optim={"schedule": "constant", "warmup": "0 steps"},
        train={"keep_best": 0},
    )


@pytest.fixture(scope="module")
def first(settings: toque.RunConfig) -> Path:
    return toque.train(settings).folder


def continued(
    settings: toque.RunConfig, first: Path, name: str, **sections: Any
) -> Any:
    adapter = {"start_from": str(first), "r": "auto"}
    run_dir = str(Path(settings.run_dir).parent / name)
    return toque.configure(
        settings, adapter=adapter, run_dir=run_dir, curriculum=None, **sections
    )


def test_two_halves_equal_one_run_over_both(settings, first, monkeypatch, tmp_path):
    stages = [FEW_INGREDIENTS, {"from": "50 %"}]
    entire = toque.train(
        toque.configure(
            settings,
            curriculum={"stages": stages},
            train={"stop_after": "8 steps"},
            run_dir=str(first.parent / "entire"),
        )
    )
    copy = tmp_path / "copy"
    shutil.copytree(first, copy)
    # The second half reads its examples in the order of the second stage.
    monkeypatch.setattr(
        batch_stream,
        "_plan_run",
        lambda config, _store, rows, make_plan: make_plan(
            np.arange(len(rows)), stage_seed(config.seed, 1)
        ),
    )
    config = continued(settings, copy, "second", train={"save_every": "1 steps"})
    heard = Notices()
    toque.train(config, callbacks=[StopAt(2)], reporter=heard)
    assert f"the optimizer continues from step 4 of {copy}" in heard.notices
    assert not any("starts its schedule again" in text for text in heard.notices)
    shutil.rmtree(copy)
    second = toque.train(config)
    assert second.step == 4

    for name in ("model", "optimizer"):
        file = f"{name}.safetensors"
        expected = entire.folder / "checkpoints/step-00000008" / file
        result = second.folder / "checkpoints/step-00000004" / file
        assert sha256_of(result) == sha256_of(expected)
    for run in (entire, second):
        toque.export(run.folder, to=tmp_path / run.folder.name)
    assert sha256_of(tmp_path / "second/model.safetensors") == sha256_of(
        tmp_path / "entire/model.safetensors"
    )


@pytest.mark.parametrize(
    ("start", "optim", "reason"),
    [
        pytest.param(
            "model",
            {},
            "/first/model is not a run with a checkpoint",
            marks=pytest.mark.slow,
        ),
        ("", {"betas": [0.9, 0.95]}, "optim.betas was None and is [0.9, 0.95]"),
    ],
)
def test_a_new_optimizer_is_announced(settings, first, start, optim, reason):
    name = "new-" + (start or "betas")
    config = continued(
        settings, first / start, name, optim=optim, train={"stop_after": "1 steps"}
    )
    heard = Notices()
    run = toque.train(config, reporter=heard)
    (note,) = [text for text in heard.notices if "the optimizer" in text]
    assert note.startswith("note: the optimizer starts new, because")
    assert reason in note
    assert (run.folder / "start-adapter" / WEIGHTS).is_file()


def test_a_schedule_that_starts_again_is_announced(settings, first):
    optim = {"schedule": "cosine", "warmup": "1 steps"}
    heard = Notices()
    config = continued(
        settings, first, "warm", optim=optim, train={"stop_after": "2 steps"}
    )
    toque.train(config, reporter=heard)
    (note,) = [text for text in heard.notices if "schedule again" in text]
    assert "again: cosine, with a warm-up of 1 steps." in note
    assert '"optim.warmup=0 steps"' in note


@pytest.mark.slow
def test_a_best_model_that_is_not_the_last_has_no_optimizer(settings, first, tmp_path):
    copy = tmp_path / "best"
    shutil.copytree(first, copy)
    weights = copy / "model" / WEIGHTS
    data = bytearray(weights.read_bytes())
    data[-3] ^= 1
    weights.write_bytes(data)
    heard = Notices()
    config = continued(settings, copy, "best-of", train={"stop_after": "1 steps"})
    toque.train(config, reporter=heard)
    assert any(
        "does not have the weights of" in text and "step-00000004" in text
        for text in heard.notices
    )


def test_a_damaged_checkpoint_is_refused(settings, first, tmp_path):
    copy = tmp_path / "damaged"
    shutil.copytree(first, copy)
    (newest,) = (copy / "checkpoints").glob("step-*")
    (newest / "optimizer.safetensors").write_bytes(b"")
    config = continued(settings, copy, "refused")
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors has 0 bytes"):
        toque.train(config)
    assert not Path(config.run_dir).exists()
