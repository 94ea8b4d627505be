"""A configuration's prepared store, and the sources and settings for its preparation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

from toque.config import FilesConfig, RunConfig
from toque.config.schema import TRAINED
from toque.cooking.prompts import own_templates
from toque.cooking.schemas.reader import reader_for
from toque.data.prepare.store_plan import PrepareSettings, store_differences
from toque.data.store.token_store import TokenStore
from toque.data.tokenizer.chat import TEMPLATES
from toque.data.tokenizer.codec import load_codec
from toque.data.tokenizer.portable import tokenizer_differences
from toque.data.tokenizer.tokenizer_folder import resolve_tokenizer, tokenizer_here
from toque.errors import ConfigError, DataError, argument
from toque.models.config_values import short_positions
from toque.models.loading.hub import find_local_folder, resolve_folder
from toque.models.loading.model_folder import describe_adapter, read_config_json
from toque.reporter import ProgressSink, no_progress
from toque.sources.archives import unpack_archives
from toque.sources.file_kinds import FileJudge
from toque.sources.layouts import RefusedFileError
from toque.sources.preference_pairs import (
    describe_missing_pairs,
    has_message_pairs,
    refuse_sources_without_pairs,
    with_one_turn,
)
from toque.sources.records import Located, Source
from toque.sources.source_files import (
    SourceFile,
    find_files,
    is_local,
    locate_files,
)
from toque.sources.token_arrays import TokenReader
from toque.storage.bucket import RemoteFile, is_remote
from toque.storage.download import fetch, list_sources
from toque.user_paths import named_path

_CONTEXT_LENGTHS = {"gpt2": 1024, "neox": 2048, "llama": 2048}
"""Default context length of a model from scratch, by family. T5 has no limit."""
_T5_TYPES = ("t5", "mt5", "umt5")
_File = TypeVar("_File", Located, RemoteFile)


def family_kind(config: RunConfig) -> Literal["decoder", "encoder-decoder"]:
    """Return the kind of the model's family. For `auto`, read the checkpoint's config.json."""
    family = config.model.family
    if family == "auto":
        folder = resolve_folder(config.model.start_from)
        if not (folder / "config.json").is_file():
            if (folder / "adapter_config.json").is_file():
                raise ConfigError(describe_adapter(folder))
            raise ConfigError(
                f"model.start_from is {config.model.start_from}, which has no config.json. Name a "
                "complete Hugging Face model folder."
            )
        has_encoder = bool(read_config_json(folder).get("is_encoder_decoder"))
    else:
        has_encoder = family == "t5"
    return "encoder-decoder" if has_encoder else "decoder"


def open_sources(
    config: RunConfig,
    *,
    progress: ProgressSink = no_progress,
    say: Callable[[str], None] = lambda _: None,
) -> list[Source]:
    """Open the configured sources with their readers.

    Args:
        config: The configuration.
        progress: Receives the progress of downloads.
        say: Receives messages about files that are downloaded or left out.

    Raises:
        ConfigError: data.sources is empty, a tokenizer would be trained on token ids, the
            objective is dpo and a file has no preference pairs, or such pairs have conversations of
            several turns for a model with an encoder.
        DataError: A file cannot be read.
    """
    configured = (*config.data.sources, *config.data.validation)
    if not config.data.sources:
        raise ConfigError(
            "data.sources is empty, so there is nothing to prepare. Name at least one file: "
            "data.sources=[{path: recipes.jsonl}]."
        )

    # List every bucket before the first download, so that a wrong key fails immediately.
    listings = [
        list_sources(s.path, say) if is_remote(s.path) else None for s in configured
    ]
    readers = partial(reader_for, tasks=own_templates(config.data))
    sources: list[Source] = []
    for source, remote in zip(configured, listings, strict=True):
        if remote is None:
            files = _limit_files(locate_files(source.path, say), source, say)
        else:
            bucket, remote_files = remote
            selected = _limit_files(remote_files, source, say)
            local_files = fetch(bucket, selected, progress=progress, say=say)
            files = [
                Located(file.address, path, sha256)
                for file, (path, sha256) in zip(selected, local_files, strict=True)
            ]
        files = unpack_archives(files, progress=progress, say=say)
        try:
            judged = FileJudge(source, config.data.encoding, readers).judge(files, say)
        except RefusedFileError as error:
            if config.objective.kind == "dpo":
                message = describe_missing_pairs(source.path, error.fields)
                raise DataError(message) from error
            raise
        _refuse_training_on_ids(judged, config.model.tokenizer_source, source.path)
        sources.append(judged)
    if config.objective.kind == "dpo":
        refuse_sources_without_pairs(sources)
    if any(map(has_message_pairs, sources)) and _has_encoder(config):
        return [with_one_turn(source) for source in sources]
    return sources


def _has_encoder(config: RunConfig) -> bool:
    """Return whether the model has an encoder. A model on the hub counts as decoder-only."""
    model = config.model
    if model.family == "auto" and find_local_folder(model.start_from) is None:
        return False
    return family_kind(config) == "encoder-decoder"


def _refuse_training_on_ids(source: Source, tokenizer: str, path: str) -> None:
    """Raise a ConfigError if a tokenizer would be trained on a source of token ids."""
    readers = (source.reader, *source.readers.values())
    has_ids = any(isinstance(reader, TokenReader) for reader in readers)
    if has_ids and tokenizer.startswith(TRAINED):
        raise ConfigError(
            f"model.tokenizer is {tokenizer}, but {path} contains token ids, and a tokenizer "
            "cannot be trained on ids. Set model.tokenizer to the tokenizer that produced these "
            "ids."
        )


def _limit_files(
    files: Sequence[_File], source: FilesConfig, say: Callable[[str], None]
) -> Sequence[_File]:
    """Return the first `max_files` files of a listing, which is sorted by name. Report them."""
    limit = source.max_files
    if limit is None:
        return files
    selection = f"all {len(files):,} files"
    if len(files) > limit:
        selection = f"the first {limit:,} of its {len(files):,} files by name"
    say(f"{source.path}: max_files is {limit:,}, so {selection} are read.")
    return files[:limit]


def prepare_settings(config: RunConfig) -> PrepareSettings:
    """Return the settings that determine the content of a store."""
    data = config.data
    prompt = None if data.max_prompt_tokens == "auto" else data.max_prompt_tokens
    target = None if data.max_target_tokens == "auto" else data.max_target_tokens
    is_automatic = prompt is None or target is None
    max_files = tuple(source.max_files for source in (*data.sources, *data.validation))
    return PrepareSettings(
        family_kind=family_kind(config),
        tokenizer=config.model.tokenizer_source,
        max_prompt_tokens=prompt,
        max_target_tokens=target,
        room=_find_max_tokens(config) if is_automatic else None,
        on_overlong=data.on_overlong,
        validation_fraction=0.0 if data.validation else data.validation_fraction,
        held_out_from=len(data.sources) if data.validation else None,
        max_examples=data.max_examples,
        dedup=data.dedup,
        min_quality=data.min_quality,
        tasks=tuple(data.tasks),
        max_bad_share=data.max_bad_share,
        max_files=max_files if any(max_files) else (),
        chat_template=_read_template(data.chat_template),
        chat_date=data.chat_date,
        loss_on=data.loss_on,
    )


def _read_template(setting: str) -> str:
    """Return the name of a chat template, or the Jinja template in a file."""
    if setting in ("auto", *TEMPLATES):
        return setting
    try:
        return named_path(setting).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"data.chat_template must be auto, {', '.join(TEMPLATES)} or a Jinja file, not "
            f"{setting!r}: {error}."
        ) from error


def _find_max_tokens(config: RunConfig) -> int | None:
    """Return the maximum tokens of a prompt and its target together. None means no limit."""
    model = config.model
    if model.start_from == "scratch":
        default = _CONTEXT_LENGTHS.get(model.family)
        shape: Mapping[str, object] = model.shape
    else:
        default = None
        shape = read_config_json(resolve_folder(model.start_from))
    if model.family == "t5" or shape.get("model_type") in _T5_TYPES:
        return None

    values = (shape.get(name) for name in ("n_positions", "max_position_embeddings"))
    positions = next((n for n in values if isinstance(n, int)), default)
    # Beyond a shorter length, LongRoPE uses other factors, so that length is the limit.
    rope = shape.get("rope_parameters") or shape.get("rope_scaling")
    short = short_positions(rope, shape.get("original_max_position_embeddings"))
    limits = [n for n in (positions, short) if n is not None]
    # The last token of a target is never an input, so it needs no position.
    return min(limits) + 1 if limits else None


def open_store(config: RunConfig, *, sources: bool = True) -> TokenStore:
    """Open the prepared store, verify its hashes, and compare it with the configuration.

    Args:
        config: The configuration.
        sources: Also compare the source files that are on this machine.

    Raises:
        DataError: The store is absent, damaged, or was prepared with other settings or files.
        ConfigError: The objective needs the tokenizer of the start model, but names another.
    """
    folder = Path(config.data.store)
    refuse_unprepared(config)
    refuse_other_tokenizer(config)
    store = TokenStore.open(folder, verify=True)
    settings = prepare_settings(config)
    # Neither a tokenizer with the same name nor one that is trained on the data is compared by ids.
    has_same_name = settings.tokenizer == store.manifest.settings.get("tokenizer")
    is_trained = settings.trained_vocab_size is not None
    tokenizer = None
    if not has_same_name and not is_trained:
        tokenizer = resolve_tokenizer(settings.tokenizer)
    differences = store_differences(
        folder,
        store.manifest,
        settings,
        tokenizer=tokenizer,
        sources=_find_local_files(config) if sources else (),
        encoding=config.data.encoding,
    )
    if differences:
        raise DataError(
            f"The store {folder} was not prepared with this configuration: "
            f"{'; '.join(differences)}. Run `toque prepare CONFIG` with another data.store or with "
            f"{argument('replace=True')}, or restore these settings. To keep the store's own "
            "sources, set data.sources=[]."
        )
    return store


def refuse_other_tokenizer(config: RunConfig) -> None:
    """Check that an objective with a start model uses its tokenizer.

    The check is skipped if the start model's tokenizer is not on this machine.

    Raises:
        ConfigError: model.tokenizer has other token ids.
    """
    kind, model = config.objective.kind, config.model
    start_folder = tokenizer_here(model.start_from)
    if kind == "sft" or model.tokenizer == "auto" or start_folder is None:
        return
    difference = "it is trained on the data"
    if not model.tokenizer.startswith(TRAINED):
        of_model = load_codec(start_folder)
        of_setting = load_codec(resolve_tokenizer(model.tokenizer))
        difference = "; ".join(tokenizer_differences(of_model, of_setting))
    if difference:
        raise ConfigError(
            f"model.tokenizer is {model.tokenizer}, which differs from the tokenizer of "
            f"model.start_from, {model.start_from}: {difference}. The objective {kind} uses the "
            "probabilities that this model gives to texts, so it needs the tokenizer of the model. "
            "Set model.tokenizer to auto, and prepare the data again."
        )


def _find_local_files(config: RunConfig) -> list[tuple[str, list[SourceFile] | None]]:
    """Return the path of each source, and its files if they are on this machine."""
    sources: list[tuple[str, list[SourceFile] | None]] = []
    for source in (*config.data.sources, *config.data.validation):
        files = None
        if is_local(source.path):
            data = config.data.model_copy(
                update={"sources": (source,), "validation": ()}
            )
            files = find_files(open_sources(config.model_copy(update={"data": data})))
        sources.append((source.path, files))
    return sources


def refuse_unprepared(config: RunConfig) -> None:
    """Raise a DataError if the store is absent."""
    if not is_prepared(config):
        raise DataError(
            f"{config.data.store} has no prepared store. Prepare it with `toque prepare CONFIG`."
        )


def is_prepared(config: RunConfig) -> bool:
    """Return whether the store is finished. It may be damaged."""
    return (Path(config.data.store) / "manifest.json").exists()
