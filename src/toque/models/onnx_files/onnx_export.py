"""ONNX export: files for onnxruntime, read back and compared with the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import onnx
import torch
from transformers import PreTrainedModel

from toque.errors import CheckpointError, ConfigError, in_shell
from toque.models.generation.engine import cut_to_half, generate, limit_answers
from toque.models.generation.options import GenerationOptions
from toque.models.loading.model_export import (
    refuse_nonempty,
    refuse_nonfinite,
    write_config,
)
from toque.models.loading.pretrained import load_model, load_with_adapter
from toque.models.loading.provenance import Provenance
from toque.models.lora.adapter_files import is_adapter_folder
from toque.models.onnx.decoders import decoder_graph
from toque.models.onnx.graph import Graph
from toque.models.onnx.stored_types import round_weights
from toque.models.onnx.supported_models import find_unsupported
from toque.models.onnx.t5 import encoder_graph, t5_decoder_graph
from toque.models.onnx_files.runtime import (
    DECODER,
    ENCODER,
    T5_DECODER,
    OnnxModel,
    Token,
)
from toque.storage.atomic import FolderWriter, atomic_folder

FOLDER: Final = "onnx"
"""Folder of the ONNX files in an export."""
N_TOKENS: Final = 32  # number of greedy tokens per prompt that are compared
_TOLERANCE: Final = 1e-4
"""Largest difference of two logits that may be in another order, relative to the largest logit."""
_MAX_FILE: Final = 2**31 - 2**20  # bytes; a protobuf file has less than 2 GiB


@dataclass(frozen=True)
class ExportedOnnx:
    """Folder with ONNX files that generate the same tokens as the source."""

    folder: Path
    prompts: int  # number of prompts with which the files were compared with the rounded source
    unchanged: int  # number of prompts with the same tokens before rounding
    loss_before: float  # nats per token of the source's own texts
    loss_after: float  # the same after rounding
    megabytes: float
    was_adapter: bool
    is_page: bool

    def __str__(self) -> str:
        """Describe the files and the comparison, and how to open a page."""
        return self._describe_files() + (self._describe_page() if self.is_page else "")

    def _describe_page(self) -> str:
        folder = in_shell(self.folder)
        return (
            f" To try the page, run `python -m http.server -d {folder} 8000`, and open "
            "http://localhost:8000. For a phone, copy the folder to a web server with https."
        )

    def _describe_files(self) -> str:
        merged = "merged into its base, " if self.was_adapter else ""
        text = (
            f"{self.folder} holds the model ({self.megabytes:.1f} MB), {merged}read back and "
            f"compared: for {self.prompts} prompts onnxruntime generates the same tokens as the "
            "model with the weights of the file"
        )
        if self.loss_after == self.loss_before:
            return f"{text}."
        return (
            f"{text}, and for {self.unchanged} of them the same tokens as the model before "
            f"rounding. Rounding changed the loss on the model's own texts from "
            f"{self.loss_before:.4f} to {self.loss_after:.4f} nats per token."
        )


def export_onnx(
    source: Path,
    to: Path,
    *,
    kind: str,
    prompts: Sequence[Sequence[int]],
    ends: Sequence[int],
    pad: int,
    record: Provenance | None,
    add_files: Callable[[FolderWriter], None],
    is_page: bool = False,
) -> ExportedOnnx:
    """Write a model or adapter as ONNX files, read them back and compare.

    The folder appears only if onnxruntime generates the same tokens as the source with rounded
    weights, for each prompt. Where the two best logits are equal but for rounding, either token may
    come.

    Args:
        source: Folder of the model or adapter.
        to: Folder to create.
        kind: Type of the matrices, of `stored_types.TYPES`.
        prompts: Token ids of prompts to compare.
        ends: Tokens that end a text.
        pad: Id of the padding token.
        record: See `model_export.save_model`.
        add_files: Writes other files, such as the tokenizer's.
        is_page: True if these files are a web page.

    Raises:
        ConfigError: No graph exists for this model, or it has more than 2 GB of weights.
        CheckpointError: `to` exists or cannot be written, or the texts differ.
    """
    refuse_nonempty(to)
    was_adapter = is_adapter_folder(source)
    model = load_with_adapter(source) if was_adapter else load_model(str(source))
    if problem := find_unsupported(model):
        raise ConfigError(
            f"This model cannot be written as ONNX: {problem}. Use format hf."
        )
    refuse_nonfinite(model)
    prompts = cut_to_half(prompts, model)
    answer_all = partial(
        generate,
        model,
        prompts,
        GenerationOptions(max_new_tokens=N_TOKENS),
        eos_id=ends,
        pad_id=pad,
    )
    before = answer_all()
    loss_before = _mean_loss(model, prompts, before)
    try:
        with atomic_folder(to) as writer:
            folder = writer.folder / FOLDER
            folder.mkdir()
            write_config(model, writer.folder, record=record, end_ids=ends)
            _write_graphs(model, folder, kind)
            round_weights(model, kind)
            expected = answer_all()
            _compare_all(model, folder, prompts, expected, ends, source)
            add_files(writer)
            size = sum(file.stat().st_size for file in folder.iterdir())
    except OSError as error:
        raise CheckpointError(f"Cannot write the model to {to}: {error}.") from error
    return ExportedOnnx(
        to,
        prompts=len(prompts),
        unchanged=sum(a == b for a, b in zip(before, expected, strict=True)),
        loss_before=loss_before,
        loss_after=_mean_loss(model, prompts, before),
        megabytes=size / 1e6,
        was_adapter=was_adapter,
        is_page=is_page,
    )


def _has_encoder(model: PreTrainedModel) -> bool:
    return bool(model.config.is_encoder_decoder)


def _write_graphs(model: PreTrainedModel, folder: Path, kind: str) -> None:
    graphs = {DECODER: decoder_graph}
    if _has_encoder(model):
        graphs = {ENCODER: encoder_graph, T5_DECODER: t5_decoder_graph}
    for name, build in graphs.items():
        graph = build(model, Graph(kind))
        size = graph.ByteSize()
        if size > _MAX_FILE:
            raise ConfigError(
                f"The model has {size / 1e9:.1f} GB of weights in one ONNX file, and the limit of "
                "the format is 2 GB. Use a smaller dtype, or format hf or gguf."
            )
        onnx.save_model(graph, folder / name)


def _compare_all(
    model: PreTrainedModel,
    folder: Path,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    ends: Sequence[int],
    source: Path,
) -> None:
    """Compare what the files in `folder` generate with the model's answers; see `_compare`."""
    start = model.config.decoder_start_token_id if _has_encoder(model) else None
    program = OnnxModel(folder, start=start)
    limits = limit_answers(model, prompts, N_TOKENS, ())
    for prompt, answer, limit in zip(prompts, answers, limits, strict=True):
        _compare(list(program.generate(prompt, ends, limit)), answer, ends, source)


