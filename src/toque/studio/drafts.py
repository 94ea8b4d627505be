"""Drafts of runs: recognised files, a proposed configuration with its forecast, and its checks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from toque.config import RunConfig, load_config, load_text
from toque.config.json_schema import SCHEMA_FILE, schema_text
from toque.config.user_code import names_of_code
from toque.config.yaml_reader import read_yaml
from toque.errors import ToqueError
from toque.runs.places import is_run
from toque.runs.run_record import CONFIG
from toque.serving.request_errors import RequestError
from toque.sources.layouts import RefusedFileError
from toque.storage.atomic import atomic_write
from toque.storage.no_follow import open_plain
from toque.studio.workplace import Workplace
from toque.workflows.first_config.init import draft_config, survey_files
from toque.workflows.first_config.source_survey import (
    PREFERENCES,
    Survey,
    SurveyedSource,
)
from toque.workflows.plan.plan import plan
from toque.workflows.trained_model.folders import finished_model

_Name = Annotated[str, Field(min_length=1, max_length=300)]
_FIELD_OF_ARGUMENT: Final = {
    "for_": "the time",
    "start_from": "the base",
    "sources": "the files",
    "columns": "the columns",
    "rewards": "the scores",
}
"""Names of the arguments of `init` on the page."""
_RUN_DIR: Final = re.compile(r"(?m)^run_dir:[^#\n]*[^#\s]")
_TEXT: Final = "The configuration"
"""Name of a text from the page in the messages about it."""
_LINE: Final = re.compile(rf"{_TEXT}:(\d+): ")
_SENTENCE_END: Final = re.compile(r"(?<=[.!?]) (?=[A-Z])")
_ELSEWHERE: Final = re.compile(
    r"docs/\w|\b(?:data|model|optim|train)\.[a-z]|Hugging Face name"
)
"""Sign of a sentence that names a setting or document, which the page does not have."""
_MAX_TEXT: Final = 200_000


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
    try:
        survey = _survey(workplace, request)
    except RefusedFileError as error:
        problem = _for_page(describe_error(error))
        if error.fields:
            # The full message has names of settings, but the page has a list for each part.
            problem = f"{', '.join(request.files)}: {error.why}."
        return {
            "problem": problem,
            "fields": list(error.fields),
            "suggestions": [dict(columns) for columns in error.columns],
        }
    except ToqueError as error:
        return {
            "problem": _for_page(describe_error(error)),
            "fields": [],
            "suggestions": [],
        }
    return {"sources": [_describe_source(source) for source in survey]}


def _survey(workplace: Workplace, request: FilesRequest) -> Survey:
    """Describe the contents of files, or return the last description if they are unchanged."""
    files = _existing(workplace, request.files)
    states = [(workplace.folder / name).stat() for name in files]
    versions = tuple((state.st_size, state.st_mtime_ns) for state in states)
    return _survey_versions(tuple(files), versions, tuple(request.columns.items()))


@lru_cache(maxsize=8)
def _survey_versions(
    files: tuple[str, ...],
    _versions: tuple[tuple[int, int], ...],
    columns: tuple[tuple[str, str], ...],
) -> Survey:
    return survey_files(files, dict(columns) or None)


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
    base = "scratch"
    if request.base:
        folder = finished_model(workplace.path(request.base))
        if is_run(folder):
            raise RequestError(
                422,
                f"{request.base} has no finished model yet. Wait for its end, or choose another "
                "model.",
            )
        base = workplace.name_of(folder)
    name = workplace.new_run(request.name)
    try:
        survey = _survey(workplace, request)
        if not request.base:
            _refuse_new_model(request, survey)
        result, text = draft_config(
            _existing(workplace, request.files),
            Path(f"{name}.yaml"),
            start=base,
            for_=request.time,
            columns=dict(request.columns) or None,
            rewards=("cookable",) if request.learn == "rewards" else (),
            survey=survey,
        )
        needs = _estimate_needs(workplace, load_text(text, name).config)
    except ToqueError as error:
        raise RequestError(422, _for_page(describe_error(error))) from error
    return {
        "name": name,
        "yaml": text,
        "forecast": _for_page(result.forecast),
        # The remarks on a source are shown with the source.
        "remarks": [
            _for_page(remark)
            for remark in result.remarks
            if not any(remark in source.remarks for source in result.sources)
        ],
        **needs,
    }


def _refuse_new_model(request: ProposalRequest, survey: Survey) -> None:
    """Raise a RequestError if a new model would learn from pairs or scores."""
    has_pairs = any(source.kind == PREFERENCES for source in survey)
    if has_pairs or request.learn == "rewards":
        lesson = "Preference pairs" if has_pairs else "Scores"
        raise RequestError(
            422,
            f"{lesson} improve a model that can already write. Choose a model under Start from.",
        )


def _for_page(text: str) -> str:
    """Remove the sentences that name settings or documents. The page cannot show them."""
    sentences = _SENTENCE_END.split(text)
    return " ".join(line for line in sentences if not _ELSEWHERE.search(line))


def _estimate_needs(workplace: Workplace, config: RunConfig) -> dict[str, Any]:
    """Estimate the memory and disk space of a run, and the changes with which it would fit."""
    estimate = plan(config, changes=False)
    changes = []
    if not estimate.fits:
        changes = [lever.settings for lever in plan(config).levers if lever.fits]
    return {
        "parameters": estimate.parameters.total,
        "memory_bytes": estimate.memory.total,
        "room_bytes": estimate.memory.room,
        "fits": estimate.fits,
        "changes": changes,
        "disk_bytes": estimate.disk.total,
        "free_disk_bytes": workplace.free_bytes,
    }


def _existing(workplace: Workplace, names: Sequence[str]) -> list[str]:
    """Return names of existing files, which the working folder resolves."""
    return [workplace.name_of(workplace.path(name)) for name in names]


def check(workplace: Workplace, text: str) -> dict[str, Any]:
    """Check the text of a configuration as `toque show` does, and estimate what its run needs.

    Returns:
        The error with its line, or the needs.
    """
    if len(text) > _MAX_TEXT:
        return {"line": None, "problem": "The configuration is too long."}
    try:
        return _estimate_needs(workplace, load_text(text, _TEXT).config)
    except ToqueError as error:
        message = describe_error(error)
        found = _LINE.match(message)
        line = None if found is None else int(found[1])
        return {
            "line": line,
            "problem": message.removeprefix(found[0] if found else ""),
        }


def write_config(workplace: Workplace, name: str, text: str) -> tuple[str, str]:
    """Write the checked configuration of a new run. Return the names of the file and the run.

    Raises:
        RequestError: The configuration is invalid, or its run exists.
    """
    try:
        config = load_text(text, _TEXT).config
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
    except FileExistsError as error:  # another request has just written it
        raise RequestError(
            409, f"{name}.yaml already exists. Start the run again to use another name."
        ) from error
    except OSError as error:
        raise RequestError(
            507, f"{name}.yaml cannot be written: {error.strerror}."
        ) from error
    return f"{name}.yaml", run


def copy_config(workplace: Workplace, run: str, file: str) -> dict[str, str]:
    """Return the text of a run's configuration file, for a new run with another name.

    Raises:
        RequestError: The file cannot be read, or comes from a run and names code, which would run
            if the copy were started.
    """
    try:
        with open_plain(workplace.path(file)) as stream:
            text = stream.read(_MAX_TEXT).decode("utf-8", "replace")
    except OSError as error:
        raise RequestError(
            409, f"{file} cannot be read: {error.strerror}. Replace it with a copy."
        ) from error
    if Path(file).name == CONFIG and (code := _code_in(text)):
        raise RequestError(
            409,
            f"{file} names {', '.join(code)}, and code that a run names is not trusted. Copy the "
            "file to this folder yourself, and remove the names that you do not trust.",
        )
    name = workplace.new_run(Path(run).name)
    new_folder = f"run_dir: runs/{name}"
    return {"name": name, "yaml": _RUN_DIR.sub(new_folder, text, count=1)}


def _code_in(text: str) -> list[str]:
    """Return the names of user code in the text of a configuration."""
    with suppress(ToqueError):
        values = read_yaml(text, CONFIG).value
        if isinstance(values, dict):
            return [name for names in names_of_code(values).values() for name in names]
    return []


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
    file = workplace.path(f"{run}/{CONFIG}")
    with suppress(ToqueError):
        config = load_config(file).config
        # A run may come from anyone, so its settings must not name other folders.
        target = (workplace.folder / config.run_dir).resolve()
        store = (workplace.folder / config.data.store).resolve()
        if target != folder.resolve() or not store.is_relative_to(workplace.folder):
            raise RequestError(
                409,
                f"{run}/{CONFIG} names another folder as run_dir, or a store outside of this "
                "studio. Change its settings, and start a new run.",
            )
    return workplace.name_of(file)


def describe_error(error: ToqueError) -> str:
    """Return the message of an error with the names of the fields of the page."""
    return error.message(_name_field)


def _name_field(argument: str) -> str:
    name, equals, value = argument.partition("=")
    field = _FIELD_OF_ARGUMENT.get(name, name)
    return f"{field} {value}" if equals else field
