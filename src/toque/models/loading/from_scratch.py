"""Models from scratch: a family, a shape and the tokenizer's special tokens."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.activations import NewGELUActivation

from toque.errors import CheckpointError, ConfigError, ToqueError, nearest_hint
from toque.models.families import FAMILIES, Family, family_of, is_read
from toque.models.loading.model_folder import allowed_share, check_config, read_config_json

_FROM_TOKENIZER = (
    "vocab_size",
    "pad_token_id",
    "eos_token_id",
    "bos_token_id",
    "decoder_start_token_id",
)
_OLDER_NAMES = ("rope_theta", "rope_scaling", "rotary_pct", "rotary_emb_base")
"""Names that configs still read and turn into `rope_parameters`."""

_SIZE = re.compile(r"(n|num|d)_.*|.*_(size|dim|positions|embeddings)")  # counts something

_DEFAULTS_TOO_LARGE = {"neox": ("GPT-NeoX-20B", "80 GB"), "llama": ("Llama-2-7B", "27 GB")}
"""The model that a family's default config describes, and its size in float32."""

_MUST_SAY = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def build_model(
    *,
    family: str,
    shape: Mapping[str, Any],
    vocab_size: int,
    pad_id: int,
    eos_id: int,
    bos_id: int | None,
    seed: int,
) -> PreTrainedModel:
    """A model with fresh float32 weights on the CPU; the same arguments give the same bits.

    `shape` holds arguments of the family's Hugging Face config; dropout is the family's default:
    0.1 for T5 and GPT-2, 0 for the others. A T5's decoder starts from `pad_id`, and with
    `tie_word_embeddings: false` it is what v1.1 is: a head of its own and unscaled outputs, where
    transformers alone would share the weights. What makes no model raises ConfigError.
    """
    found = FAMILIES[family]
    _check_shape(found, shape)
    own_head = found.name == "t5" and shape.get("tie_word_embeddings") is False
    arguments: dict[str, Any] = {
        **shape,
        "vocab_size": vocab_size,
        "pad_token_id": pad_id,
        "eos_token_id": eos_id,
        "bos_token_id": bos_id,
    }
    if found.is_encoder_decoder:
        arguments["decoder_start_token_id"] = pad_id
    try:
        config: Any = found.config_class(**arguments)
        heads = config.num_attention_heads
        shared = getattr(config, "num_key_value_heads", None) or heads
        if heads % shared != 0:  # Llama's own config would fail only in the first forward
            raise ConfigError(
                f"model.shape.num_attention_heads is {heads}, which num_key_value_heads, {shared}, "
                "does not divide. Use a divisor, or leave num_key_value_heads out."
            )
        _refuse_odd_rotation(config)
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.manual_seed(seed)
            model = construct(found, config)
            if own_head:
                give_own_head(model)
    except (
        StrictDataclassError,
        ValueError,
        TypeError,
        ZeroDivisionError,
        KeyError,
        RuntimeError,  # PyTorch's, of a negative deviation or of more memory than there is
    ) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"model.shape does not make a {found.name} model: {reason} See the arguments of "
            f"transformers' {found.config_class.__name__}."
        ) from error
    fuse_activations(model)
    return model


def _refuse_odd_rotation(config: Any) -> None:
    """Refuse heads of which rotary positions turn an odd part, for they turn pairs, or too much."""
    rotary: Mapping[str, Any] | None = getattr(config, "rope_parameters", None)
    if rotary is None:
        return
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    turned = int(width * rotary.get("partial_rotary_factor", 1.0))
    if turned > width:
        raise ConfigError(
            f"model.shape makes heads {width} wide, and rotary positions turn {turned} numbers of "
            "each. The share that they turn (rotary_pct, partial_rotary_factor) is at most 1."
        )
    if turned % 2 or not turned:
        raise ConfigError(
            f"model.shape makes {heads} heads {width} wide, and rotary positions turn {turned} "
            "numbers of each, in pairs. Use fewer heads or a wider hidden_size, for an even number."
        )


def give_own_head(model: PreTrainedModel, weight: torch.Tensor | None = None) -> None:
    """Separate a T5's output head from its embeddings, and say so in its config.

    Without a weight it is drawn with standard deviation d_model ** -0.5, as outputs are not scaled.
    """
    config = model.config
    head = model.get_submodule("lm_head")
    if weight is None:
        weight = torch.empty(config.vocab_size, config.d_model)
        nn.init.normal_(weight, std=config.initializer_factor * config.d_model**-0.5)
    head.weight = nn.Parameter(weight)
    config.tie_word_embeddings = False


def outline_of(folder: Path) -> PreTrainedModel:
    """The model of a folder's config.json with fresh weights, to be made in `FakeTensorMode`."""
    check_config(read_config_json(folder), folder / "config.json", None)
    config = config_in(folder)
    family = family_of(config)
    own_head = family.name == "t5" and not config.tie_word_embeddings
    # A T5's own head is the only table it has twice; transformers alone would give encoder and
    # decoder embeddings of their own besides.
    config.tie_word_embeddings |= own_head
    model = construct(family, config)
    if own_head:
        give_own_head(model)
    fuse_activations(model)
    return model


