"""Embedding and output head that an adapter trains as whole matrices, next to its layers.

They are trained in place, so a shared matrix stays shared. peft's files name their modules in
`modules_to_save`, and contain a matrix once per module that reads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from torch import nn
from transformers import PreTrainedModel

from toque.config.field_types import TableName
from toque.errors import ConfigError
from toque.models.families import embedding

HEAD = "lm_head"
_SHARED = "shared"
"""T5's name for the embedding. The encoder and the decoder read it through their own modules."""


def train_tables(model: PreTrainedModel, names: Sequence[TableName]) -> list[str]:
    """Make the matrices with these names trainable.

    Returns:
        The last names of their modules, for `modules_to_save`.
    """
    selected = set()
    for name in names:
        is_head = name == "head"
        matrix = model.get_parameter(f"{HEAD}.weight") if is_head else embedding(model)
        matrix.requires_grad_(True)
        selected.add(id(matrix))
    paths = _paths_of(model, selected)
    return sorted({path.rpartition(".")[-1] for path in paths})


def named_tables(modules: Iterable[str]) -> tuple[TableName, ...]:
    """Return the setting `also_train` for the last names of modules in `modules_to_save`."""
    last_names = {module.rpartition(".")[-1] for module in modules}
    names: list[TableName] = []
    if last_names - {HEAD}:
        names.append("embeddings")
    if HEAD in last_names:
        names.append("head")
    return tuple(names)


def trained_tables(
    model: PreTrainedModel, modules: Iterable[str]
) -> dict[str, nn.Parameter]:
    """Return the matrices of the modules in `modules_to_save`, by parameter name.

    A matrix that several modules share has several names.
    """
    suffixes = tuple(f".{module}" for module in modules)
    tables = {}
    for path, module in model.named_modules(remove_duplicate=False):
        matrix = getattr(module, "weight", None)
        if f".{path}".endswith(suffixes) and isinstance(matrix, nn.Parameter):
            tables[f"{path}.weight"] = matrix
    return tables


def refuse_other_modules(
    model: PreTrainedModel, modules: Sequence[str], folder: Path
) -> None:
    """Refuse an adapter that trains other modules, or a copy of a matrix that modules share.

    Raises:
        ConfigError: The modules are not the embedding, the head or both.
    """
    tables = trained_tables(model, modules)
    head = model.get_parameter(f"{HEAD}.weight")
    allowed = {id(embedding(model)), id(head)}
    selected = {id(matrix): matrix for matrix in tables.values()}
    paths = {f"{path}.weight" for path in _paths_of(model, selected)}
    missing = sorted(paths - tables.keys())
    if tables and selected.keys() <= allowed and not missing:
        return
    reason = "Only the embedding and the output head can be trained entirely"
    if missing:
        reason = f"Without {missing[0]}, which shares its matrix, the matrix cannot stay shared"
    raise ConfigError(
        f"{folder / 'adapter_config.json'} sets modules_to_save to {', '.join(modules)}. {reason}. "
        "Merge the adapter with peft (merge_and_unload) and use the merged model."
    )


def _paths_of(model: PreTrainedModel, matrices: Iterable[int]) -> list[str]:
    """Return the paths of the modules that read the matrices with these ids."""
    ids = set(matrices)
    paths = [
        path
        for path, module in model.named_modules(remove_duplicate=False)
        if id(getattr(module, "weight", None)) in ids
    ]
    return [path for path in paths if path != _SHARED] or paths
