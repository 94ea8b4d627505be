"""Front matter of a model card, which the hub reads.

It contains only recorded facts: the scores of the evaluation, and the licence and languages on the
base model's card.
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
_MAX_CARD_BYTES: Final = 1 << 20
"""Maximum size in bytes of a base model's card."""
_MAX_VALUE_LENGTH: Final = 200
"""Maximum characters per value on a base model's card."""


def describe_licence(config: RunConfig) -> str:
    """Return the sentence of the card about the licence."""
    facts = _facts(config)
    name = facts.get("license_name", facts.get("license"))
    if name is None:
        return "Licence: unknown. Neither `model.licence` nor the card of its base names one."
    if config.model.licence:
        return f"Licence: {name}."
    return f"Licence: {name}, from the card of its base."


def card_head(
    config: RunConfig, manifest: StoreManifest, evaluation: Evaluation, *, sources: str
) -> str:
    """Return the front matter with its lines of dashes. `sources` is the name of the data."""
    facts = _facts(config)
    base = hub_name(config.model.start_from)
    is_adapter = config.adapter is not None
    if base is not None:
        facts["base_model_relation"] = "adapter" if is_adapter else "finetune"

    is_encoder_decoder = manifest.family_kind == "encoder-decoder"
    task = "text2text-generation" if is_encoder_decoder else "text-generation"
    tags = ["toque"]
    if config.model.family != "auto":
        tags.append(config.model.family)

    recorded = (recorded_dataset(entry.path) for entry in manifest.sources)
    datasets = list(
        dict.fromkeys(dataset for dataset in recorded if dataset is not None)
    )

    data = ModelCardData(
        model_name=" ".join(Path(config.run_dir).name.split()) or "model",
        **facts,
        base_model=base,
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag=task,
        datasets=list(dict.fromkeys(dataset.name for dataset, _ in datasets)) or None,
        tags=tags,
    )

    only, commit = datasets[0] if len(datasets) == 1 else (None, None)
    scores = {
        name: estimate.value for name, estimate in evaluation.texts.overall.items()
    }
    scores = {**evaluation.of_examples, **scores}

    data.eval_results = [
        EvalResult(
            task_type=task,
            # The hub needs a name, so data without a dataset on the hub has a general name.
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
    """Return the licence and languages under the hub's keys, from `model.licence` or the base."""
    start = config.model.start_from
    base_facts: dict[str, Any] = {}
    # The card is untrusted, and an error in it must never cost a trained model.
    with suppress(ConfigError, OSError, ValueError, RecursionError, yaml.YAMLError):
        card = Path() if start == "scratch" else resolve_folder(start) / "README.md"
        if card.is_file() and card.stat().st_size <= _MAX_CARD_BYTES:
            base_facts = metadata_load(card) or {}
    facts = {
        name: base_facts[name] for name in _LICENCE if _is_short(base_facts.get(name))
    }
    if config.model.licence is not None:
        facts = {"license": config.model.licence}
    languages = base_facts.get("language")
    if all(map(_is_short, languages if isinstance(languages, list) else [languages])):
        facts["language"] = languages
    return facts


def _is_short(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= _MAX_VALUE_LENGTH


def convert_head(card: str, form: str) -> str:
    """Convert the front matter of an adapter's card for an export in `form`."""
    head, mark, text = card.partition("\n---\n")
    if not card.startswith("---\n") or form == "adapter":
        return card
    head = head.replace("\nlibrary_name: peft", "\nlibrary_name: transformers")
    head = head.replace(
        "\nbase_model_relation: adapter", "\nbase_model_relation: finetune"
    )
    if form == "gguf":
        head = head.replace("\nlibrary_name: transformers", "\nlibrary_name: gguf")
    return head + mark + text
