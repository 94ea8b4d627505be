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
from toque.sources.hub_datasets import HubDataset, recorded_dataset
from toque.workflows.evaluate import Evaluation

_LICENCE: Final = ("license", "license_name", "license_link")
_MOST_BYTES: Final = 1 << 20  # of a base's card
_LONGEST: Final = 200  # characters of a value that a base's card gives


def base_facts(config: RunConfig) -> dict[str, Any]:
    """Licence and languages as the card of the run's base names them; {} where it names none."""
    start, found = config.model.start_from, dict[str, Any]()
    if start == "scratch":
        return found
    # Anyone may have written it; a card is never a reason to lose a trained model.
    with suppress(ConfigError, OSError, ValueError, RecursionError, yaml.YAMLError):
        card = resolve_folder(start) / "README.md"
        if card.is_file() and card.stat().st_size <= _MOST_BYTES:
            found = metadata_load(card) or {}
    spoken = found.get("language")
    languages = spoken if isinstance(spoken, list) else [spoken]
    facts = {name: found[name] for name in _LICENCE if _is_short(found.get(name))}
    if all(_is_short(language) for language in languages):
        facts["language"] = spoken
    return facts


def _is_short(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= _LONGEST


def licence_of(config: RunConfig) -> dict[str, str]:
    """The licence by the hub's keys: the one of the setting, else the base's; {} for none."""
    if config.model.licence is not None:
        return {"license": config.model.licence}
    return {name: value for name, value in base_facts(config).items() if name in _LICENCE}


def licence_in_words(config: RunConfig) -> str:
    """The card's sentence about the licence."""
    known = licence_of(config)
    if not known:
        base = "" if config.model.start_from == "scratch" else " or its base's card"
        return f"Licence: not known; `model.licence`{base} would name it."
    named = known.get("license_name", known.get("license"))
    return f"Licence: {named}" + ("." if config.model.licence else ", as its base's card says.")


def datasets_of(manifest: StoreManifest) -> dict[str, tuple[HubDataset, str]]:
    """Datasets of the hub that a store was made of, each with its commit, by the source's path."""
    found = (recorded_dataset(entry.path) for entry in manifest.sources)
    return {one[0].address(): one for one in found if one is not None}


def card_head(
    config: RunConfig, manifest: StoreManifest, evaluation: Evaluation, *, sources: str
) -> str:
    """The front matter, between its lines of dashes; `sources` names the data for people."""
    encoder, adapted = manifest.family_kind == "encoder-decoder", config.adapter is not None
    task = "text2text-generation" if encoder else "text-generation"
    base, family = hub_name(config.model.start_from), config.model.family
    spoken = {name: said for name, said in base_facts(config).items() if name not in _LICENCE}
    facts: dict[str, Any] = spoken | licence_of(config)
    if base is not None:
        facts["base_model_relation"] = "adapter" if adapted else "finetune"
    names = list(dict.fromkeys(asked.name for asked, _ in datasets_of(manifest).values()))
    data = ModelCardData(
        model_name=" ".join(Path(config.run_dir).name.split()) or "model",
        **facts,
        base_model=base,
        library_name="peft" if adapted else "transformers",
        pipeline_tag=task,
        datasets=names or None,
        tags=["toque"] + ([family] if family != "auto" else []),
        eval_results=_results(manifest, evaluation, task=task, sources=sources) or None,
    )
    return f"---\n{data.to_yaml()}\n---\n"


def _results(
    manifest: StoreManifest, evaluation: Evaluation, *, task: str, sources: str
) -> list[EvalResult]:
    """The scores as the hub lists them, each of one held-out set."""
    texts = {name: estimate.value for name, estimate in evaluation.texts.overall.items()}
    scores = {**evaluation.of_examples, **texts}
    scores.pop("target_tokens", None)  # a size
    known = list(datasets_of(manifest).values())
    asked, commit = known[0] if len(known) == 1 else (None, None)
    return [
        EvalResult(
            task_type=task,
            # One that others can look up where there is one; otherwise the word for its kind.
            dataset_type=asked.name if asked else "held-out",
            dataset_name=f"held out of {' '.join(sources.split())}",
            dataset_config=asked.config if asked else None,
            dataset_split=asked.split if asked else None,
            dataset_revision=commit,
            dataset_args={"fingerprint": manifest.fingerprint[:16]},
            metric_type=name,
            metric_value=float(f"{value:.6g}"),
        )
        for name, value in scores.items()
        if math.isfinite(value)
    ]


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
