"""Answers to plain HTTP requests, and the checks of a request before it becomes a WebSocket."""

from __future__ import annotations

import hmac
import json
from email.utils import formatdate
from http import HTTPStatus
from importlib import resources
from urllib.parse import parse_qs, urlsplit

from websockets.datastructures import Headers, MultipleValuesError
from websockets.http11 import Request, Response

from cnorm.tools.recordings import recordings as packaged_recordings

__all__ = ["STREAM", "answer", "refusal"]

STREAM = "/stream"  # the path of the WebSocket
TEXT = "text/plain; charset=utf-8"
FILES = {"/": ("page.html", "text/html; charset=utf-8"), "/page.js": ("page.js", "text/javascript; charset=utf-8")}
POLICY = "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; connect-src 'self'; img-src data:"


def refusal(worker, request: Request) -> Response | None:
    """Why a request for a WebSocket is refused before the handshake; None if it is not."""
    if not authorised(worker.options.token, request):
        return response(HTTPStatus.UNAUTHORIZED, "a token is needed\n", extra={"WWW-Authenticate": "Bearer"})
    if reason := worker.unready():
        return response(HTTPStatus.SERVICE_UNAVAILABLE, reason + "\n", extra={"Retry-After": "1"})
    return None


def answer(worker, request: Request) -> Response:
    """The answer to any other request."""
    path = urlsplit(request.path).path
    if request.method != "GET":
        return response(HTTPStatus.METHOD_NOT_ALLOWED, "only GET is answered\n", extra={"Allow": "GET"})
    if path == "/healthz":
        return response(HTTPStatus.OK, "ok\n")
    if path == "/readyz":
        reason = worker.unready()
        return response(HTTPStatus.SERVICE_UNAVAILABLE if reason else HTTPStatus.OK, (reason or "ok") + "\n")
    if path == "/metrics":
        if not authorised(worker.options.token, request):
            return response(HTTPStatus.UNAUTHORIZED, "a token is needed\n", extra={"WWW-Authenticate": "Bearer"})
        return response(HTTPStatus.OK, worker.metrics.text(), "text/plain; version=0.0.4; charset=utf-8")
    if path in FILES:
        name, kind = FILES[path]
        body = (resources.files("cnorm.tools.serve") / name).read_bytes()
        return response(HTTPStatus.OK, body, kind)
    if path == "/recordings.json":
        return response(HTTPStatus.OK, recordings(worker.options), "application/json")
    return response(HTTPStatus.NOT_FOUND, "there is no such page\n")


def recordings(options) -> bytes:
    """The recordings that the page can play: those of the packaged data, if the model is the packaged one."""
    found = []
    if not options.model:
        each = zip(*packaged_recordings(), strict=True)
        # three of the twelve of each speaker
        found = [{"label": int(label), "frames": frames.tolist()} for frames, label in list(each)[::4]]
    return json.dumps({"demo": options.demo, "recordings": found}).encode()


def authorised(token: str, request: Request) -> bool:
    """Whether a request has the token, as ``Authorization: Bearer`` or, for browsers, as ``?token=``."""
    if not token:
        return True
    try:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
    except MultipleValuesError:
        return False
    given = given or parse_qs(urlsplit(request.path).query).get("token", [""])[0]
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
