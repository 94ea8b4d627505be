"""First configuration for the files of a user."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from toque.config import RunConfig, resolve_values
from toque.config.json_schema import SCHEMA_FILE, schema_text
from toque.config.schema import TRAINED
from toque.config.yaml_reader import read_yaml
from toque.data.tokenizer.codec import load_codec
from toque.data.tokenizer.tokenizer_folder import tokenizer_here
from toque.errors import ConfigError, argument, in_shell
from toque.hardware.processor import WORTH_WHILE, ProcessorUse, usable_cores
from toque.reporter import SILENT, Reporter
from toque.runs.typical_speeds import GENERATION_SHARE
from toque.sources.hub_datasets import saved_splits
from toque.sources.layouts import RefusedFileError, columns_in_words, shown_names
from toque.sources.preference_pairs import (
    CHOSEN,
    PreferenceReader,
    refuse_mixture,
)
from toque.sources.records import Source
from toque.storage.atomic import atomic_write
from toque.storage.bucket import is_remote
from toque.units import Duration
from toque.user_paths import named_path
from toque.workflows.configure import Columns, configure, source_columns
from toque.workflows.first_config.config_text import (
    HELD_OUT_SHARE,
    Plan,
    render_config,
)
from toque.workflows.first_config.init_base import MeasuredBase, measure_base
from toque.workflows.first_config.model_sizes import POSITIONS, SIZES, model_settings
from toque.workflows.first_config.sizing import (
    OF_PLAIN_TEXT,
    OF_RECIPES,
    SAMPLE_BYTES,
    Choice,
    TextTokenizer,
    choose_batch,
    choose_size,
    parse_run_time,
    remark_on_preparation,
    tokenizer_for_text,
    trained_tokenizer,
    training_seconds,
)
from toque.workflows.first_config.source_survey import (
    CHARACTERS_PER_TOKEN,
    DOCUMENTS,
    RECIPES,
    TOKENS,
    Survey,
    SurveyedSource,
    kinds_of,
    remark_on_few_records,
    survey_sources,
    total_records,
    total_rows,
    total_tokens,
)
from toque.workflows.first_config.speed_trial import (
    WRITTEN_AT_ONCE,
    measure_writing_rate,
)
from toque.workflows.first_config.tuning import (
    MAX_BATCH_TOKENS,
    MAX_PASSES,
    REWARD_PROMPTS,
    plan_tuning,
    reference_seconds,
    set_objective,
)
from toque.workflows.prepared_store import open_sources

_MEASURED_SECONDS: Final = 0.5
"""Minimum duration of a load measurement. The processor's counters have steps of 10 ms."""
_HELD_OUT_SPLITS: Final = ("validation", "valid", "dev", "test")
"""Names of splits to hold out. The first existing split is used."""


@dataclass(frozen=True)
class Initialised:
    """Configuration file that `init` wrote."""

    file: Path
    config: RunConfig
    sources: tuple[SurveyedSource, ...]
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


def survey_files(paths: Sequence[str], columns: Columns | None = None) -> Survey:
    """Describe the contents of files, as `init` recognises them.

    Args:
        paths: The files.
        columns: The field for each part of a record, as for `init`.

    Raises:
        ConfigError: A column is unknown.
        DataError: A file cannot be read or recognised, or has no usable record.
    """
    settings = source_columns(columns)
    draft = configure(data={"sources": [{"path": path, **settings} for path in paths]})
    local_sources = _open_local_sources(draft, SILENT.notice)
    refuse_mixture(local_sources)
    return survey_sources(draft, local_sources)


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
    rewards: Sequence[str] = (),
    replace: bool = False,
    reporter: Reporter = SILENT,
) -> Initialised:
    """Look at files and write a commented configuration for them, ready to train.

    Args:
        sources: One or several files, folders or patterns. The format of the files is detected.
        to: The file to write. The run and the store are named after it.
        size: Size of a model from scratch: 300k, 1m, 3m, 6m, 14m or 30m, the number of parameters
            with a vocabulary of 2,048 tokens. None means the best size for the text, the time and
            the measured speed of this machine.
        start_from: The model to continue from, a folder or a hub name. The default is random
            weights.
        for_: Time of the entire run with preparation and scores, e.g. "10 minutes". "tonight" is
            eight hours.
        tokenizer: A folder or a hub name. auto: the tokenizer of the model, or a new tokenizer
            trained on the data.
        encoding: Encoding of text files, e.g. cp1252 for an old export.
        columns: The field for each part of a record, {"prompt": "question", "target": "answer"},
            or a template over fields, {"prompt": "{question} {hint}", "target": "answer"}.
        rewards: Scores from which `start_from` learns, instead of imitating the texts:
            "cookable", or a function of yours as "module:function".
        replace: Overwrite an existing file.
        reporter: Receives slow activities.

    Returns:
        The file, its configuration, and the contents of each source.

    Raises:
        ConfigError: `to` exists or is not writable, or a value is invalid. Or a new model would
            learn from preference pairs or rewards.
        DataError: A source cannot be found or recognised, or has no usable record.
    """
    source_paths = [sources] if isinstance(sources, str | Path) else list(sources)
    file = named_path(to)
    _refuse_early(source_paths, size, file, replace=replace)
    result, text = draft_config(
        [str(path) for path in source_paths],
        file,
        size=size,
        start=str(start_from),
        for_=for_,
        tokenizer=tokenizer,
        encoding=encoding,
        columns=columns,
        rewards=rewards,
        reporter=reporter,
    )
    _write_config(file, text)
    return result


