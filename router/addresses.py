"""Which addresses may name an engine, and which a name may lead to. Depends on aiohttp and ``errors``."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from fnmatch import fnmatchcase
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from urllib.parse import urlsplit

from aiohttp.abc import ResolveResult
from aiohttp.resolver import ThreadedResolver

from tollway.errors import BadRequest

__all__ = ["Resolver", "check_url"]

_LONGEST = 2048
"""Characters of a URL; what servers tell each other has the same limit."""
_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
"""Between two dots of a name. What is none breaks in the look-up with an error that is no network's."""
_WRAPPING = tuple(map(IPv6Network, ("::/96", "::ffff:0:0:0/96", "64:ff9b::/96")))
"""IPv6 networks whose last 32 bits are an IPv4 address; mapped ones and 6to4 Python knows itself."""


def check_url(url: str, allowed: Sequence[str] = ("*",)) -> str:
    """An engine's URL: http or https, an allowed host, no credentials, no query. Raises ``BadRequest``.

    Link-local addresses are refused whatever is allowed: metadata services of clouds answer there. Names that
    resolve to one are refused when a connection is made, by ``Resolver``.
    """
    if len(url) > _LONGEST:
        raise BadRequest(f"engine url {url[:80]!r}... has more than {_LONGEST} characters", param="url")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise BadRequest(f"engine url {url!r}: {error}", param="url") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
        raise BadRequest(f"engine url {url!r}: want http://host:port without credentials", param="url")
    if parts.query or parts.fragment or port == 0:
        raise BadRequest(f"engine url {url!r}: want http://host:port without query or fragment", param="url")
    host = parts.hostname.lower()
    if not url.isascii() or not url.isprintable() or " " in url:
        raise BadRequest(f"engine url {url!r}: want printable ASCII without spaces", param="url")
    if not _is_host(host):
        raise BadRequest(f"engine url {url!r}: {host!r} is neither an address nor the name of a host", param="url")
    if not any(fnmatchcase(host, pattern.lower()) for pattern in allowed):
        raise BadRequest(f"engine host {host} is not in router.engine_hosts: {', '.join(allowed)}", param="url")
    if _is_link_local(host):
        raise BadRequest(f"engine url {url!r} is a link-local address; no engine is served there", param="url")
    # One spelling for one address, so that an engine that is added twice is one engine.
    return f"{parts.scheme}://{parts.netloc.lower()}{parts.path}".rstrip("/")


class Resolver(ThreadedResolver):
    """Looks names of engines up, and takes none for one that is a link-local address."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """As aiohttp wants it. Raises ``OSError`` when there is no address that an engine may have."""
        found = await super().resolve(host, port, family)
        allowed = [each for each in found if not _is_link_local(each["host"])]
        if found and not allowed:
            raise OSError(None, f"{host} is a link-local address; no engine is served there")
        return allowed


def _is_host(host: str) -> bool:
    if ":" in host:  # in brackets
        try:
            ip_address(host.partition("%")[0])
        except ValueError:
            return False
        return True
    labels = host.removesuffix(".").split(".")
    return all(_LABEL.fullmatch(label) for label in labels)


def _is_link_local(host: str) -> bool:
    host = host.removesuffix(".")
    address: IPv4Address | IPv6Address
    try:
        address = IPv4Address(socket.inet_aton(host))  # 0xa9fe0001 and 169.254.1 are addresses, too
    except OSError:
        try:
            address = ip_address(host.partition("%")[0])
        except ValueError:
            return False
    if isinstance(address, IPv6Address):
        inner = [address.ipv4_mapped, address.sixtofour]
        if any(address in network for network in _WRAPPING):
            inner.append(IPv4Address(address.packed[-4:]))
        return address.is_link_local or any(each.is_link_local for each in inner if each is not None)
    return address.is_link_local
