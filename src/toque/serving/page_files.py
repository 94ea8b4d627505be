"""Files of the page that a server shows to people, held in memory and sent with strict headers.

Only what lies in the page's folder at start has an address, so no request can name another file.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FOLDER: Final = Path(__file__).parent / "page"
_TYPES: Final = {
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
    "Cache-Control": "no-cache",  # another version of the server sends other files
}


def page_files(folder: Path = FOLDER, also: Iterable[Path] = ()) -> list[Route]:
    """The page at "/" and what it is made of below "/page/".

    Args:
        folder: Holds index.html and the page's own files.
        also: Files that it shares with other pages.
    """
    files = [*sorted(folder.iterdir()), *also]
    routes = [Route(f"/page/{file.name}", _sending(file)) for file in files]
    return [Route("/", _sending(folder / "index.html")), *routes]


def _sending(file: Path) -> Callable[[Request], Awaitable[Response]]:
    content, kind = file.read_bytes(), _TYPES[file.suffix]

    async def send(_: Request) -> Response:
        return Response(content, media_type=kind, headers=_HEADERS)

    return send
