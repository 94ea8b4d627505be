"""Asking of a run's model: what it was trained on, and a person's own words as its prompt."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from toque.config import RunConfig, load_config
from toque.cooking.prompts import (
    CLASSES,
    QUESTIONS,
    TASKS,
    asks_for_a_recipe,
    dish_and_foods,
    write_prompt,
)
from toque.data.store.store_manifest import StoreManifest, form_of, read_manifest
from toque.data.store.token_store import TokenStore
from toque.data.tokenizer.codec import Codec, FamilyKind, asking_bounds, load_codec, prompt_ids
from toque.data.tokenizer.portable import files_of_model
from toque.data.tokenizer.tokenizer_folder import is_toques, resolve_tokenizer
from toque.errors import CheckpointError, ConfigError, DataError
from toque.models.loading.hub import resolve_folder
from toque.models.loading.provenance import Provenance, provenance_of

if TYPE_CHECKING:
    from toque.evaluation.text_samples import Prompt

UNKNOWN: Final = Provenance(form="recipes", max_new_tokens=256)
"""Record of models that hold none but have a tokenizer of Toque's."""
FOREIGN: Final = Provenance(form="documents", max_new_tokens=256)
"""Record of models that others made, whose training is unknown; they continue prompts."""
_DISH: Final = ("lentil soup", ("lentils", "carrots", "cumin"))
_OTHER_PROMPTS: Final = {
    "request": "`How do I make NAME?` and other free requests",
    "next_step": f"`{QUESTIONS['next_step']}...`",
    "title": f"`{QUESTIONS['title']}...`",
}


def provenance_of_run(config: RunConfig, manifest: StoreManifest) -> Provenance:
    """The record of a run's model."""
    form = form_of(entry.reader for entry in manifest.sources)
    return Provenance(
        form="gaps" if config.span_corruption is not None else form,
        max_new_tokens=target_limit(config, manifest),
        tasks=[*config.data.tasks] if form == "recipes" else [],
    )


def target_limit(config: RunConfig, manifest: StoreManifest | None) -> int:
    """Longest target, in tokens: as the store was cut, else as the configuration says."""
    found = None if manifest is None else manifest.settings.get("max_target_tokens")
    asked = config.data.max_target_tokens
    if isinstance(found, int):
        return found
    return UNKNOWN.max_new_tokens if asked == "auto" else asked


def provenance_in(folder: Path) -> Provenance:
    """Record of the model of a run, a model folder or a hub name.

    A run without a record, which is not finished, is known by its store.

    Raises:
        CheckpointError: the record cannot be read.
        ConfigError: the run's configuration cannot be read.
    """
    if not (folder / "config.yaml").is_file():
        here = _here(folder)
        return provenance_of(here) or (UNKNOWN if is_toques(here) else FOREIGN)
    record = provenance_of(folder / "model")
    if record is not None:
        return record
    config = load_config(folder / "config.yaml").config
    return provenance_of_run(config, read_manifest(Path(config.data.store)))


def codec_in(folder: Path, record: Provenance) -> Codec:
    """The tokenizer of a model folder, which begins a foreign model's prompts as that expects.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        codec = load_codec(resolve_tokenizer(str(folder)))
    except DataError as error:
        raise CheckpointError(str(error)) from error
    if record is FOREIGN:
        codec.begin_as_written()
    return codec


def _here(folder: Path) -> Path:
    """The folder itself, or the copy of what has that name on the hub."""
    if folder.exists():
        return folder
    try:
        return resolve_folder(str(folder))
    except (ConfigError, DataError):
        return folder  # opening it says what is wrong


def model_files(codec: Codec, record: Provenance, *, encoder: bool) -> tuple[dict[str, str], bool]:
    """Files of a model folder beside its weights; see `files_of_model`."""
    kind: FamilyKind = "encoder-decoder" if encoder else "decoder"
    begin, end = asking_bounds(codec, kind, record.form)
    return files_of_model(codec, record, begin=begin, end=end)


def is_recorded(record: Provenance) -> bool:
    """True if the model itself says what it was trained to be asked."""
    return record is not UNKNOWN and record is not FOREIGN


def writes_recipes(record: Provenance) -> bool:
    """True if "dish: a, b, c" is turned into the request for a recipe."""
    return record.form == "recipes" and (not record.tasks or "write" in record.tasks)


def example_prompt(record: Provenance) -> str | None:
    """A prompt for the model card; None for a model that answers none."""
    if record.form == "gaps":
        return None
    if record.form == "documents":
        return "Once upon a time"
    if record.form == "pairs":
        return "Your prompt"
    if writes_recipes(record):
        return write_prompt(*_DISH)
    if "request" in record.tasks:
        return f"How do I make {_DISH[0]}?"
    task = next(task for task in TASKS if task in record.tasks)
    return f"{QUESTIONS[task]}{_DISH[0]}"


def form_in_words(record: Provenance) -> str:
    """The sentence of the model card that says what the model is asked with."""
    if record.form == "gaps":
        return (
            "It was trained to fill gaps in texts, as a start for further training: it answers no "
            "prompts and writes no texts yet."
        )
    if record.form == "documents":
        return (
            "It was trained on whole texts: a prompt is the beginning of a text, which it goes on "
            "with."
        )
    if record.form == "pairs":
        return "It was trained on its maker's own prompts and answers: a prompt is sent as it is."
    shown = {"write": f"`{write_prompt('NAME', ('a', 'b', 'c'))}`", **_OTHER_PROMPTS}
    shown |= {task: f"`{QUESTIONS[task]}...`" for task in CLASSES}
    prompts = [shown[task] for task in record.tasks or ["write"]]
    several = len(prompts) > 1
    return f"The {'prompts' if several else 'prompt'} it was trained on: {', '.join(prompts)}."


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
    from toque.evaluation.text_samples import Prompt  # with torch

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
