"""What a failed connection means, in words for whoever reads a log. Pure; depends on aiohttp's exceptions."""

from __future__ import annotations

import errno
import os
import socket

import aiohttp

__all__ = ["lost_words", "nobody_listens"]


def nobody_listens(error: BaseException) -> bool:
    """Whether the address itself refused: the process is gone. A full table of our own sockets is not that."""
    return _errno(error) == errno.ECONNREFUSED


def lost_words(error: BaseException) -> str:
    """Why there is no answer.

    >>> lost_words(aiohttp.ServerDisconnectedError())
    'it closed the connection without an answer'
    """
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return "no connection in time"
    if isinstance(error, TimeoutError):
        said = str(error)
        return said if said and not isinstance(error, aiohttp.ClientError) else "no answer in time"
    if nobody_listens(error):
        return "nobody listens there: its process is gone, or has not started yet"
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        known = not isinstance(error.os_error, socket.gaierror)
        return error.os_error.strerror if known and error.os_error.strerror else "its host name is not known"
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "it closed the connection without an answer"
    if isinstance(error, aiohttp.ClientPayloadError):
        return "it broke off in the middle of its answer"
    if isinstance(error, aiohttp.ClientResponseError):
        return "its answer is not HTTP"
    if (number := _errno(error)) is not None:
        return f"the connection broke: {os.strerror(number).lower()}"
    return f"the connection broke: {error}" if str(error) else "the connection broke"


def _errno(error: BaseException) -> int | None:
    return error.errno if isinstance(error, OSError) and error.errno else None
