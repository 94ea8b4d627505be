"""Crafted model folders: configurations that ask for the impossible, and tokenizers that panic."""

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from toque.data.tokenizer.codec import load_codec
from toque.data.tokenizer.tokenizer_training import train_codec
from toque.models.loading.from_scratch import build_model
from toque.models.loading.pretrained import grow_vocabulary, load_model

GPT2 = {"n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 8}
CONFIGS: dict[str, dict[str, Any]] = {
    "ten thousand layers": {"n_layer": 10_000},
    "a billion layers": {"n_layer": 10**9},
    "a vocabulary of terabytes": {"vocab_size": 1 << 40},
    "a vocabulary beyond its weights": {"vocab_size": 1 << 24},
    "positions of terabytes": {"n_positions": 1 << 40},
    "a width of terabytes": {"n_embd": 1 << 20},
    "an inner width of terabytes": {"n_inner": 1 << 40},
    "a negative width": {"n_embd": -8},
    "a negative vocabulary": {"vocab_size": -8},
    "negative layers": {"n_layer": -1},
    "no heads": {"n_head": 0},
    "heads that do not divide": {"n_head": 3},
    "a size that is a text": {"n_embd": "8"},
    "a size that is a fraction": {"n_embd": 8.5},
    "a size that is a list": {"n_layer": [1]},
    "a size that is a mapping": {"vocab_size": {"a": 1}},
    "a size that is true": {"n_layer": True},
    "a dropout above 1": {"attn_pdrop": 7},
    "a dropout that is no number": {"attn_pdrop": float("nan")},
    "an epsilon below zero": {"layer_norm_epsilon": -1.0},
    "an endless epsilon": {"layer_norm_epsilon": float("inf")},
    "an activation of no name": {"activation_function": "evil"},
    "an activation that is a list": {"activation_function": [1]},
    "a padding token out of reach": {"pad_token_id": 1 << 60},
    "quantisation by an absent package": {
        "quantization_config": {"quant_method": "gptq", "bits": 4}
    },
    "quantisation of no kind": {"quantization_config": [1]},
    "a number format of no name": {"dtype": "complex1024"},
    "labels by the billion": {"num_labels": 10**9},
}
NESTED = '{"a": ' * 5000 + "1" + "}" * 5000
TEXTS: dict[str, str] = {
    "a thousand brackets": "[" * 100_000,
    "a config of 20 MB": '{"model_type": "gpt2", "x": "' + "a" * (20 << 20) + '"}',
    "nesting without an end": f'{{"model_type": "gpt2", "n_embd": {NESTED}}}',
    "bytes that are no text": '{"model_type": "\udcff"}',
}
LLAMA = {
    "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
}  # fmt: skip
T5 = {"d_model": 8, "num_layers": 1, "num_heads": 1, "d_kv": 8, "d_ff": 16}
OTHERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "a Llama of no key heads": ("llama", LLAMA, {"num_key_value_heads": 0}),
    "a Llama of odd key heads": ("llama", LLAMA, {"num_key_value_heads": -2}),
    "a Llama with heads of terabytes": ("llama", LLAMA, {"head_dim": 1 << 40}),
    "a Llama turned by text": ("llama", LLAMA, {"rope_parameters": "evil"}),
    "a Llama turned by nothing": (
        "llama",
        LLAMA,
        {"rope_parameters": {"rope_type": "evil"}},
    ),
    "a T5 of ten thousand layers": ("t5", T5, {"num_decoder_layers": 10_000}),
    "a T5 of buckets of terabytes": (
        "t5",
        T5,
        {"relative_attention_num_buckets": 1 << 40},
    ),
}
SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
TOKENIZERS: dict[str, dict[str, Any]] = {
    "an expression that panics": {
        "pre_tokenizer": {**SPLIT, "pattern": {"Regex": "(e|ee)+$"}}
    },
    "an expression that does not close": {
        "pre_tokenizer": {**SPLIT, "pattern": {"Regex": "("}}
    },
    "pieces of no length": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "padding of terabytes": {
        "padding": {
            "strategy": {"Fixed": 1 << 40},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "x",
        }
    },
    "a template of nothing": {
        "post_processor": {
            "type": "TemplateProcessing",
            "pair": [],
            "special_tokens": {},
            "single": [{"SpecialToken": {"id": "x", "type_id": 0}}],
        }
    },
    "an id of four billion": {
        "model": {
            "type": "BPE",
            "merges": [],
            "vocab": {"a": 4294967290, "<|endoftext|>": 0},
        }
    },
    "nothing known and nothing unknown": {
        "model": {"type": "Unigram", "unk_id": None, "vocab": [["<|endoftext|>", 0.0]]}
    },
    "a model of no kind": {"model": {"type": "Evil"}},
    "a thousand brackets": {
        "model": {"type": "BPE", "merges": [], "vocab": {}, "x": [[[[[[]]]]]]}
    },
}
HARMLESS = ("padding of terabytes", "a template of nothing")
"""Parts of a tokenizer that are never used here: it opens, and reads a text."""
TEXT = "Fold in 250 g flour, slowly; Wh" + "e" * 60 + "!"


