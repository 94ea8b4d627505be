"""Static files of the web pages."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

PAGE: Final = Path(__file__).parent / "page"
"""Folder of the page of `toque serve`."""
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


def page_files(folder: Path = PAGE, also: Iterable[Path] = ()) -> list[Route]:
    """Create routes for a page's index.html at "/" and for its files below "/page/".

    The files are read once, before any request, so that a request cannot read another file.

    Args:
        folder: Folder of the page.
        also: Files from other folders.
    """

    def file_route(path: str, file: Path) -> Route:
        content = file.read_bytes()
        media_type = _MEDIA_TYPES[file.suffix]

        async def send(_: Request) -> Response:
            return Response(content, media_type=media_type, headers=_HEADERS)

        return Route(path, send)

    files = [*sorted(folder.iterdir()), *also]
    routes = [file_route(f"/page/{file.name}", file) for file in files]
    return [file_route("/", folder / "index.html"), *routes]
