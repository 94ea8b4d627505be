"""Plan of a store: everything known before the first record is read, and its fingerprint."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from toque.data.prepare.settings import DEFAULT_BAD_SHARE, LIMITS, PrepareSettings
from toque.data.prepare.worker import Job
from toque.data.store.manifest import FORMAT
from toque.data.tokenizer.folder import hash_of_folder, resolve_tokenizer
from toque.sources.files import SourceFile, find_files
from toque.sources.plain_text import TextReader
from toque.sources.records import Source
from toque.sources.token_arrays import TokenReader

CODE_VERSION = 2
"""Raised when the same inputs and settings would give other rows: older stores are not reused."""


@dataclass(frozen=True)
class Plan:
    """Everything known before the first record is read."""

    job: Job
    files: list[SourceFile]
    tokenizer: Path | None
    """None: it is to be trained."""
    recorded: dict[str, Any]
    """The settings as the manifest records them."""
    inputs: list[Any]
    """What a fingerprint covers besides settings: content and reader of every source file."""
    left_out: dict[str, str]
    """Files of the sources that are not read, with the reason."""

    def fingerprint(self, settings: PrepareSettings, **changed: object) -> str:
        """Of a store with these settings, whose limits are the same whoever chose them."""
        recorded = self.recorded | {name: getattr(settings, name) for name in LIMITS} | changed
        # The paths of the tokenizer and the sources do not change the store.
        learnt = settings.trained_vocab_size is not None
        counted = recorded | ({} if learnt else {"tokenizer": None})
        counted |= {"room": settings.room} if settings.open_limits else {}
        # The share of bad records decides whether there is a store, never what is in it: one made
        # under another limit is the same, with the fingerprint it has had since 0.1.0.
        counted |= {"max_bad_share": DEFAULT_BAD_SHARE}
        inputs = [FORMAT, counted, self.inputs]
        data = msgspec.json.encode(inputs, order="deterministic")
        return hashlib.sha256(data).hexdigest()

    def fingerprint_of_shards(self) -> str:
        """Of what decides a shard besides its blocks.

        A tokenizer or limits that are learnt from the sources bring all of them into every shard;
        otherwise the sources' content counts block by block, and shards can be written while later
        files are still being fetched.
        """
        settings = self.job.settings
        if self._learns:
            return self.fingerprint(settings)
        return dataclasses.replace(self, inputs=[]).fingerprint(settings)

    @property
    def can_begin(self) -> bool:
        """Whether shards can be written before all files are here."""
        return not self._learns and self.job.settings.max_examples is None

    @property
    def _learns(self) -> bool:
        """Whether the tokenizer or a limit is learnt from the sources."""
        settings = self.job.settings
        if settings.trained_vocab_size is not None:
            return True
        # Of documents that are split no length is looked at.
        documents = all(isinstance(f.reader, TokenReader | TextReader) for f in self.files)
        return bool(settings.open_limits) and not (documents and settings.splits_documents)

    def recorded_with(self, chosen: PrepareSettings) -> dict[str, Any]:
        """The settings as recorded once the limits are known; those that were chosen are named."""
        names = self.job.settings.open_limits
        said = {"chosen": names, "room": chosen.room} if names else {}
        return self.recorded | {name: getattr(chosen, name) for name in LIMITS} | said


def plan_of(sources: Sequence[Source], store: Path, settings: PrepareSettings) -> Plan:
    """The plan of these sources; what is still being fetched is in it without its checksum."""
    sources = [source.for_tasks(settings.tasks) for source in sources]
    files = find_files(sources)
    learnt = settings.trained_vocab_size is not None
    tokenizer = None if learnt else resolve_tokenizer(settings.tokenizer)
    recorded = settings.as_recorded() | {
        "tokenizer_sha256": None if tokenizer is None else hash_of_folder(tokenizer),
        "code_version": CODE_VERSION,
        "reader_versions": [version for source in sources for version in source.versions],
    }
    inputs = [[f.sha256, f.reader.recorded_name, f.source] for f in files]
    readers = {number: source.reader for number, source in enumerate(sources)}
    others = {
        (number, name): reader
        for number, source in enumerate(sources)
        for name, reader in source.readers.items()
    }
    left_out = {name: why for source in sources for name, why in source.left_out.items()}
    job = Job(store, "", readers, settings, others)
    plan = Plan(job, files, tokenizer, recorded, inputs, left_out)
    job = dataclasses.replace(job, fingerprint=plan.fingerprint_of_shards())
    return dataclasses.replace(plan, job=job)
