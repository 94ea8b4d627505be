"""First configuration for the files of a user."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from toque.config import RunConfig, resolve_values
from toque.config.dump import flow
from toque.config.json_schema import SCHEMA_FILE, schema_text
from toque.config.schema import TRAINED, ModelConfig
from toque.config.yaml_reader import read_yaml
from toque.cooking.schemas.reader import RecipeReader
from toque.data.prepare.data_report import (
    ENCODING_HINT,
    SourceReport,
    describe_reasons,
    describe_unused_fields,
    is_of_another_encoding,
)
from toque.data.tokenizer.codec import load_codec
from toque.data.tokenizer.tokenizer_folder import tokenizer_here
from toque.errors import ConfigError, DataError, argument, in_shell
from toque.hardware.processor import WORTH_WHILE, ProcessorUse, usable_cores
from toque.reporter import SILENT, Reporter
from toque.sources.conversations import ConversationReader
from toque.sources.decompress import UTF_8
from toque.sources.documents import PairReader, TextReader
from toque.sources.hub_datasets import saved_splits
from toque.sources.layouts import RefusedFileError, columns_in_words, shown_names
from toque.sources.records import Source, examples_in, is_filled, most_frequent
from toque.sources.source_files import blocks_of, find_files, is_documentation
from toque.sources.token_arrays import TokenReader
from toque.storage.atomic import atomic_write
from toque.storage.bucket import is_remote
from toque.units import Duration
from toque.user_paths import named_path
from toque.workflows.configure import Columns, configure, source_columns
from toque.workflows.first_config.init_base import MeasuredBase, measure_base
from toque.workflows.first_config.sizing import (
    EVALUATING,
    MAX_BATCH_TOKENS,
    MAX_PASSES,
    OF_PLAIN_TEXT,
    OF_RECIPES,
    POSITIONS,
    SAMPLE_BYTES,
    SIZES,
    WRITTEN_AT_ONCE,
    Choice,
    TextTokenizer,
    Tuning,
    batch_for,
    choose_size,
    measure_writing_rate,
    model_settings,
    parse_run_time,
    plan_tuning,
    tokenizer_for_text,
    trained_tokenizer,
    training_seconds,
    tuned_lr,
)
from toque.workflows.prepared_store import open_sources

RECIPES, DOCUMENTS = "recipes", "documents"
PAIRS, TOKENS = "prompts with answers", "texts of token ids"
CONVERSATIONS = "conversations"
_LOOK_BYTES: Final = 4 << 20
"""Bytes to read of each source: several thousand recipes, in about a second."""
_CHARACTERS_PER_TOKEN: Final = 4.0
"""Guess for English recipes and vocabularies of several thousand entries."""
_MEASURED_SECONDS: Final = 0.5
"""Minimum duration for the processor's counters, which count hundredths of a second."""
_EVALUATIONS: Final = 10
_HELD_OUT_SHARE: Final = 0.05
"""Share of the examples to hold out, if no source is held out."""
_MAX_LOST_MINUTES: Final = 10
"""Minutes of training that a run without a warning before its kill may lose."""
_MAX_HELD_OUT: Final = 512
_MIN_HELD_OUT: Final = 32
_MAX_FINAL_TEXTS: Final = 16
_WRITING: Final = 0.25
"""Ratio of generation speed to training speed, a guess if the base is not measured
(lab/performance.md, "Threads that wait")."""
_FEW_REPEATS: Final = 0.8
"""Share of different records above which repeats are not reported."""
_FEW_RECORDS: Final = 5000
"""Number of different records below which `init` advises against a model from scratch. With 2,400
recipes, one or two of 20 random texts were usable (lab/notes.md)."""
_HELD_OUT_SPLITS: Final = ("validation", "valid", "dev", "test")
"""Names of splits to hold out. The first existing split is used."""
_COMMENT_COLUMN: Final = 29
"""Column of the comments at the ends of lines."""


