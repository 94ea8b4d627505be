"""Own words: what a person types, in the form that a run's model is asked in."""

from __future__ import annotations

from toque.config import RunConfig
from toque.cooking.prompts import asks_for_a_recipe, dish_and_foods, write_prompt
from toque.data.prepare.example_rows import prompt_ids
from toque.data.prepare.prepare_settings import FamilyKind
from toque.data.store.store_manifest import form_of
from toque.data.store.token_store import TokenStore
from toque.evaluation.text_samples import Prompt
from toque.models.loading.provenance import Provenance
from toque.workflows.asking.provenance import provenance_of_run, writes_recipes


def in_trained_form(typed: str, record: Provenance) -> str:
    """The prompt a model reads; as it was typed where nothing else is nearer to its training.

    Args:
        typed: in any words.
        record: what the model was trained to be asked.

    >>> in_trained_form("Create a simple pasta dish", Provenance(form="recipes", max_new_tokens=9))
    'Generate recipe for: simple pasta dish'
    """
    if record.form != "recipes" or asks_for_a_recipe(typed):
        return typed
    title, foods = dish_and_foods(typed)
    if writes_recipes(record):
        return write_prompt(title, foods)
    if "request" not in record.tasks:
        return typed
    if not foods:
        return f"How do I make {title}?"
    return f"Please tell me how to make {title} with {', '.join(foods)}."


def own_prompts(config: RunConfig, store: TokenStore, *, encoder: bool) -> list[Prompt]:
    """Prompts of evaluation.prompts, in the form the model is trained on where it has one."""
    codec, record = store.codec(), provenance_of_run(config, store.manifest)
    kind: FamilyKind = "encoder-decoder" if encoder else "decoder"
    form = form_of(entry.reader for entry in store.manifest.sources)
    asked = [(typed, in_trained_form(typed, record)) for typed in config.evaluation.prompts]
    return [
        Prompt(
            tuple(prompt_ids(codec, text, kind, form)), text, typed=typed if typed != text else None
        )
        for typed, text in asked
    ]
