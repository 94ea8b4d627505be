"""Models from scratch, by family, shape and the special tokens of a tokenizer."""

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
from toque.models.config_values import head_size
from toque.models.families import FAMILIES, Family, family_of, may_be_supported
from toque.models.loading.model_folder import (
    allowed_share,
    check_config,
    read_config_json,
)

_FROM_TOKENIZER = (
    "vocab_size",
    "pad_token_id",
    "eos_token_id",
    "bos_token_id",
    "decoder_start_token_id",
)
_OLD_NAMES = ("rope_theta", "rope_scaling", "rotary_pct", "rotary_emb_base")
"""Old names that configs accept and convert to `rope_parameters`."""

# Names of counts, which must be positive.
_SIZE = re.compile(r"(n|num|d)_.*|.*_(size|dim|positions|embeddings)")

_DEFAULTS_TOO_LARGE = {
    "neox": ("GPT-NeoX-20B", "80 GB"),
    "llama": ("Llama-2-7B", "27 GB"),
}
"""Model that a family's default config describes, and its size in float32."""

# Sizes that a family with too large defaults must have in `model.shape`.
_REQUIRED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)


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
    """Build a model with new float32 weights on the CPU.

    Equal arguments give bitwise identical weights. A T5's decoder starts with `pad_id`. With
    `tie_word_embeddings: false` the model is a T5 v1.1, with its own head and unscaled outputs.
    transformers alone would share the weights.

    Args:
        family: Name of the family.
        shape: Arguments of the family's config. Without a dropout, it is 0.1 for T5 and GPT-2, and
            0 for GPT-NeoX and Llama.
        vocab_size: Number of rows of the embedding.
        pad_id: Id of the padding token.
        eos_id: Id of the token that ends a text.
        bos_id: Id of the token that begins a text, if there is one.
        seed: Seed of the weights.

    Raises:
        ConfigError: The arguments do not describe a model.
    """
    architecture = FAMILIES[family]
    _check_shape(architecture, shape)
    is_untied = shape.get("tie_word_embeddings") is False

    arguments: dict[str, Any] = {
        **shape,
        "vocab_size": vocab_size,
        "pad_token_id": pad_id,
        "eos_token_id": eos_id,
        "bos_token_id": bos_id,
    }
    if architecture.is_encoder_decoder:
        arguments["decoder_start_token_id"] = pad_id

    try:
        config: Any = architecture.config_class(**arguments)
        _check_key_heads(config)
        _check_rotary_columns(config)
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.manual_seed(seed)
            model = construct(architecture, config)
            if architecture.name == "t5" and is_untied:
                give_own_head(model)
    except (
        StrictDataclassError,
        ValueError,
        TypeError,
        ZeroDivisionError,
        KeyError,
        RuntimeError,  # PyTorch's, for a negative deviation or too little memory
    ) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"model.shape does not describe a {family} model: {reason} See the arguments of "
            f"transformers' {architecture.config_class.__name__}."
        ) from error

    fuse_activations(model)
    return model


def _check_key_heads(config: Any) -> None:
    """Raise a ConfigError if query heads cannot be divided among the key and value heads.

    transformers would fail only in the first forward.
    """
    heads = config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    if heads % key_heads != 0:
        raise ConfigError(
            f"model.shape.num_attention_heads ({heads}) must be a multiple of "
            f"num_key_value_heads ({key_heads}). Change one of them, or remove "
            "num_key_value_heads."
        )


def _check_rotary_columns(config: Any) -> None:
    """Raise a ConfigError if RoPE would rotate more columns than a head has, or an odd number.

    RoPE rotates pairs of columns.
    """
    rotary: Mapping[str, Any] | None = getattr(config, "rope_parameters", None)
    if rotary is None:
        return
    width = head_size(config)
    rotated = int(width * rotary.get("partial_rotary_factor", 1.0))
    if rotated > width:
        raise ConfigError(
            f"model.shape gives each head {width} dimensions, but RoPE would rotate {rotated}. Set "
            "rotary_pct or partial_rotary_factor to at most 1."
        )
    if rotated % 2 or not rotated:
        raise ConfigError(
            f"model.shape gives each of {config.num_attention_heads} heads {width} dimensions, and "
            f"RoPE would rotate {rotated} of them. This number must be even and positive. Use "
            "fewer heads or a larger hidden_size."
        )


def give_own_head(model: PreTrainedModel, weight: torch.Tensor | None = None) -> None:
    """Separate a T5's output head from its embeddings, and set `tie_word_embeddings` to false.

    Without a weight, sample one with the standard deviation d_model ** -0.5, because the outputs
    are not scaled.
    """
    config = model.config
    head = model.get_submodule("lm_head")
    if weight is None:
        weight = torch.empty(config.vocab_size, config.d_model)
        nn.init.normal_(weight, std=config.initializer_factor * config.d_model**-0.5)
    head.weight = nn.Parameter(weight)
    config.tie_word_embeddings = False


def outline_of(folder: Path) -> PreTrainedModel:
    """Build the model of a folder's config.json with new weights. Call it in `FakeTensorMode`."""
    check_config(read_config_json(folder), folder / "config.json", None)
    config = config_in(folder)
    family = family_of(config)
    has_own_head = family.name == "t5" and not config.tie_word_embeddings
    if has_own_head:
        # The output head is the only separate table of a T5. Untied, transformers would also give
        # encoder and decoder their own embeddings.
        config.tie_word_embeddings = True
    model = construct(family, config)
    if has_own_head:
        give_own_head(model)
    fuse_activations(model)
    return model