def draft_config(
    sources: Sequence[str],
    file: Path,
    *,
    size: str | None = None,
    start: str = "scratch",
    for_: str,
    tokenizer: str = "auto",
    encoding: str = "utf-8",
    columns: Columns | None = None,
    rewards: Sequence[str] = (),
    survey: Survey | None = None,
    reporter: Reporter = SILENT,
) -> tuple[Initialised, str]:
    """Return the configuration that `init` writes, and its text. Nothing is written.

    See `init` for the arguments and errors. The run and the store are named after `file`. `survey`
    is the result of `survey_files` for `sources`, if it is known.
    """
    total = parse_run_time(for_)
    paths, held_out, split_remarks = _choose_splits(sources)
    column_settings = source_columns(columns)
    model = {"family": "llama"}
    if start != "scratch":
        model = {"family": "auto", "start_from": start}
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
        refuse_mixture(local_sources)
        if start == "scratch":
            _refuse_pairs(local_sources)
        if survey is None:
            survey = survey_sources(draft, local_sources)
        draft = set_objective(draft, survey, rewards)

    if start == "scratch":
        run = _plan_new_model(draft, survey, total, size, reporter)
    else:
        run = _plan_tuning(draft, local_sources, survey, total, reporter)
    text = render_config(draft, survey, file, run.base, run.plan, run.batch)
    config = resolve_values(read_yaml(text, str(file)).value, str(file)).config

    remarks = [remark for source in survey for remark in source.remarks]
    remarks += [*run.base.remarks, *split_remarks]
    remarks += remark_on_preparation(total_tokens(survey) * CHARACTERS_PER_TOKEN, total)
    if start == "scratch":
        remarks += remark_on_few_records(survey)
    forecast = "" if run.plan is None else run.plan.forecast(total)
    return Initialised(file, config, tuple(survey), tuple(remarks), forecast), text


class _PlannedRun(NamedTuple):
    """Measured and chosen parts of the run that a configuration describes."""

    base: MeasuredBase
    """Settings for the base model, and remarks. A new model has only remarks."""
    plan: Plan
    """Use of the time, or None if the base is not on this machine."""
    batch: str
    """Value of `train.batch`."""


