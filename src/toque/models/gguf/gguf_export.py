"""GGUF export: a folder with the model's file, read back and asked before anyone gets it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Final

from toque.errors import CheckpointError
from toque.models.families import max_positions
from toque.models.generation.engine import generate
from toque.models.generation.options import GenerationOptions
from toque.models.gguf.file import read_weights, round_weights, write_gguf
from toque.models.gguf.gguf_vocabulary import Asking
from toque.models.gguf.layout import architecture_of, suit
from toque.models.loading.model_export import refuse_taken
from toque.models.loading.pretrained import load_model, load_with_adapter
from toque.models.lora.adapter_files import is_adapter_folder
from toque.storage.atomic import atomic_folder

N_TOKENS: Final = 32
"""Greedy tokens of each prompt that are compared."""
_OPTIONS: Final = GenerationOptions(max_new_tokens=N_TOKENS)


@dataclass(frozen=True)
class ExportedGguf:
    """A folder with a GGUF file whose model writes what the source writes."""

    folder: Path
    file: str
    prompts: int
    """Prompts whose greedy tokens were compared with those of the source, rounded as stored."""
    unchanged: int
    """Prompts of these that the source answers with the same tokens before it is rounded."""
    was_adapter: bool

    def __str__(self) -> str:
        """A sentence for people."""
        how = "merged into its base, " if self.was_adapter else ""
        return (
            f"{self.folder / self.file} holds the model, {how}read back and compared: the greedy "
            f"tokens of {self.prompts} prompts are those of the weights as stored, and of "
            f"{self.unchanged} also those of the model before it was rounded."
        )


def export_gguf(
    source: Path,
    to: Path,
    *,
    kind: str,
    tokenizer_json: str,
    asking: Asking,
    prompts: Sequence[Sequence[int]],
    files: Mapping[str, str] = MappingProxyType({}),
) -> ExportedGguf:
    """Write the model or adapter of `source` as a GGUF file, read it back and compare.

    The folder appears when its file has passed: what is read back must write, token by token, what
    the source writes after each of `prompts`, ids, with its weights rounded as the file stores
    them. `kind` is one of `TYPES`, `asking` the tokenizer's special tokens and template, `files`
    the texts of further files, by name.

    Raises ConfigError where llama.cpp computes no such model, or has no such tokenizer;
    CheckpointError where `to` is taken or cannot be written, or another model was read back.
    """
    refuse_taken(to)
    adapted = is_adapter_folder(source)
    model = load_with_adapter(source) if adapted else load_model(str(source))
    architecture_of(model.config)
    room = max_positions(model.config)
    shown = [list(prompt if room is None else prompt[: max(1, room // 2)]) for prompt in prompts]
    write = partial(generate, model, shown, _OPTIONS, eos_id=asking.eos, pad_id=asking.pad)
    before = write()
    suit(model)
    file = gguf_name(to, kind)
    try:
        with atomic_folder(to) as writer:
            path = writer.folder / file
            write_gguf(
                model, path, name=to.name, kind=kind, tokenizer_json=tokenizer_json, asking=asking
            )
            round_weights(model, kind)
            expected = write()
            for weight in model.parameters():  # what is not read back is seen to be missing
                weight.detach().fill_(float("nan"))
            read_weights(model, path)
            found = write()
            if found != expected:
                other = sum(a != b for a, b in zip(expected, found, strict=True))
                raise CheckpointError(
                    f"The GGUF file of {source} was read back and writes other tokens than the "
                    f"model for {other} of {len(found)} prompts, so it was not kept. Try another "
                    f"type than {kind}, or the format hf, and please report this."
                )
            for name, text in files.items():
                writer.put(name, text.encode())
    except OSError as error:
        raise CheckpointError(f"The model could not be written to {to}: {error}.") from error
    same = sum(a == b for a, b in zip(before, found, strict=True))
    return ExportedGguf(to, file, len(shown), same, adapted)


def gguf_name(to: Path, kind: str) -> str:
    """The file's name in its folder: soup-Q8_0.gguf."""
    return f"{to.name}-{kind.upper()}.gguf"
