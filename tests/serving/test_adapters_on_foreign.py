"""Adapters on a model that others made: asked by their own record, tokenizer and begin token."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

import toque
from fixtures.kitchens import TINY
from serving.test_foreign_models import write_model
from toque.config.schema_methods import AdapterConfig
from toque.errors import ConfigError
from toque.models.loading.pretrained import load_model
from toque.models.lora.adapter_files import write_adapter
from toque.models.lora.frozen import base_sha256
from toque.models.lora.layers import attach
from toque.workflows.inference.open_served import open_models

TYPED = "What is 3 plus 1?"
PAIRS = [
    {"question": f"What is {i} plus 1?", "answer": f"It is {i + 1}."} for i in range(30)
]
GREEDY = {"temperature": 0, "max_new_tokens": 12}


@pytest.fixture(scope="module")
def base(
    tmp_path_factory: pytest.TempPathFactory, tokenizers_at: dict[str, Path]
) -> Path:
    folder = tmp_path_factory.mktemp("foreign") / "base"
    return write_model(folder, tokenizers_at["decoder"], begins=False)


@pytest.fixture(scope="module")
def run(base: Path) -> Path:
    """A run of an adapter of pairs, which begin with a token that the base's texts have not."""
    work = base.parent
    (work / "data.jsonl").write_text("\n".join(map(json.dumps, PAIRS)))
    source = {"path": str(work / "data.jsonl")}
    source["columns"] = {"prompt": "question", "target": "answer"}
    config = toque.configure(
        TINY | {"model": {"family": "auto", "start_from": str(base)}},
        run_dir=str(work / "run"),
        adapter={"r": 4},
        data={"sources": [source], "store": str(work / "store"), "validation_fraction": 0.2,
              "max_prompt_tokens": 64, "max_target_tokens": 48},
        optim={"peak_lr": 0.05},
    )  # fmt: skip
    return toque.train(config).folder


@pytest.fixture(scope="module")
def bare(base: Path) -> Path:
    return bare_adapter(base.parent / "bare", base, scale=0.5)


def bare_adapter(folder: Path, base: Path, *, scale: float) -> Path:
    """An adapter as peft writes it: without a tokenizer, and with nothing of Toque's."""
    folder.mkdir()
    model = load_model(str(base))
    base_hash = base_sha256(model)
    attach(model, AdapterConfig(r=2, dropout=0.0), base=str(base), seed=1)
    with torch.no_grad():  # B begins at zero, and the adapter would change nothing
        for key, tensor in model.named_parameters():
            if ".lora_B" in key:
                tensor.normal_(0, scale, generator=torch.Generator().manual_seed(1))
    write_adapter(model, folder, base_hash=base_hash)
    return folder


def text(model: Path, *adapters: Path) -> str:
    (written,) = toque.generate(model, TYPED, adapters=adapters, **GREEDY)
    return written.text


def test_an_adapter_beside_its_base_writes_what_its_run_writes(
    run: Path, base: Path
) -> None:
    served = open_models({"base": base, "adapter": run})
    with_begin = served["adapter"].prompt_ids(TYPED)
    assert with_begin[0] == served["adapter"].codec.bos_id
    assert served["base"].prompt_ids(TYPED)[0] != with_begin[0]
    assert text(base, run / "model") == text(run) != text(base)
    assert text(base, run) == text(run), "a run folder names its adapter, as for serve"


def test_an_adapter_without_a_tokenizer_has_its_bases(
    bare: Path, base: Path, tmp_path: Path
) -> None:
    expected = text(base, bare)
    assert text(bare) == expected != text(base)
    done = toque.export(bare, tmp_path / "whole")
    assert text(done.folder) == expected
    ids = [
        AutoTokenizer.from_pretrained(one)(TYPED)["input_ids"]
        for one in (base, done.folder)
    ]
    assert ids[0] == ids[1]


def test_an_adapter_of_a_model_of_toques_is_asked_as_that_one(
    run: Path, tmp_path: Path
) -> None:
    whole = toque.export(run, tmp_path / "whole").folder
    on_it = bare_adapter(tmp_path / "on_it", whole, scale=0.0)
    assert text(on_it) == text(whole), "it changes nothing"


def test_what_holds_no_adapter_is_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no adapter \(adapter_config.json\)"):
        text(base, base)
    with pytest.raises(ConfigError, match="does not exist"):
        text(base, tmp_path / "absent")


def test_an_adapter_on_an_adapter_is_refused(bare: Path, tmp_path: Path) -> None:
    own = shutil.copytree(bare, tmp_path / "own")
    settings = json.loads((own / "adapter_config.json").read_text())
    settings["base_model_name_or_path"] = str(own)
    (own / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match="which is an adapter itself"):
        text(own)
