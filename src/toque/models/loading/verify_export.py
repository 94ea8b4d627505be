"""Export verification: the exported model is read back and its logits are compared."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from toque.errors import CheckpointError, argument
from toque.models.loading.export import save_model
from toque.models.loading.pretrained import load_model, load_with_adapter
from toque.models.lora.files import is_adapter_folder, merged

TOLERANCE = 1e-4
"""Largest difference of logits allowed, as a share of the largest logit: float32 sums that merging
orders otherwise differ by about 1e-6."""
DTYPES: Final = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
"""Types of weights in a Hugging Face folder, by the names that GGUF has for them."""
_ROWS, _TOKENS = 4, 32


@dataclass(frozen=True)
class Exported:
    """An exported folder whose model computes what the source computes."""

    folder: Path
    difference: float
    """Largest difference of a logit to the model before merging, rounding and saving, in shares of
    the largest logit."""
    was_adapter: bool
    template: str = ""
    """What is to be said about its chat template, where there is one."""

    def __str__(self) -> str:
        """A sentence for people, or two."""
        how = "merged into its base, " if self.was_adapter else ""
        return (
            f"{self.folder} holds the model, {how}read back and compared: logits differ by at most "
            f"{self.difference:.1e} of the largest.{self.template}"
        )


def export_model(
    source: Path,
    to: Path,
    *,
    card: str,
    dtype: str = "f32",
    files: Mapping[str, str] = MappingProxyType({}),
    max_new_tokens: int | None = None,
) -> Exported:
    """Write the model or adapter of `source` as a whole model, read it back and compare.

    What is read back must compute what the source computes with its weights rounded to `dtype`.

    Args:
        source: A model folder or an adapter folder, with its tokenizer.
        to: Where to; nothing may lie there.
        card: README.md of the result.
        dtype: of the weights, one of `DTYPES`.
        files: As of `save_model`.
        max_new_tokens: As of `save_model`.

    Raises:
        CheckpointError: `to` is taken, or what was read back computes something else; then `to`
            is removed.
    """
    refuse_taken(to)
    adapted = is_adapter_folder(source)
    model = load_with_adapter(source, merge=False) if adapted else load_model(str(source))
    before = sample_logits(model)
    whole = merged(model)
    whole.to(DTYPES[dtype])  # type: ignore[arg-type]  # transformers annotates it away
    save_model(whole, source, to, card=card, files=files, max_new_tokens=max_new_tokens)
    whole.to(torch.float32)  # type: ignore[arg-type]
    expected = before if dtype == "f32" else sample_logits(whole)
    after = sample_logits(load_model(str(to)))
    difference = _apart(after, expected)
    if not difference <= TOLERANCE:  # a NaN is no agreement
        shutil.rmtree(to, ignore_errors=True)
        raise CheckpointError(
            f"The exported model computes other logits than {source}: they differ by "
            f"{difference:.2g} of the largest, and {TOLERANCE:.0e} is allowed. It was removed. "
            "Use the adapter beside its base instead, and please report this."
        )
    return Exported(to, _apart(after, before), adapted)


def refuse_taken(to: Path) -> None:
    """Refuse a folder in which something lies.

    Raises:
        CheckpointError: there is something.
    """
    if to.exists() and any(to.iterdir()):
        raise CheckpointError(
            f"{to} exists and is not empty. Name another folder with {argument('to')}."
        )


def _apart(after: Tensor, before: Tensor) -> float:
    """Largest difference of logits, in shares of the largest of `before`."""
    return float((after - before).abs().max() / before.abs().max().clamp_min(1e-30))


@torch.no_grad()
def sample_logits(model: PreTrainedModel) -> Tensor:
    """Float32 logits [4, 32, V] for fixed pseudo-random tokens, whatever the machine's state."""
    generator = torch.Generator().manual_seed(0)
    rows = int(model.config.vocab_size)
    ids = torch.randint(rows, (_ROWS, _TOKENS), generator=generator)
    extra = {"decoder_input_ids": ids.flip(1)} if model.config.is_encoder_decoder else {}
    logits: Tensor = model.train(mode=False)(input_ids=ids, **extra).logits
    return logits.float()
