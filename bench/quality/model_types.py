"""Every type of transformers' causal models, from a tiny random config: works, or refused in words.

    python bench/quality/model_types.py [--types gemma2 opt ...] [--table models.md]

A type works when, of a model folder that transformers wrote: packed examples give the loss and the
gradient of each example alone through transformers' own eager forward, within 1e-5 of them, by
every attention that a CPU has (by segments, by masks of all pairs, and FlexAttention by its
definition); texts are those of `model.generate`; an adapter's every part gets a gradient; and two
updates after a saved checkpoint are those of the run that was not stopped, with all weights and
with an adapter. A type is refused in words by a ConfigError as soon as its folder is opened. All
else is wrong, and so is a type of which transformers makes no model from the tiny config and that
is not refused before. Encoder-decoders are tried beside the causal types: those that are read.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness
import torch
from safetensors.torch import save_file
from torch.nn import functional
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

import toque
from toque.batch import IGNORE, DecoderBatch, EncoderDecoderBatch
from toque.config.schema_methods import AdapterConfig
from toque.cooking.cookbook.recipes import write_cookbook
from toque.errors import ConfigError
from toque.models.forward.flex_attention import use_attention
from toque.models.forward.loss import loss_sum
from toque.models.generation.engine import generate
from toque.models.generation.options import GenerationOptions
from toque.models.loading.pretrained import load_model
from toque.models.lora.layers import attach, refuse_unreached

VOCAB, PAD, EOS = 61, 0, 1
NEAR = 1e-5
MOST = 20_000_000  # weights of a model that is tiny
ENCODER_DECODERS = ("t5", "mt5", "umt5")
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": 2,
    "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 512, "head_dim": 8, "ffn_dim": 48,
    "word_embed_proj_dim": 32, "rotary_dim": 4, "initializer_range": 0.2, "sliding_window": 5,
    "query_pre_attn_scalar": 8, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2,
    "num_decoder_layers": 3, "num_heads": 4, "attention_dropout": 0.0,
    "is_decoder": True, "add_cross_attention": False, "type_vocab_size": 2, "embedding_size": 32,
    "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48, "encoder_layers": 2,
    "encoder_attention_heads": 4, "encoder_ffn_dim": 48, "q_lora_rank": 8, "kv_lora_rank": 8,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
}  # fmt: skip
"""Entries of a tiny config; a type takes those that it knows, and each that matters is small."""
MORE: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4}
            for kind in ("full_attention", "sliding_attention")
        }
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "moe_intermediate_size": 8},
    "gemma3n_text": {
        "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 4,
    },
    "gemma4_text": {
        "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 0,
        "global_head_dim": 8,
    },
    "gemma4_assistant": {
        "text_config": {
            "model_type": "gemma4_text",
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
        }
    },
    "hunyuan_v1_moe": {"num_experts": 4},
    "xlnet": {"d_head": 8, "n_head": 4, "n_layer": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "num_layers": 4, "window_size": 5},
    "reformer": {"axial_pos_embds_dim": (16, 16), "axial_pos_shape": (16, 32)},
    "gemma3_text": {"final_logit_softcapping": 20.0},
    "granite": {"logits_scaling": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3},
    "phi3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 2},
    "smollm3": {"use_sliding_window": True},
}
PAIRS = [
    [([5, 6, 7, 8, 9, 10, 11], [12, 13, 14, 15, 1]), ([20, 21], [22, 1]), ([9], [8, 7, 30, 1])],
    [([33, 34, 35], [36, 37, 38, 39, 40, 41, 42, 43, 1])],
]
"""Two rows of examples, prompt and target, longer and shorter than the window."""


@dataclass(frozen=True)
class Row:
    """Outcome of a type: one line of the table."""

    kind: str
    outcome: str  # works, refused or wrong
    why: str
    seconds: float


def tiny_config(kind: str) -> Any:
    """The type's config with our sizes, its own defaults elsewhere."""
    of = CONFIG_MAPPING[kind]
    known = {*of.__dataclass_fields__, *of.attribute_map}
    given = {name: value for name, value in SIZES.items() if name in known}
    starts = {"decoder_start_token_id": PAD} if kind in ENCODER_DECODERS else {}
    return of(**given | starts | MORE.get(kind, {}))


def write_folder(kind: str, folder: Path) -> str | None:
    """A folder of the type, as transformers writes it; why it has no weights, where it has none."""
    auto = AutoModelForSeq2SeqLM if kind in ENCODER_DECODERS else AutoModelForCausalLM
    why = None
    try:
        config = tiny_config(kind)
    except Exception as error:  # noqa: BLE001 - whatever a config makes of our sizes
        config, why = None, f"no tiny config: {error}"
    folder.mkdir()
    try:
        assert why is None, why
        with torch.device("meta"):
            n_weights = sum(p.numel() for p in auto.from_config(config).parameters())
        assert n_weights < MOST, f"{n_weights:,} weights, whatever of our sizes it takes"
        torch.manual_seed(3)
        model = auto.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for weight in model.parameters():
                # Vectors start as ones and zeros, which would hide one that is left out.
                weight.add_(0.1 * torch.randn_like(weight)) if weight.dim() < 2 else None
                weight.mul_(2.0) if kind in ENCODER_DECODERS and weight.dim() > 1 else None
        model.save_pretrained(folder)
    except Exception as error:  # noqa: BLE001 - whatever a model makes of our sizes
        shutil.rmtree(folder)
        folder.mkdir()
        said = config.to_diff_dict() if config else {}
        (folder / "config.json").write_text(json.dumps(said | {"model_type": kind}, default=str))
        save_file({"weight": torch.zeros(1 << 20)}, folder / "model.safetensors")
        why = why or f"transformers makes no model of it: {type(error).__name__}: {error}"
    return why


