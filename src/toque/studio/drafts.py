"""Drafts of runs: recognised files, a proposed configuration with its forecast, and its checks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from toque.config import load_config, load_text
from toque.config.json_schema import SCHEMA_FILE, schema_text
from toque.errors import ConfigError, ToqueError
from toque.runs.run_record import CONFIG
from toque.serving.request_errors import RequestError
from toque.sources.layouts import RefusedFileError
from toque.storage.atomic import atomic_write
from toque.studio.workplace import Workplace
from toque.workflows.first_config.init import draft_config, survey_files
from toque.workflows.first_config.source_survey import RECIPES, SurveyedSource
from toque.workflows.plan.plan import plan
from toque.workflows.trained_model.folders import finished_model

_Name = Annotated[str, Field(min_length=1, max_length=300)]
_FIELD_OF_ARGUMENT: Final = {
    "for_": "the time",
    "start_from": "the base",
    "sources": "the files",
    "columns": "the columns",
}
"""Names of the arguments of `init` on the page."""
_PEAK_LR: Final = re.compile(r"(?m)^(  peak_lr: )(\S+)")
_BATCH: Final = re.compile(r"(?m)^(  batch: )[^#\n]*")
_LINE: Final = re.compile(r"line:(\d+): ")
_MAX_TEXT: Final = 200_000
_REWARDS: Final = """\
objective:                   # the model writes, scores rate its texts, and it learns from them
  kind: grpo
  rewards: {cookable: 1.0}
  samples: 8
"""
_REWARD_LR: Final = 0.1
"""Peak learning rate with rewards, as a fraction of the rate for imitation."""
_REWARD_BATCH: Final = "8 examples"


class FilesRequest(BaseModel):
    """Request to recognise files."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    files: Annotated[list[_Name], Field(min_length=1, max_length=50)]
    columns: dict[_Name, _Name] = {}
    """Field of each part of a record, such as {"prompt": "question", "target": "answer"}."""


class ProposalRequest(FilesRequest):
    """Request for a configuration."""

    name: _Name
    base: Annotated[str, Field(max_length=300)] = ""
    """Folder of the model to start from; empty for a new model."""
    time: Annotated[str, Field(min_length=1, max_length=40)]
    learn: Literal["imitation", "rewards"] = "imitation"


def recognise(workplace: Workplace, request: FilesRequest) -> dict[str, Any]:
    """Describe the contents of files.

    Returns:
        The sources, or the reason why a file cannot be read, with its fields and the columns that
        would read it.
    """
    files = _existing(workplace, request.files)
    try:
        survey = survey_files(files, dict(request.columns) or None)
    except RefusedFileError as error:
        return {
            "problem": describe_error(error),
            "fields": list(error.fields),
            "suggestions": [dict(columns) for columns in error.columns],
        }
    except ToqueError as error:
        return {"problem": describe_error(error), "fields": [], "suggestions": []}
    return {"sources": [_describe_source(source) for source in survey]}


def _describe_source(source: SurveyedSource) -> dict[str, Any]:
    record = asdict(source)
    del record["sample"]
    return record | {"summary": str(source)}


def propose(workplace: Workplace, request: ProposalRequest) -> dict[str, Any]:
    """Write a configuration as `init` does, and forecast its result, memory and disk space.

    The speed of the machine is measured, which takes seconds the first time.

    Raises:
        RequestError: The files, the base or the time cannot be used.
    """
    files = _existing(workplace, request.files)
    base = "scratch"
    if request.base:
        base = workplace.name_of(finished_model(workplace.path(request.base)))
    name = workplace.new_run(request.name)
    try:
        result, text = draft_config(
            files,
            Path(f"{name}.yaml"),
            start=base,
            for_=request.time,
            columns=dict(request.columns) or None,
        )
        if request.learn == "rewards":
            kinds = {source.kind for source in result.sources}
            text = _with_rewards(text, kinds, base)
        estimate = plan(load_text(text, name).config)
    except ToqueError as error:
        raise RequestError(422, describe_error(error)) from error
    return {
        "name": name,
        "yaml": text,
        "forecast": result.forecast,
        "remarks": result.remarks,
        "parameters": estimate.parameters.total,
        "memory_bytes": estimate.memory.total,
        "room_bytes": estimate.memory.room,
        "fits": estimate.fits,
        "changes": [lever.settings for lever in estimate.levers if lever.fits],
        "disk_bytes": estimate.disk.total,
        "free_disk_bytes": workplace.free_bytes,
    }


