"""Answers to plain HTTP requests, and the checks of a request before it becomes a WebSocket."""

from __future__ import annotations

import functools
import hmac
import logging
from email.utils import formatdate
from http import HTTPStatus
from pathlib import Path
from urllib.parse import parse_qs

from websockets.datastructures import Headers
from websockets.http11 import Request, Response

__all__ = ["STREAM", "answer", "log_refusal", "operators"]

LOG = logging.getLogger("cnorm.serve")
STREAM = "/stream"  # the path of the WebSocket
OPERATORS = ("/healthz", "/readyz", "/metrics")
TEXT = "text/plain; charset=utf-8"
KINDS = {".html": "text/html; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".json": "application/json"}
POLICY = "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; connect-src 'self'; img-src data:"


def answer(worker, connection, request: Request) -> Response | None:
    """The answer to a request; None if it shall become a WebSocket."""
    path = request.path.partition("?")[0]
    if path == STREAM and request.method == "GET":
        return refusal(worker, request)
    if path in OPERATORS:
        return operators(worker, connection, request)
    if request.method != "GET":
        return response(HTTPStatus.METHOD_NOT_ALLOWED, "only GET is answered\n", extra={"Allow": "GET"})
    if path not in (files := page(worker.options.page)):
        return response(HTTPStatus.NOT_FOUND, "there is no such page\n")
    return foreign_host(worker, request) or response(HTTPStatus.OK, *files[path])


def operators(worker, connection, request: Request) -> Response:
    """The answer to a request of an orchestrator or of Prometheus; the metrics port has no other pages."""
    path = request.path.partition("?")[0]
    if path not in OPERATORS:
        return response(HTTPStatus.NOT_FOUND, "there is no such page here\n")
    if request.method != "GET":
        return response(HTTPStatus.METHOD_NOT_ALLOWED, "only GET is answered\n", extra={"Allow": "GET"})
    if path == "/healthz":
        return response(HTTPStatus.OK, "ok\n")
    if path == "/readyz":
        reason = worker.unready()
        return response(HTTPStatus.SERVICE_UNAVAILABLE if reason else HTTPStatus.OK, (reason or "ok") + "\n")
    if not authorised(worker.options.token, request):
        return response(HTTPStatus.UNAUTHORIZED, "a token is needed\n", extra={"WWW-Authenticate": "Bearer"})
    if refused := None if worker.options.token else foreign_host(worker, request):
        return refused
    return response(HTTPStatus.OK, worker.metrics.text(), "text/plain; version=0.0.4; charset=utf-8")


def refusal(worker, request: Request) -> Response | None:
    """Why a request for a WebSocket is refused before the handshake; None if it is not."""
    if not authorised(worker.options.token, request):
        return response(HTTPStatus.UNAUTHORIZED, "a token is needed\n", extra={"WWW-Authenticate": "Bearer"})
    if reason := worker.unready():
        return response(HTTPStatus.SERVICE_UNAVAILABLE, reason + "\n", extra={"Retry-After": "1"})
    return None


def log_refusal(worker, connection, request: Request, response: Response) -> None:
    """Log why a request was refused, and what an operator can do about an origin."""
    if response.status_code < HTTPStatus.BAD_REQUEST:
        return
    path, origins = request.path.partition("?")[0][:100], request.headers.get_all("Origin")
    if path == STREAM and response.status_code == HTTPStatus.FORBIDDEN and origins:
        reason = f"the origin {origins[0][:200]!r}: start with --origin {origins[0][:200]!r} to accept it"
    else:
        reason = response.body.decode(errors="replace").splitlines()[0][:200] if response.body else ""
    LOG.info("refused %s to %s with status %d: %s", repr(path), connection.peer, response.status_code, reason)


def foreign_host(worker, request: Request) -> Response | None:
    """A refusal if a loopback server is asked by a foreign name, as by a page whose name was rebound to 127.0.0.1."""
    if worker.options.host not in ("127.0.0.1", "localhost", "::1"):
        return None
    hosts = request.headers.get_all("Host")
    if len(hosts) == 1 and any(
        origin == f"{scheme}://{hosts[0]}"
        if isinstance(origin, str)
        else origin and origin.fullmatch(f"{scheme}://{hosts[0]}")
        for origin in worker.origins
        for scheme in ("http", "https")
    ):
        return None
    return response(HTTPStatus.FORBIDDEN, "this host name is none of the server's: start with --origin to accept it\n")


@functools.cache
def page(folder: str) -> dict[str, tuple[bytes, str]]:
    """Path -> bytes and type of the files of `--page`, read once; index.html is at /."""
    files = (file for file in Path(folder).iterdir() if file.suffix in KINDS) if folder else ()
    found = {f"/{file.name}": (file.read_bytes(), KINDS[file.suffix]) for file in files}
    return {"/" if path == "/index.html" else path: each for path, each in found.items()}


def authorised(token: str, request: Request) -> bool:
    """Whether a request has the token, as ``Authorization: Bearer`` or, for browsers, as ``?token=``."""
    if not token:
        return True
    headers = request.headers.get_all("Authorization")
    if headers:
        given = headers[0].removeprefix("Bearer ") if len(headers) == 1 and headers[0].startswith("Bearer ") else ""
    else:
        given = parse_qs(request.path.partition("?")[2]).get("token", [""])[0]
    return hmac.compare_digest(given.encode(), token.encode())


def response(status: HTTPStatus, body: str | bytes, kind: str = TEXT, extra: dict[str, str] | None = None) -> Response:
    body = body.encode() if isinstance(body, str) else body
    headers = {
        "Date": formatdate(usegmt=True),
        "Connection": "close",
        "Content-Length": str(len(body)),
        "Content-Type": kind,
        "Content-Security-Policy": POLICY,
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-store",
    }
    return Response(status.value, status.phrase, Headers(headers | (extra or {})), body)
