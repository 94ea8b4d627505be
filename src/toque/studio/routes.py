"""Part of the application that starts runs and manages them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Annotated, Any, Final, Literal, final

from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from toque.errors import ConfigError
from toque.hardware.ending_thread import call_in_ending_thread
from toque.runs.run_state import state_of
from toque.serving.application import Part
from toque.serving.gate import Limits
from toque.serving.request_body import read_request
from toque.serving.request_errors import RequestError
from toque.serving.watch_app import Watcher
from toque.studio import drafts
from toque.studio.exports import export_model, read_card, zip_export
from toque.studio.feedback import Comparison, add_comparison, count_wins
from toque.studio.jobs import Jobs
from toque.studio.model_pool import ModelPool, describe_models
from toque.studio.overview import Overview
from toque.studio.trash import Trash
from toque.studio.uploads import Uploads
from toque.studio.workplace import Workplace
from toque.units import Duration

_Name = Annotated[str, Field(min_length=1, max_length=300)]
_ADVANCE_SECONDS: Final = 0.5
"""Interval at which the queue looks for an ended process."""
_NO_STORE: Final = {"Cache-Control": "no-store"}


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
        """Two measurements at a time would disturb each other."""

    def part(self) -> Part:
        """Return the part of the application."""
        post = self._post
        return Part(
            views=["home", "new", "compare"],
            routes=[
                Route("/api/home", self._describe_home),
                Route("/api/files", self._list_files),
                Route("/api/files/{name}", self._upload, methods=["PUT"]),
                Route("/api/models", self._list_models),
                Route("/api/log", self._send_log),
                Route("/api/card", self._send_card),
                Route("/api/wins", self._send_wins),
                Route("/api/export/{name:path}", self._send_export),
                post("/api/recognise", drafts.FilesRequest, self._recognise),
                post("/api/propose", drafts.ProposalRequest, self._propose),
                post("/api/check", _TextRequest, self._check),
                post("/api/start", _StartRequest, self._start),
                post("/api/stop", _RunRequest, self._stop),
                post("/api/continue", _ContinueRequest, self._continue),
                post("/api/dismiss", _JobRequest, self._dismiss),
                post("/api/delete", _RunRequest, self._delete),
                post("/api/restore", _RestoreRequest, self._restore),
                post("/api/open", _ModelRequest, self._open_model),
                post("/api/feedback", Comparison, self._add_feedback),
                post("/api/export", _ExportRequest, self._export),
            ],
            run=self._run,
        )

    @asynccontextmanager
    async def _run(self) -> AsyncIterator[None]:
        """Advance the queue until the server ends. Training processes continue without it."""

        async def advance() -> None:
            while True:
                await run_in_threadpool(self._jobs.advance)
                await asyncio.sleep(_ADVANCE_SECONDS)

        task = asyncio.create_task(advance())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    def _post(
        self, path: str, kind: type[BaseModel], answer: Callable[..., Any]
    ) -> Route:
        """Build a route that answers a request of a kind with JSON."""

        async def respond(http_request: Request) -> Response:
            request = await read_request(kind, http_request, self._limits)
            return JSONResponse(await answer(request) or {})

        return Route(path, respond, methods=["POST"])

    async def _describe_home(self, _: Request) -> Response:
        home = await run_in_threadpool(self._overview.describe, self._jobs.jobs)
        return JSONResponse(home, headers=_NO_STORE)

    async def _list_files(self, _: Request) -> Response:
        files = await run_in_threadpool(self._overview.data_files)
        return JSONResponse({"files": files}, headers=_NO_STORE)

    async def _upload(self, request: Request) -> Response:
        path = await self._uploads.receive(request, request.path_params["name"])
        return JSONResponse({"name": path.name})

    async def _list_models(self, _: Request) -> Response:
        names = await run_in_threadpool(self._overview.usable_models)
        models = await run_in_threadpool(describe_models, self._workplace, names)
        return JSONResponse({"models": models}, headers=_NO_STORE)

    async def _send_log(self, request: Request) -> Response:
        run = request.query_params.get("run", "")
        log = await run_in_threadpool(self._jobs.log, run)
        return JSONResponse({"log": log}, headers=_NO_STORE)

    async def _send_card(self, request: Request) -> Response:
        model = request.query_params.get("model", "")
        card = await run_in_threadpool(read_card, self._workplace, model)
        return JSONResponse({"card": card}, headers=_NO_STORE)

    async def _send_wins(self, _: Request) -> Response:
        wins = await run_in_threadpool(count_wins, self._workplace.folder)
        return JSONResponse({"wins": wins}, headers=_NO_STORE)

    async def _send_export(self, request: Request) -> Response:
        name = request.path_params["name"].removesuffix(".zip")
        blocks = await run_in_threadpool(zip_export, self._workplace, name)
        file = f"{name.rpartition('/')[2]}.zip"
        headers = {"Content-Disposition": f'attachment; filename="{file}"'}
        return StreamingResponse(blocks, media_type="application/zip", headers=headers)

    async def _recognise(self, request: drafts.FilesRequest) -> Any:
        return await run_in_threadpool(drafts.recognise, self._workplace, request)

    async def _propose(self, request: drafts.ProposalRequest) -> Any:
        async with self._measuring:
            return await run_in_threadpool(
                call_in_ending_thread, lambda: drafts.propose(self._workplace, request)
            )

    async def _check(self, request: _TextRequest) -> Any:
        return await run_in_threadpool(drafts.check, request.yaml)

    async def _start(self, request: _StartRequest) -> Any:
        def start() -> dict[str, str]:
            file, run = drafts.write_config(self._workplace, request.name, request.yaml)
            self._jobs.add(run, ["train", file])
            return {"run": run}

        return await run_in_threadpool(start)

    async def _stop(self, request: _RunRequest) -> None:
        await run_in_threadpool(self._jobs.stop, request.run)

    async def _continue(self, request: _ContinueRequest) -> None:
        def add() -> None:
            command = ["train", drafts.config_of_run(self._workplace, request.run)]
            if request.time:
                try:
                    length = Duration.parse(request.time)
                except ConfigError as error:
                    raise RequestError(422, str(error), param="time") from error
                command += [f"train.stop_after={length}", "train.time_limit=null"]
            self._jobs.add(request.run, command)

        await run_in_threadpool(add)

    async def _dismiss(self, request: _JobRequest) -> None:
        await run_in_threadpool(self._jobs.remove, request.job)

    async def _delete(self, request: _RunRequest) -> Any:
        def delete() -> dict[str, str]:
            record = self._watcher.records().get(request.run)
            is_active = record is not None and state_of(record).kind in (
                "running",
                "scoring",
            )
            if is_active or self._jobs.has(request.run):
                raise RequestError(
                    409, f"{request.run} is being trained or waits. Stop it first."
                )
            return {"id": self._trash.remove(request.run)}

        return await run_in_threadpool(delete)

    async def _restore(self, request: _RestoreRequest) -> None:
        await run_in_threadpool(self._trash.restore, request.id, request.run)

    async def _open_model(self, request: _ModelRequest) -> None:
        await self._pool.open(request.model)

    async def _add_feedback(self, request: Comparison) -> None:
        await run_in_threadpool(add_comparison, self._workplace.folder, request)

    async def _export(self, request: _ExportRequest) -> Any:
        return await export_model(self._workplace, request.model, request.format)
