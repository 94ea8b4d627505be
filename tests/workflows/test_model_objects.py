"""A model and a tokenizer of the program, where a configuration names folders."""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

import toque
from fixtures.kitchens import TINY
from toque.errors import ConfigError

FAMILY = {"family": "auto", "start_from": "folder"}
TRAIN = {"stop_after": "2 steps"}


def test_objects_train_as_their_folders_do(stocked, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOQUE_CACHE", str(tmp_path / "cache"))
    tokenizer = AutoTokenizer.from_pretrained(stocked / "store" / "tokenizer")
    torch.manual_seed(3)
    shape = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 512}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **shape))
    tokenizer.save_pretrained("folder")
    model.save_pretrained("folder")
    data = {"sources": [{"path": str(stocked / "a.jsonl")}]}
    losses = []
    for number, given in enumerate(({"start_from": model, "tokenizer": tokenizer},
                                    {"start_from": "folder"})):  # fmt: skip
        config = toque.configure(
            TINY | {"model": {"family": "auto"} | given},
            run_dir=f"run{number}",
            data=data | {"store": f"store{number}"},
            train=TRAIN,
        )
        losses.append(toque.train(config).losses)
    assert losses[0] == losses[1]
    kept = [path.name for path in Path("cache/objects").iterdir()]
    again = toque.configure({"model": {"family": "auto", "start_from": model}})
    assert Path(again.model.start_from).name in kept
    assert len(kept) == len([*Path("cache/objects").iterdir()]) == 2


def test_a_tokenizer_with_several_chat_templates_is_kept_whole(
    stocked, tmp_path, monkeypatch
):
    monkeypatch.setenv("TOQUE_CACHE", str(tmp_path))
    tokenizer = AutoTokenizer.from_pretrained(stocked / "store" / "tokenizer")
    kept = []
    for tools in ("{{ messages }}", "{{ tools }}"):
        tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": tools}
        kept.append(
            toque.configure(model=FAMILY | {"tokenizer": tokenizer}).model.tokenizer
        )
    again = [
        AutoTokenizer.from_pretrained(folder).chat_template["tool_use"]
        for folder in kept
    ]
    assert again == ["{{ messages }}", "{{ tools }}"]
    assert (
        toque.configure(model=FAMILY | {"tokenizer": tokenizer}).model.tokenizer
        == kept[1]
    )


def test_a_model_with_an_adapter_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("TOQUE_CACHE", str(tmp_path))
    base = GPT2LMHeadModel(
        GPT2Config(vocab_size=8, n_embd=4, n_layer=1, n_head=1, n_positions=8)
    )
    adapted = get_peft_model(
        base, LoraConfig(r=1, target_modules=["c_attn"], fan_in_fan_out=True)
    )
    with pytest.raises(
        ConfigError, match=r"A PeftModel with an adapter .*merge_and_unload"
    ):
        toque.configure(model=FAMILY | {"start_from": adapted})
    assert [*(tmp_path / "objects").iterdir()] == []