def config_in(folder: Path) -> PretrainedConfig:
    """Read the config of a model folder.

    Raises:
        ConfigError: The config is not readable, and Toque does not support its model type.
        CheckpointError: The config is not readable, although Toque supports its model type.
    """
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # transformers may raise anything for an untrusted file
        model_type = read_config_json(folder).get("model_type")
        error_class: type[ToqueError] = ConfigError
        if may_be_supported(model_type):
            error_class = CheckpointError
        reason = " ".join(str(error).split())[:600]
        raise error_class(
            f"{folder / 'config.json'} is not a model config that transformers can read: {reason} "
            "Copy the model again, or use another one."
        ) from error
    return config


def construct(family: Family, config: PretrainedConfig) -> PreTrainedModel:
    """Build a model from a config in float32, with transformers' initialisation."""
    auto = AutoModelForSeq2SeqLM if family.is_encoder_decoder else AutoModelForCausalLM
    model: PreTrainedModel = auto.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    return model


def _check_shape(family: Family, shape: Mapping[str, Any]) -> None:
    """Raise a ConfigError for an unknown argument, an impossible value or a missing size.

    This happens before any allocation, because a default size can mean tens of gigabytes.
    """
    allowed = _allowed_arguments(family)
    for name, value in shape.items():
        if name in _FROM_TOKENIZER:
            raise ConfigError(
                f"model.shape.{name} comes from the tokenizer. Remove it, and select the "
                "vocabulary with model.tokenizer."
            )
        if name not in allowed:
            raise ConfigError(
                f"model.shape.{name} is not an argument of a {family.name} model."
                f"{nearest_hint(name, allowed)} Allowed: {', '.join(sorted(allowed))}."
            )
        _check_value(name, value)

    missing = [name for name in _REQUIRED if name not in shape]
    if missing and family.name in _DEFAULTS_TOO_LARGE:
        model, size = _DEFAULTS_TOO_LARGE[family.name]
        raise ConfigError(
            f"model.shape does not set {', '.join(missing)}. The default sizes of a {family.name} "
            f"model are the sizes of {model} ({size} of weights). Values for a small model: "
            "hidden_size=256, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=8."
        )


def _allowed_arguments(family: Family) -> set[str]:
    """List the arguments of a family's config that `model.shape` may set."""
    config_class = family.config_class
    names = {field.name for field in dataclasses.fields(config_class)}
    common = {field.name for field in dataclasses.fields(PretrainedConfig)}
    allowed = (names - common) | {"tie_word_embeddings", *config_class.attribute_map}
    if "rope_parameters" in names:
        allowed |= set(_OLD_NAMES)
    return allowed - {*_FROM_TOKENIZER, "use_cache", "is_decoder", "is_encoder_decoder"}


def _check_value(name: str, value: object) -> None:
    """Raise a ConfigError for a value out of its range. Configs check the types themselves."""
    if allowed_range := allowed_share(name, value):
        raise ConfigError(f"model.shape.{name} must be {allowed_range}, not {value}.")
    if type(value) is not int:
        return
    if _SIZE.fullmatch(name) and value < 1:
        raise ConfigError(f"model.shape.{name} must be at least 1, not {value}.")
    if name == "relative_attention_num_buckets" and value < 4:
        raise ConfigError(
            f"model.shape.{name} must be at least 4, not {value}. A T5's encoder divides the "
            "buckets by direction and by distance."
        )


def fuse_activations(model: nn.Module) -> None:
    """Use PyTorch's kernel for "gelu_new", which saves a quarter of a small GPT-2's CPU step."""
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if isinstance(module, NewGELUActivation):
            model.set_submodule(path, nn.GELU(approximate="tanh"))


def stock_activations(model: nn.Module) -> None:
    """Undo `fuse_activations`."""
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if isinstance(module, nn.GELU) and module.approximate == "tanh":
            model.set_submodule(path, NewGELUActivation())


def _t5_v1_1(width: int, inner: int, layers: int, heads: int) -> dict[str, Any]:
    """Arguments of `build_model` for a T5 v1.1 (Shazeer 2020), the architecture of FLAN-T5."""
    shape = {
        "d_model": width,
        "d_kv": 64,
        "d_ff": inner,
        "num_layers": layers,
        "num_heads": heads,
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
    }
    return {"family": "t5", "shape": shape, "vocab_size": 32128}


def _gpt2(width: int, layers: int, heads: int) -> dict[str, Any]:
    """Arguments of `build_model` for a GPT-2 (Radford et al. 2019)."""
    shape = {"n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": 1024}
    return {"family": "gpt2", "shape": shape, "vocab_size": 50257}


KNOWN: Final[Mapping[str, dict[str, Any]]] = {
    "google/flan-t5-small": _t5_v1_1(512, 1024, 8, 6),
    "google/flan-t5-base": _t5_v1_1(768, 2048, 12, 12),
    "google/flan-t5-large": _t5_v1_1(1024, 2816, 24, 16),
    "google/flan-t5-xl": _t5_v1_1(2048, 5120, 24, 32),
    "google/flan-t5-xxl": _t5_v1_1(4096, 10240, 24, 64),
    "openai-community/gpt2": _gpt2(768, 12, 12),
    "openai-community/gpt2-medium": _gpt2(1024, 24, 16),
    "openai-community/gpt2-large": _gpt2(1280, 36, 20),
    "openai-community/gpt2-xl": _gpt2(1600, 48, 25),
}
"""Arguments of `build_model` by hub name. The FLAN-T5 models have 77 M, 248 M, 783 M, 2.85 B and
11.1 B parameters, the GPT-2 models 124 M, 355 M, 774 M and 1.56 B."""


def known_model(name: str) -> PreTrainedModel | None:
    """Build a model in the shape of a hub model, for `FakeTensorMode`; None for unknown names."""
    if name not in KNOWN:
        return None
    return build_model(**KNOWN[name], pad_id=0, eos_id=1, bos_id=None, seed=0)
