"""Init: a first configuration, written for the files it is pointed at."""

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
    is_of_another_encoding,
    reasons_in_words,
    unused_in_words,
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
from toque.sources.records import Source, examples_in, is_filled, most_named
from toque.sources.source_files import blocks_of, find_files, is_documentation
from toque.sources.token_arrays import TokenReader
from toque.storage.atomic import atomic_write
from toque.storage.bucket import is_remote
from toque.units import Duration
from toque.user_paths import named_path
from toque.workflows.configure import Columns, configure, source_columns
from toque.workflows.first_config.init_base import SeenBase, base_seen
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
from toque.workflows.prepared_store import sources_of

RECIPES, DOCUMENTS = "recipes", "documents"
PAIRS, TOKENS = "prompts with answers", "texts of token ids"
CONVERSATIONS = "conversations"
_LOOK_BYTES: Final = 4 << 20
"""Bytes of every source that are read: some thousand recipes, in about a second."""
_CHARACTERS_A_TOKEN: Final = 4.0
"""Guess, for English recipes and tokenizers of some thousand entries."""
_MEASURED_SECONDS: Final = 0.5  # below it the processor's counters, in hundredths, tell nothing
_EVALUATIONS: Final = 10
_HELD_OUT_SHARE: Final = 0.05  # of the examples, where no source is held out
_MOST_LOST: Final = 10  # minutes of a run that is killed without a warning
_MOST_HELD_OUT, _FEWEST_HELD_OUT = 512, 32  # examples of an evaluation
_MOST_AT_END, _MOST_BETWEEN = 16, WRITTEN_AT_ONCE  # texts at the end, and of each evaluation
_WRITING: Final = 0.25
"""Tokens that a machine writes per token that it trains, a guess for a base that is not tried
(lab/performance.md, "Threads that wait")."""
_MANY_REPEATS: Final = 0.8  # share of different records from which on no repeat is told
_FEW_RECORDS: Final = 5000
"""Different records below which a model from scratch is advised against: of 20 texts that were
drawn by lot after 2,400 recipes one or two could be cooked from (lab/notes.md)."""
_HELD_OUT: Final = ("validation", "valid", "dev", "test")
"""Names of the split of a dataset that is held out; the first that is there."""
_COLUMN: Final = 29  # column of the comments that end a line


@dataclass(frozen=True)
class FoundSource:
    """A source and what it holds."""

    path: str
    kind: str = ""  # one of the names above; "" where nobody has looked
    schema: str = ""  # its name in the data report, e.g. "json-lines" or "foodcom"
    files: int = 1
    records: int = 0  # usable records
    tokens: int = 0  # estimated tokens of them
    different: int = 0  # of the records: each text counted once
    whole: bool = True  # false where a part was read, and `records` is scaled up by the bytes
    remarks: tuple[str, ...] = ()
    """Sentences on what no example holds, and on bytes that are not of the encoding."""
    sample: bytes = field(default=b"", repr=False)  # texts drawn by lot, `SAMPLE_BYTES` at most

    def __str__(self) -> str:
        """The contents in a few words."""
        if not self.kind:
            return "in a bucket or on the hub; not looked at"
        one = " ".join(word.removesuffix("s") for word in self.kind.split())
        files = f" in {self.files:,} files" if self.files > 1 else ""
        about, kind = "" if self.whole else "about ", one if self.records == 1 else self.kind
        return f"{self.schema}, {about}{self.records:,} {kind}{files}"


