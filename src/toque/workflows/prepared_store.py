"""Prepared store of a configuration: its sources, what it should hold, and the store opened."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final, Literal, TypeVar

from toque.config import FilesConfig, RunConfig
from toque.config.schema import TRAINED
from toque.cooking.prompts import own_templates
from toque.cooking.schemas.reader import reader_for
from toque.data.prepare.store_plan import PrepareSettings, store_differences
from toque.data.store.token_store import TokenStore
from toque.data.tokenizer.chat import TEMPLATES
from toque.data.tokenizer.tokenizer_folder import resolve_tokenizer
from toque.errors import ConfigError, DataError, argument
from toque.models.config_values import short_positions
from toque.models.loading.hub import resolve_folder
from toque.models.loading.model_folder import read_config_json
from toque.reporter import ProgressSink, no_progress
from toque.sources.file_kinds import FileJudge
from toque.sources.records import Located, Source
from toque.sources.source_files import (
    SourceFile,
    find_files,
    is_here,
    located,
)
from toque.sources.token_arrays import TokenReader
from toque.storage.bucket import RemoteFile, is_remote
from toque.storage.download import fetch, listing
from toque.user_paths import named_path

_POSITIONS: Final = {"gpt2": 1024, "neox": 2048, "llama": 2048}
"""Positions of a model from scratch whose shape does not say, by family; T5 has no limit."""
_File = TypeVar("_File", Located, RemoteFile)


def family_kind(config: RunConfig) -> Literal["decoder", "encoder-decoder"]:
    """Kind of the model's family; of `auto`, from the checkpoint's config.json."""
    family = config.model.family
    if family == "auto":
        folder = resolve_folder(config.model.start_from)
        if not (folder / "config.json").is_file():
            raise ConfigError(
                f"model.start_from is {config.model.start_from}, which has no config.json. Name a "
                "whole Hugging Face model folder."
            )
        encoder = bool(read_config_json(folder).get("is_encoder_decoder"))
        return "encoder-decoder" if encoder else "decoder"
    return "encoder-decoder" if family == "t5" else "decoder"


def sources_of(
    config: RunConfig,
    *,
    progress: ProgressSink = no_progress,
    say: Callable[[str], None] = lambda _: None,
) -> list[Source]:
    """The configured sources with their readers; `say` hears of files fetched or left out."""
    given = (*config.data.sources, *config.data.validation)
    if not config.data.sources:
        raise ConfigError(
            "data.sources is empty, so there is nothing to prepare. Name at least one file: "
            "data.sources=[{path: recipes.jsonl}]."
        )
    # Every bucket is asked before the first byte is fetched: a wrong key shows at once.
    listed = [listing(s.path, say) if is_remote(s.path) else None for s in given]
    readers = partial(reader_for, tasks=own_templates(config.data))
    sources: list[Source] = []
    for source, remote in zip(given, listed, strict=True):
        if remote is None:
            files = _first(located(source.path, say), source, say)
        else:
            wanted = _first(remote[1], source, say)
            fetched = fetch(remote[0], wanted, progress=progress, say=say)
            files = [
                Located(file.address, place, sha256)
                for file, (place, sha256) in zip(wanted, fetched, strict=True)
            ]
        judged = FileJudge(source, config.data.encoding, readers).judged(files, say)
        judges = (judged.reader, *judged.readers.values())
        tokenizer = config.model.tokenizer_source
        if tokenizer.startswith(TRAINED) and any(isinstance(r, TokenReader) for r in judges):
            raise ConfigError(
                f"{source.path} holds token ids, and model.tokenizer is {tokenizer}: no tokenizer "
                "can be learnt from ids. Name the tokenizer the file was written with in "
                "model.tokenizer."
            )
        sources.append(judged)
    return sources


def _first(
    files: Sequence[_File], source: FilesConfig, say: Callable[[str], None]
) -> Sequence[_File]:
    """The files that `max_files` leaves of a listing, which is in the order of names."""
    most = source.max_files
    if most is None:
        return files
    asked = f"{source.path}: max_files is {most:,}"
    if len(files) <= most:
        say(f"{asked}, and it has {len(files):,} files: all of them are read.")
    else:
        say(f"{asked}: the first {most:,} of its {len(files):,} files by name are read.")
    return files[:most]


def prepare_settings(config: RunConfig) -> PrepareSettings:
    """The settings that decide what a store holds."""
    data = config.data
    prompt = None if data.max_prompt_tokens == "auto" else data.max_prompt_tokens
    target = None if data.max_target_tokens == "auto" else data.max_target_tokens
    most = tuple(source.max_files for source in (*data.sources, *data.validation))
    return PrepareSettings(
        family_kind=family_kind(config),
        tokenizer=config.model.tokenizer_source,
        max_prompt_tokens=prompt,
        max_target_tokens=target,
        room=_room(config) if None in (prompt, target) else None,
        on_overlong=data.on_overlong,
        validation_fraction=0.0 if data.validation else data.validation_fraction,
        held_out_from=len(data.sources) if data.validation else None,
        max_examples=data.max_examples,
        dedup=data.dedup,
        min_quality=data.min_quality,
        tasks=tuple(data.tasks),
        max_bad_share=data.max_bad_share,
        max_files=most if any(most) else (),
        chat_template=_template(data.chat_template),
        chat_date=data.chat_date,
        loss_on=data.loss_on,
    )


def _template(asked: str) -> str:
    """A chat template by its name, or the Jinja in a file."""
    if asked in ("auto", *TEMPLATES):
        return asked
    try:
        return named_path(asked).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"data.chat_template is {asked!r}, which is neither auto, {', '.join(TEMPLATES)}, nor "
            f"a file of Jinja that can be read: {error}."
        ) from error


def _room(config: RunConfig) -> int | None:
    """Tokens that a prompt and its target may have together; None without a limit."""
    model = config.model
    if model.start_from == "scratch":
        usual = _POSITIONS.get(model.family)
        shape: Mapping[str, object] = model.shape
    else:
        shape = read_config_json(resolve_folder(model.start_from))
        usual = None
        if shape.get("model_type") in ("t5", "mt5", "umt5"):
            return None
    named = (shape.get(name) for name in ("n_positions", "max_position_embeddings"))
    positions = next((n for n in named if isinstance(n, int)), usual)
    rope = shape.get("rope_parameters") or shape.get("rope_scaling")
    short = short_positions(rope, shape.get("original_max_position_embeddings"))
    positions = min((n for n in (positions, short) if n is not None), default=None)
    # The last token of a target is never read, so it needs no position.
    return None if positions is None or model.family == "t5" else positions + 1


def open_store(config: RunConfig, *, sources: bool = True) -> TokenStore:
    """The prepared store, every file hashed; refused where settings or `sources` are others."""
    folder = Path(config.data.store)
    refuse_unprepared(config)
    store = TokenStore.open(folder, verify=True)
    settings = prepare_settings(config)
    same_name = settings.tokenizer == store.manifest.settings.get("tokenizer")
    learnt = settings.trained_vocab_size is not None
    differences = store_differences(
        folder,
        store.manifest,
        settings,
        tokenizer=None if same_name or learnt else resolve_tokenizer(settings.tokenizer),
        sources=_files_here(config) if sources else (),
        encoding=config.data.encoding,
    )
    if differences:
        raise DataError(
            f"The store {folder} is not the one that the configuration asks for: "
            f"{'; '.join(differences)}. Run `toque prepare CONFIG` again with another data.store "
            f"(or {argument('replace=True')}), or set these back; data.sources=[] goes on with "
            "the store's own sources."
        )
    return store


def _files_here(config: RunConfig) -> list[tuple[str, list[SourceFile] | None]]:
    """Each source's path, with its files where they are on this machine: nothing is fetched."""

    def files(source: FilesConfig) -> list[SourceFile]:
        data = config.data.model_copy(update={"sources": (source,), "validation": ()})
        return find_files(sources_of(config.model_copy(update={"data": data})))

    given = (*config.data.sources, *config.data.validation)
    return [(each.path, files(each) if is_here(each.path) else None) for each in given]


def refuse_unprepared(config: RunConfig) -> None:
    """Raise a DataError if the store is absent."""
    if not is_prepared(config):
        raise DataError(
            f"{config.data.store} holds no prepared store. Write it with `toque prepare CONFIG` "
            "first."
        )


def is_prepared(config: RunConfig) -> bool:
    """True if the store exists, whole or damaged; an unfinished one does not."""
    return (Path(config.data.store) / "manifest.json").exists()