@dataclass(frozen=True)
class FoundSource:
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
    """Estimated tokens of the different records."""
    different: int = 0
    """Number of different records."""
    whole: bool = True
    """False if only a part was read. The counts are then estimates."""
    remarks: tuple[str, ...] = ()
    """Messages about unused fields, repeats and a wrong encoding."""
    sample: bytes = field(default=b"", repr=False)
    """Random sample of the texts, at most `SAMPLE_BYTES`."""

    def __str__(self) -> str:
        """Return a short description of the contents."""
        if not self.kind:
            return "in a bucket or on the hub, not read"
        kind = self.kind
        if self.records == 1:
            kind = " ".join(word.removesuffix("s") for word in kind.split())
        about = "" if self.whole else "about "
        files = f" in {self.files:,} files" if self.files > 1 else ""
        return f"{self.schema}, {about}{self.records:,} {kind}{files}"


@dataclass(frozen=True)
class Initialised:
    """Configuration file that `init` wrote."""

    file: Path
    config: RunConfig
    sources: tuple[FoundSource, ...]
    remarks: tuple[str, ...] = ()
    """Messages about data that is left out or cut."""
    forecast: str = ""
    """Expected result of the run, or "" if it is unknown."""

    def __str__(self) -> str:
        """Return the sources, the remarks and the next step."""
        lines = [f"{source.path}: {source}" for source in self.sources]
        lines += self.remarks
        if self.forecast:
            lines.append(self.forecast)
        lines.append(
            f"Wrote {self.file}. Check it, then run: toque train {in_shell(self.file)}"
        )
        return "\n".join(lines)


def init(
    sources: str | Path | Sequence[str | Path],
    *,
    to: str | Path = "my.yaml",
    size: str | None = None,
    start_from: str | Path = "scratch",
    for_: str = "1 hour",
    tokenizer: str = "auto",
    encoding: str = "utf-8",
    columns: Columns | None = None,
    replace: bool = False,
    reporter: Reporter = SILENT,
) -> Initialised:
    """Look at files and write a commented configuration for them, ready to train.

    Args:
        sources: One or several files, folders or patterns. The format of the files is detected.
        to: The file to write. The run and the store are named after it.
        size: Size of a model from scratch: 300k, 1m, 3m, 6m, 14m or 30m, the number of parameters
            with a vocabulary of 2,048 tokens. None: the best size for the text, the time and the
            measured speed of this machine.
        start_from: The model to continue from, a folder or a hub name. The default is random
            weights.
        for_: Time of the entire run with preparation and scores, e.g. "10 minutes". "tonight" is
            eight hours.
        tokenizer: A folder or a hub name. auto: the tokenizer of the model, or a new tokenizer
            trained on the data.
        encoding: Encoding of text files, e.g. cp1252 for an old export.
        columns: The field for each part of a record, {"prompt": "question", "target": "answer"},
            or a template over fields, {"prompt": "{question} {hint}", "target": "answer"}.
        replace: Overwrite an existing file.
        reporter: Receives slow activities.

    Returns:
        The file, its configuration, and the contents of each source.

    Raises:
        ConfigError: `to` exists or is not writable, or a value is invalid.
        DataError: A source cannot be found or recognised, or has no usable record.
    """
    source_paths = [sources] if isinstance(sources, str | Path) else list(sources)
    file = named_path(to)
    start = str(start_from)
    _refuse_early(source_paths, size, file, replace=replace)

    total = parse_run_time(for_)
    paths, held_out, split_remarks = _choose_splits(
        [str(path) for path in source_paths]
    )
    column_settings = source_columns(columns)
    model = {"family": "auto", "start_from": start} if start != "scratch" else {}
    draft = configure(
        data={
            "sources": [{"path": path, **column_settings} for path in paths],
            "validation": [{"path": path, **column_settings} for path in held_out],
            "encoding": encoding,
        },
        model=model | {"tokenizer": tokenizer},
        train={"stop_after": str(total)},
    )
    with reporter.working("reading the files"):
        local_sources = _open_local_sources(draft, reporter.notice)
        survey = _survey(draft, local_sources)

    base, plan, batch = _plan_run(draft, local_sources, survey, total, size, reporter)
    remarks = [remark for source in survey for remark in source.remarks]
    remarks += [*base.remarks, *split_remarks]
    if start == "scratch":
        remarks += _remark_on_few_records(survey)
    text = _render_config(draft, survey, file, base, plan, batch)
    config = resolve_values(read_yaml(text, str(file)).value, str(file)).config
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(file, text.encode())
        atomic_write(file.parent / SCHEMA_FILE, schema_text().encode())
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be written: {error.strerror}. Name another file with {argument('to')}."
        ) from error
    forecast = "" if plan is None else plan.forecast(total)
    return Initialised(file, config, tuple(survey), tuple(remarks), forecast)