def model_cases(work: Path) -> Mapping[str, Callable[[], object]]:
    """How each is opened, by name."""
    found: dict[str, Callable[[], object]] = {}

    def folder_of(name: str, family: str, shape: dict[str, Any]) -> Path:
        model = build_model(
            family=family,
            shape=shape,
            vocab_size=8,
            pad_id=0,
            eos_id=1,
            bos_id=None,
            seed=0,
        )
        folder = work / "strangers" / name.replace(" ", "-")
        model.save_pretrained(folder)
        return folder

    def opened(folder: Path) -> Callable[[], object]:
        return lambda: grow_vocabulary(load_model(str(folder)), 64)

    configs = OTHERS | {
        name: ("gpt2", GPT2, change) for name, change in CONFIGS.items()
    }
    for name, (family, shape, change) in configs.items():
        folder = folder_of(name, family, shape)
        held = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(held | change))
        found[f"model: {name}"] = opened(folder)
    for name, text in TEXTS.items():
        folder = folder_of(name, "gpt2", GPT2)
        (folder / "config.json").write_bytes(text.encode(errors="surrogateescape"))
        found[f"model: {name}"] = opened(folder)
    layers = folder_of("layers by the thousand in the weights, too", "gpt2", GPT2)
    held = json.loads((layers / "config.json").read_text()) | {"n_layer": 20_000}
    (layers / "config.json").write_text(json.dumps(held))
    names = {f"transformer.h.{i}.ln_1.weight": torch.zeros(1) for i in range(20_000)}
    save_file(names, layers / "model.safetensors", metadata={"format": "pt"})
    found["model: layers by the thousand in the weights, too"] = opened(layers)
    return found | tokenizer_cases(work)


def tokenizer_cases(work: Path) -> Mapping[str, Callable[[], object]]:
    """The same of tokenizer folders: opened, and one text read."""
    good = train_codec(["Fold in the flour, slowly."] * 4, vocab_size=300, kind="bpe")
    found: dict[str, Callable[[], object]] = {}
    for name, change in TOKENIZERS.items():
        folder = work / "tokenizers" / name.replace(" ", "-")
        good.save(folder)
        held = (
            copy.deepcopy(json.loads((folder / "tokenizer.json").read_text())) | change
        )
        (folder / "tokenizer.json").write_text(json.dumps(held))
        if name == "a thousand brackets":
            (folder / "tokenizer.json").write_text("[" * 100_000)

        def read(folder: Path = folder) -> object:
            codec = load_codec(folder)
            return codec.decode(codec.encode(codec.normalise(TEXT)))

        found[f"{'harmless' if name in HARMLESS else 'tokenizer'}: {name}"] = read
    return found