def _write_config(file: Path, text: str) -> None:
    """Write a configuration, and the JSON schema that editors use for it."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(file, text.encode())
        atomic_write(file.parent / SCHEMA_FILE, schema_text().encode())
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be written: {error.strerror}. Name another file with {argument('to')}."
        ) from error


def _known_amount(survey: Survey) -> tuple[int, int]:
    """Return the estimated numbers of tokens and distinct records, or zeros if unknown.

    A source in a bucket may be far larger than the local files.
    """
    if not all(source.tokens for source in survey):
        return 0, 0
    return total_tokens(survey), total_records(survey)


def _plan_new_model(
    draft: RunConfig,
    survey: Survey,
    total: Duration,
    size: str | None,
    reporter: Reporter,
) -> _PlannedRun:
    """Choose the size of a new model by its speed on this machine."""
    tokens, records = _known_amount(survey)
    before = ProcessorUse.now()
    with reporter.working("measuring the training speed of this machine"):
        choice, remarks = _choose_new_model(draft, survey, tokens, records, total, size)
    base = MeasuredBase(remarks=(*remarks, *_remark_on_load(before)))
    known_tokens = tokens or math.inf
    batch = choose_batch(
        choice.passes.useful * known_tokens,
        tokens,
        records,
        max_tokens=choice.size.batch_tokens,
        longest=POSITIONS,
    )
    return _PlannedRun(base, choice, batch)


def _plan_tuning(
    draft: RunConfig,
    local_sources: Sequence[Source],
    survey: Survey,
    total: Duration,
    reporter: Reporter,
) -> _PlannedRun:
    """Measure the base model and its training speed on this machine."""
    tokens, records = _known_amount(survey)
    before = ProcessorUse.now()
    seconds = training_seconds(tokens * CHARACTERS_PER_TOKEN, total)
    with reporter.working(
        "reading the model and measuring its training speed on this machine"
    ):
        rows = total_rows(survey)
        base = measure_base(draft, local_sources, tokens / rows if tokens else None)
        writing = 0.0
        if base.is_small:
            model = {"family": "auto", "start_from": draft.model.start_from}
            writing = _writing_rate(model, survey, tokens, records)
    objective = draft.objective
    if base.rate is None or (objective.learns_from_rewards and not tokens):
        batch = str(draft.train.batch)
        if not objective.learns_from_rewards:
            n_read = MAX_PASSES * (tokens or math.inf)
            batch = choose_batch(
                n_read, tokens, records, max_tokens=MAX_BATCH_TOKENS, longest=1
            )
        return _PlannedRun(base, None, batch)

    # The base's tokenizer gives a better count than the guess, except for texts that are divided
    # into rows.
    if base.tokens_each and kinds_of(survey).isdisjoint({DOCUMENTS, TOKENS, ""}):
        tokens = round(base.tokens_each * rows)
    trained = tokens if draft.data.validation else tokens * (1.0 - HELD_OUT_SHARE)
    reference = None
    if objective.kind == "dpo":
        reference = reference_seconds(tokens, base.rate, seconds, total)
        seconds -= reference
    tuning = plan_tuning(trained, records, seconds, base.rate, longest=base.longest)
    tuning = tuning._replace(reference=reference, writing=writing)
    batch = tuning.batch
    if objective.learns_from_rewards:
        batch = str(draft.train.batch)
        if base.is_small:
            n_texts = REWARD_PROMPTS * objective.samples
            writing = _writing_rate(model, survey, tokens, records, n_texts)
        writing = writing or GENERATION_SHARE * base.rate
        tuning = tuning.with_rewards(objective.samples, tokens / rows, writing, seconds)
    base = base._replace(remarks=(*base.remarks, *_remark_on_load(before)))
    return _PlannedRun(base, tuning, batch)


def _choose_new_model(
    draft: RunConfig,
    survey: Survey,
    tokens: int,
    records: int,
    total: Duration,
    size: str | None,
) -> tuple[Choice, list[str]]:
    """Choose the size of a new model by this machine's speed, with remarks on guesses."""
    n_bytes = tokens * CHARACTERS_PER_TOKEN
    bytes_per_source = SAMPLE_BYTES // len(survey)
    sample = b"".join(source.sample[:bytes_per_source] for source in survey)
    tokenizer, remarks = _choose_tokenizer(
        n_bytes or math.inf, draft.model.tokenizer, sample
    )
    # A source that was not read counts as recipes.
    is_plain_text = kinds_of(survey).isdisjoint({RECIPES, ""})
    choice = choose_size(
        n_bytes,
        records,
        total,
        tokenizer=tokenizer,
        sample=sample,
        like=OF_PLAIN_TEXT if is_plain_text else OF_RECIPES,
        only=size,
    )
    model = model_settings(choice.size, choice.tokenizer.setting)
    writing = _writing_rate(model, survey, tokens, records)
    return choice._replace(writing=writing), remarks


def _writing_rate(
    model: Mapping[str, Any],
    survey: Survey,
    tokens: int,
    records: int,
    n_texts: int = WRITTEN_AT_ONCE,
) -> float:
    """Measure the generation speed in tokens per second. Return 0.0 if no texts are generated."""
    if not tokens or kinds_of(survey) <= {DOCUMENTS, TOKENS}:
        return 0.0
    characters = tokens * CHARACTERS_PER_TOKEN / records
    return measure_writing_rate(model, characters, n_texts)