@dataclass(frozen=True)
class Initialised:
    """A configuration that was written."""

    file: Path
    config: RunConfig
    sources: tuple[FoundSource, ...]
    remarks: tuple[str, ...] = ()  # sentences on what is left out or cut
    forecast: str = ""  # sentence on what the run will reach, where that is known

    def __str__(self) -> str:
        """The sources, and what to do next."""
        lines = [*(f"{one.path}: {one}" for one in self.sources), *self.remarks]
        lines += [self.forecast] if self.forecast else []
        todo = f"Wrote {self.file}. Look it over, then: toque train {in_shell(self.file)}"
        return "\n".join([*lines, todo])


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
        sources: a file, a folder or a pattern, or several; what they hold is recognised.
        to: the file to write; run and store are named after it.
        size: of a model from scratch: 300k, 1m, 3m, 6m, 14m or 30m, its parameters with a
            vocabulary of 2,048 tokens. None: the best for this text, this machine's speed, which is
            measured, and the time.
        start_from: a model to continue from, a folder or a hub name, instead of random weights.
        for_: time of the whole run, preparing and scoring included, e.g. "10 minutes"; "tonight" is
            eight hours.
        tokenizer: a folder or a hub name; auto: the model's own, or learnt from the data.
        encoding: of the files that are text, e.g. cp1252 for an old export.
        columns: fields that hold a part of each record, {"prompt": "question", "target": "answer"},
            or a template over fields, {"prompt": "{question} {hint}", "target": "answer"}.
        replace: overwrite a file that is there.
        reporter: hears what takes time.

    Returns:
        The file, its configuration, and what each source holds.

    Raises:
        ConfigError: `to` is there already or cannot be written, or a value makes no sense.
        DataError: a source cannot be found or recognised, or holds nothing of use.
    """
    given = [sources] if isinstance(sources, str | Path) else list(sources)
    file, start = named_path(to), str(start_from)
    _refuse_early(given, size, file, replace=replace)
    whole = parse_run_time(for_)
    paths, held_out, left = _by_split([str(path) for path in given])
    named = source_columns(columns)
    model = {"family": "auto", "start_from": start} if start != "scratch" else {}
    wanted = configure(
        data={
            "sources": [{"path": path, **named} for path in paths],
            "validation": [{"path": path, **named} for path in held_out],
            "encoding": encoding,
        },
        model=model | {"tokenizer": tokenizer},
        train={"stop_after": str(whole)},
    )
    with reporter.working("looking at the files"):
        here = _sources_here(wanted, reporter.notice)
        found = _survey(wanted, here)
    base, how, batch = _settled(wanted, here, found, whole, size, reporter)
    few = _few_in_words(found) if start == "scratch" else []
    remarks = (*(remark for one in found for remark in one.remarks), *base.remarks, *left, *few)
    text = _written(wanted, found, file, base, how, batch)
    config = resolve_values(read_yaml(text, str(file)).value, str(file)).config
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(file, text.encode())
        atomic_write(file.parent / SCHEMA_FILE, schema_text().encode())
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be written: {error.strerror}. Name another file with {argument('to')}."
        ) from error
    return Initialised(
        file, config, tuple(found), remarks, "" if how is None else how.forecast(whole)
    )


def _settled(
    wanted: RunConfig,
    here: Sequence[Source],
    found: Sequence[FoundSource],
    whole: Duration,
    size: str | None,
    reporter: Reporter,
) -> tuple[SeenBase, Choice | Tuning | None, str]:
    """Settle what the base asks for, what the time is best used for, and `train.batch`."""
    # A bucket that nobody looked at may hold far more than the files that are here.
    tokens, records = _amount(found) if all(one.tokens for one in found) else (0, 0)
    before = ProcessorUse.now()
    if wanted.model.start_from == "scratch":
        with reporter.working("measuring how fast this machine trains"):
            choice, unseen = _choice(wanted, found, tokens, records, whole, size)
        read = choice.passes.useful * (tokens or math.inf)
        max_tokens = choice.size.batch_tokens
        batch = batch_for(read, tokens, records, max_tokens=max_tokens, longest=POSITIONS)
        return SeenBase(remarks=(*unseen, *_disturbed(before))), choice, batch

    seconds = training_seconds(tokens * _CHARACTERS_A_TOKEN, whole)
    with reporter.working("looking at the model, and how fast this machine trains it"):
        base = base_seen(wanted, here, tokens / records if records else None)
        model = {"family": "auto", "start_from": wanted.model.start_from}
        writing = _writing_rate(model, found, tokens, records) if base.is_small else 0.0
    if base.rate is None:
        read = MAX_PASSES * (tokens or math.inf)
        return base, None, batch_for(read, tokens, records, max_tokens=MAX_BATCH_TOKENS, longest=1)
    if base.tokens_each and {one.kind for one in found}.isdisjoint({DOCUMENTS, TOKENS, ""}):
        tokens = round(base.tokens_each * records)
    trained = tokens if wanted.data.validation else tokens * (1.0 - _HELD_OUT_SHARE)
    tuning = plan_tuning(trained, records, seconds, base.rate, longest=base.longest)
    base = base._replace(remarks=(*base.remarks, *_disturbed(before)))
    return base, tuning._replace(writing=writing), tuning.batch


def _choice(
    wanted: RunConfig,
    found: Sequence[FoundSource],
    tokens: int,
    records: int,
    whole: Duration,
    size: str | None,
) -> tuple[Choice, list[str]]:
    """Choose the size of a new model by this machine's speed; a sentence if a guess was needed."""
    text = tokens * _CHARACTERS_A_TOKEN
    each = SAMPLE_BYTES // len(found)
    sample = b"".join(one.sample[:each] for one in found)
    tokenizer, unseen = _tokenizer_for(text or math.inf, wanted.model.tokenizer, sample)
    # Texts that nobody has looked at are taken for recipes.
    plain = {one.kind for one in found}.isdisjoint({RECIPES, ""})
    choice = choose_size(
        text,
        records,
        whole,
        tokenizer=tokenizer,
        sample=sample,
        like=OF_PLAIN_TEXT if plain else OF_RECIPES,
        only=size,
    )
    model = model_settings(choice.size, choice.tokenizer.setting)
    return choice._replace(writing=_writing_rate(model, found, tokens, records)), unseen


