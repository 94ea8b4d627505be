"""Front matter of a model card: what the hub reads of it, written by the hub's own library.

It holds what is known alone: the scores are the evaluation's, and what a base says of itself is
read from its own card.
"""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import yaml
from huggingface_hub import EvalResult, ModelCardData
from huggingface_hub.repocard import metadata_load

from toque.config import RunConfig
from toque.data.store.store_manifest import StoreManifest
from toque.errors import ConfigError
from toque.models.loading.hub import hub_name, resolve_folder
from toque.runs.run_record import COUNTS
from toque.sources.hub_datasets import recorded_dataset
from toque.workflows.evaluate import Evaluation

_LICENCE: Final = ("license", "license_name", "license_link")
_MOST_BYTES: Final = 1 << 20  # of a base's card
_LONGEST: Final = 200  # characters of a value that a base's card gives


def licence_in_words(config: RunConfig) -> str:
    """The card's sentence about the licence."""
    facts = _facts(config)
    named = facts.get("license_name", facts.get("license"))
    if named is None:
        return "Licence: not known; neither `model.licence` nor a card of its base names one."
    return f"Licence: {named}" + ("." if config.model.licence else ", as its base's card says.")


def card_head(
    config: RunConfig, manifest: StoreManifest, evaluation: Evaluation, *, sources: str
) -> str:
    """The front matter, between its lines of dashes; `sources` names the data for people."""
    facts, base, family = _facts(config), hub_name(config.model.start_from), config.model.family
    adapted, encoder = config.adapter is not None, manifest.family_kind == "encoder-decoder"
    task = "text2text-generation" if encoder else "text-generation"
    if base is not None:
        facts["base_model_relation"] = "adapter" if adapted else "finetune"
    recorded = (recorded_dataset(entry.path) for entry in manifest.sources)
    datasets = list(dict.fromkeys(one for one in recorded if one is not None))
    data = ModelCardData(
        model_name=" ".join(Path(config.run_dir).name.split()) or "model",
        **facts,
        base_model=base,
        library_name="peft" if adapted else "transformers",
        pipeline_tag=task,
        datasets=list(dict.fromkeys(asked.name for asked, _ in datasets)) or None,
        tags=["toque"] + ([family] if family != "auto" else []),
    )
    only, commit = datasets[0] if len(datasets) == 1 else (None, None)
    scores = {name: estimate.value for name, estimate in evaluation.texts.overall.items()}
    scores = {**evaluation.of_examples, **scores}
    data.eval_results = [
        EvalResult(
            task_type=task,
            # One that others can look up where there is one; otherwise the word for its kind.
            dataset_type=only.name if only else "held-out",
            dataset_name=f"held out of {' '.join(sources.split())}",
            dataset_config=only.config if only else None,
            dataset_split=only.split if only else None,
            dataset_revision=commit,
            dataset_args={"fingerprint": manifest.fingerprint[:16]},
            metric_type=name,
            metric_value=float(f"{value:.6g}"),
        )
        for name, value in scores.items()
        if math.isfinite(value) and name not in COUNTS
    ]
    return f"---\n{data.to_yaml()}\n---\n"


def _facts(config: RunConfig) -> dict[str, Any]:
    """Licence and languages by the hub's keys: the setting's, else as the base's card has them."""
    start, held = config.model.start_from, dict[str, Any]()
    # Anyone may have written that card; it is never a reason to lose a trained model.
    with suppress(ConfigError, OSError, ValueError, RecursionError, yaml.YAMLError):
        card = Path() if start == "scratch" else resolve_folder(start) / "README.md"
        if card.is_file() and card.stat().st_size <= _MOST_BYTES:
            held = metadata_load(card) or {}
    facts = {name: held[name] for name in _LICENCE if _is_short(held.get(name))}
    if config.model.licence is not None:
        facts = {"license": config.model.licence}
    spoken = held.get("language")
    if all(map(_is_short, spoken if isinstance(spoken, list) else [spoken])):
        facts["language"] = spoken
    return facts


def _is_short(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= _LONGEST


def head_as(card: str, form: str) -> str:
    """A card whose front matter is that of a whole model, where it was an adapter's, in `form`."""
    head, mark, text = card.partition("\n---\n")
    if not card.startswith("---\n") or form == "adapter":
        return card
    head = head.replace("\nlibrary_name: peft", "\nlibrary_name: transformers")
    head = head.replace("\nbase_model_relation: adapter", "\nbase_model_relation: finetune")
    if form == "gguf":
        head = head.replace("\nlibrary_name: transformers", "\nlibrary_name: gguf")
    return head + mark + text