def batch_of(encoder: bool) -> Any:  # noqa: FBT001
    """`PAIRS`, packed by hand."""
    lines: dict[str, list[list[int]]] = {}
    for row in PAIRS:
        made: dict[str, list[int]] = {}
        for number, (prompt, target) in enumerate(row, start=1):
            read = (prompt + target)[:-1]
            parts = {
                "source_tokens": prompt, "source_segments": [number] * len(prompt),
                "target_tokens": [PAD, *target[:-1]], "target_segments": [number] * len(target),
                "labels": target,
            } if encoder else {
                "tokens": read, "segments": [number] * len(read), "positions": [*range(len(read))],
                "labels": [IGNORE] * (len(prompt) - 1) + target,
            }  # fmt: skip
            for name, values in parts.items():
                made[name] = made.get(name, []) + values
        for name, values in made.items():
            lines.setdefault(name, []).append(values)
    tensors = {}
    for name, rows in lines.items():
        width = max(map(len, rows)) + 1
        padding = IGNORE if name == "labels" else 0
        filled = torch.tensor([row + [padding] * (width - len(row)) for row in rows])
        tensors[name] = filled.int() if name.endswith("segments") else filled
    ids = ((0, 1, 2), (3,))
    return (EncoderDecoderBatch if encoder else DecoderBatch)(example_ids=ids, **tensors)


def alone(stock: Any, prompt: list[int], target: list[int]) -> torch.Tensor:
    """Loss of one example in nats by the model's own forward."""
    if stock.config.is_encoder_decoder:
        logits = stock(input_ids=torch.tensor([prompt]), labels=torch.tensor([target])).logits[0]
    else:
        read = torch.tensor([prompt + target])
        logits = stock(input_ids=read, use_cache=False).logits[0, len(prompt) - 1 : -1]
    return functional.cross_entropy(logits, torch.tensor(target), reduction="sum")


def gradients(model: Any) -> torch.Tensor:
    """All gradients as one vector, and none left behind."""
    found = [p.grad.flatten() for _, p in sorted(model.named_parameters()) if p.grad is not None]
    model.zero_grad(set_to_none=True)
    return torch.cat(found)


def stock_of(kind: str, folder: Path) -> Any:
    """The folder's model by transformers alone, with the attention that knows caps."""
    auto = AutoModelForSeq2SeqLM if kind in ENCODER_DECODERS else AutoModelForCausalLM
    return auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def unlike_alone(kind: str, folder: Path) -> str:
    """Where packed loss or gradient is not that of each example alone; "" for nowhere."""
    stock, model = stock_of(kind, folder), load_model(str(folder))
    expected = sum(alone(stock, *pair) for row in PAIRS for pair in row)
    expected.backward()
    theirs, batch = gradients(stock), batch_of(kind in ENCODER_DECODERS)
    for attention in ("segments", "dense", "flex"):
        use_attention(model, attention)
        loss = loss_sum(model, batch)
        loss.backward()
        ours = gradients(model)
        if len(ours) != len(theirs):
            return f"{attention}: gradients of other weights"
        off = max(float(abs(loss / expected - 1)), float((ours - theirs).norm() / theirs.norm()))
        if not off <= NEAR:
            return f"{attention}: packed is off by {off:.1e}"
    return ""


def other_texts(kind: str, folder: Path) -> str:
    """Where texts are not those of `model.generate`; "" for nowhere."""
    stock, model = stock_of(kind, folder), load_model(str(folder))
    prompts = [prompt for row in PAIRS for prompt, _ in row] + [[4] * 11, [7, 3, 9, 2] * 2]
    got = generate(model, prompts, GenerationOptions(max_new_tokens=20), eos_id=EOS, pad_id=PAD)
    for prompt, answer in zip(prompts, got, strict=True):
        ids = torch.tensor([prompt])
        found = stock.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False,
            use_cache=False, pad_token_id=PAD, eos_token_id=EOS,
        )[0].tolist()  # fmt: skip
        found = found[1:] if stock.config.is_encoder_decoder else found[len(prompt) :]
        found = found[: found.index(EOS)] if EOS in found else found
        if found != answer:
            return f"another text after {len(prompt)} tokens: {answer} for {found}"
    return ""


def unreached(kind: str, folder: Path) -> str:
    """Parts of an adapter on all linear layers that get no gradient; "" for none."""
    model = load_model(str(folder))
    attach(model, AdapterConfig(r=4, target_modules="all"), base=str(folder), seed=0)
    loss_sum(model, batch_of(kind in ENCODER_DECODERS)).backward()
    refuse_unreached(model)
    return ""


