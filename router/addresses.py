"""Which addresses may name an engine. Pure; depends on ``errors``."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from fnmatch import fnmatchcase
from ipaddress import ip_address
from urllib.parse import urlsplit

from tollway.errors import BadRequest

__all__ = ["check_url"]


def check_url(url: str, allowed: Sequence[str] = ("*",)) -> str:
    """An engine's URL: http or https, an allowed host, no credentials, no query. Raises ``BadRequest``.

    Link-local addresses are refused whatever is allowed: metadata services of clouds answer there.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise BadRequest(f"engine url {url!r}: {error}", param="url") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.password:
        raise BadRequest(f"engine url {url!r}: want http://host:port without credentials", param="url")
    if parts.query or parts.fragment or port == 0:
        raise BadRequest(f"engine url {url!r}: want http://host:port without query or fragment", param="url")
    host = parts.hostname.lower()
    if not url.isascii() or not url.isprintable() or " " in url:
        raise BadRequest(f"engine url {url!r}: want printable ASCII without spaces", param="url")
    if not any(fnmatchcase(host, pattern.lower()) for pattern in allowed):
        raise BadRequest(f"engine host {host} is not in router.engine_hosts: {', '.join(allowed)}", param="url")
    if _is_link_local(host):
        raise BadRequest(f"engine url {url!r} is a link-local address; no engine is served there", param="url")
    # One spelling for one address, so that an engine that is added twice is one engine.
    return f"{parts.scheme}://{parts.netloc.lower()}{parts.path}".rstrip("/")


def _is_link_local(host: str) -> bool:
    try:
        address = ip_address(socket.inet_ntoa(socket.inet_aton(host)))  # 0xa9fe0001 and 169.254.1 are addresses, too
    except OSError:
        try:
            address = ip_address(host.partition("%")[0])
        except ValueError:
            return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_link_local)