def _existing(workplace: Workplace, names: Sequence[str]) -> list[str]:
    """Return names of existing files, which the working folder resolves."""
    return [workplace.name_of(workplace.path(name)) for name in names]


def _with_rewards(text: str, kinds: set[str], base: str) -> str:
    """Add the objective of rewards to a configuration.

    Raises:
        ConfigError: The model is new, or the texts are not recipes.
    """
    if base == "scratch":
        raise ConfigError(
            "Rewards improve a model that can already write. Choose one as the base."
        )
    if not kinds <= {RECIPES, ""}:
        raise ConfigError(
            "The rewards of Toque score recipes, but these files have other texts. Write a score "
            "of your own, and add it under Advanced: docs/guides/learn-from-rewards.md."
        )

    def lower_rate(match: re.Match[str]) -> str:
        return f"{match[1]}{float(match[2]) * _REWARD_LR:.1g}"

    text = _PEAK_LR.sub(lower_rate, text)
    text = _BATCH.sub(rf"\g<1>{_REWARD_BATCH}   ", text)
    return text.replace("optim:\n", f"{_REWARDS}optim:\n", 1)


def check(text: str) -> dict[str, Any]:
    """Check the text of a configuration as `toque show` does.

    Returns:
        The error with its line, or {} for a valid configuration.
    """
    if len(text) > _MAX_TEXT:
        return {"line": None, "problem": "The configuration is too long."}
    try:
        load_text(text, "line")
    except ToqueError as error:
        message = describe_error(error)
        found = _LINE.match(message)
        line = None if found is None else int(found[1])
        return {
            "line": line,
            "problem": message.removeprefix(found[0] if found else ""),
        }
    return {}


def write_config(workplace: Workplace, name: str, text: str) -> tuple[str, str]:
    """Write the checked configuration of a new run. Return the names of the file and the run.

    Raises:
        RequestError: The configuration is invalid, or its run exists.
    """
    try:
        config = load_text(text, "line").config
    except ToqueError as error:
        raise RequestError(422, describe_error(error)) from error
    name = workplace.new_run(name)
    folder = (workplace.folder / config.run_dir).resolve()
    if not folder.is_relative_to(workplace.folder) or folder == workplace.folder:
        raise RequestError(422, "run_dir must be a folder inside the studio's folder.")
    run = workplace.name_of(folder)
    if folder.exists():
        raise RequestError(
            409,
            f"{run} already exists. Choose another name for run_dir under Advanced.",
        )
    try:
        atomic_write(workplace.folder / SCHEMA_FILE, schema_text().encode())
        atomic_write(workplace.folder / f"{name}.yaml", text.encode(), new=True)
    except OSError as error:
        raise RequestError(
            507, f"{name}.yaml cannot be written: {error.strerror}."
        ) from error
    return f"{name}.yaml", run


def config_of_run(workplace: Workplace, run: str) -> str:
    """Return the configuration that started a run, or its copy in the run folder.

    Raises:
        RequestError: The run does not exist.
    """
    folder = workplace.path(run)
    file = workplace.folder / f"{folder.name}.yaml"
    with suppress(ToqueError):
        config = load_config(file).config
        if (workplace.folder / config.run_dir).resolve() == folder.resolve():
            return file.name
    return workplace.name_of(workplace.path(f"{run}/{CONFIG}"))


def describe_error(error: ToqueError) -> str:
    """Return the message of an error with the names of the fields of the page."""
    return error.message(_name_field)


def _name_field(argument: str) -> str:
    name, equals, value = argument.partition("=")
    field = _FIELD_OF_ARGUMENT.get(name, name)
    return f"{field} {value}" if equals else field
