"""The files of the page at `GET /`, and what a browser may do with them. Owns no data: nothing in them is
about this server."""

from __future__ import annotations

import functools
from importlib.resources import files
from typing import NamedTuple

from starlette.responses import Response
from starlette.types import Scope


class ViewFile(NamedTuple):
    place: str  # in the package
    kind: str


# By path; these are answered without a key.
FILES = {
    "/": ViewFile("server/page/index.html", "text/html"),
    "/page/page.css": ViewFile("server/page/page.css", "text/css"),
    "/page/page.js": ViewFile("server/page/page.js", "text/javascript"),
    "/page/example.txt": ViewFile("commands/demo.txt", "text/plain"),
}
# Scripts and styles are our files only, and nothing is asked of another server.
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
    "vary": "accept",
}


def is_browser(scope: Scope) -> bool:
    """Programs ask for `*/*`, or for nothing."""
    return any(name == b"accept" and b"text/html" in value for name, value in scope["headers"])


def file_response(path: str) -> Response:
    return Response(_read(path), headers=HEADERS, media_type=FILES[path].kind)


@functools.cache
def _read(path: str) -> bytes:
    return files("penstock").joinpath(FILES[path].place).read_bytes()
