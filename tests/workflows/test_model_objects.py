"""A model and a tokenizer of the program, where a configuration names folders."""

from pathlib import Path

import torch
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

import toque
from fixtures.kitchens import TINY

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
