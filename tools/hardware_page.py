"""Reference page of the GPU memory that models need, computed by `toque plan`.

    pytest -m slow --regenerate tests/docs/test_hardware_page.py

The slow test writes and compares the rows of the page. A fast test derives the tiers from them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from transformers import GPTNeoXConfig, LlamaConfig

from toque.runs.outlined_update import outlining
from toque.workflows.configure import configure
from toque.workflows.plan.run_estimate import build_estimator

CARDS: Final = {
    name: round(gib * 2**30)
    for name, gib in {
        "8 GB": 7.8, "12 GB": 11.7, "16 GB": 15.7, "24 GB": 23.5, "48 GB": 44.5, "80 GB": 79.2,
        "141 GB": 139.8,
    }.items()
}  # fmt: skip
"""Bytes that torch can use on a card of the advertised size. The driver reserves the rest."""
WAYS: Final[Mapping[str, dict[str, Any] | None]] = {
    "whole": None,
    "LoRA": {"kind": "lora"},
    "LoRA, nf4": {"kind": "lora", "quantize_base": "nf4"},
}


def _neox(width: int, layers: int, heads: int) -> GPTNeoXConfig:
    """Return the config of a Pythia model (Biderman et al. 2023)."""
    return GPTNeoXConfig(
        hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
        intermediate_size=4 * width, vocab_size=50304,
    )  # fmt: skip


def _llama(
    width: int, inner: int, layers: int, heads: tuple[int, int], words: int
) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads[0], num_key_value_heads=heads[1], vocab_size=words,
        tie_word_embeddings=layers == _TIED, max_position_embeddings=2048,
    )  # fmt: skip


_TIED: Final = 28  # layers of the Llama with tied embeddings
MODELS: Final[Mapping[str, Any]] = {
    "FLAN-T5 small, 77 M": "google/flan-t5-small",
    "FLAN-T5 base, 248 M": "google/flan-t5-base",
    "FLAN-T5 large, 783 M": "google/flan-t5-large",
    "FLAN-T5 XL, 2.8 B": "google/flan-t5-xl",
    "FLAN-T5 XXL, 11 B": "google/flan-t5-xxl",
    "GPT-2, 124 M": "openai-community/gpt2",
    "GPT-2 medium, 355 M": "openai-community/gpt2-medium",
    "GPT-2 large, 774 M": "openai-community/gpt2-large",
    "GPT-2 XL, 1.6 B": "openai-community/gpt2-xl",
    "NeoX (Pythia), 410 M": _neox(1024, 24, 16),
    "NeoX (Pythia), 1.4 B": _neox(2048, 24, 16),
    "NeoX (Pythia), 2.8 B": _neox(2560, 32, 32),
    "NeoX (Pythia), 6.9 B": _neox(4096, 32, 32),
    "Llama, 1.1 B": _llama(2048, 5632, 22, (32, 4), 32000),
    "Llama, 3.2 B": _llama(3072, 8192, _TIED, (24, 8), 128256),
    "Llama, 8 B": _llama(4096, 14336, 32, (32, 8), 128256),
}
HEAD: Final = """\
# GPU memory by model

<!-- Written by `pytest -m slow --regenerate tests/docs/test_hardware_page.py` from plans. -->

This page lists the smallest GPU for each model, as planned by `toque plan`. The plans assume one
GPU, AdamW, bf16, updates of 16 rows, and one row per micro-batch: 256 + 512 tokens for a T5, 768
for other models. They include the overhead of the allocator. More rows per micro-batch are faster
and need more memory; `toque plan CONFIG --hardware CARD` shows how many fit.

* "Recomputed" means `train.gradient_checkpointing: true`. `auto` uses it if a row does not fit.
* LoRA uses the rank of `r: auto`: 16, or 8 for models of 2.5 billion weights or more.
* nf4 stores the frozen matrices in 4 bits.

