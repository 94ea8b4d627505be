"""Plan of a store: its settings, its fingerprint, and its differences from an existing store."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from toque.config.schema import CHAT_DATE, TRAINED
from toque.data.store.store_manifest import FORMAT, SourceEntry, StoreManifest
from toque.data.tokenizer.chat import TEMPLATES, template_text
from toque.data.tokenizer.codec import FamilyKind, load_codec
from toque.data.tokenizer.portable import tokenizer_differences
from toque.data.tokenizer.tokenizer_folder import (
    hash_of_folder,
    read_folder,
    resolve_tokenizer,
)
from toque.errors import ConfigError, DataError
from toque.sources.conversations import CONVERSATIONS
from toque.sources.records import Source, encoding_of
from toque.sources.source_files import SourceFile, brackets_as_names, find_files
from toque.sources.token_arrays import TokenReader
from toque.user_paths import expanded

OnOverlong = Literal["error", "drop", "truncate", "split", "auto"]
Dedup = Literal["none", "exact", "near"]
USUAL_PROMPT = 256  # tokens; limit of prompts if nothing else determines it
USUAL_TARGET = 512  # tokens; limit of targets
LIMITS = ("max_prompt_tokens", "max_target_tokens")
CHAT = ("chat_template", "chat_date", "loss_on")  # settings of conversations
# If more records are unusable, the file probably has another format.
DEFAULT_BAD_SHARE = 0.5
CODE_VERSION = 4
"""Version of the code. It increases when equal inputs give other rows, so that older stores are
not reused."""
_MAX_NAMES: Final = 3  # files that a sentence names
_IN_WORDS: Final = {
    "code_version": "the version of preparing",
    "own_template": "the hash of the tokenizer's chat template",
    "reader_versions": "the version of each reader",
    "room": "the number of the model's positions",
    "held_out_from": "the number of sources in data.sources",
}
_HELD_OUT: Final = ("held_out_from", "validation_fraction")
_BY_SOURCE: Final = ("reader_versions", "max_files")  # settings with a value per source


@dataclass(frozen=True, kw_only=True)
class PrepareSettings:
    """Settings that change the content of a store. The configuration has checked them."""

    family_kind: FamilyKind
    tokenizer: str
    # None: `source_sample` chooses it from the data.
    max_prompt_tokens: int | None = USUAL_PROMPT
    max_target_tokens: int | None = USUAL_TARGET
    # Positions of the model for both sides; recorded with chosen limits.
    room: int | None = None
    on_overlong: OnOverlong = "auto"  # auto: truncate pairs and split documents
    validation_fraction: float = 0.1
    max_examples: int | None = None
    min_quality: float = 0.0
    dedup: Dedup = "exact"
    tasks: tuple[str, ...] = ("write",)
    # Largest share of records that a reader may drop.
    max_bad_share: float = DEFAULT_BAD_SHARE
    max_files: tuple[
        int | None, ...
    ] = ()  # files read per source; recorded if one has a limit
    chat_template: str = "auto"  # name or Jinja code; recorded for conversations only
    chat_date: str = CHAT_DATE
    loss_on: Literal["answers", "last_answer"] = "answers"
    held_out_from: int | None = None
    """Index of the first source that is held out. None: a share of all records is held out.
    Recorded only if it is a number."""

    def holds_out(self, source: int) -> bool:
        """Check if a source is held out."""
        return self.held_out_from is not None and source >= self.held_out_from

    @property
    def open_limits(self) -> list[str]:
        """Names of the limits that are chosen from the data."""
        return [name for name in LIMITS if getattr(self, name) is None]

    @property
    def limits(self) -> tuple[int, int]:
        """Limits of prompt and target, if both are chosen."""
        assert self.max_prompt_tokens is not None and self.max_target_tokens is not None  # noqa: PT018
        return self.max_prompt_tokens, self.max_target_tokens

    def as_recorded(self) -> dict[str, Any]:
        """Return the settings for the manifest and the fingerprint."""
        values = {
            **asdict(self),
            "tasks": list(self.tasks),
            "max_files": list(self.max_files),
        }
        for name in ("room", *CHAT):
            del values[name]
        if not self.max_files:
            del values["max_files"]
        if self.held_out_from is None:
            del values["held_out_from"]
        return values

    @property
    def of_conversations(self) -> dict[str, str]:
        """Settings of conversations for the manifest."""
        template = self.chat_template
        if template not in ("auto", *TEMPLATES):
            template = f"Jinja with the SHA-256 {_sha256(template)}"
        return {
            "chat_template": template,
            "chat_date": self.chat_date,
            "loss_on": self.loss_on,
        }

    @property
    def trained_vocab_size(self) -> int | None:
        """Vocabulary size of the tokenizer to train. None if it exists already."""
        is_trained = self.tokenizer.startswith(TRAINED)
        return int(self.tokenizer.removeprefix(TRAINED)) if is_trained else None


@dataclass(frozen=True)
class StorePlan:
    """Inputs of a store, before the first record is read."""

    store: Path
    settings: PrepareSettings
    files: Sequence[SourceFile]
    tokenizer: Path | None  # None: `prepare` trains it
    recorded: Mapping[str, Any]  # settings and code versions for the manifest
    sources: Sequence[Source]

    @property
    def trained(self) -> list[SourceFile]:
        """Files of sources that are not held out."""
        return [file for file in self.files if not self.settings.holds_out(file.source)]

    @property
    def left_out(self) -> dict[str, str]:
        """Reasons for files of the sources that are not read, by name."""
        return {
            name: why
            for source in self.sources
            for name, why in source.left_out.items()
        }

    def fingerprint(self, settings: PrepareSettings) -> str:
        """Hash the inputs that determine the rows. Chosen and set limits count the same."""
        content = dict(self.recorded) | {
            name: getattr(settings, name) for name in LIMITS
        }
        if settings.trained_vocab_size is None:
            content["tokenizer"] = None  # the hash of its files counts, not its path
        if settings.open_limits:
            content["room"] = settings.room
        # The share of bad records decides if a store is written, but does not change the rows.
        content["max_bad_share"] = DEFAULT_BAD_SHARE
        inputs = [[f.sha256, f.reader.recorded_name, f.source] for f in self.files]
        data = msgspec.json.encode([FORMAT, content, inputs], order="deterministic")
        return hashlib.sha256(data).hexdigest()

    def recorded_with(self, chosen: PrepareSettings) -> dict[str, Any]:
        """Return the settings for the manifest, with chosen limits and their names."""
        recorded = dict(self.recorded) | {
            name: getattr(chosen, name) for name in LIMITS
        }
        if names := self.settings.open_limits:
            recorded |= {"chosen": names, "room": chosen.room}
        return recorded

    def differences(self, manifest: StoreManifest) -> list[str]:
        """Describe the differences of an existing store from the plan."""
        names = ("code_version", "reader_versions", "own_template")
        more = {name: self.recorded[name] for name in names if name in self.recorded}
        if self.settings.open_limits and manifest.settings.get("chosen"):
            more["room"] = self.settings.room
        return store_differences(
            self.store,
            manifest,
            self.settings,
            tokenizer=self.tokenizer,
            sources=[
                (source.path, [file for file in self.files if file.source == number])
                for number, source in enumerate(self.sources)
            ],
            more=more,
        )


def plan_of(
    sources: Sequence[Source], store: Path, settings: PrepareSettings
) -> StorePlan:
    """Plan a store: find and hash the files of its sources.

    Raises:
        DataError: A source or the tokenizer cannot be used.
        ConfigError: A setting of conversations is set, but no source has conversations.
    """
    sources = [source.for_tasks(settings.tasks) for source in sources]
    files = find_files(sources)
    tokenizer = None
    if settings.trained_vocab_size is None:
        tokenizer = resolve_tokenizer(settings.tokenizer)
    recorded = settings.as_recorded() | {
        "tokenizer_sha256": None if tokenizer is None else hash_of_folder(tokenizer),
        "code_version": CODE_VERSION,
        "reader_versions": [
            version for source in sources for version in source.versions
        ],
    }
    if any(file.reader.recorded_name.startswith(CONVERSATIONS) for file in files):
        template = (
            None
            if tokenizer is None
            else template_text(read_folder(tokenizer).settings)
        )
        digest = None if template is None else _sha256(template)
        recorded |= settings.of_conversations | {"own_template": digest}
    elif any(
        getattr(settings, name) != getattr(PrepareSettings, name) for name in CHAT
    ):
        raise ConfigError(
            "data.chat_template, data.chat_date and data.loss_on are for conversations, but no "
            "source of data.sources has any. Remove these settings, or name the field of the "
            "messages in the columns of a source: {messages: NAME}."
        )
    return StorePlan(store, settings, files, tokenizer, recorded, sources)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def store_differences(
    store: Path,
    manifest: StoreManifest,
    settings: PrepareSettings,
    *,
    tokenizer: Path | None,
    sources: Sequence[tuple[str, Sequence[SourceFile] | None]],
    encoding: str | None = None,
    more: Mapping[str, Any] | None = None,
) -> list[str]:
    """Describe the differences of a store from the requested store. [] means that they are equal.

    Args:
        store: The folder of the store.
        manifest: Its manifest.
        settings: The requested settings.
        tokenizer: The folder of the requested tokenizer. Tokenizers are compared by their ids. None
            means that only names are compared.
        sources: The paths of the requested sources, each with its files, or None if they are not on
            this machine. () means the sources of the store.
        encoding: The requested encoding. None means that it is compared with the readers.
        more: More requested values of the manifest's settings.
    """
    old = manifest.settings
    chosen = {
        name: old[name]
        for name in settings.open_limits
        if name in old.get("chosen", ())
    }
    new = msgspec.to_builtins(
        replace(settings, **chosen).as_recorded() | dict(more or {})
    )
    new |= {name: "auto" for name in LIMITS if new[name] is None}
    if sources:
        new.setdefault("max_files", None)
        new.setdefault("held_out_from", None)
    elif "held_out_from" in old:
        new |= {name: old[name] for name in _HELD_OUT}
    if "chat_template" in old:
        new |= settings.of_conversations

    split_difference = _split_difference(manifest, new)
    skipped = {"tokenizer", "max_bad_share"}
    if split_difference:
        skipped.update(_HELD_OUT)
    # If the numbers of sources differ, `_source_differences` reports it.
    if sources and len({entry.source for entry in manifest.sources}) != len(sources):
        skipped.update(_BY_SOURCE)
    differences = split_difference + [
        f"{_IN_WORDS.get(name, name)} was {old.get(name)} and is {value}"
        for name, value in new.items()
        if old.get(name) != value and name not in skipped
    ]
    differences += _tokenizer_difference(store, old, settings.tokenizer, tokenizer)

    # Token ids have no encoding.
    readers = {
        e.reader for e in manifest.sources if e.reader != TokenReader.recorded_name
    }
    old_encodings = {encoding_of(reader) for reader in readers} - {encoding}
    if encoding is not None and old_encodings:
        return [
            *differences,
            f"data.encoding was {min(old_encodings)} and is {encoding}",
        ]

    entries = manifest.sources
    if split_difference:  # only training sources can be compared
        old_start = old.get("held_out_from", math.inf)
        entries = [entry for entry in entries if entry.source < old_start]
        sources = sources[: settings.held_out_from]
        settings = replace(settings, held_out_from=None)
    return differences + _source_differences(entries, sources, settings)


def _split_difference(manifest: StoreManifest, new: Mapping[str, Any]) -> list[str]:
    """Describe a change from data.validation to a held-out share of the data, or the reverse."""
    old_start = manifest.settings.get("held_out_from")
    if (old_start is None) == (new.get("held_out_from") is None):
        return []
    if old_start is None:
        share = manifest.settings.get("validation_fraction", 0.0)
        return [
            (
                f"{share:.0%} of data.sources was held out, but now data.validation is set; remove "
                "data.validation (in Python the argument validation) to use this store"
            )
        ]
    held_out = named(
        entry.path for entry in manifest.sources if entry.source >= old_start
    )
    return [
        (
            f"{held_out} was held out as data.validation, but data.validation is empty now, which "
            f"holds out {new['validation_fraction']:.0%} of data.sources; set data.validation (in "
            "Python the argument validation) again to use this store"
        )
    ]


def _tokenizer_difference(
    store: Path, old_settings: Mapping[str, Any], new: str, folder: Path | None
) -> list[str]:
    old = old_settings.get("tokenizer")
    if folder is None:
        return [] if old == new else [f"its tokenizer was {old} and is {new}"]
    if old_settings.get("tokenizer_sha256") == hash_of_folder(folder):
        return []
    try:
        differences = tokenizer_differences(
            load_codec(store / "tokenizer"), load_codec(folder)
        )
    except DataError as error:
        differences = [str(error)]
    if not differences:  # the tokenizer was saved again, e.g. with a finished model
        return []
    change = f"{new} has changed since" if old == new else f"was {old} and is {new}"
    return [f"its tokenizer {change} ({'; '.join(differences)}; one is the store's)"]


def _source_differences(
    entries: Sequence[SourceEntry],
    sources: Sequence[tuple[str, Sequence[SourceFile] | None]],
    settings: PrepareSettings,
) -> list[str]:
    """Describe the differences of the sources in order, without a download."""
    numbers = sorted({entry.source for entry in entries})
    if sources and len(numbers) != len(sources):
        old_files = named(entry.path for entry in entries)
        new_paths = named(path for path, _ in sources)
        setting = (
            "data.sources" if settings.held_out_from is None else "the data section"
        )
        return [
            (
                f"it was prepared from {len(numbers)} sources (files such as {old_files}), but "
                f"{setting} has {len(sources)} ({new_paths})"
            )
        ]
    differences = []
    for i, ((path, files), number) in enumerate(zip(sources, numbers, strict=False)):
        source_entries = [entry for entry in entries if entry.source == number]
        source = f"data.sources[{i}] is {path}"
        if settings.holds_out(i):
            source = f"data.validation[{i - (settings.held_out_from or 0)}] is {path}"
        if files is not None:
            differences += [
                f"{source}: {how}" for how in _file_differences(source_entries, files)
            ]
        elif not all(_names(path, entry.path) for entry in source_entries):
            names = named(entry.path for entry in source_entries)
            differences.append(
                f"{source}, which is not on this machine, but it was prepared from {names}"
            )
    return differences


def _file_differences(
    entries: Sequence[SourceEntry], files: Sequence[SourceFile]
) -> list[str]:
    """Describe the differences of a source's files by content and reader, not by path."""
    hashes = [file.sha256 for file in files]
    readers = {entry.sha256: entry.reader for entry in entries}
    new = [file.name for file in files if file.sha256 not in readers]
    gone = [entry.path for entry in entries if entry.sha256 not in hashes]
    reread = [
        f.name
        for f in files
        if readers.get(f.sha256, "") not in ("", f.reader.recorded_name)
    ]
    differences = []
    if new:
        old = named(entry.path for entry in entries)
        differences.append(
            f"{named(new)} is new or has changed since (it was prepared from {old})"
        )
    elif gone:
        differences.append(f"{named(gone)}, from which it was prepared, is missing")
    elif [entry.sha256 for entry in entries] != hashes:
        differences.append("its files were in another order, or one was repeated")
    if reread:
        differences.append(
            f"{named(reread)} was read in another way (format, encoding, columns or tasks)"
        )
    return differences


def _names(pattern: str, path: str) -> bool:
    """Check if a source's path is a file, its folder, or a pattern that matches it."""
    pattern = expanded(pattern) if "://" not in pattern else pattern.rstrip("/")
    if path == pattern or path.startswith((f"{pattern}/", f"{pattern}:")):
        return True
    return fnmatch(path, pattern) or fnmatch(path, brackets_as_names(pattern))


def named(paths: Iterable[str]) -> str:
    """List the first few of many paths."""
    paths = list(paths)
    more = f" and {len(paths) - _MAX_NAMES} more" if len(paths) > _MAX_NAMES else ""
    return ", ".join(paths[:_MAX_NAMES]) + more
