"""Store plan: the settings of the store that is asked for, its fingerprint, and differences."""

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
from toque.data.tokenizer.tokenizer_folder import hash_of_folder, read_folder, resolve_tokenizer
from toque.errors import ConfigError, DataError
from toque.sources.conversations import CONVERSATIONS
from toque.sources.records import Source, encoding_in
from toque.sources.source_files import SourceFile, brackets_as_names, find_files
from toque.sources.token_arrays import TokenReader
from toque.user_paths import expanded

OnOverlong = Literal["error", "drop", "truncate", "split", "auto"]
Dedup = Literal["none", "exact", "near"]
USUAL_PROMPT, USUAL_TARGET = 256, 512  # limits where nothing else decides
LIMITS = ("max_prompt_tokens", "max_target_tokens")
CHAT = ("chat_template", "chat_date", "loss_on")  # settings of conversations
DEFAULT_BAD_SHARE = 0.5  # over half of the records unusable: the file is likely of another format
CODE_VERSION = 4  # raised when the same inputs give other rows: older stores are not reused
_NAMED: Final = 3  # files that a sentence names
_IN_WORDS: Final = {
    "code_version": "the version of preparing",
    "own_template": "the hash of the tokenizer's chat template",
    "reader_versions": "the version of each reader",
    "room": "the model's room in tokens",
    "held_out_from": "the number of sources before those of data.validation",
}
_HELD_OUT: Final = ("held_out_from", "validation_fraction")
_BY_SOURCE: Final = ("reader_versions", "max_files")  # settings with a value for each source


@dataclass(frozen=True, kw_only=True)
class PrepareSettings:
    """Everything that changes what a store holds, checked by the configuration."""

    family_kind: FamilyKind
    tokenizer: str
    max_prompt_tokens: int | None = USUAL_PROMPT  # None: chosen from the data (`source_sample`)
    max_target_tokens: int | None = USUAL_TARGET
    room: int | None = None  # tokens of both sides, for limits to choose; recorded if any is
    on_overlong: OnOverlong = "auto"  # truncates pairs and splits documents
    validation_fraction: float = 0.1
    max_examples: int | None = None
    min_quality: float = 0.0
    dedup: Dedup = "exact"
    tasks: tuple[str, ...] = ("write",)
    max_bad_share: float = DEFAULT_BAD_SHARE  # of records a reader refuses; above is an error
    max_files: tuple[int | None, ...] = ()  # files read of each source; recorded if one is limited
    chat_template: str = "auto"  # a name or Jinja; recorded with `loss_on` of conversations alone
    chat_date: str = CHAT_DATE
    loss_on: Literal["answers", "last_answer"] = "answers"
    held_out_from: int | None = None
    """Sources from this number on are held out, the others trained on; None: a share of all is.
    Recorded where it is a number."""

    def holds_out(self, source: int) -> bool:
        """True if the source of this number is held out whole."""
        return self.held_out_from is not None and source >= self.held_out_from

    @property
    def open_limits(self) -> list[str]:
        """The limits that are chosen from the data, by name."""
        return [name for name in LIMITS if getattr(self, name) is None]

    @property
    def limits(self) -> tuple[int, int]:
        """Longest prompt and target, once both are known."""
        assert self.max_prompt_tokens is not None and self.max_target_tokens is not None  # noqa: PT018
        return self.max_prompt_tokens, self.max_target_tokens

    def as_recorded(self) -> dict[str, Any]:
        """The settings as manifests record them and fingerprints cover them."""
        values = {**asdict(self), "tasks": list(self.tasks), "max_files": list(self.max_files)}
        left_out = {"room", *CHAT} if self.max_files else {"room", "max_files", *CHAT}
        left_out |= {"held_out_from"} if self.held_out_from is None else set()
        return {name: value for name, value in values.items() if name not in left_out}

    @property
    def of_conversations(self) -> dict[str, str]:
        """The settings of conversations as they are recorded."""
        template = self.chat_template
        if template not in ("auto", *TEMPLATES):
            template = f"Jinja with the SHA-256 {hashlib.sha256(template.encode()).hexdigest()}"
        return {
            "chat_template": template,
            "chat_date": self.chat_date,
            "loss_on": self.loss_on,
        }

    @property
    def trained_vocab_size(self) -> int | None:
        """Vocabulary size of the tokenizer to train; None if it is given."""
        learnt = self.tokenizer.startswith(TRAINED)
        return int(self.tokenizer.removeprefix(TRAINED)) if learnt else None


