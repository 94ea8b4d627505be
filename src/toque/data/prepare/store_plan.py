"""Plan of a store: its settings, its fingerprint, and its differences from an existing store."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal

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
from toque.errors import ConfigError, DataError, join_first
from toque.sources.conversations import CONVERSATIONS
from toque.sources.preference_pairs import refuse_mixture
from toque.sources.records import Source, encoding_of
from toque.sources.source_files import SourceFile, brackets_as_names, find_files
from toque.sources.token_arrays import TokenReader
from toque.user_paths import expanded

OnOverlong = Literal["error", "drop", "truncate", "split", "auto"]
Settings = Mapping[str, Any]  # settings of a manifest
Dedup = Literal["none", "exact", "near"]
USUAL_PROMPT = 256  # tokens; limit on prompts if nothing else determines it
USUAL_TARGET = 512  # tokens; limit on targets
LIMITS = ("max_prompt_tokens", "max_target_tokens")
CHAT = ("chat_template", "chat_date", "loss_on")  # settings of conversations
# If more records are unusable, the file probably has another format.
DEFAULT_BAD_SHARE = 0.5
CODE_VERSION = 4
"""Version of the code. It increases when the same inputs give different rows, so that older stores
are not reused.
"""
_DESCRIPTIONS = {
    "code_version": "the version of the preparation code",
    "own_template": "the hash of the tokenizer's chat template",
    "reader_versions": "the version of each reader",
    "room": "the model's maximum tokens per example",
    "held_out_from": "the number of sources in data.sources",
}
_HELD_OUT = ("held_out_from", "validation_fraction")
_BY_SOURCE = ("reader_versions", "max_files")  # settings with a value per source


@dataclass(frozen=True, kw_only=True)
class PrepareSettings:
    """Settings that change the content of a store. The configuration has checked them."""

    family_kind: FamilyKind
    tokenizer: str
    # None: `source_sample` chooses it from the data.
    max_prompt_tokens: int | None = USUAL_PROMPT
    max_target_tokens: int | None = USUAL_TARGET
    # Largest number of tokens of a prompt with its target: the model's context length plus 1,
    # because the last token is not read. Recorded with chosen limits.
    room: int | None = None
    on_overlong: OnOverlong = "auto"  # auto: truncate pairs and split documents
    validation_fraction: float = 0.1
    max_examples: int | None = None
    min_quality: float = 0.0
    dedup: Dedup = "exact"
    tasks: tuple[str, ...] = ("write",)
    # Largest fraction of records that a reader may drop.
    max_bad_share: float = DEFAULT_BAD_SHARE
    # Files read per source. Recorded if a source has a limit.
    max_files: tuple[int | None, ...] = ()
    chat_template: str = "auto"  # name or Jinja code; recorded for conversations only
    chat_date: str = CHAT_DATE
    loss_on: Literal["answers", "last_answer"] = "answers"
    held_out_from: int | None = None
    """Index of the first held-out source. None: part of all records is held out. Recorded only
    if it is a number."""

    def holds_out(self, source: int) -> bool:
        """Check if a source is held out."""
        return self.held_out_from is not None and source >= self.held_out_from

    @property
    def open_limits(self) -> list[str]:
        """Names of the limits that are not set and will be chosen from the data."""
        return [name for name in LIMITS if getattr(self, name) is None]

    @property
    def limits(self) -> tuple[int, int]:
        """Limits on prompt and target, in tokens. Both must be set."""
        assert self.max_prompt_tokens is not None and self.max_target_tokens is not None  # noqa: PT018
        return self.max_prompt_tokens, self.max_target_tokens

    def as_recorded(self) -> dict[str, Any]:
        """Return the settings for the manifest and the fingerprint."""
        values = asdict(self)
        values["tasks"] = list(self.tasks)
        values["max_files"] = list(self.max_files)
        for name in ("room", *CHAT):
            del values[name]
        if not self.max_files:
            del values["max_files"]
        if self.held_out_from is None:
            del values["held_out_from"]
        return values

    def conversation_settings(self) -> dict[str, str]:
        """Return the settings of conversations for the manifest."""
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
        """Vocabulary size of the tokenizer to train. None if the tokenizer already exists."""
        if not self.tokenizer.startswith(TRAINED):
            return None
        return int(self.tokenizer.removeprefix(TRAINED))


@dataclass(frozen=True)
class StorePlan:
    """Inputs of a store, collected before the first record is read."""

    store: Path
    settings: PrepareSettings
    files: Sequence[SourceFile]
    tokenizer: Path | None  # None: `prepare` trains it
    recorded: Settings  # settings and code versions for the manifest
    sources: Sequence[Source]

    @property
    def train_files(self) -> list[SourceFile]:
        """Files of sources that are not held out."""
        return [file for file in self.files if not self.settings.holds_out(file.source)]

    @property
    def left_out(self) -> dict[str, str]:
        """Reasons why files of the sources are not read, by file name."""
        reasons: dict[str, str] = {}
        for source in self.sources:
            reasons |= source.left_out
        return reasons

    def fingerprint(self, settings: PrepareSettings) -> str:
        """Hash the inputs that determine the rows. Chosen limits count like limits that are set."""
        content = dict(self.recorded)
        content |= {name: getattr(settings, name) for name in LIMITS}
        if settings.trained_vocab_size is None:
            # The tokenizer's path does not matter, because its hash is part of `recorded`.
            content["tokenizer"] = None
        if settings.open_limits:
            content["room"] = settings.room
        # The fraction of bad records decides whether a store is written, but not which rows it has.
        content["max_bad_share"] = DEFAULT_BAD_SHARE
        inputs = [[f.sha256, f.reader.recorded_name, f.source] for f in self.files]
        data = msgspec.json.encode([FORMAT, content, inputs], order="deterministic")
        return hashlib.sha256(data).hexdigest()

    def recorded_with(self, chosen: PrepareSettings) -> dict[str, Any]:
        """Return the settings for the manifest, with the chosen limits and their names."""
        recorded = dict(self.recorded)
        recorded |= {name: getattr(chosen, name) for name in LIMITS}
        if names := self.settings.open_limits:
            recorded |= {"chosen": names, "room": chosen.room}
        return recorded

    def differences(self, manifest: StoreManifest) -> list[str]:
        """Describe the differences between an existing store and the plan."""
        names = ("code_version", "reader_versions", "own_template")
        more = {name: self.recorded[name] for name in names if name in self.recorded}
        if self.settings.open_limits and manifest.settings.get("chosen"):
            more["room"] = self.settings.room
        sources = []
        for number, source in enumerate(self.sources):
            files = [file for file in self.files if file.source == number]
            sources.append((source.path, files))
        return store_differences(
            self.store,
            manifest,
            self.settings,
            tokenizer=self.tokenizer,
            sources=sources,
            more=more,
        )


def plan_of(
    sources: Sequence[Source], store: Path, settings: PrepareSettings
) -> StorePlan:
    """Plan a store: find and hash the files of its sources.

    Raises:
        DataError: A source or the tokenizer cannot be used.
        ConfigError: A setting for conversations is set, but no source has conversations. Or only
            some sources have preference pairs.
    """
    refuse_mixture(sources)
    sources = [source.for_tasks(settings.tasks) for source in sources]
    files = find_files(sources)
    tokenizer = None
    if settings.trained_vocab_size is None:
        tokenizer = resolve_tokenizer(settings.tokenizer)
    versions = [version for source in sources for version in source.versions]
    recorded = settings.as_recorded() | {
        "tokenizer_sha256": None if tokenizer is None else hash_of_folder(tokenizer),
        "code_version": CODE_VERSION,
        "reader_versions": versions,
    }
    if any(file.reader.recorded_name.startswith(CONVERSATIONS) for file in files):
        recorded |= settings.conversation_settings()
        recorded["own_template"] = _hash_template(tokenizer)
    elif any(
        getattr(settings, name) != getattr(PrepareSettings, name) for name in CHAT
    ):
        raise ConfigError(
            "data.chat_template, data.chat_date and data.loss_on apply only to conversations, but "
            "no source in data.sources has conversations. Remove these settings, or name the "
            "messages field in the columns of a source: {messages: NAME}."
        )
    return StorePlan(store, settings, files, tokenizer, recorded, sources)


def _hash_template(tokenizer: Path | None) -> str | None:
    """Hash the chat template in a tokenizer's folder. None without a template or folder."""
    if tokenizer is None:
        return None
    template = template_text(read_folder(tokenizer).settings)
    return None if template is None else _sha256(template)


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
    more: Settings | None = None,
) -> list[str]:
    """Describe the differences between a store and the requested store. [] means no difference.

    Args:
        store: The folder of the store.
        manifest: The store's manifest.
        settings: The requested settings.
        tokenizer: The folder of the requested tokenizer. Tokenizers are compared by their ids. None
            means that only names are compared.
        sources: The paths of the requested sources, each with its files, or with None if they are
            not on this machine. () means the sources of the store.
        encoding: The requested encoding. None means that the readers' encodings are compared.
        more: More requested values of the manifest's settings.
    """
    old = manifest.settings
    new = _requested_settings(old, settings, more or {}, has_sources=bool(sources))
    split_difference = _split_difference(manifest, new)
    skipped = {"tokenizer", "max_bad_share"}
    if split_difference:
        skipped.update(_HELD_OUT)
    # If the numbers of sources differ, `_source_differences` reports it.
    if sources and len({entry.source for entry in manifest.sources}) != len(sources):
        skipped.update(_BY_SOURCE)
    differences = split_difference + [
        f"{_DESCRIPTIONS.get(name, name)} was {old.get(name)} and is {value}"
        for name, value in new.items()
        if old.get(name) != value and name not in skipped
    ]
    differences += _tokenizer_difference(store, old, settings.tokenizer, tokenizer)

    if encoding is not None:
        old_encodings = _encodings(manifest) - {encoding}
        if old_encodings:
            change = f"data.encoding was {min(old_encodings)} and is {encoding}"
            return [*differences, change]

    entries = manifest.sources
    if split_difference:  # only training sources can be compared
        old_start = old.get("held_out_from", math.inf)
        entries = [entry for entry in entries if entry.source < old_start]
        sources = sources[: settings.held_out_from]
        settings = replace(settings, held_out_from=None)
    return differences + _source_differences(entries, sources, settings)