def _writing_rate(
    model: Mapping[str, Any], found: Sequence[FoundSource], tokens: int, records: int
) -> float:
    """Measure the tokens per second that a model writes; 0.0 if it writes none while training."""
    if not tokens or {one.kind for one in found} <= {DOCUMENTS, TOKENS}:
        return 0.0
    return measure_writing_rate(model, tokens * _CHARACTERS_A_TOKEN / records)


def _tokenizer_for(text: float, name: str, sample: bytes) -> tuple[TextTokenizer, list[str]]:
    """The tokenizer that the user named, or one for `text` bytes; a sentence if that stands in."""
    if name.startswith(TRAINED):
        return trained_tokenizer(int(name.removeprefix(TRAINED))), []
    if name == "auto":
        return tokenizer_for_text(text), []
    if (folder := tokenizer_here(name)) is None:
        said = (
            f"{name} is not on this machine: the speed was measured with a tokenizer that is "
            "learnt from the data, and one of more entries makes it slower."
        )
        return tokenizer_for_text(text)._replace(entries=0), [said]
    codec = load_codec(folder)
    tokens = len(codec.encode_flat([sample.decode(errors="ignore")]).flat)
    each = len(sample) / tokens if tokens else _CHARACTERS_A_TOKEN
    return TextTokenizer(name, each, codec.vocab_size), []


def _disturbed(before: ProcessorUse) -> tuple[str, ...]:
    """Say that other programs computed since `before`, while a speed was measured."""
    now = ProcessorUse.now()
    others = now.others_since(before)
    if now.at - before.at < _MEASURED_SECONDS or others <= WORTH_WHILE:
        return ()
    said = (
        f"Other programs kept {others:.1f} of {len(usable_cores())} cores busy while the speed of "
        "this machine was measured: the choice is for a machine that stays so busy. Once they have "
        "ended, another init over this file measures again."
    )
    return (said,)


def _refuse_early(
    given: Sequence[str | Path], size: str | None, file: Path, *, replace: bool
) -> None:
    """Refuse no sources, an unknown size, and a file that is there, before anything is read."""
    if not given:
        raise ConfigError(
            f"{argument('sources')} is empty, so there is nothing to write a configuration for. "
            "Name a file, a folder or a pattern with recipes or other texts. Without any, `toque "
            "cookbook recipes.jsonl` writes synthetic recipes."
        )
    if size is not None and size not in SIZES:
        raise ConfigError(f"{argument('size')} is {size}. Use {', '.join(SIZES)}, or leave it out.")
    if file.exists() and not replace:
        raise ConfigError(
            f"{file} is there already and may hold your changes. Name another file with "
            f"{argument('to')}, or overwrite it with {argument('replace=True')}."
        )