def resumed_otherwise(kind: str, folder: Path, kitchen: Path) -> str:
    """Where a run that goes on from a saved checkpoint differs; "" for nowhere."""
    store = "encoder" if kind in ENCODER_DECODERS else "decoder"
    for adapter in (None, {"r": 4}):
        run = folder.with_name(f"run-{kind}-{'lora' if adapter else 'all'}")
        config = toque.configure(
            {
                "run_dir": str(run),
                "seed": 5,
                "model": {"family": "auto", "start_from": str(folder), "tokenizer": "trained:512"},
                "data": {
                    "sources": [{"path": str(kitchen / "a.jsonl")}],
                    "store": str(kitchen / store),
                    "max_prompt_tokens": 64,
                    "max_target_tokens": 256,
                },
                "optim": {"warmup": "1 steps", "peak_lr": 1e-3},
                "train": {
                    "stop_after": "4 steps",
                    "save_every": "2 steps",
                    "batch": "512 tokens",
                    "precision": "float32",
                    "micro_batch_rows": 2,
                    "compile": False,
                },
                "evaluation": {"max_examples": 2, "generate": 0},
                "adapter": adapter,
            }
        )
        whole = toque.train(config)
        before = whole.losses, weights_in(whole.model)
        again = toque.train(config, resume="step-00000002")
        after = again.losses, weights_in(again.model)
        shutil.rmtree(run)
        if before != after:
            return "a resumed run has other losses or weights" + " of its adapter" * bool(adapter)
    return ""


def weights_in(folder: Path) -> dict[str, bytes]:
    """The bytes of a finished model's weights."""
    return {file.name: file.read_bytes() for file in folder.glob("*.safetensors")}


def tried(kind: str, work: Path, *, train: bool = True) -> Row:
    """One type, from its folder to a resumed run; `train` False leaves the runs out."""
    began, folder = time.monotonic(), work / kind

    def row(outcome: str, why: str) -> Row:
        return Row(kind, outcome, " ".join(why.split())[:400], time.monotonic() - began)

    why_none = write_folder(kind, folder)
    try:
        load_model(str(folder))
    except ConfigError as error:
        return row("refused", str(error))
    except Exception as error:  # noqa: BLE001 - anything else is what is looked for
        return row("wrong", f"{why_none or ''} {type(error).__name__}: {error}")
    checks: list[Any] = [unlike_alone, other_texts, unreached]
    checks += [partial(resumed_otherwise, kitchen=kitchen_in(work))] * train
    for check in checks:
        try:
            why = check(kind, folder)
        except Exception as error:  # noqa: BLE001 - whatever it is, the type does not work
            why = f"{type(error).__name__}: {error}"
        if why:
            return row("wrong", why)
    return row("works", "")


def kitchen_in(work: Path) -> Path:
    """A folder with a few recipes, beside which stores are made once."""
    folder = work / "kitchen"
    if not folder.exists():
        folder.mkdir()
        write_cookbook(folder / "a.jsonl", n=30, seed=3)
    return folder


@contextmanager
def quiet() -> Any:
    """Say nothing of what transformers thinks of tiny configs."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def markdown(rows: Sequence[Row]) -> str:
    """The table of the manual."""
    lines = ["| Type | | Seconds |", "|---|---|---|"]
    for row in rows:
        why = row.why.partition(". ")[0].removeprefix(f"This {row.kind} model ")
        what = row.outcome if row.outcome == "works" else f"{row.outcome}: {why}"
        lines.append(f"| `{row.kind}` | {what.replace('|', '/')} | {row.seconds:.1f} |")
    return "\n".join(lines) + "\n"


def measure(a: argparse.Namespace) -> harness.Result:
    """The rows of the types that were asked for, all of them by default."""
    kinds = a.types or [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *ENCODER_DECODERS]
    rows = []
    with tempfile.TemporaryDirectory() as work, quiet():
        for kind in kinds:
            rows.append(tried(kind, Path(work)))
            shutil.rmtree(Path(work) / kind, ignore_errors=True)
            print(markdown(rows[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    if a.table:
        Path(a.table).write_text(markdown(rows), encoding="utf-8")
    counts = {name: [r.kind for r in rows if r.outcome == name] for name in ("works", "wrong")}
    figures = {"types": len(rows), "refused": sum(r.outcome == "refused" for r in rows)}
    figures |= {name: len(found) for name, found in counts.items()}
    passes = not counts["wrong"]
    quality = {"passes": passes, "compared": "each type with transformers' own forward"}
    quality |= {} if passes else {"reason": f"wrong: {', '.join(counts['wrong'])}"}
    return harness.Result(ours=figures, quality=quality, details={"works": counts["works"]})


def options(parser: argparse.ArgumentParser) -> None:
    """What is tried, and where the table goes."""
    parser.add_argument("--types", nargs="+", help="model types; every causal one by default")
    parser.add_argument("--table", help="file for the Markdown table")


if __name__ == "__main__":
    harness.main(__file__, __doc__, options, measure)
