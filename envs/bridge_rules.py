"""What passes the bridge: which request targets, which headers, which credentials. Pure functions.

The rule is a list of what may pass, compared byte by byte with what was sent: nothing is decoded, joined or cleaned
first, so that no two readers of one target can disagree about it. Depends on the standard library.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable, Mapping

__all__ = ["answer_headers", "credential_matches", "forwarded_headers", "route_of"]

_CALLS = frozenset({"/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"})
_MODEL = re.compile(r"/v1/models(/[A-Za-z0-9][A-Za-z0-9._:@-]*(/[A-Za-z0-9][A-Za-z0-9._:@-]*)*)?")
_QUERY = re.compile(r"[A-Za-z0-9._~=&-]{1,500}")
_HOP = frozenset(
    {"connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade", "expect"}
)
"""Headers between two neighbours. The sending side frames its own message."""
_OWN = frozenset(
    {"host", "authorization", "x-api-key", "cookie", "forwarded", "via", "content-length", "accept-encoding"}
)
"""Headers that the bridge writes itself or that would say something about who asks."""
_OTHER_CALLS = frozenset(
    {"x-http-method", "x-http-method-override", "x-method-override", "x-original-url", "x-rewrite-url"}
)
"""Headers by which some servers take a request for another one than was looked at here."""
_OWN_PREFIXES = ("x-forwarded-", "x-tollway-", "proxy-", "sec-websocket-")


def route_of(method: str, target: str, session_id: str) -> str | None:
    """Where below the session's own URL a request goes, query included; ``None`` for what may not pass.

    ``target`` is the request target exactly as it stood on the request line.

    >>> route_of("POST", "/v1/messages?beta=true", "ab")
    '/v1/messages?beta=true'
    >>> route_of("POST", "/sessions/ab/v1/responses", "ab"), route_of("GET", "/cache", "ab")
    ('/v1/responses', None)
    """
    path, mark, query = target.partition("?")
    if mark and not _QUERY.fullmatch(query):
        return None
    suffix = path.removeprefix(f"/sessions/{session_id}")
    if method == "HEAD":
        return "" if suffix in ("", "/") and path else None
    if method == "POST" and suffix in _CALLS:
        return suffix + mark + query
    if method == "GET" and _MODEL.fullmatch(suffix):
        return suffix + mark + query
    return None


def credential_matches(headers: Iterable[tuple[str, str]], key: str) -> bool:
    """Whether a request brings the episode's key, as ``Authorization: Bearer`` or ``x-api-key``."""
    found = False
    for name, value in headers:
        kind = name.lower()
        said = value.strip()
        if kind == "authorization":
            scheme, _, said = said.partition(" ")
            if scheme.lower() != "bearer":
                continue
        elif kind != "x-api-key":
            continue
        found |= hmac.compare_digest(said.strip().encode("utf-8", "surrogateescape"), key.encode())
    return found


def forwarded_headers(headers: Iterable[tuple[str, str]], token: str) -> list[tuple[str, str]]:
    """What the session server gets to see of a request's headers, with the session's own token."""
    given = list(headers)
    named = _named_by_connection(given)
    kept = [(name, value) for name, value in given if _passes(name.lower()) and name.lower() not in named]
    # Uncompressed, so that the bridge can see where a stream ends.
    return [*kept, ("Authorization", f"Bearer {token}"), ("Accept-Encoding", "identity")]


def answer_headers(headers: Mapping[str, str]) -> list[tuple[str, str]]:
    """What a harness gets to see of an answer's headers."""
    given = list(headers.items())
    named = _named_by_connection(given)
    return [
        (name, value) for name, value in given if name.lower() not in _HOP | named | {"set-cookie", "server", "date"}
    ]


def _passes(name: str) -> bool:
    same = name.replace("_", "-")  # to some servers
    return same not in _HOP | _OWN | _OTHER_CALLS and not same.startswith(_OWN_PREFIXES)


def _named_by_connection(headers: Iterable[tuple[str, str]]) -> set[str]:
    """Headers that ``Connection`` declares to be between neighbours, too; never those that a model call needs."""
    named = {
        each.strip().lower() for name, value in headers if name.lower() == "connection" for each in value.split(",")
    }
    return named - {"content-type", "authorization", "content-length"}
