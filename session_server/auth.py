"""Secrets: one per session, hashed at rest, compared in constant time; the admin key is apart.

A session token names its session (``tw_<id>_<secret>``), so harnesses that cannot set a path can use it
alone, and a session id names the worker that owns it. Unknown and foreign sessions are answered alike. Pure
functions over strings.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable

from tollway.errors import Unauthorized

__all__ = [
    "admin_only",
    "credential",
    "is_admin",
    "new_session_secret",
    "refused",
    "session_of",
    "token_hash",
    "token_matches",
    "worker_of",
]

_ID = re.compile(r"[0-9a-f]{32}([0-9a-f]{2})")
_TOKEN = re.compile(r"tw_([0-9a-f]{34})_[A-Za-z0-9_-]{43}")
Headers = Iterable[tuple[bytes, bytes]]


def new_session_secret(worker: int = 0) -> tuple[str, str]:
    """(session id, token): 128 random bits and its worker name the session, 256 random bits guard it."""
    session_id = f"{secrets.token_hex(16)}{worker:02x}"
    return session_id, f"tw_{session_id}_{secrets.token_urlsafe(32)}"


def worker_of(session_id: str) -> int | None:
    """Index of the worker that owns a session; ``None`` for what is no session id.

    >>> worker_of("0123456789abcdef" * 2 + "0a")
    10
    """
    match = _ID.fullmatch(session_id)
    return int(match.group(1), 16) if match else None


def token_hash(token: str) -> bytes:
    """[32 bytes] what is kept of a token."""
    return hashlib.sha256(token.encode()).digest()


def token_matches(token: str, kept: bytes | None) -> bool:
    """Compare in constant time, also when there is no such session."""
    return hmac.compare_digest(token_hash(token), kept if kept is not None else bytes(32))


def session_of(token: str) -> str | None:
    """Session id that a well-formed token names."""
    match = _TOKEN.fullmatch(token)
    return match.group(1) if match else None


def credential(headers: Headers) -> str | None:
    """Token of ``Authorization: Bearer`` or ``x-api-key``."""
    key = None
    for name, value in headers:
        if name == b"authorization":
            scheme, _, token = value.decode("latin-1").partition(" ")
            if scheme.lower() == "bearer" and token.strip():
                return token.strip()
        elif name == b"x-api-key":
            key = value.decode("latin-1").strip()
    return key or None


def is_admin(token: str | None, admin_key: str) -> bool:
    """Whether ``token`` is the admin key; an empty admin key admits nobody."""
    return bool(admin_key) and token is not None and hmac.compare_digest(token.encode(), admin_key.encode())


def admin_only() -> Unauthorized:
    """The one answer to whoever lacks the admin key where nothing else helps."""
    return Unauthorized("this call needs the admin key (the server's TOLLWAY_ADMIN_KEY) as Bearer")


def refused() -> Unauthorized:
    """The one answer for a missing, wrong, unknown or foreign credential."""
    return Unauthorized("no valid credential for this resource; send the session token or the admin key as Bearer")