def _requested_settings(
    old: Settings,
    settings: PrepareSettings,
    more: Settings,
    *,
    has_sources: bool,
) -> dict[str, Any]:
    """List the requested settings as a manifest would record them.

    Args:
        old: The settings of an existing store. Its chosen limits count as requested.
        settings: The requested settings.
        more: More requested values.
        has_sources: Whether sources are requested. If not, the store's split counts as requested.
    """
    old_choices = old.get("chosen", ())
    chosen = {name: old[name] for name in settings.open_limits if name in old_choices}
    recorded = replace(settings, **chosen).as_recorded() | dict(more)
    new: dict[str, Any] = msgspec.to_builtins(recorded)
    new |= {name: "auto" for name in LIMITS if new[name] is None}
    if has_sources:
        # The manifest does not have these two settings if they are not set.
        new.setdefault("max_files", None)
        new.setdefault("held_out_from", None)
    elif "held_out_from" in old:
        new |= {name: old[name] for name in _HELD_OUT}
    if "chat_template" in old:
        new |= settings.conversation_settings()
    return new


def _encodings(manifest: StoreManifest) -> set[str]:
    """List the encodings of a store's text files. Token ids have no encoding."""
    readers = {entry.reader for entry in manifest.sources}
    readers.discard(TokenReader.recorded_name)
    return {encoding_of(reader) for reader in readers}


