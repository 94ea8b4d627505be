"""Weights in a model folder's safetensors files: checked headers, and one tensor read at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from toque.errors import CheckpointError
from toque.storage.array_headers import check_safetensors_header

_INDEX: Final = "model.safetensors.index.json"
_PICKLES: Final = {".bin", ".pt", ".pth", ".pkl", ".ckpt"}


@dataclass(frozen=True)
class StoredWeights:
    """The tensors of a model folder, by the names that their files give them.

    A file is open only while one tensor is read: what is mapped of an open one counts as the
    process's memory, and of a large model that would be all of it.
    """

    files: Mapping[str, Path]
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def n_weights(self) -> int:
        """Numbers in all files."""
        return sum(map(math.prod, self.shapes.values()))

    def name_of(self, parameter: str, prefix: str) -> str | None:
        """What the files call a model's parameter: with its base model's prefix or without.

        The published GPT-2 says `wte.weight` for `transformer.wte.weight`. None: not there.
        """
        bare = parameter.removeprefix(f"{prefix}.")
        names = (parameter, bare, f"{prefix}.{parameter}")
        return next((name for name in names if name in self.files), None)

    def float32(self, name: str) -> Tensor:
        """A tensor in float32 and memory of its own.

        Raises:
            CheckpointError: its file is damaged, or gone since its header was read.
        """
        file = self.files[name]
        try:
            with safe_open(file, framework="pt") as tensors:
                tensor: Tensor = tensors.get_tensor(name)
                return tensor.to(torch.float32, copy=True)
        except (SafetensorError, OSError) as error:
            raise _damaged(file, error) from error


def stored_weights(folder: Path) -> StoredWeights:
    """What a model folder holds; headers and lengths are checked, no tensor is read.

    Raises:
        CheckpointError: a file is missing or damaged, or there are only pickles.
    """
    files: dict[str, Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for file in _weight_files(folder):
        try:
            check_safetensors_header(file)
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118  # not a mapping
                    files[name] = file
                    shapes[name] = tuple(tensors.get_slice(name).get_shape())
        except FileNotFoundError as error:
            raise CheckpointError(f"{file} is missing, and {folder / _INDEX} names it.") from error
        except (SafetensorError, OSError) as error:
            raise _damaged(file, error) from error
    return StoredWeights(files, shapes)


def _damaged(file: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{file} is damaged or cut short ({error}). Copy or download it again.")


def _weight_files(folder: Path) -> list[Path]:
    if (folder / _INDEX).exists():
        try:
            index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
            names = sorted(set(index["weight_map"].values()))
            outside = [name for name in names if not name or name != Path(name).name]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{folder / _INDEX} cannot be read: {error!r}.") from error
        if outside:
            raise CheckpointError(
                f"{folder / _INDEX} names the file {outside[0]!r}; only plain names in its folder "
                "are allowed. It is damaged or made to harm; copy the model from its source again."
            )
        return [folder / name for name in names]
    if (folder / "model.safetensors").exists():
        return [folder / "model.safetensors"]
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in _PICKLES)
    if pickles:
        raise CheckpointError(
            f"{folder} holds its weights only as {', '.join(pickles)}, a pickle, which can run any "
            "code while it loads, so it is not read. Use a checkpoint with model.safetensors, or "
            "convert this one once on a machine you trust: from_pretrained, then save_pretrained."
        )
    raise CheckpointError(f"{folder} holds a config.json but no model.safetensors.")
