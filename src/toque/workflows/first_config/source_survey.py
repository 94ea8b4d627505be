"""Survey of sources: their kind, size and quality, estimated from their first records."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NoReturn

from toque.config import RunConfig
from toque.cooking.labels.features import read_features
from toque.cooking.labels.origins import language_of
from toque.cooking.recipe import Recipe, parse_text
from toque.cooking.schemas.reader import RecipeReader
from toque.data.prepare.data_report import (
    ENCODING_HINT,
    SourceReport,
    describe_reasons,
    describe_unused_fields,
    is_of_another_encoding,
)
from toque.errors import DataError, argument
from toque.sources.conversations import ConversationReader
from toque.sources.documents import PairReader, TextReader
from toque.sources.layouts import shown_names
from toque.sources.preference_pairs import PreferenceReader
from toque.sources.records import (
    BlockExamples,
    Example,
    Source,
    examples_in,
    is_filled,
    most_frequent,
)
from toque.sources.source_files import (
    SourceFile,
    blocks_of,
    find_files,
    is_documentation,
)
from toque.sources.token_arrays import TokenReader
from toque.user_paths import named_path
from toque.workflows.first_config.sizing import SAMPLE_BYTES

RECIPES: Final = "recipes"
DOCUMENTS: Final = "documents"
PAIRS: Final = "prompts with answers"
TOKENS: Final = "texts of token ids"
CONVERSATIONS: Final = "conversations"
PREFERENCES: Final = "preference pairs"
_KINDS: Final[dict[type, str]] = {
    RecipeReader: RECIPES,
    PairReader: PAIRS,
    TokenReader: TOKENS,
    ConversationReader: CONVERSATIONS,
    PreferenceReader: PREFERENCES,
}
"""Kind of a source by its reader. All other readers read documents."""
CHARACTERS_PER_TOKEN: Final = 4.0
"""Guess for English recipes and vocabularies of several thousand entries."""
_BYTES_PER_TOKEN_ID: Final = 4
_LOOK_BYTES: Final = 4 << 20
"""Bytes to read per source: several thousand recipes, in about a second."""
_FEW_REPEATS: Final = 0.8
"""Fraction of distinct records above which repeats are not reported."""
_SHOWN_EXAMPLES: Final = 40
"""Number of examples in which languages are recognised."""
_MAX_EXAMPLES: Final = 3
_SHOWN_CHARACTERS: Final = 1500
"""Maximum length of each part of an example."""
_FEW_RECORDS: Final = 5000
"""Number of distinct records below which `init` advises against a model from scratch. With 2,400
recipes, one or two of 20 random texts were usable (lab/notes.md)."""


@dataclass(frozen=True)
class SurveyedSource:
    """Source and its contents."""

    path: str
    kind: str = ""
    """One of the names above, or "" if the source was not read."""
    schema: str = ""
    """Name in the data report, e.g. "json-lines" or "foodcom"."""
    files: int = 1
    records: int = 0
    """Number of usable records."""
    tokens: int = 0
    """Estimated tokens of the distinct records."""
    distinct: int = 0
    """Number of distinct records."""
    is_complete: bool = True
    """False if only a part was read. The counts are then estimates."""
    remarks: tuple[str, ...] = ()
    """Messages about unused fields, repeats and a wrong encoding."""
    problems: tuple[str, ...] = ()
    """Reasons for dropping records, with their count and their first line."""
    examples: tuple[tuple[str, str], ...] = ()
    """Prompt and text of the first examples."""
    languages: tuple[str, ...] = ()
    """Languages of the first recipes, the most frequent first. Empty for other texts."""
    sample: bytes = field(default=b"", repr=False)
    """Random sample of the texts, at most `SAMPLE_BYTES`."""

    def __str__(self) -> str:
        """Return a short description of the contents."""
        if not self.kind:
            return "in a bucket or on the hub, not read"
        kind = self.kind
        if self.records == 1:
            kind = " ".join(word.removesuffix("s") for word in kind.split())
        about = "" if self.is_complete else "about "
        files = f" in {self.files:,} files" if self.files > 1 else ""
        return f"{self.schema}, {about}{self.records:,} {kind}{files}"


Survey = Sequence[SurveyedSource]


def survey_sources(config: RunConfig, local_sources: Sequence[Source]) -> Survey:
    """Describe the contents of the configuration's sources, in their order.

    Raises:
        DataError: A source has no usable record at its start.
    """
    contents = {source.path: _survey_source(source) for source in local_sources}
    return [
        contents.get(source.path, SurveyedSource(source.path))
        for source in config.data.sources
    ]


def kinds_of(survey: Survey) -> set[str]:
    """Return the kinds of all sources."""
    return {source.kind for source in survey}


def total_tokens(survey: Survey) -> int:
    """Return the estimated number of tokens in all sources that were read."""
    return sum(source.tokens for source in survey)


def total_records(survey: Survey) -> int:
    """Return the number of distinct records of all sources that were read."""
    return sum(source.distinct for source in survey)


def total_rows(survey: Survey) -> int:
    """Return the number of distinct rows in a store. A preference pair has two rows."""
    n_pairs = sum(source.distinct for source in survey if source.kind == PREFERENCES)
    return total_records(survey) + n_pairs


def remark_on_few_records(survey: Survey) -> list[str]:
    """Warn if a new model would learn its language from very few records."""
    n = total_records(survey)
    kinds_without_records = {"", DOCUMENTS, TOKENS}
    if n >= _FEW_RECORDS or kinds_without_records & kinds_of(survey):
        return []
    amount = f"{n:,} different {'record is' if n == 1 else 'records are'} few"
    remark = (
        f"{amount} for a new model, which learns its language only from them. Start from a "
        "pretrained model such as HuggingFaceTB/SmolLM2-135M, or add records."
    )
    return [remark]


@dataclass
class _Start:
    """Counts and texts of a source's first records."""

    n_read: int = 0
    n_usable: int = 0
    n_messages: int = 0
    bytes_read: float = 0.0
    tokens: float = 0.0
    keys: set[int] = field(default_factory=set)
    """Hashes of the usable records. Repeats have the same hash."""
    texts: list[str] = field(default_factory=list)
    message_fields: Counter[str] = field(default_factory=Counter)
    """Counts of messages with fields other than the text, by field."""
    unused: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    first_lines: dict[str, int] = field(default_factory=dict)
    """Line of the first dropped record by reason."""
    examples: list[Example] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)

    @property
    def has_other_encoding(self) -> bool:
        """True if the records look as if they were in another encoding."""
        return is_of_another_encoding(self.n_read, self.dropped, self.notes)

    def add(self, block: BlockExamples) -> None:
        """Add the examples of a block."""
        self.n_read += block.read
        self.n_usable += block.kept
        self.unused.update(block.unused)
        self.notes.update(block.notes)
        for reason, lines in block.dropped.items():
            self.dropped[reason] += len(lines)
            self.first_lines.setdefault(reason, min(lines))
        n_missing = _SHOWN_EXAMPLES - len(self.examples)
        self.examples += block.examples[: max(0, n_missing)]
        for example in block.examples:
            self._add_example(example)

    def _add_example(self, example: Example) -> None:
        self.keys.add(example.record_key)
        if text := example.text:
            self.texts.append(text)
        if example.ids:
            self.tokens += len(example.ids) / _BYTES_PER_TOKEN_ID
        else:
            characters = len(example.prompt) + len(example.target)
            self.tokens += characters / CHARACTERS_PER_TOKEN
        self.n_messages += len(example.turns)
        for turn in example.turns:
            self.message_fields.update(
                name for name, value in turn.fields.items() if is_filled(value)
            )