def _split_difference(manifest: StoreManifest, new: Settings) -> list[str]:
    """Describe a change from data.validation to a held-out share of the data, or the reverse."""
    old_start = manifest.settings.get("held_out_from")
    has_sources = new.get("held_out_from") is not None
    if has_sources == (old_start is not None):
        return []
    if old_start is None:
        share = manifest.settings.get("validation_fraction", 0.0)
        change = (
            f"{share:.0%} of data.sources was held out, but now data.validation is set; remove "
            "data.validation (in Python the argument validation) to use this store"
        )
    else:
        held_out = join_first(
            entry.path for entry in manifest.sources if entry.source >= old_start
        )
        change = (
            f"{held_out} was held out as data.validation, but data.validation is empty now, which "
            f"holds out {new['validation_fraction']:.0%} of data.sources; set data.validation (in "
            "Python the argument validation) again to use this store"
        )
    return [change]


def _tokenizer_difference(
    store: Path, old_settings: Settings, new: str, folder: Path | None
) -> list[str]:
    """Describe a change to the tokenizer, in a list of at most one text."""
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
    """Describe how the sources differ from the store's, in order and without a download."""
    numbers = sorted({entry.source for entry in entries})
    if sources and len(numbers) != len(sources):
        old_files = join_first(entry.path for entry in entries)
        new_paths = join_first(path for path, _ in sources)
        setting = "the data section"
        if settings.held_out_from is None:
            setting = "data.sources"
        return [
            (
                f"it was prepared from {len(numbers)} sources (files such as {old_files}), but "
                f"{setting} has {len(sources)} ({new_paths})"
            )
        ]
    differences = []
    for i, (path, files) in enumerate(sources):
        source_entries = [entry for entry in entries if entry.source == numbers[i]]
        source = f"data.sources[{i}] is {path}"
        if settings.holds_out(i):
            source = f"data.validation[{i - (settings.held_out_from or 0)}] is {path}"
        if files is not None:
            changes = _file_differences(source_entries, files)
            differences += [f"{source}: {change}" for change in changes]
        elif not all(_matches(path, entry.path) for entry in source_entries):
            names = join_first(entry.path for entry in source_entries)
            differences.append(
                f"{source}, which is not on this machine, but it was prepared from {names}"
            )
    return differences