def _plan_run(
    draft: RunConfig,
    local_sources: Sequence[Source],
    survey: Sequence[FoundSource],
    total: Duration,
    size: str | None,
    reporter: Reporter,
) -> tuple[MeasuredBase, Choice | Tuning | None, str]:
    """Return the settings for the base, the use of the time, and `train.batch`."""
    # A source in a bucket may be far larger than the local files, so the amount is unknown.
    tokens, records = (
        _amount(survey) if all(source.tokens for source in survey) else (0, 0)
    )
    before = ProcessorUse.now()
    if draft.model.start_from == "scratch":
        with reporter.working("measuring the training speed of this machine"):
            choice, remarks = _choose_new_model(
                draft, survey, tokens, records, total, size
            )
        read = choice.passes.useful * (tokens or math.inf)
        max_tokens = choice.size.batch_tokens
        batch = batch_for(
            read, tokens, records, max_tokens=max_tokens, longest=POSITIONS
        )
        return MeasuredBase(remarks=(*remarks, *_remark_on_load(before))), choice, batch

    seconds = training_seconds(tokens * _CHARACTERS_PER_TOKEN, total)
    with reporter.working(
        "reading the model and measuring its training speed on this machine"
    ):
        base = measure_base(draft, local_sources, tokens / records if records else None)
        model = {"family": "auto", "start_from": draft.model.start_from}
        writing = (
            _writing_rate(model, survey, tokens, records) if base.is_small else 0.0
        )
    if base.rate is None:
        read = MAX_PASSES * (tokens or math.inf)
        return (
            base,
            None,
            batch_for(read, tokens, records, max_tokens=MAX_BATCH_TOKENS, longest=1),
        )
    if base.tokens_each and _kinds(survey).isdisjoint({DOCUMENTS, TOKENS, ""}):
        tokens = round(base.tokens_each * records)
    trained = tokens if draft.data.validation else tokens * (1.0 - _HELD_OUT_SHARE)
    tuning = plan_tuning(trained, records, seconds, base.rate, longest=base.longest)
    base = base._replace(remarks=(*base.remarks, *_remark_on_load(before)))
    return base, tuning._replace(writing=writing), tuning.batch


def _kinds(survey: Sequence[FoundSource]) -> set[str]:
    return {source.kind for source in survey}


def _choose_new_model(
    draft: RunConfig,
    survey: Sequence[FoundSource],
    tokens: int,
    records: int,
    total: Duration,
    size: str | None,
) -> tuple[Choice, list[str]]:
    """Choose the size of a new model by this machine's speed, with remarks on guesses."""
    text = tokens * _CHARACTERS_PER_TOKEN
    bytes_per_source = SAMPLE_BYTES // len(survey)
    sample = b"".join(source.sample[:bytes_per_source] for source in survey)
    tokenizer, remarks = _choose_tokenizer(
        text or math.inf, draft.model.tokenizer, sample
    )
    # A source that was not read counts as recipes.
    plain = _kinds(survey).isdisjoint({RECIPES, ""})
    choice = choose_size(
        text,
        records,
        total,
        tokenizer=tokenizer,
        sample=sample,
        like=OF_PLAIN_TEXT if plain else OF_RECIPES,
        only=size,
    )
    model = model_settings(choice.size, choice.tokenizer.setting)
    return choice._replace(
        writing=_writing_rate(model, survey, tokens, records)
    ), remarks