def _survey_source(source: Source) -> SurveyedSource:
    """Describe a source by its first `_LOOK_BYTES`.

    Raises:
        DataError: These bytes have no usable record.
    """
    files = find_files([source])
    sizes = [float(file.plain_bytes) for file in files]
    start, is_complete = _read_start(files, sizes)
    if start.n_usable == 0:
        _refuse_unusable(source, start)

    kind = _kind_of(source)
    scale = 1.0 if is_complete else max(1.0, sum(sizes) / start.bytes_read)
    records = scale * start.n_usable
    if scale > 1.0:
        records = float(f"{records:.2g}")  # an estimate has two significant digits
    distinct_share = len(start.keys) / start.n_usable
    return SurveyedSource(
        source.path,
        kind=kind,
        schema=files[0].reader.schema(files[0].path),
        files=len(files),
        records=round(records),
        tokens=round(start.tokens * scale * distinct_share),
        distinct=round(records * distinct_share),
        is_complete=is_complete,
        remarks=(*_remark_on_records(source.path, start), *_remark_on_files(source)),
        problems=tuple(
            f"{n:,} {reason}, first in line {start.first_lines[reason]:,}"
            for reason, n in start.dropped.most_common()
        ),
        examples=tuple(
            (_show_prompt(example), example.target[:_SHOWN_CHARACTERS])
            for example in start.examples[:_MAX_EXAMPLES]
        ),
        languages=_languages_of(start.examples) if kind == RECIPES else (),
        sample=_sample_texts(start.texts),
    )