def _file_differences(
    entries: Sequence[SourceEntry], files: Sequence[SourceFile]
) -> list[str]:
    """Describe how a source's files differ from the store's, by content and reader."""
    hashes = [file.sha256 for file in files]
    readers = {entry.sha256: entry.reader for entry in entries}
    new = [file.name for file in files if file.sha256 not in readers]
    missing = [entry.path for entry in entries if entry.sha256 not in hashes]
    # A new file has no earlier reader.
    reread = [
        file.name
        for file in files
        if readers.get(file.sha256, "") not in ("", file.reader.recorded_name)
    ]
    differences = []
    if new:
        old = join_first(entry.path for entry in entries)
        differences.append(
            f"{join_first(new)} is new or has changed since (it was prepared from {old})"
        )
    elif missing:
        differences.append(
            f"{join_first(missing)}, from which it was prepared, is missing"
        )
    elif [entry.sha256 for entry in entries] != hashes:
        differences.append("its files were in another order, or one was repeated")
    if reread:
        differences.append(
            f"{join_first(reread)} was read in another way (format, encoding, columns or tasks)"
        )
    return differences


def _matches(pattern: str, path: str) -> bool:
    """Check if a source's path is a file, its folder, or a pattern that matches it."""
    pattern = pattern.rstrip("/") if "://" in pattern else expanded(pattern)
    if path == pattern or path.startswith((f"{pattern}/", f"{pattern}:")):
        return True
    return fnmatch(path, pattern) or fnmatch(path, brackets_as_names(pattern))