def _writing_rate(
    model: Mapping[str, Any], survey: Sequence[FoundSource], tokens: int, records: int
) -> float:
    """Measure the generation speed in tokens per second. 0.0: the run generates no texts."""
    if not tokens or _kinds(survey) <= {DOCUMENTS, TOKENS}:
        return 0.0
    return measure_writing_rate(model, tokens * _CHARACTERS_PER_TOKEN / records)


def _choose_tokenizer(
    text: float, name: str, sample: bytes
) -> tuple[TextTokenizer, list[str]]:
    """Return the user's tokenizer, or a new one for `text` bytes, with remarks on guesses."""
    if name.startswith(TRAINED):
        return trained_tokenizer(int(name.removeprefix(TRAINED))), []
    if name == "auto":
        return tokenizer_for_text(text), []
    if (folder := tokenizer_here(name)) is None:
        remark = (
            f"{name} is not on this machine, so the speed was measured with a new tokenizer. "
            "Training is slower with a larger vocabulary."
        )
        return tokenizer_for_text(text)._replace(entries=0), [remark]
    codec = load_codec(folder)
    tokens = len(codec.encode_flat([sample.decode(errors="ignore")]).flat)
    bytes_per_token = len(sample) / tokens if tokens else _CHARACTERS_PER_TOKEN
    return TextTokenizer(name, bytes_per_token, codec.vocab_size), []


def _remark_on_load(before: ProcessorUse) -> tuple[str, ...]:
    """Report that other programs used the processor since `before`, while a speed was measured."""
    now = ProcessorUse.now()
    others = now.others_since(before)
    if now.at - before.at < _MEASURED_SECONDS or others <= WORTH_WHILE:
        return ()
    remark = (
        f"Other programs kept {others:.1f} of {len(usable_cores())} cores busy during the speed "
        "measurement, so the configuration suits a machine under that load. To measure again, "
        "repeat init over this file after they end."
    )
    return (remark,)


def _refuse_early(
    sources: Sequence[str | Path], size: str | None, file: Path, *, replace: bool
) -> None:
    """Refuse missing sources, an unknown size and an existing file before reading anything."""
    if not sources:
        raise ConfigError(
            f"{argument('sources')} is empty. Name a file, a folder or a pattern with recipes or "
            "other texts. `toque cookbook recipes.jsonl` writes synthetic recipes."
        )
    if size is not None and size not in SIZES:
        raise ConfigError(
            f"{argument('size')} must be one of {', '.join(SIZES)}, not {size}. Leave it out to "
            "use the best size."
        )
    if file.exists() and not replace:
        raise ConfigError(
            f"{file} exists and may have your changes. Name another file with {argument('to')}, "
            f"or overwrite it with {argument('replace=True')}."
        )