def _compare(
    tokens: Sequence[Token], answer: Sequence[int], ends: Sequence[int], source: Path
) -> None:
    """Compare the tokens of the files with the model's `answer`, which has no end token.

    Raises:
        CheckpointError: A token differs, although its logit is clearly lower.
    """
    for n, token in enumerate(tokens):
        allowed = [answer[n]] if n < len(answer) else list(ends)
        if token.id in allowed:
            continue
        largest = float(abs(token.logits).max())
        gap = float(token.logits.max() - token.logits[allowed].max())
        if gap <= _TOLERANCE * largest:
            return  # later tokens depend on this choice
        raise CheckpointError(
            f"The ONNX files of {source} generate another token than the model: {token.id} instead "
            f"of {allowed[0]} at position {n + 1}. The export was removed. Try another dtype or "
            "format hf, and please report this bug."
        )


@torch.no_grad()
def _mean_loss(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
) -> float:
    """Compute the mean cross-entropy of the answers, in nats per token."""
    nats, n_tokens = 0.0, 0
    for prompt, answer in zip(prompts, answers, strict=True):
        if not answer:
            continue
        text = torch.tensor([answer])
        if _has_encoder(model):
            inputs = {"input_ids": torch.tensor([prompt]), "labels": text}
            logits = model(**inputs).logits[0]
        else:
            both = torch.tensor([[*prompt, *answer]])
            logits = model(input_ids=both).logits[0, len(prompt) - 1 : -1]
        nats += float(
            torch.nn.functional.cross_entropy(logits, text[0], reduction="sum")
        )
        n_tokens += len(answer)
    return nats / n_tokens if n_tokens else math.nan
