"""An adapter that continues an earlier one."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import toque
from fixtures.kitchens import StopAt, adapter_config
from toque.errors import CheckpointError, ConfigError
from toque.models.loading.model_export import sample_logits
from toque.models.loading.pretrained import load_with_adapter
from toque.models.lora.adapter_files import WEIGHTS
from toque.workflows.build import build_language_model, model_to_train
from toque.workflows.prepared_store import open_store


@pytest.fixture(
    scope="module", params=["gpt2", pytest.param("t5", marks=pytest.mark.slow)]
)
def begun(request: pytest.FixtureRequest, tmp_path_factory: Any) -> toque.RunConfig:
    """A base, and the settings of a run that trains an adapter on it."""
    return adapter_config(
        tmp_path_factory.mktemp(request.param),
        request.param,
        adapter={"r": 4},
        train={"stop_after": "6 steps", "save_every": "2 steps"},
    )


@pytest.fixture(scope="module")
def first(begun: toque.RunConfig) -> Path:
    toque.train(begun)
    return Path(begun.run_dir)


def continued(begun: toque.RunConfig, first: Path, name: str, **sections: Any) -> Any:
    adapter = {"r": "auto", "start_from": str(first)} | sections.pop("adapter", {})
    run = str(first.parent / name)
    return toque.configure(begun, run_dir=run, adapter=adapter, **sections)


def test_it_starts_with_the_weights_of_the_earlier_one(begun, first):
    config = continued(begun, first, "start")
    model = build_language_model(config, open_store(config)).eval()
    expected = sample_logits(load_with_adapter(first / "model", merge=False))
    assert torch.equal(sample_logits(model), expected)
    base = Path(begun.model.start_from)
    plain = toque.configure(begun, adapter={"r": 4})
    new = build_language_model(plain, open_store(config)).eval()
    assert not torch.equal(sample_logits(new), expected)
    assert base.is_dir()


def test_it_learns_on_and_can_be_merged(begun, first):
    config = continued(begun, first, "second", train={"stop_after": "4 steps"})
    toque.train(config)
    folder = Path(config.run_dir) / "model"
    before = load_file(first / "model" / WEIGHTS)
    after = load_file(folder / WEIGHTS)
    assert before.keys() == after.keys()
    assert {name: tensor.shape for name, tensor in before.items()} == {
        name: tensor.shape for name, tensor in after.items()
    }
    assert any(not torch.equal(before[name], after[name]) for name in before)
    settings = json.loads((folder / "adapter_config.json").read_text())
    assert settings["r"] == 4
    toque.export(config.run_dir, to=first.parent / "merged")
    assert (first.parent / "merged" / "model.safetensors").is_file()


def test_a_stopped_run_gives_the_same_weights(begun, first):
    whole = continued(begun, first, "whole")
    toque.train(whole)
    stopped = continued(begun, first, "stopped")
    toque.train(stopped, callbacks=[StopAt(3)])
    toque.train(stopped)
    expected = load_file(Path(whole.run_dir) / "model" / WEIGHTS)
    found = load_file(Path(stopped.run_dir) / "model" / WEIGHTS)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("adapter", "words"),
    [
        ({"r": 8}, r"adapter\.r is 8, but the adapter .* has 4"),
        ({"kind": "dora"}, r"adapter\.kind is dora, but the adapter .* has lora"),
        (
            {"start_from": "missing"},
            r"adapter\.start_from is missing, which has no adapter",
        ),
    ],
)
def test_other_settings_are_refused(begun, first, adapter, words):
    config = continued(begun, first, "refused", adapter=adapter)
    with pytest.raises(ConfigError, match=words):
        toque.train(config)


def test_another_base_is_refused(begun, first):
    base = Path(begun.model.start_from)
    other = first.parent / "other-base"
    if not other.exists():
        shutil.copytree(base, other)
        path = other / "model.safetensors"
        data = bytearray(path.read_bytes())
        data[-3] ^= 1
        path.write_bytes(data)
    model = {"family": "auto", "start_from": str(other)}
    config = continued(begun, first, "other", model=model)
    with pytest.raises(
        CheckpointError, match="was trained on other weights than this base"
    ):
        toque.train(config)


def test_the_message_for_an_adapter_as_a_model_names_the_setting(begun, first):
    model = {"family": "auto", "start_from": str(first / "model")}
    config = toque.configure(begun, run_dir=str(first.parent / "as-model"), model=model)
    with pytest.raises(
        ConfigError, match=r"also set adapter\.start_from to this folder"
    ):
        toque.train(config)


def test_preferences_compare_with_the_start_and_not_with_the_base(begun, first):
    pairs = first.parent / "pairs.jsonl"
    rows = [
        {"prompt": f"Rice {n}:", "chosen": f"Stew {n}.", "rejected": f"Fry {n} now."}
        for n in range(24)
    ]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = continued(
        begun, first, "dpo", objective={"kind": "dpo"},
        data={"sources": [{"path": str(pairs)}], "store": str(first.parent / "pairs")},
    )  # fmt: skip
    toque.train(config)
    lines = (Path(config.run_dir) / "metrics.jsonl").read_text().splitlines()
    steps = [event for event in map(json.loads, lines) if event["event"] == "step"]
    assert steps[0]["loss"] == pytest.approx(0.6931, abs=1e-3)


def test_the_outline_of_a_plan_reads_no_weights(begun, first):
    config = continued(begun, first, "planned")
    with torch.device("meta"):
        to_train = model_to_train(config, open_store(config).codec())
        assert to_train._adapter is not None
        assert to_train._adapter.r == 4
    assert toque.plan(config).parameters.trainable > 0
