"""Prompts with which an exported file and its model are compared."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from toque.cooking.cookbook.recipes import recipes
from toque.cooking.prompts import write_prompt
from toque.data.tokenizer.chat import prompt_ids
from toque.data.tokenizer.codec import Codec, FamilyKind
from toque.models.loading.hub import resolve_folder
from toque.models.loading.provenance import Provenance

_N_PROMPTS: Final = 20


def has_encoder(source: Path) -> bool:
    """Return whether a model is an encoder-decoder. For an adapter, look at its base."""
    from toque.models.loading.from_scratch import config_in
    from toque.models.lora.adapter_files import is_adapter_folder, read_config

    if is_adapter_folder(source):
        source = resolve_folder(str(read_config(source).base_model_name_or_path))
    return bool(config_in(source).is_encoder_decoder)


def sample_prompts(
    codec: Codec, family: FamilyKind, record: Provenance
) -> dict[str, list[int]]:
    """Encode the prompts with which the exported file and the model are compared."""
    texts = [
        write_prompt(recipe.title, recipe.ingredients)
        for recipe in recipes(_N_PROMPTS, 0)
    ]
    return {text: prompt_ids(codec, text, family, record.form) for text in texts}