@dataclass(frozen=True)
class StorePlan:
    """Everything known before the first record is read."""

    store: Path
    settings: PrepareSettings
    files: Sequence[SourceFile]
    tokenizer: Path | None  # None: it is to be trained
    recorded: Mapping[str, Any]  # settings and versions of the code, for the manifest
    sources: Sequence[Source]

    @property
    def held_out(self) -> list[SourceFile]:
        """Files of the sources that are held out whole."""
        return [file for file in self.files if self.settings.holds_out(file.source)]

    @property
    def trained(self) -> list[SourceFile]:
        """The other files."""
        return [file for file in self.files if not self.settings.holds_out(file.source)]

    @property
    def left_out(self) -> dict[str, str]:
        """Files of the sources that are not read, with the reason."""
        return {name: why for source in self.sources for name, why in source.left_out.items()}

    def fingerprint(self, settings: PrepareSettings) -> str:
        """Hash of all that decides the rows; limits count the same whoever chose them."""
        counted = dict(self.recorded) | {name: getattr(settings, name) for name in LIMITS}
        if settings.trained_vocab_size is None:
            counted["tokenizer"] = None  # its content counts, not where it lies
        if settings.open_limits:
            counted["room"] = settings.room
        # The share of bad records decides whether there is a store, never what is in it.
        counted["max_bad_share"] = DEFAULT_BAD_SHARE
        inputs = [[f.sha256, f.reader.recorded_name, f.source] for f in self.files]
        data = msgspec.json.encode([FORMAT, counted, inputs], order="deterministic")
        return hashlib.sha256(data).hexdigest()

    def recorded_with(self, chosen: PrepareSettings) -> dict[str, Any]:
        """The settings as recorded once the limits are known; those that were chosen are named."""
        names = self.settings.open_limits
        how = {"chosen": names, "room": chosen.room} if names else {}
        return dict(self.recorded) | {name: getattr(chosen, name) for name in LIMITS} | how

    def differences(self, manifest: StoreManifest) -> list[str]:
        """Differences of the existing store from the planned one, in words; [] for the same."""
        names = ("code_version", "reader_versions", "own_template")
        more = {name: self.recorded[name] for name in names if name in self.recorded}
        if self.settings.open_limits and manifest.settings.get("chosen"):
            more["room"] = self.settings.room
        files = [[f for f in self.files if f.source == n] for n in range(len(self.sources))]
        return store_differences(
            self.store,
            manifest,
            self.settings,
            tokenizer=self.tokenizer,
            sources=[(s.path, own) for s, own in zip(self.sources, files, strict=True)],
            more=more,
        )


def plan_of(sources: Sequence[Source], store: Path, settings: PrepareSettings) -> StorePlan:
    """The plan of these sources, whose files are hashed."""
    sources = [source.for_tasks(settings.tasks) for source in sources]
    learnt = settings.trained_vocab_size is not None
    files = find_files(sources)
    tokenizer = None if learnt else resolve_tokenizer(settings.tokenizer)
    recorded = settings.as_recorded() | {
        "tokenizer_sha256": None if tokenizer is None else hash_of_folder(tokenizer),
        "code_version": CODE_VERSION,
        "reader_versions": [version for source in sources for version in source.versions],
    }
    if any(file.reader.recorded_name.startswith(CONVERSATIONS) for file in files):
        own = None if tokenizer is None else template_text(read_folder(tokenizer).settings)
        digest = None if own is None else hashlib.sha256(own.encode()).hexdigest()
        recorded |= settings.of_conversations | {"own_template": digest}
    elif any(getattr(settings, name) != getattr(PrepareSettings, name) for name in CHAT):
        raise ConfigError(
            "data.chat_template, data.chat_date or data.loss_on is set, and no source of "
            "data.sources holds conversations. Leave it out, or name the field of their messages "
            "in columns of the source: {messages: NAME}."
        )
    return StorePlan(store, settings, files, tokenizer, recorded, sources)


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
    """Differences of a store from the one that is asked for, in words; [] for the same.

    A tokenizer is compared by what it does, by its name where it has no folder. `sources` are each
    one's path with its files, None where they are not on this machine; () takes the store's. An
    `encoding` of None is left to the readers' names.
    """
    was = manifest.settings
    chosen = {name: was[name] for name in settings.open_limits if name in was.get("chosen", ())}
    asked = msgspec.to_builtins(replace(settings, **chosen).as_recorded() | dict(more or {}))
    asked |= {name: "auto" for name in LIMITS if asked[name] is None}
    if sources:
        asked.setdefault("max_files", None)
        asked.setdefault("held_out_from", None)
    elif "held_out_from" in was:  # the store's own sources, of which no share is held out
        asked |= {name: was[name] for name in ("held_out_from", "validation_fraction")}
    if "chat_template" in was:
        asked |= settings.of_conversations
    how_held_out = _held_out_difference(manifest, asked)
    silent = {"tokenizer", "max_bad_share", *(_HELD_OUT if how_held_out else ())}
    # Of other numbers of sources the sources themselves are compared below.
    n_sources = len({entry.source for entry in manifest.sources})
    silent |= set(_BY_SOURCE if sources and n_sources != len(sources) else ())
    found = how_held_out + [
        f"{_IN_WORDS.get(name, name)} was {was.get(name)} and is {value}"
        for name, value in asked.items()
        if was.get(name) != value and name not in silent
    ]
    found += _tokenizer_difference(store, was, settings.tokenizer, tokenizer)
    # Token ids have no encoding, so no reader of theirs names one.
    tokens = TokenReader.recorded_name
    others = {encoding_in(e.reader) for e in manifest.sources if e.reader != tokens} - {encoding}
    if encoding is not None and others:
        return [*found, f"data.encoding was {min(others)} and is {encoding}"]
    entries = manifest.sources
    if how_held_out:  # then only what is trained on can be compared
        before, now = was.get("held_out_from", math.inf), settings.held_out_from
        entries = [entry for entry in entries if entry.source < before]
        sources, settings = sources[:now], replace(settings, held_out_from=None)
    return found + _source_differences(entries, sources, settings)


