"""Static files of the application, and the login with the token of the server."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from jinja2 import Environment
from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from toque.reports.page import STYLE
from toque.serving.gate import Limits, Login
from toque.serving.request_body import read_request
from toque.serving.request_errors import RequestError

SITE: Final = Path(__file__).parent / "site"
_TITLES: Final = {
    "home": "Home",
    "new": "New",
    "runs": "Runs",
    "use": "Cook",
    "talk": "Talk",
    "compare": "Compare",
}
"""Titles of the views in the navigation."""
_MEDIA_TYPES: Final = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS: Final = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # the files change with the version of the server
}


class _LoginRequest(BaseModel):
    """Request for the cookie of the server."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    token: str


def site_routes(views: Sequence[str], login: Login) -> list[Route]:
    """Create the routes of the page at "/", its files below "/page/", and its login.

    The files are read once, before any request, so that a request cannot read another file.

    Args:
        views: Names of the views, the first one at the start.
        login: Login of the server.
    """
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    index = template.from_string((SITE / "index.html").read_text(encoding="utf-8"))
    content = index.render(views=views, titles=_TITLES)
    page = Response(content, media_type="text/html", headers=_HEADERS)

    async def send_page(request: Request) -> Response:
        token = request.query_params.get("token")
        if token is None or not login.accepts(token):
            return page
        # The token disappears from the address, which the browser may store or show.
        response = RedirectResponse("./", status_code=303)
        response.headers["Set-Cookie"] = login.cookie
        return response

    async def log_in(request: Request) -> Response:
        body = await read_request(_LoginRequest, request, Limits())
        if not login.accepts(body.token):
            raise RequestError(
                401, "This is not the token of the server. Check it, and try again."
            )
        return JSONResponse({}, headers={"Set-Cookie": login.cookie})

    files = [
        _file_route(file.name, file.read_bytes())
        for file in sorted(SITE.iterdir())
        if file.name not in ("index.html", "app.css")
    ]
    return [
        Route("/", send_page),
        Route("/session", log_in, methods=["POST"]),
        _file_route("style.css", read_style()),
        *files,
    ]


def read_style() -> bytes:
    """Read the style sheet of the application: the styles of all pages, and its own."""
    return STYLE.read_bytes() + (SITE / "app.css").read_bytes()


def _file_route(name: str, content: bytes) -> Route:
    media_type = _MEDIA_TYPES[Path(name).suffix]

    async def send(_: Request) -> Response:
        return Response(content, media_type=media_type, headers=_HEADERS)

    return Route(f"/page/{name}", send)