def _choose_splits(paths: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Return the paths to train on, the paths to hold out, and remarks on unused splits."""
    train: list[str] = []
    held_out: list[str] = []
    remarks: list[str] = []
    for path in paths:
        splits = [] if is_remote(path) else saved_splits(named_path(path))
        names = [split.name for split in splits]
        if len(names) < 2 or "train" not in names:
            train.append(path)
            continue
        train.append(f"{path}/train")
        validation = next((name for name in _HELD_OUT_SPLITS if name in names), None)
        if validation is not None:
            held_out.append(f"{path}/{validation}")
        if rest := [name for name in names if name not in ("train", validation)]:
            remarks.append(f"Splits of {path} that are not read: {shown_names(rest)}.")
    return train, held_out, remarks


def _open_local_sources(config: RunConfig, say: Callable[[str], None]) -> list[Source]:
    """Return the sources on this machine with their readers."""
    local = [
        s
        for s in config.data.sources
        if not (is_remote(s.path) or s.path.startswith("hf:"))
    ]
    data = config.data.model_copy(update={"sources": tuple(local)})
    if not local:
        return []
    try:
        return open_sources(config.model_copy(update={"data": data}), say=say)
    except RefusedFileError as error:
        advice = str(error)
        for columns in error.columns:
            words = columns_in_words(columns)
            flags = [_as_argument(part, field) for part, field in columns.items()]
            advice = advice.replace(
                f"{words} in its source of data.sources", " ".join(flags)
            )
            advice = advice.replace(words, " ".join(flags))
        raise RefusedFileError(advice, error.why) from error


def _as_argument(part: str, field: str | tuple[str, ...]) -> str:
    """Format a column as an argument. Several fields become a template."""
    template = (
        field if isinstance(field, str) else " ".join(f"{{{name}}}" for name in field)
    )
    return f"{argument('columns')} {in_shell(f'{part}={template}')}"


def _survey(config: RunConfig, local_sources: Sequence[Source]) -> list[FoundSource]:
    """Describe the contents of the configuration's sources."""
    contents = {source.path: _read_start(source) for source in local_sources}
    return [
        contents.get(source.path, FoundSource(source.path))
        for source in config.data.sources
    ]


def _read_start(source: Source) -> FoundSource:
    """Describe a source by its first `_LOOK_BYTES`.

    Raises:
        DataError: These bytes have no usable record.
    """
    files = find_files([source])
    sizes = [float(file.plain_bytes) for file in files]
    n_usable = n_read = n_messages = 0
    tokens = bytes_read = 0.0
    keys: set[int] = set()
    texts: list[str] = []
    fields = Counter[str]()
    unused = Counter[str]()
    dropped = Counter[str]()
    notes = Counter[str]()
    blocks = ((file, size, block) for file, size in zip(files, sizes, strict=True)
              for block in blocks_of(file))  # fmt: skip
    for file, size, block in blocks:
        examples = examples_in(block, file.reader)
        n_usable += examples.kept
        n_read += examples.read
        unused.update(examples.unused)
        dropped.update(
            {reason: len(lines) for reason, lines in examples.dropped.items()}
        )
        notes.update(examples.notes)
        keys.update(e.record_key for e in examples.examples)
        texts += [e.text for e in examples.examples if e.text]
        turns = [turn for e in examples.examples for turn in e.turns]
        fields.update(
            name
            for turn in turns
            for name, value in turn.fields.items()
            if is_filled(value)
        )
        n_messages += len(turns)
        tokens += sum(
            len(e.ids) / 4
            if e.ids
            else (len(e.prompt) + len(e.target)) / _CHARACTERS_PER_TOKEN
            for e in examples.examples
        )
        bytes_read += min(size, len(block.payload))  # the size is an estimate
        if bytes_read >= _LOOK_BYTES:
            break

    has_other_encoding = is_of_another_encoding(n_read, dropped, notes)
    if n_usable == 0:
        advice = "docs/reference/formats.md lists the supported formats."
        if has_other_encoding:
            advice = f"{ENCODING_HINT} For init it is {argument('encoding=cp1252')}."
        raise DataError(
            f"{source.path} has no usable record in its first {bytes_read:,.0f} bytes: "
            f"{describe_reasons(dropped, {})}. {advice}"
        )

    is_complete = next(blocks, None) is None
    scale = 1.0 if is_complete else max(1.0, sum(sizes) / bytes_read)
    # Two digits of a guess.
    records = float(f"{n_usable * scale:.2g}") if scale > 1 else n_usable
    share_different = len(keys) / n_usable
    report = SourceReport(source.path, "", 0, n_read, n_usable, dict(unused))
    remarks = [
        *describe_unused_fields([report]),
        *_remark_on_messages(source.path, fields, n_messages, notes),
    ]
    if has_other_encoding:
        remarks.append(ENCODING_HINT)
    if share_different < _FEW_REPEATS:
        remarks.append(
            f"{n_usable - len(keys):,} of the {n_usable:,} records of {source.path} that were read "
            "are repeats. `prepare` leaves them out."
        )
    remarks += _remark_on_files(source)

    kinds: dict[type, str] = {
        RecipeReader: RECIPES,
        PairReader: PAIRS,
        TokenReader: TOKENS,
    }
    kinds[ConversationReader] = CONVERSATIONS
    return FoundSource(
        source.path,
        kind=next(
            (k for kind, k in kinds.items() if isinstance(source.reader, kind)),
            DOCUMENTS,
        ),
        schema=files[0].reader.schema(files[0].path),
        files=len(files),
        records=round(records),
        tokens=round(tokens * scale * share_different),
        different=round(records * share_different),
        whole=is_complete,
        remarks=tuple(remarks),
        sample=_sample_texts(texts),
    )


def _remark_on_messages(
    path: str, fields: Counter[str], n_messages: int, notes: Counter[str]
) -> list[str]:
    """Report fields of messages other than their texts, and notes about conversations."""
    remarks = []
    if fields:
        names = ", ".join(
            f"{name!r} ({n:,})" for name, n in most_frequent(fields).items()
        )
        remarks.append(
            f"Other fields of the {n_messages:,} messages of {path} that were read: {names}. The "
            "chat template gets them, and the data report counts the fields that it ignores."
        )
    if n_messages:
        remarks += [f"{path}: {n:,} {note}." for note, n in sorted((+notes).items())]
    return remarks


def _sample_texts(texts: list[str]) -> bytes:
    """Return a random sample. The texts are shuffled, because neighbours may be similar."""
    random.Random(17).shuffle(texts)  # not for secrets
    return "\n".join(texts).encode(errors="replace")[:SAMPLE_BYTES]


def _remark_on_few_records(survey: Sequence[FoundSource]) -> list[str]:
    """Warn if a new model would learn its language from very few records."""
    n = sum(source.different for source in survey)
    if n >= _FEW_RECORDS or not _kinds(survey).isdisjoint({"", DOCUMENTS, TOKENS}):
        return []
    amount = f"{n:,} different {'record is' if n == 1 else 'records are'} few"
    remark = (
        f"{amount} for a new model, which learns its language only from them. Start from a "
        "pretrained model such as HuggingFaceTB/SmolLM2-135M, or add records."
    )
    return [remark]


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
    if isinstance(source.reader, TextReader) and 0 < len(documentation) < len(names):
        remarks.append(
            f"Files of {source.path} that look like documentation are read as text: "
            f"{shown_names(documentation)}. To leave them out, move them or name only the other "
            "files."
        )
    return remarks


def _amount(survey: Sequence[FoundSource]) -> tuple[int, int]:
    """Return the estimated tokens and different records of all sources that were read."""
    return sum(source.tokens for source in survey), sum(
        source.different for source in survey
    )


def _held_out_line(survey: Sequence[FoundSource], plan: Choice | Tuning | None) -> str:
    """Write the line of `evaluation.max_examples`, limited by the time for held-out losses."""
    if plan is None:
        return ""
    # The forward pass of an evaluation is a third of an update's work.
    affordable = (
        3 * EVALUATING / _EVALUATIONS * plan.tokens / _tokens_per_record(survey)
    )
    n = max(_MIN_HELD_OUT, round(min(_MAX_HELD_OUT, affordable)))
    return f"  max_examples: {n}   # held-out texts per evaluation{_share(n <= affordable)}\n"


def _text_counts(
    survey: Sequence[FoundSource], plan: Choice | Tuning | None
) -> tuple[int, int]:
    """Return `evaluation.generate` and `evaluation.texts`, limited by the time for texts."""
    if plan is None:
        return _MAX_FINAL_TEXTS, WRITTEN_AT_ONCE
    seconds = plan.tokens / plan.rate
    writing = plan.writing or _WRITING * plan.rate
    affordable = math.floor(EVALUATING * seconds * writing / _tokens_per_record(survey))
    return min(_MAX_FINAL_TEXTS, affordable), min(
        WRITTEN_AT_ONCE, affordable // _EVALUATIONS
    )


def _share(fits: bool) -> str:  # noqa: FBT001 - the name is the argument
    """Return the end of a comment on a number of texts that `fits` its share of the time or not."""
    if fits:
        return f": at most {EVALUATING:.0%} of the time"
    return f", the useful minimum: more than {EVALUATING:.0%} of the time"


def _tokens_per_record(survey: Sequence[FoundSource]) -> float:
    """Return the mean tokens per record, or 1 if they are unknown."""
    tokens, records = _amount(survey)
    return tokens / max(1, records) or 1.0


def _render_config(
    draft: RunConfig,
    survey: Sequence[FoundSource],
    file: Path,
    base: MeasuredBase,
    plan: Choice | Tuning | None,
    batch: str,
) -> str:
    """Write the text of the file, with comments on the settings that users change most."""
    kinds = _kinds(survey)
    total = draft.train.stop_after
    length = f"  stop_after: {flow(str(total))}   # with preparation and scores; or 3 epochs\n"
    if plan is not None and plan.passes.ends_early:
        limit = flow(str(Duration(total.amount, total.unit)))
        why = f"time is enough for {plan.passes.possible:,.0f}, but they would be memorised"
        length = f"""\
  stop_after: {plan.passes.useful:g} epochs   # {why}
  time_limit: {limit}   # for the entire command, in case the machine becomes slower
"""

    optimizer = weight_decay = ""
    schedule = "cosine"
    if isinstance(plan, Choice):
        model_section = _new_model_section(plan, draft.model.tokenizer)
        optimizer = "  name: muon   # for matrices, AdamW for the rest\n"
        peak_lr = plan.size.peak_lr
        schedule = "linear"
        weight_decay = (
            f"  weight_decay: {plan.decay:g}   # more for texts that repeat often\n"
        )
    else:
        model_section = _pretrained_section(draft.model, base.adapter)
        peak_lr = tuned_lr(base.parameters, adapted=base.is_adapted)

    columns = draft.data.sources[0].model_dump(mode="json")["columns"]
    column_line = f"\n      columns: {flow(columns)}   # your choice" if columns else ""
    paths = "".join(
        f"\n    - path: {flow(one.path)}  # {one}{column_line}" for one in survey
    )
    encoding = ""
    if draft.data.encoding != UTF_8:
        encoding = f"  encoding: {flow(draft.data.encoding)}   # your choice\n"
    held_out = (
        f"  validation_fraction: {_HELD_OUT_SHARE}   # held out for the evaluation\n"
    )
    if draft.data.validation:
        validation = "".join(
            f"\n    - path: {flow(one.path)}{column_line}"
            for one in draft.data.validation
        )
        held_out = f"  validation:   # held out for the evaluation{validation}\n"

    scores = "  generate: 0   # plain texts have no prompts"
    if kinds - {DOCUMENTS, TOKENS}:
        prompt = '"your own question"'
        if kinds <= {RECIPES, ""}:
            prompt = '"Lentil soup: red lentils, carrots, cumin"'
        n_final, n_between = _text_counts(survey, plan)
        n = max(1, n_final)
        scores = f"""\
  generate: {n}   # texts to write and score at the end{_share(n == n_final)}
  texts: {n_between}   # texts to write per evaluation{_share(True)}
  # prompts: [{prompt}]   # written at every evaluation"""
    text = f"""\
# yaml-language-server: $schema={SCHEMA_FILE}
# Written by `toque init`. Edit it as you like. Settings that are not in this file have defaults.
#   toque show {in_shell(file)}      print every setting and its origin
#   toque train {in_shell(file)}     prepare the data and train, or continue a stopped run
# docs/reference/configuration.md explains every setting.

run_dir: {flow(f"runs/{file.stem}")}   # checkpoints, metrics and the finished model

{model_section}
data:
  sources:{paths}
{encoding}\
  store: {flow(f"stores/{file.stem}")}   # prepared data, for all runs with these data settings
{held_out}{base.data}{_more_of_data(kinds, base)}
optim:
{optimizer}  peak_lr: {peak_lr}   # lower it if the loss jumps, raise it if the loss hardly moves
  schedule: {schedule}   # warm up for 3 % of the run, then decay to 0
{weight_decay}
train:
{length}  batch: {batch}   # per update
  evaluate_every: 10 %
  save_every: {_save_every(total)}   # a killed run continues from the last save
  # early_stopping: {{patience: 3}}   # stop when the held-out loss no longer falls

evaluation:
{_held_out_line(survey, plan)}{scores}
"""
    return "".join(f"{_align_comment(line)}\n" for line in text.splitlines())


def _save_every(stop_after: Duration) -> str:
    """Return a tenth of the run, but at most `_MAX_LOST_MINUTES`."""
    tenth = (stop_after.seconds or 0.0) / 60 / 10
    return f"{_MAX_LOST_MINUTES} minutes" if tenth > _MAX_LOST_MINUTES else "10 %"


def _more_of_data(kinds: set[str], base: MeasuredBase) -> str:
    """Write optional lines of the data section, each commented out."""
    extras = "  # dedup: near   # also drop nearly equal texts\n"
    if kinds <= {RECIPES, ""}:
        extras = f"""\
  # min_quality: 0.6   # leave out recipes whose quality score is lower
{extras}  # tasks: [write, difficulty, nutrition]   # also learn to judge recipes
"""
    elif CONVERSATIONS in kinds:
        extras += (
            "  # loss_on: last_answer   "
            "# train only on the last answer of each conversation\n"
        )
        if not base.data:
            extras += "  # chat_template: chatml   # the default is the template of the tokenizer\n"
    elif PAIRS in kinds:
        extras += "  # on_overlong: drop   # drop long pairs instead of cutting them\n"
    return extras


def _new_model_section(choice: Choice, tokenizer: str) -> str:
    size = choice.size
    setting = choice.tokenizer.setting if tokenizer == "auto" else tokenizer
    origin = "trained on your data" if setting.startswith(TRAINED) else "your choice"
    heads = size.shape["num_attention_heads"]
    return f"""\
model:  # {choice.model}, from random weights
  family: llama   # or t5, gpt2, neox
  shape: {{hidden_size: {size.width}, num_hidden_layers: {size.layers},
          num_attention_heads: {heads}, num_key_value_heads: {heads},
          intermediate_size: {size.inner}, max_position_embeddings: {POSITIONS},
          tie_word_embeddings: true}}
  tokenizer: {flow(setting)}   # {origin}
  # To continue from an existing model, replace family, shape and tokenizer with:
  # {{family: auto, start_from: FOLDER-OR-HUB-NAME}}
"""


def _pretrained_section(model: ModelConfig, adapter: str) -> str:
    tokenizer = ""
    if model.tokenizer != "auto":
        tokenizer = f"  tokenizer: {flow(model.tokenizer)}   # your choice\n"
    return f"""\
model:
  family: auto   # read from the checkpoint
  start_from: {flow(model.start_from)}   # initial weights
{tokenizer}\
{adapter}
"""


def _align_comment(line: str) -> str:
    """Move the comment at the end of a line to the common column."""
    code, mark, comment = line.rpartition("  # ")
    if not code.strip():
        return line
    return f"{code.rstrip():{_COMMENT_COLUMN}} {mark.strip()} {comment}"