def _choose_tokenizer(
    n_bytes: float, name: str, sample: bytes
) -> tuple[TextTokenizer, list[str]]:
    """Return the user's tokenizer, or a new one for `n_bytes` of text, with remarks on guesses."""
    if name.startswith(TRAINED):
        return trained_tokenizer(int(name.removeprefix(TRAINED))), []
    if name == "auto":
        return tokenizer_for_text(n_bytes), []
    folder = tokenizer_here(name)
    if folder is None:
        remark = (
            f"{name} is not on this machine, so the speed was measured with a new tokenizer. "
            "Training is slower with a larger vocabulary."
        )
        return tokenizer_for_text(n_bytes)._replace(entries=0), [remark]
    codec = load_codec(folder)
    tokens = len(codec.encode_flat([sample.decode(errors="ignore")]).flat)
    bytes_per_token = len(sample) / tokens if tokens else CHARACTERS_PER_TOKEN
    return TextTokenizer(name, bytes_per_token, codec.vocab_size), []


def _remark_on_load(before: ProcessorUse) -> tuple[str, ...]:
    """Report that other programs used the processor since `before`, while a speed was measured."""
    now = ProcessorUse.now()
    others = now.others_since(before)
    if now.at - before.at < _MEASURED_SECONDS or others <= WORTH_WHILE:
        return ()
    remark = (
        f"Other programs kept {others:.1f} of {len(usable_cores())} cores busy during the speed "
        "measurement, so the configuration suits a machine under that load. Measure again "
        "after they end."
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
            f"{file} exists and may contain your changes. Name another file with {argument('to')}, "
            f"or overwrite it with {argument('replace=True')}."
        )


def _choose_splits(paths: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Return the paths to train on, the paths to hold out, and remarks on unused splits."""
    train = []
    held_out = []
    remarks = []
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
        unused = [name for name in names if name not in ("train", validation)]
        if unused:
            remarks.append(
                f"Splits of {path} that are not read: {shown_names(unused)}."
            )
    return train, held_out, remarks


def _open_local_sources(
    config: RunConfig, notice: Callable[[str], None]
) -> list[Source]:
    """Return the sources on this machine with their readers."""
    local = [
        source
        for source in config.data.sources
        if not is_remote(source.path) and not source.path.startswith("hf:")
    ]
    if not local:
        return []
    data = config.data.model_copy(update={"sources": tuple(local)})
    try:
        return open_sources(config.model_copy(update={"data": data}), say=notice)
    except RefusedFileError as error:
        raise RefusedFileError(
            _name_arguments(error), error.why, error.columns, error.fields
        ) from error


def _refuse_pairs(sources: Sequence[Source]) -> None:
    """Raise a ConfigError if a new model would learn from preference pairs."""
    for source in sources:
        reader = source.reader
        if not isinstance(reader, PreferenceReader):
            continue
        advice = ""
        if reader.form == "texts" and "prompt" in reader.columns:
            columns = {
                "prompt": reader.columns["prompt"],
                "target": reader.columns[CHOSEN],
            }
            arguments = [
                _format_argument(part, field) for part, field in columns.items()
            ]
            advice = (
                f" To imitate the chosen answers instead, use {' '.join(arguments)}."
            )
        raise ConfigError(
            f"{source.path} has preference pairs. They improve a model that can already write, "
            f"so {argument('start_from')} must name one: the model folder of a run, or a Hugging "
            f"Face name.{advice}"
        )


def _name_arguments(error: RefusedFileError) -> str:
    """Return the error's message with arguments of `init` in place of the suggested settings.

    The configuration with these settings does not exist yet.
    """
    message = str(error)
    for columns in error.columns:
        setting = columns_in_words(columns)
        arguments = " ".join(
            _format_argument(part, field) for part, field in columns.items()
        )
        message = message.replace(f"{setting} in its source of data.sources", arguments)
        message = message.replace(setting, arguments)
    return message


def _format_argument(part: str, field: str | tuple[str, ...]) -> str:
    """Format a column as an argument. Several fields become a template."""
    template = field
    if not isinstance(field, str):
        template = " ".join(f"{{{name}}}" for name in field)
    return f"{argument('columns')} {in_shell(f'{part}={template}')}"