def _by_split(given: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Paths to train on and to hold out, and sentences on splits of saved datasets not read."""
    train, held_out, left = list[str](), list[str](), list[str]()
    for path in given:
        splits = [] if is_remote(path) else saved_splits(named_path(path))
        names = [split.name for split in splits]
        if len(names) < 2 or "train" not in names:
            train.append(path)
            continue
        train.append(f"{path}/train")
        held = next((name for name in _HELD_OUT if name in names), None)
        held_out += [] if held is None else [f"{path}/{held}"]
        if rest := [name for name in names if name not in ("train", held)]:
            left.append(f"Splits of {path} that are not read: {shown_names(rest)}.")
    return train, held_out, left


def _sources_here(config: RunConfig, say: Callable[[str], None]) -> list[Source]:
    """The sources on this machine, each with the reader that would prepare it."""
    local = [s for s in config.data.sources if not (is_remote(s.path) or s.path.startswith("hf:"))]
    data = config.data.model_copy(update={"sources": tuple(local)})
    if not local:
        return []
    try:
        return sources_of(config.model_copy(update={"data": data}), say=say)
    except RefusedFileError as error:
        advice = str(error)
        for columns in error.columns:
            words = columns_in_words(columns)
            flags = [_as_argument(part, field) for part, field in columns.items()]
            advice = advice.replace(f"{words} in its source of data.sources", " ".join(flags))
            advice = advice.replace(words, " ".join(flags))
        raise RefusedFileError(advice, error.why) from error


def _as_argument(part: str, field: str | tuple[str, ...]) -> str:
    """A column as the command takes it; of several fields, as a template over them."""
    template = field if isinstance(field, str) else " ".join(f"{{{name}}}" for name in field)
    return f"{argument('columns')} {in_shell(f'{part}={template}')}"


def _survey(config: RunConfig, here: Sequence[Source]) -> list[FoundSource]:
    """Contents of the configuration's sources."""
    known = {source.path: _looked_at(source) for source in here}
    return [known.get(source.path, FoundSource(source.path)) for source in config.data.sources]


def _looked_at(source: Source) -> FoundSource:
    files = find_files([source])
    sizes = [float(file.plain_bytes) for file in files]
    kept, tokens, looked, read = 0, 0.0, 0.0, 0
    keys, texts = set[int](), list[str]()
    fields, n_messages = Counter[str](), 0
    unused, dropped, notes = Counter[str](), Counter[str](), Counter[str]()
    # Blocks may end beyond the size that was estimated for their file.
    blocks = ((file, size, block) for file, size in zip(files, sizes, strict=True)
              for block in blocks_of(file))  # fmt: skip
    for file, size, block in blocks:
        examples = examples_in(block, file.reader)
        kept += examples.kept
        read += examples.read
        unused.update(examples.unused)
        dropped.update({reason: len(lines) for reason, lines in examples.dropped.items()})
        notes.update(examples.notes)
        keys.update(e.record_key for e in examples.examples)
        texts += [e.text for e in examples.examples if e.text]
        turns = [turn for e in examples.examples for turn in e.turns]
        fields.update(
            name for turn in turns for name, value in turn.fields.items() if is_filled(value)
        )
        n_messages += len(turns)
        tokens += sum(
            len(e.ids) / 4 if e.ids else (len(e.prompt) + len(e.target)) / _CHARACTERS_A_TOKEN
            for e in examples.examples
        )
        looked += min(size, len(block.payload))
        if looked >= _LOOK_BYTES:
            break
    foreign = is_of_another_encoding(read, dropped, notes)
    if kept == 0:
        todo = "docs/reference/formats.md lists what is read."
        if foreign:
            todo = f"{ENCODING_HINT} Here it is {argument('encoding=cp1252')}."
        raise DataError(
            f"{source.path} holds no usable record in its first {looked:,.0f} bytes: "
            f"{reasons_in_words(dropped, {})}. {todo}"
        )
    named = SourceReport(source.path, "", 0, read, kept, dict(unused))
    whole = next(blocks, None) is None
    scale = 1.0 if whole else max(1.0, sum(sizes) / looked)
    records = float(f"{kept * scale:.2g}") if scale > 1 else kept  # 67,412 is about 67,000
    share = len(keys) / kept
    repeated = list[str]()
    if share < _MANY_REPEATS:
        seen = f"{kept - len(keys):,} of the {kept:,} records of {source.path} that were looked at"
        repeated.append(f"{seen} repeat another one; preparing leaves them out.")
    kinds: dict[type, str] = {RecipeReader: RECIPES, PairReader: PAIRS, TokenReader: TOKENS}
    kinds[ConversationReader] = CONVERSATIONS
    return FoundSource(
        source.path,
        next((k for kind, k in kinds.items() if isinstance(source.reader, kind)), DOCUMENTS),
        files[0].reader.schema(files[0].path),
        len(files),
        round(records),
        round(tokens * scale * share),
        round(records * share),
        whole,
        (
            *unused_in_words([named]),
            *_talks_in_words(source.path, fields, n_messages, notes),
            *([ENCODING_HINT] if foreign else []),
            *repeated,
            *_no_data(source),
        ),
        _drawn(texts),
    )


def _talks_in_words(
    path: str, fields: Counter[str], n_messages: int, notes: Counter[str]
) -> list[str]:
    """Sentences on what the messages of conversations hold besides their texts."""
    remarks = []
    if fields:
        names = ", ".join(f"{name!r} ({n:,})" for name, n in most_named(fields).items())
        remarks.append(
            f"Other fields of the {n_messages:,} messages of {path} that were looked at: {names}. "
            "They are for the chat template; the data report counts those that it does not write."
        )
    if n_messages:
        remarks += [f"{path}: {n:,} {note}." for note, n in sorted((+notes).items())]
    return remarks


def _drawn(texts: list[str]) -> bytes:
    """Some of the texts, which are shuffled, for a file may have like ones side by side."""
    random.Random(17).shuffle(texts)  # no secret
    return "\n".join(texts).encode(errors="replace")[:SAMPLE_BYTES]


def _few_in_words(found: Sequence[FoundSource]) -> list[str]:
    """A sentence where a new model would learn its language from very few records."""
    n = sum(one.different for one in found)
    if n >= _FEW_RECORDS or any(one.kind in ("", DOCUMENTS, TOKENS) for one in found):
        return []
    told = f"{n:,} different {'record is' if n == 1 else 'records are'} few for a new model"
    todo = "let init start from a pretrained one, e.g. HuggingFaceTB/SmolLM2-135M, or add more"
    return [f"{told}, which learns its language from them alone: {todo}."]


def _no_data(source: Source) -> list[str]:
    """Sentences on hidden files of a folder, and on documentation among its texts."""
    folder, said = named_path(source.path), list[str]()
    if folder.is_dir() and (hidden := sorted(one.name for one in folder.glob(".*"))):
        said.append(f"Hidden files of {source.path} are not read: {shown_names(hidden)}.")
    texts = [file.name for file in source.files or ()]
    read_me = [Path(name).name for name in texts if is_documentation(name)]
    if isinstance(source.reader, TextReader) and 0 < len(read_me) < len(texts):
        said.append(
            f"Documentation by its name is read as text like the rest of {source.path}: "
            f"{shown_names(read_me)}. Name the others alone, or move it, if it is none."
        )
    return said


def _amount(found: Sequence[FoundSource]) -> tuple[int, int]:
    """Tokens and different records of all sources, as estimated; 0 where nobody has looked."""
    return sum(one.tokens for one in found), sum(one.different for one in found)


def _held_out(found: Sequence[FoundSource], how: Choice | Tuning | None) -> str:
    """`evaluation.max_examples`, so many that held-out losses take their share of the time."""
    if how is None:
        return ""
    # The forward pass of an evaluation is a third of an update's work.
    allowed = 3 * EVALUATING / _EVALUATIONS * how.tokens / _tokens_each(found)
    n = max(_FEWEST_HELD_OUT, round(min(_MOST_HELD_OUT, allowed)))
    return f"  max_examples: {n}   # held-out texts of an evaluation{_share(n <= allowed)}\n"


def _texts(found: Sequence[FoundSource], how: Choice | Tuning | None) -> tuple[int, int]:
    """`evaluation.generate` and `evaluation.texts`; each takes its share of the time at most."""
    if how is None:
        return _MOST_AT_END, _MOST_BETWEEN
    seconds, writing = how.tokens / how.rate, how.writing or _WRITING * how.rate
    allowed = math.floor(EVALUATING * seconds * writing / _tokens_each(found))
    return min(_MOST_AT_END, allowed), min(_MOST_BETWEEN, allowed // _EVALUATIONS)


def _share(fits: bool) -> str:  # noqa: FBT001 - the name is the argument
    """The end of a comment on a number of texts that `fits` into its share of the time, or not."""
    if fits:
        return f": {EVALUATING:.0%} of the time at most"
    return f", the fewest that are of use: more than {EVALUATING:.0%} of the time"


def _tokens_each(found: Sequence[FoundSource]) -> float:
    """Tokens of a record on average; 1 where nobody has looked."""
    tokens, records = _amount(found)
    return tokens / max(1, records) or 1.0


def _written(
    wanted: RunConfig,
    found: Sequence[FoundSource],
    file: Path,
    base: SeenBase,
    how: Choice | Tuning | None,
    batch: str,
) -> str:
    """The text of the file, each setting that a user would turn with a comment."""
    kinds, model, encoding = {one.kind for one in found}, wanted.model, wanted.data.encoding
    whole = wanted.train.stop_after
    length = f"  stop_after: {flow(str(whole))}   # with preparing and scoring; or 3 epochs\n"
    if how is not None and how.passes.ends_early:
        limit = flow(str(Duration(whole.amount, whole.unit)))
        why = f"there is time for {how.passes.possible:,.0f}; more would be memorised"
        length = f"""\
  stop_after: {how.passes.useful:g} epochs   # {why}
  time_limit: {limit}   # of the whole command, for a machine that becomes slower
"""
    if isinstance(how, Choice):
        of_model, peak_lr = _scratch(how, model.tokenizer), how.size.peak_lr
        name, schedule = "  name: muon   # for matrices, AdamW for the rest\n", "linear"
        more = f"  weight_decay: {how.decay:g}   # the oftener texts are read, the more of it\n"
    else:
        peak_lr = tuned_lr(base.parameters, adapted=base.is_adapted)
        of_model, name, schedule = _pretrained(model, base.adapter), "", "cosine"
        more = ""
    columns = wanted.data.sources[0].model_dump(mode="json")["columns"]
    named = f"\n      columns: {flow(columns)}   # as you said" if columns else ""
    paths = "".join(f"\n    - path: {flow(one.path)}  # {one}{named}" for one in found)
    written = "" if encoding == UTF_8 else f"  encoding: {flow(encoding)}   # as you said\n"
    held_out = (
        f"  validation_fraction: {_HELD_OUT_SHARE}   # held out from training, to measure by\n"
    )
    if wanted.data.validation:
        held = "".join(f"\n    - path: {flow(v.path)}{named}" for v in wanted.data.validation)
        held_out = f"  validation:   # held out from training, to measure by{held}\n"
    scores = "  generate: 0   # plain texts have no prompt to write for"
    if kinds - {DOCUMENTS, TOKENS}:
        dish = '"Lentil soup: red lentils, carrots, cumin"'
        asked = dish if kinds <= {RECIPES, ""} else '"your own question"'
        at_end, between = _texts(found, how)
        n = max(1, at_end)
        scores = f"""\
  generate: {n}   # texts written at the end and scored{_share(n == at_end)}
  texts: {between}   # of them at every evaluation{_share(True)}
  # prompts: [{asked}]   # shown at every evaluation"""
    text = f"""\
# yaml-language-server: $schema={SCHEMA_FILE}
# Written by `toque init`; yours to change. What is not named here has its default:
#   toque show {in_shell(file)}      every setting, and where its value is from
#   toque train {in_shell(file)}     prepares the data, then trains; a stopped run continues
# docs/reference/configuration.md explains every setting.

run_dir: {flow(f"runs/{file.stem}")}   # checkpoints, metrics and the finished model

{of_model}
data:
  sources:{paths}
{written}\
  store: {flow(f"stores/{file.stem}")}   # the prepared data; runs with equal settings can share it
{held_out}{base.data}{_more_of_data(kinds, base)}
optim:
{name}  peak_lr: {peak_lr}   # lower it if the loss jumps; raise it if it hardly moves
  schedule: {schedule}   # warms up for 3 % of the run, then falls to nothing by its end
{more}
train:
{length}  batch: {batch}   # what one update sees
  evaluate_every: 10 %
  save_every: {_save_every(wanted.train.stop_after)}   # a killed run continues from here
  # early_stopping: {{patience: 3}}   # end when the held-out loss has stopped falling

evaluation:
{_held_out(found, how)}{scores}
"""
    return "".join(f"{_aligned(line)}\n" for line in text.splitlines())


def _save_every(stop_after: Duration) -> str:
    """A tenth of the run, but `_MOST_LOST` where that is less."""
    tenth = (stop_after.seconds or 0.0) / 60 / 10
    return f"{_MOST_LOST} minutes" if tenth > _MOST_LOST else "10 %"


def _more_of_data(kinds: set[str], base: SeenBase) -> str:
    """Lines of the data section that a user may want, each commented out."""
    extras = "  # dedup: near   # drop nearly equal texts too, not only equal ones\n"
    if kinds <= {RECIPES, ""}:
        extras = f"""\
  # min_quality: 0.6   # leave out recipes whose quality score is lower
{extras}  # tasks: [write, difficulty, nutrition]   # learn to judge recipes, too
"""
    elif CONVERSATIONS in kinds:
        extras += "  # loss_on: last_answer   # learn the last answer of each conversation alone\n"
        if not base.data:
            extras += (
                "  # chat_template: chatml   # how it is written; the tokenizer's own without\n"
            )
    elif PAIRS in kinds:
        extras += (
            "  # on_overlong: drop   # leave out pairs that are too long, instead of cutting them\n"
        )
    return extras


def _scratch(choice: Choice, tokenizer: str) -> str:
    size = choice.size
    own = choice.tokenizer.setting if tokenizer == "auto" else tokenizer
    origin = "learnt from your data" if own.startswith(TRAINED) else "as you said"
    heads = size.shape["num_attention_heads"]
    return f"""\
model:  # {choice.model}, from random weights
  family: llama   # or t5, gpt2, neox
  shape: {{hidden_size: {size.width}, num_hidden_layers: {size.layers},
          num_attention_heads: {heads}, num_key_value_heads: {heads},
          intermediate_size: {size.inner}, max_position_embeddings: {POSITIONS},
          tie_word_embeddings: true}}
  tokenizer: {flow(own)}   # {origin}
  # To continue from a model you have, replace family, shape and tokenizer by:
  # {{family: auto, start_from: FOLDER-OR-HUB-NAME}}
"""


def _pretrained(model: ModelConfig, adapter: str) -> str:
    own = f"  tokenizer: {flow(model.tokenizer)}   # as you said\n"
    return f"""\
model:
  family: auto   # read from the checkpoint
  start_from: {flow(model.start_from)}   # what training begins with
{"" if model.tokenizer == "auto" else own}\
{adapter}
"""


def _aligned(line: str) -> str:
    """The line with the comment that ends it in the column of the others."""
    code, mark, comment = line.rpartition("  # ")
    return f"{code.rstrip():{_COLUMN}} {mark.strip()} {comment}" if code.strip() else line