def _show_prompt(example: Example) -> str:
    """Return the prompt of an example, or the messages before its answer."""
    prompt = example.prompt
    if example.turns:
        prompt = "\n".join(f"{turn.role}: {turn.text}" for turn in example.turns)
    return prompt[:_SHOWN_CHARACTERS]


def _languages_of(examples: Sequence[Example]) -> tuple[str, ...]:
    """Return the languages of recipes, the most frequent first."""
    languages: Counter[str] = Counter()
    for example in examples:
        parsed = parse_text(example.target)
        recipe = Recipe("", parsed.ingredients, parsed.steps)
        languages[language_of(read_features(recipe))] += 1
    return tuple(name for name, _ in languages.most_common())


def _kind_of(source: Source) -> str:
    for reader, kind in _KINDS.items():
        if isinstance(source.reader, reader):
            return kind
    return DOCUMENTS


def _refuse_unusable(source: Source, start: _Start) -> NoReturn:
    """Raise a DataError for a source without a usable record, with the reasons and advice."""
    advice = "docs/reference/formats.md lists the supported formats."
    if start.has_other_encoding:
        advice = f"{ENCODING_HINT} For init it is {argument('encoding=cp1252')}."
    raise DataError(
        f"{source.path} has no usable record in its first {start.bytes_read:,.0f} bytes: "
        f"{describe_reasons(start.dropped, {})}. {advice}"
    )


def _read_start(
    files: Sequence[SourceFile], sizes: Sequence[float]
) -> tuple[_Start, bool]:
    """Read the first `_LOOK_BYTES`. Also return whether these are all bytes."""
    start = _Start()
    for file, size in zip(files, sizes, strict=True):
        for block in blocks_of(file):
            if start.bytes_read >= _LOOK_BYTES:
                return start, False
            start.add(examples_in(block, file.reader))
            # The payload may be longer than the file's size, which is an estimate.
            start.bytes_read += min(size, len(block.payload))
    return start, True


def _remark_on_records(path: str, start: _Start) -> list[str]:
    """Report unused fields, a wrong encoding and repeats."""
    report = SourceReport(path, "", 0, start.n_read, start.n_usable, dict(start.unused))
    remarks = [*describe_unused_fields([report]), *_remark_on_messages(path, start)]
    if start.has_other_encoding:
        remarks.append(ENCODING_HINT)
    n_distinct = len(start.keys)
    if n_distinct / start.n_usable < _FEW_REPEATS:
        remarks.append(
            f"{start.n_usable - n_distinct:,} of the {start.n_usable:,} records of {path} that "
            "were read are repeats. `prepare` leaves them out."
        )
    return remarks


def _remark_on_messages(path: str, start: _Start) -> list[str]:
    """Report fields of messages other than their texts, and notes about conversations."""
    if not start.n_messages:
        return []
    remarks = []
    if start.message_fields:
        fields = most_frequent(start.message_fields)
        names = ", ".join(f"{name!r} ({n:,})" for name, n in fields.items())
        remarks.append(
            f"Other fields of the {start.n_messages:,} messages of {path} that were read: {names}. "
            "The chat template receives them, and the data report counts the fields that it "
            "ignores."
        )
    # `+` leaves out counts of 0.
    notes = sorted((+start.notes).items())
    return remarks + [f"{path}: {n:,} {note}." for note, n in notes]


def _remark_on_files(source: Source) -> list[str]:
    """Report hidden files of a folder, and documentation among its texts."""
    remarks = []
    folder = named_path(source.path)
    hidden = sorted(path.name for path in folder.glob(".*")) if folder.is_dir() else []
    if hidden:
        remarks.append(
            f"Hidden files of {source.path} are not read: {shown_names(hidden)}."
        )
    names = [file.name for file in source.files or ()]
    documentation = [Path(name).name for name in names if is_documentation(name)]
    # A user who names a folder with only documentation wants to read it.
    if isinstance(source.reader, TextReader) and 0 < len(documentation) < len(names):
        remarks.append(
            f"Files of {source.path} that look like documentation are read as text: "
            f"{shown_names(documentation)}. To leave them out, move them or name only the other "
            "files."
        )
    return remarks


def _sample_texts(texts: list[str]) -> bytes:
    """Return a random sample. The texts are shuffled, because neighbours may be similar."""
    random.Random(17).shuffle(texts)  # a fixed seed, so that the forecast is repeatable
    return "\n".join(texts).encode(errors="replace")[:SAMPLE_BYTES]
