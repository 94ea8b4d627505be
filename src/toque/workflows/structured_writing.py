"""Structured writing: recipes held to their form and to the ingredients of their prompts."""

from __future__ import annotations

from collections.abc import Sequence

from toque.cooking.recipe_form import recipe_form
from toque.cooking.recipe_scores import asked_ingredients
from toque.data.tokenizer.codec import Codec
from toque.errors import ConfigError, argument
from toque.models.generation.constraints import FormConstraint, Spelling
from toque.models.loading.provenance import Provenance
from toque.workflows.asking import writes_recipes


def recipe_constraint(codec: Codec, prompts: Sequence[str], record: Provenance) -> FormConstraint:
    """The constraint for one call of the generation engine.

    Args:
        codec: of the model that writes.
        prompts: in the trained form; one that names no ingredients is held to the form alone.
        record: what the model was trained to be asked.

    Raises:
        ConfigError: the model does not write recipes, its vocabulary lacks an ingredient's
            letters, or llguidance is not installed.
    """
    if not writes_recipes(record):
        raise ConfigError(
            f"{argument('must_use')} holds texts to the form of a recipe, and this model was "
            f"trained on {record.form}{_tasks(record)}. Leave it out."
        )
    forms = [
        recipe_form([_writable(name, codec) for name in asked_ingredients(prompt)])
        for prompt in prompts
    ]
    return FormConstraint(
        forms,
        Spelling(
            tokenizer_json=codec.tokenizer_json,
            eos_id=codec.eos_id,
            break_id=codec.newline_id,
            encode=codec.encode,
            decode=codec.decode,
        ),
    )


def _tasks(record: Provenance) -> str:
    return f" for {', '.join(record.tasks)}" if record.form == "recipes" else ""


def _writable(name: str, codec: Codec) -> str:
    """The name in the letters that the vocabulary holds.

    Raises:
        ConfigError: it holds them not at all.
    """
    plain = codec.normalise(name)
    if codec.decode(codec.encode(plain)).strip().casefold() != plain.strip().casefold():
        raise ConfigError(
            f"{argument('must_use')}: this model's vocabulary cannot write {name!r}. Spell the "
            f"ingredient otherwise, or leave {argument('must_use')} out."
        )
    return plain
