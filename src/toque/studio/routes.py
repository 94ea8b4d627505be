"""Part of the application that starts runs and manages them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Annotated, Any, Final, Literal, final
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from toque.errors import ConfigError
from toque.hardware.ending_thread import call_in_ending_thread
from toque.reporter import clock_text
from toque.runs.places import is_run
from toque.runs.run_state import state_of
from toque.serving.application import Part
from toque.serving.gate import Limits
from toque.serving.request_body import R, post_route
from toque.serving.request_errors import RequestError
from toque.serving.watch_app import Watcher
from toque.studio import drafts
from toque.studio.exports import describe_export, export_model, zip_export
from toque.studio.feedback import Comparison, add_comparison, count_wins
from toque.studio.jobs import Jobs
from toque.studio.model_pool import ModelPool, describe_models
from toque.studio.overview import Overview
from toque.studio.trash import Trash
from toque.studio.uploads import Uploads
from toque.studio.workplace import Workplace
from toque.units import Duration

_log = logging.getLogger("toque.studio")
_Name = Annotated[str, Field(min_length=1, max_length=300)]
_ADVANCE_SECONDS: Final = 0.5
"""Interval at which the queue looks for an ended process."""


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _RunRequest(_Request):
    run: _Name


class _ContinueRequest(_RunRequest):
    time: Annotated[str, Field(max_length=40)] = ""
    """New length of the run, to train it longer; empty for the length in its configuration."""


class _StartRequest(_Request):
    name: _Name
    yaml: Annotated[str, Field(max_length=200_000)]


class _TextRequest(_Request):
    yaml: Annotated[str, Field(max_length=400_000)]


class _JobRequest(_Request):
    job: _Name


class _RestoreRequest(_RunRequest):
    id: _Name


class _ModelRequest(_Request):
    model: _Name


class _ExportRequest(_ModelRequest):
    format: Literal["hf", "gguf", "adapter"]


@final
class Studio:
    """Studio of a folder.

    Args:
        workplace: The folder.
        watcher: Reader of its runs.
        pool: Models that generate texts.
        jobs: Queue of its runs.
    """

    def __init__(
        self, workplace: Workplace, watcher: Watcher, pool: ModelPool, jobs: Jobs
    ) -> None:
        self._workplace = workplace
        self._watcher = watcher
        self._pool = pool
        self._jobs = jobs
        self._overview = Overview(workplace, watcher)
        self._uploads = Uploads(workplace)
        self._trash = Trash(workplace)
        self._limits = Limits()
        self._measuring = asyncio.Lock()
        """Two measurements or estimates at a time would disturb each other."""
        self._exporting = asyncio.Lock()
        """Two exports at a time would choose the same name."""

    def part(self) -> Part:
        """Return the part of the application."""
        get, post, place = self._get, self._post, self._workplace
        return Part(
            views=["home", "new", "compare"],
            routes=[
                get("home", lambda _: self._describe_home()),
                get("files", lambda _: {"files": self._overview.data_files()}),
                get("models", lambda _: self._list_models()),
                get("config", self._copy_config),
                get("log", lambda run: {"log": self._jobs.log(run)}),
                get("card", lambda model: describe_export(place, model)),
                get("wins", lambda _: {"wins": count_wins(place.folder)}),
                post("recognise", drafts.FilesRequest, self._recognise),
                post("start", _StartRequest, self._start),
                post("stop", _RunRequest, lambda wish: self._jobs.stop(wish.run)),
                post("continue", _ContinueRequest, self._continue),
                post("dismiss", _JobRequest, lambda wish: self._jobs.remove(wish.job)),
                post("delete", _RunRequest, self._delete),
                post("restore", _RestoreRequest, self._restore),
                post("empty", _Request, lambda _: self._trash.empty()),
                post("feedback", Comparison, self._add_feedback),
                post("propose", drafts.ProposalRequest, self._propose),
                post("check", _TextRequest, self._check),
                post("open", _ModelRequest, self._open_model),
                post("export", _ExportRequest, self._export),
                Route("/api/files/{name}", self._upload, methods=["PUT"]),
                Route("/api/export/{name:path}", self._send_export),
            ],
            run=self._run,
        )

    @asynccontextmanager
    async def _run(self) -> AsyncIterator[None]:
        """Advance the queue until the server ends. Training processes continue without it."""

        async def advance() -> None:
            problem = ""
            while True:
                try:
                    await run_in_threadpool(self._jobs.advance)
                except OSError as error:  # such as a full disk: try again
                    if str(error) != problem:
                        problem = str(error)
                        _log.exception("the queue cannot be advanced")
                await asyncio.sleep(_ADVANCE_SECONDS)

        task = asyncio.create_task(advance())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    def _post(self, name: str, kind: type[R], answer: Callable[[R], Any]) -> Route:
        return post_route(f"/api/{name}", kind, self._limits, answer)

    def _get(self, name: str, answer: Callable[[str], Any]) -> Route:
        """Build a route that answers with JSON. `answer` receives the value of the query."""

        async def respond(request: Request) -> Response:
            value = next(iter(request.query_params.values()), "")
            content = await run_in_threadpool(answer, value)
            return JSONResponse(content, headers={"Cache-Control": "no-store"})

        return Route(f"/api/{name}", respond)

    def _describe_home(self) -> Any:
        home = self._overview.describe(self._jobs.jobs)
        return home | {"trash": self._trash.contents()}

    def _list_models(self) -> Any:
        names = self._overview.usable_models()
        return {"models": describe_models(self._workplace, names)}

    def _copy_config(self, run: str) -> Any:
        jobs = [job for job in self._jobs.jobs if job.run == run]
        files = [file for job in jobs for file in job.command[1:2]]
        file = files[0] if files else drafts.config_of_run(self._workplace, run)
        return drafts.copy_config(self._workplace, run, file)

    async def _upload(self, request: Request) -> Response:
        name = request.path_params["name"]
        path, is_new = await self._uploads.receive(request, name)
        return JSONResponse({"name": path.name, "is_new": is_new})

    async def _send_export(self, request: Request) -> Response:
        name = request.path_params["name"].removesuffix(".zip")
        blocks = await run_in_threadpool(zip_export, self._workplace, name)
        file = quote(f"{name.rpartition('/')[2]}.zip")
        headers = {"Content-Disposition": f"attachment; filename*=UTF-8''{file}"}
        return StreamingResponse(blocks, media_type="application/zip", headers=headers)

    async def _export(self, request: _ExportRequest) -> Any:
        async with self._exporting:
            return await export_model(self._workplace, request.model, request.format)

    async def _propose(self, request: drafts.ProposalRequest) -> Any:
        return await self._measure(lambda: drafts.propose(self._workplace, request))

    async def _check(self, request: _TextRequest) -> Any:
        return await self._measure(lambda: drafts.check(self._workplace, request.yaml))

    async def _measure(self, work: Callable[[], Any]) -> Any:
        async with self._measuring:
            return await run_in_threadpool(call_in_ending_thread, work)

    async def _open_model(self, request: _ModelRequest) -> None:
        await self._pool.open(request.model)

    def _recognise(self, request: drafts.FilesRequest) -> Any:
        return drafts.recognise(self._workplace, request)

    def _start(self, request: _StartRequest) -> Any:
        file, run = drafts.write_config(self._workplace, request.name, request.yaml)
        try:
            self._jobs.add(run, ["train", file])
        except RequestError:
            (self._workplace.folder / file).unlink(missing_ok=True)
            raise
        return {"run": run}

    def _continue(self, request: _ContinueRequest) -> None:
        command = ["train", drafts.config_of_run(self._workplace, request.run)]
        if request.time:
            try:
                length = Duration.parse(request.time)
            except ConfigError as error:
                raise RequestError(422, str(error), param="time") from error
            self._refuse_shorter(request.run, length)
            command += [f"train.stop_after={length}", "train.time_limit=null"]
        self._jobs.add(request.run, command)

    def _refuse_shorter(self, run: str, length: Duration) -> None:
        """Raise a RequestError if a run has already trained for longer."""
        record = self._watcher.records().get(run)
        done = 0.0 if record is None else record.history.progress.seconds
        if length.seconds and length.seconds <= done:
            raise RequestError(
                422,
                f"{run} has already trained for {clock_text(done)}. Choose a longer time.",
                param="time",
            )

    def _delete(self, request: _RunRequest) -> Any:
        if not is_run(self._workplace.path(request.run)):
            raise RequestError(
                404, f"{request.run} is not a run. Choose one of the runs."
            )
        record = self._watcher.records().get(request.run)
        kind = None if record is None else state_of(record).kind
        if kind in ("running", "scoring"):  # started in a terminal
            raise RequestError(409, f"{request.run} is being trained. Stop it first.")
        with self._jobs.kept_out(request.run):
            return {"id": self._trash.remove(request.run)}

    def _restore(self, request: _RestoreRequest) -> None:
        self._trash.restore(request.id, request.run)

    def _add_feedback(self, request: Comparison) -> None:
        add_comparison(self._workplace.folder, request)