def config_in(folder: Path) -> PretrainedConfig:
    """The config in a model's folder; ConfigError or CheckpointError if it cannot be read."""
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # whatever transformers makes of a file that may be anyone's
        ours = is_read(read_config_json(folder).get("model_type"))
        kind: type[ToqueError] = CheckpointError if ours else ConfigError
        raise kind(
            f"{folder / 'config.json'} is not a model config that transformers can read: "
            f"{' '.join(str(error).split())[:600]}"
        ) from error
    return config


def construct(family: Family, config: PretrainedConfig) -> PreTrainedModel:
    """A model of this config in float32, its weights drawn as the family draws them."""
    auto = AutoModelForSeq2SeqLM if family.is_encoder_decoder else AutoModelForCausalLM
    model: PreTrainedModel = auto.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    return model


def _check_shape(family: Family, shape: Mapping[str, Any]) -> None:
    """Checked before anything is allocated: a default size can mean tens of gigabytes."""
    known = {f.name for f in dataclasses.fields(family.config_class)}
    base = {f.name for f in dataclasses.fields(PretrainedConfig)}
    own = (known - base) | {"tie_word_embeddings", *family.config_class.attribute_map}
    own |= set(_OLDER_NAMES) if "rope_parameters" in known else set()
    own -= {*_FROM_TOKENIZER, "use_cache", "is_decoder", "is_encoder_decoder"}
    for name, value in shape.items():
        if name in _FROM_TOKENIZER:
            raise ConfigError(
                f"model.shape.{name} is set by the tokenizer and must not be given. Remove it; "
                "choose the vocabulary with model.tokenizer."
            )
        if name not in own:
            raise ConfigError(
                f"model.shape.{name} is not an argument of a {family.name} model."
                f"{nearest_hint(name, own)} Allowed: {', '.join(sorted(own))}."
            )
        if _SIZE.fullmatch(name) and type(value) is int and value < 1:
            raise ConfigError(f"model.shape.{name} is {value}; it must be at least 1.")
        if allowed := allowed_share(name, value):
            raise ConfigError(f"model.shape.{name} is {value}; it must be {allowed}.")
        if name == "relative_attention_num_buckets" and type(value) is int and value < 4:
            raise ConfigError(
                f"model.shape.{name} is {value}. A T5's encoder halves them for the two directions,"
                " and again for near and far: use at least 4."
            )
    unsaid = [name for name in _MUST_SAY if name not in shape]
    if unsaid and family.name in _DEFAULTS_TOO_LARGE:
        name, size = _DEFAULTS_TOO_LARGE[family.name]
        raise ConfigError(
            f"model.shape lacks {', '.join(unsaid)}. A {family.name} model from scratch must say "
            f"them, for the defaults are those of {name}, {size} of weights alone. A small start: "
            "hidden_size=256, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=8."
        )


def fuse_activations(model: nn.Module) -> None:
    """Put PyTorch's own kernel for "gelu_new": a quarter of a small GPT-2's step on a CPU."""
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if isinstance(module, NewGELUActivation):
            model.set_submodule(path, nn.GELU(approximate="tanh"))


def stock_activations(model: nn.Module) -> None:
    """Undo `fuse_activations`."""
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if isinstance(module, nn.GELU) and module.approximate == "tanh":
            model.set_submodule(path, NewGELUActivation())


def _t5(width: int, inner: int, layers: int, heads: int) -> dict[str, Any]:
    """T5 v1.1 (Shazeer 2020), which FLAN-T5 goes on from."""
    shape = {"d_model": width, "d_kv": 64, "d_ff": inner, "num_layers": layers, "num_heads": heads}
    own = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
    return {"family": "t5", "shape": shape | own, "vocab_size": 32128}


def _gpt2(width: int, layers: int, heads: int) -> dict[str, Any]:
    """GPT-2 (Radford et al. 2019)."""
    shape = {"n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": 1024}
    return {"family": "gpt2", "shape": shape, "vocab_size": 50257}


KNOWN: Final[Mapping[str, dict[str, Any]]] = {
    "google/flan-t5-small": _t5(512, 1024, 8, 6),
    "google/flan-t5-base": _t5(768, 2048, 12, 12),
    "google/flan-t5-large": _t5(1024, 2816, 24, 16),
    "google/flan-t5-xl": _t5(2048, 5120, 24, 32),
    "google/flan-t5-xxl": _t5(4096, 10240, 24, 64),
    "openai-community/gpt2": _gpt2(768, 12, 12),
    "openai-community/gpt2-medium": _gpt2(1024, 24, 16),
    "openai-community/gpt2-large": _gpt2(1280, 36, 20),
    "openai-community/gpt2-xl": _gpt2(1600, 48, 25),
}
"""Arguments of `build_model` by hub name: of 77 M, 248 M, 783 M, 2.85 B, 11.1 B, and 124 M, 355 M,
774 M, 1.56 B."""


def known_model(name: str) -> PreTrainedModel | None:
    """A fresh model of that checkpoint's shape, for `FakeTensorMode`; None if it is not known."""
    if name not in KNOWN:
        return None
    return build_model(**KNOWN[name], pad_id=0, eos_id=1, bos_id=None, seed=0)
