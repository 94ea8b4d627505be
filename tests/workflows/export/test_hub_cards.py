"""Model cards as the hub reads them, of a LoRA of a hub's base, through training and exports."""

import json
import shutil
from pathlib import Path

import pytest
from huggingface_hub import ModelCard, ModelCardData, constants

import toque
from fixtures.hub import hub
from plain_transformers import model_folder
from toque.data.tokenizer.codec import load_codec
from toque.errors import ConfigError

BASE = "org/soup"
ROWS = [
    {"prompt": f"How many spoons, {n}?", "target": f"{n % 7} spoons."}
    for n in range(60)
]
BASE_CARD = (
    "---\nlicense: other\nlicense_name: soup-1.0\nlanguage: [en, de]\ntags: [x]\n"
    "---\n# Soup\n"
)


@pytest.fixture
def base(
    tokenizers_at: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A model in the hub's cache, as downloaded."""
    made = model_folder(tmp_path, "gpt2", load_codec(tokenizers_at["decoder"]), "pairs")
    place = tmp_path / "hub" / "models--org--soup"
    snapshot = place / "snapshots" / ("0" * 40)
    shutil.copytree(made, snapshot)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("0" * 40)
    (snapshot / "README.md").write_text(BASE_CARD)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return snapshot


def trained(start: str, *, adapter: bool = True, **model: str) -> toque.TrainedRun:
    config = toque.configure(
        run_dir="run",
        data={"store": "store", "dedup": "none"},
        model={"start_from": start, "family": "auto", **model},
        adapter={"r": 2} if adapter else None,
        train={"stop_after": "2 steps", "batch": "512 tokens", "precision": "float32"},
        evaluation={"texts": 2},
    )
    return toque.train(config, data=ROWS)


def head_of(folder: Path) -> ModelCardData:
    return ModelCard.load(folder / "README.md").data


@pytest.mark.usefixtures("base")
def test_the_card_of_an_adapter_and_of_what_is_exported_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = trained(BASE)
    head = head_of(Path("run/model"))
    known = head.to_dict()
    results = known.pop("model-index")
    assert known == {
        "license": "other",
        "license_name": "soup-1.0",
        "language": ["en", "de"],
        "base_model": BASE,
        "base_model_relation": "adapter",
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["toque", "gpt2"],
    }
    measured = json.loads(Path("run/evaluation.json").read_text())
    expected = measured["heldout"] | measured["generated"]
    for size in ("target_tokens", "target_bytes", "texts"):
        expected.pop(size)
    assert {r.metric_type: r.metric_value for r in head.eval_results} == pytest.approx(
        expected, rel=1e-5, abs=1e-6
    )
    assert "loss" in expected
    (listed,) = results[0]["results"]
    assert listed["dataset"]["type"] == "held-out"
    card = Path("run/model/README.md").read_text()
    assert "Licence: soup-1.0, from the card of its base." in card

    whole = head_of(toque.export(run, "merged").folder)
    assert whole.to_dict() == head.to_dict() | {
        "base_model_relation": "finetune",
        "library_name": "transformers",
    }
    assert head_of(toque.export(run, "soup", form="gguf").folder).library_name == "gguf"

    with hub() as server:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        done = toque.export(run, "adapter", form="adapter", push_to="me/soup")
    assert str(done).startswith(
        "adapter holds the adapter alone, read back and compared"
    )
    assert done.difference == 0
    held = {
        path.relative_to("adapter")
        for path in Path("adapter").rglob("*")
        if path.is_file()
    }
    kept = {path.relative_to("run/model") for path in Path("run/model").rglob("*")}
    assert held == {path for path in kept if Path("run/model", path).is_file()}
    assert all(
        Path("adapter", path).read_bytes() == Path("run/model", path).read_bytes()
        for path in held
    )
    assert set(server.files) == {path.as_posix() for path in held}
    sent = json.loads(server.files["adapter_config.json"])
    assert sent["base_model_name_or_path"] == BASE


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"push_to": "me/soup"}, "a folder on this machine.*base_model_name_or_path"),
        (
            {"dtype": "bf16"},
            "dtype cannot be combined, because an adapter is copied unchanged",
        ),
    ],
)
def test_an_adapter_that_cannot_be_pushed_is_refused_before_anything_is_written(
    options: dict[str, str], words: str, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trained(str(base), licence="mit")
    head = head_of(Path("run/model")).to_dict()
    assert head["license"] == "mit"
    assert {"license_name", "base_model", "base_model_relation"} & set(head) == set()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with pytest.raises(ConfigError, match=words):
        toque.export(run, "out", form="adapter", **options)
    assert not Path("out").exists()


def test_a_whole_model_is_a_finetune_and_no_adapter_of_it_is_written(
    base: Path,
) -> None:
    (base / "README.md").write_text("---\nlicense: [1, 2]\nlanguage: {a: b}\n---\n")
    run = trained(BASE, adapter=False)
    head = head_of(Path("run/model"))
    assert head.base_model_relation == "finetune"
    assert head.license is None
    card = Path("run/model/README.md").read_text()
    assert (
        "Licence: unknown. Neither `model.licence` nor the card of its base names one."
        in card
    )
    with pytest.raises(
        ConfigError, match=r"form=adapter needs an adapter, but .* has a complete model"
    ):
        toque.export(run, "out", form="adapter")