def _held_out_difference(manifest: StoreManifest, asked: Mapping[str, Any]) -> list[str]:
    """The difference between holding out data.validation and holding out a share of the data."""
    before, now = manifest.settings.get("held_out_from"), asked.get("held_out_from")
    if (before is None) == (now is None):
        return []
    if before is None:
        share = manifest.settings.get("validation_fraction", 0.0)
        said = (
            f"{share:.0%} of data.sources was held out, and now data.validation is; leave "
            "data.validation out (in Python the argument validation) to use this store"
        )
        return [said]
    held_out = named(entry.path for entry in manifest.sources if entry.source >= before)
    said = (
        f"{held_out} was held out as data.validation, which is empty now, so that "
        f"{asked['validation_fraction']:.0%} of data.sources would be held out instead; give "
        "data.validation (in Python the argument validation) again to use this store"
    )
    return [said]


def _tokenizer_difference(
    store: Path, was: Mapping[str, Any], asked: str, folder: Path | None
) -> list[str]:
    before = was.get("tokenizer")
    if folder is None:
        return [] if before == asked else [f"its tokenizer was {before} and is {asked}"]
    if was.get("tokenizer_sha256") == hash_of_folder(folder):
        return []
    try:
        how = tokenizer_differences(load_codec(store / "tokenizer"), load_codec(folder))
    except DataError as error:
        how = [str(error)]
    if not how:  # saved again, or learnt for the store and now a finished model's
        return []
    is_now = f"{asked} has changed since" if before == asked else f"was {before} and is {asked}"
    return [f"its tokenizer {is_now} ({'; '.join(how)}, where one is the store's)"]


def _source_differences(
    entries: Sequence[SourceEntry],
    asked: Sequence[tuple[str, Sequence[SourceFile] | None]],
    settings: PrepareSettings,
) -> list[str]:
    """Differences of the sources, which count in their order; nothing is fetched to find them."""
    numbers = sorted({entry.source for entry in entries})
    if asked and len(numbers) != len(asked):
        stores = named(entry.path for entry in entries)
        lists = named(path for path, _ in asked)
        stores = f"it was prepared from {len(numbers)} (files such as {stores})"
        both = "data.sources" if settings.held_out_from is None else "the data section"
        return [f"{stores}, and {both} lists {len(asked)} ({lists})"]
    found = []
    for i, ((path, files), number) in enumerate(zip(asked, numbers, strict=False)):
        own = [entry for entry in entries if entry.source == number]
        place = f"data.sources[{i}] is {path}"
        if settings.holds_out(i):
            place = f"data.validation[{i - (settings.held_out_from or 0)}] is {path}"
        if files is not None:
            found += [f"{place}: {how}" for how in _file_differences(own, files)]
        elif not all(_names(path, entry.path) for entry in own):
            names = named(entry.path for entry in own)
            found.append(f"{place}, which is not on this machine, and it was prepared from {names}")
    return found


def _file_differences(entries: Sequence[SourceEntry], files: Sequence[SourceFile]) -> list[str]:
    """Differences of a source's files by content and reader, wherever they lie."""
    now = [file.sha256 for file in files]
    readers = {entry.sha256: entry.reader for entry in entries}
    new = [file.name for file in files if file.sha256 not in readers]
    gone = [entry.path for entry in entries if entry.sha256 not in now]
    other = [f.name for f in files if readers.get(f.sha256, "") not in ("", f.reader.recorded_name)]
    found = []
    if new:
        then = named(entry.path for entry in entries)
        found.append(f"{named(new)} is new or has changed since (it was prepared from {then})")
    elif gone:
        found.append(f"{named(gone)}, which it was prepared from, is not there any more")
    elif [entry.sha256 for entry in entries] != now:
        found.append("its files were in another order, or one was there more than once")
    if other:
        found.append(f"{named(other)} was read in another way (format, encoding, columns or tasks)")
    return found


def _names(pattern: str, path: str) -> bool:
    """True if a source's path names this file: itself, or a folder or a pattern it lies in."""
    pattern = expanded(pattern) if "://" not in pattern else pattern.rstrip("/")
    if path == pattern or path.startswith((f"{pattern}/", f"{pattern}:")):
        return True
    return fnmatch(path, pattern) or fnmatch(path, brackets_as_names(pattern))


def named(paths: Iterable[str]) -> str:
    """The first few of many paths."""
    paths = list(paths)
    more = f" and {len(paths) - _NAMED} more" if len(paths) > _NAMED else ""
    return ", ".join(paths[:_NAMED]) + more