Shorter texts, `adamw8bit` and int8 change every number. [Plan a run](../guides/plan.md#accuracy)
describes the accuracy.
"""
_TABLE: Final = """\
| model | trained | one row, GiB | recomputed, GiB | from | recomputed from | RAM, GiB | disk |
|---|---|---:|---:|---|---|---:|---:|
"""
MACHINE: Final = """\
## The rest of the machine

The table lists the RAM and disk space that the largest model that fits on a GPU needs. RAM is for
reading the weights; the program needs 1 GiB more. Disk space is for the checkpoints, the best model
and the finished model. Add space for the base model and your data.

| GPU | RAM, GiB | disk, GiB |
|---|---:|---:|
"""
REST: Final = """
* **Cores**: two are enough for one GPU. Preparing a batch takes less than a millisecond on one
  core, and an update of such a model takes about a second on the GPU. `toque prepare` uses all
  cores.
* **Systems**: Linux. On macOS, training uses the CPU. Windows needs WSL 2; keep runs and stores on
  the WSL disk, not under `/mnt`.
* **Python** 3.11, 3.12 or 3.13, and torch 2.11 or later.
"""


def row(model: str, way: str) -> str:
    """Return the table row of a model, trained in one way."""
    shape = MODELS[model]
    with tempfile.TemporaryDirectory() as folder:
        if not isinstance(shape, str):
            shape.save_pretrained(folder)
            shape = folder
        plain, recomputed = (
            _planned(shape, way, recompute=again) for again in (False, True)
        )
    sizes = plain.card, recomputed.card
    cells = [model, way]
    cells += [_gib(size) for size in sizes]
    cells += [_smallest(size) for size in sizes]
    cells += [_gib(plain.ram), _gib(plain.disk)]
    return f"| {' | '.join(cells)} |"


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f}"


class _Bytes(NamedTuple):
    """Planned bytes on the card, in the memory of the machine and on its disk."""

    card: int
    ram: int
    disk: int


def _planned(start: str, way: str, *, recompute: bool) -> _Bytes:
    settings = {
        "model": {"start_from": start},
        "adapter": WAYS[way],
        "data": {"max_prompt_tokens": 256, "max_target_tokens": 512},
        "train": {
            "batch": "16 examples", "precision": "bf16", "micro_batch_rows": 1,
            "gradient_checkpointing": recompute,
        },
    }  # fmt: skip
    estimator, model_of, _ = build_estimator(configure(settings), "h100")
    with outlining():
        model = model_of(estimator.config)
        memory = estimator.memory(model)
    disk = estimator.disk(model, memory, 0, update_seconds=1.0)
    return _Bytes(memory.total, memory.host, disk.total)


def _smallest(size: int) -> str:
    return next((card for card, memory in CARDS.items() if size <= memory), "–")


def rows_of(page: str) -> dict[tuple[str, str], list[str]]:
    """Return the cells of the large table of a page, by model and way."""
    found = {}
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] in MODELS:
            found[cells[0], cells[1]] = cells
    return found


def page_of(rows: Mapping[tuple[str, str], list[str]]) -> str:
    """Return the page: tiers, then every model."""
    lines = [
        HEAD,
        "## Tiers\n",
        "The table lists the largest model of each family that fits, recomputed if necessary.\n",
    ]
    lines.append(f"| GPU | {' | '.join(WAYS)} |\n|---|{'---|' * len(WAYS)}")
    for card in CARDS:
        largest = (_largest(rows, way, card) for way in WAYS)
        lines.append(f"| {card} | {' | '.join(largest)} |")
    lines.append(f"\n{MACHINE.rstrip()}")
    for card in CARDS:
        fitting = [cells for cells in rows.values() if _fits(cells[5], card)]
        ram, disk = (max(float(cells[n]) for cells in fitting) for n in (6, 7))
        lines.append(f"| {card} | {ram:.0f} | {disk:.0f} |")
    lines.append(REST.rstrip())
    lines.append(f"\n## Every model\n\n{_TABLE.rstrip()}")
    keys = [(model, way) for model in MODELS for way in WAYS]
    lines += [f"| {' | '.join(rows[key])} |" for key in keys if key in rows]
    return "\n".join([*lines, ""])


def _fits(smallest: str, card: str) -> bool:
    """Return True if `card` is at least as large as `smallest`."""
    order = list(CARDS)
    return smallest != "–" and order.index(smallest) <= order.index(card)


def _largest(rows: Mapping[tuple[str, str], list[str]], way: str, card: str) -> str:
    """Return the largest model of each family that fits on a card."""
    found = {}
    for model in MODELS:
        *_, plain, again, _, _ = rows.get((model, way), ["–"] * 4)
        if _fits(again, card):
            fits = _fits(plain, card)
            name = model.replace(",", "")
            found[model.split()[0].rstrip(",")] = name + (
                "" if fits else " (recomputed)"
            )
    return ", ".join(found.values()) or "–"


def written(path: Path, *made: str) -> str:
    """Return the page at `path` with the rows of `made` replaced."""
    before = rows_of(path.read_text(encoding="utf-8")) if path.exists() else {}
    return page_of(before | rows_of("\n".join(made)))
