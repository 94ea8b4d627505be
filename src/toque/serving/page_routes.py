"""Routes of the page that a server shows to people: its files, and what it asks below /api/.

The recipe itself is written by /v1/completions, as for any other client.
"""

from __future__ import annotations

from functools import partial

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from toque.serving.context import Serving
from toque.serving.gate import read_body
from toque.serving.page_answers import Classified, Purchase, Wish, WrittenText, class_shares
from toque.serving.page_files import page_files
from toque.serving.protocol import parsed


def page_routes(serving: Serving) -> list[Route]:
    """The page, and its own questions. Texts are read in other threads: nobody waits for them."""

    async def models(_: Request) -> Response:
        found = [
            {"name": served.name, "form": served.record.form} for served in serving.models.values()
        ]
        return JSONResponse({"models": found})

    async def prompt(request: Request) -> Response:
        wish = parsed(Wish, await read_body(request, serving.limits))
        return JSONResponse({"prompt": wish.prompt(serving.models.named(wish.model))})

    async def score(request: Request) -> Response:
        written = parsed(WrittenText, await read_body(request, serving.limits))
        return JSONResponse(await run_in_threadpool(written.verdict))

    async def classes(request: Request) -> Response:
        asked = parsed(Classified, await read_body(request, serving.limits))
        served = serving.models.named(asked.model)
        questions = await run_in_threadpool(asked.questions, served)
        shares = await serving.batcher.run(served, partial(class_shares, served, questions))
        return JSONResponse({"classes": await run_in_threadpool(asked.classes, shares)})

    async def shopping_list(request: Request) -> Response:
        purchase = parsed(Purchase, await read_body(request, serving.limits))
        return JSONResponse(await run_in_threadpool(purchase.answer))

    return [
        *page_files(),
        Route("/api/models", models),
        Route("/api/prompt", prompt, methods=["POST"]),
        Route("/api/score", score, methods=["POST"]),
        Route("/api/classes", classes, methods=["POST"]),
        Route("/api/shopping-list", shopping_list, methods=["POST"]),
    ]
