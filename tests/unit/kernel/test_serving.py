"""A serving process takes its port or says why not, and its ready line is read back as it was meant."""

from __future__ import annotations

import json
import os
import socket

import pytest

from tollway.errors import ConfigError
from tollway.serving import announce, listen, read_ready


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_client_reaches_the_announced_address(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    with _listen(host) as listener:
        announce(listener)
        line = capsys.readouterr().out
        assert line.endswith("\n")
        assert json.loads(line)["pid"] == os.getpid()
        url = read_ready(line.encode())
        port = listener.getsockname()[1]
        assert url == (f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")
        socket.create_connection((host, port), timeout=5).close()


def _listen(host: str) -> socket.socket:
    try:
        return listen(host, 0, key="a.port")
    except ConfigError:
        if ":" in host:
            pytest.skip("this machine has no IPv6")
        raise


def test_a_taken_port_is_told_with_the_setting_to_change() -> None:
    with listen("127.0.0.1", 0, key="a.port") as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            listen("127.0.0.1", port, key="b.port")
    assert str(caught.value) == (
        f"cannot listen on 127.0.0.1:{port}: Address already in use; set b.port to a free port, or 0 for any"
    )


def test_an_address_of_another_machine_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1:0: .*set b\.host to an address"):
        listen("192.0.2.1", 0, key="b.port")


@pytest.mark.parametrize(
    "line",
    [b"", b"hello\n", b"[]\n", b"3\n", b'{"event": "ready"}\n', b'{"event": "bye", "url": "http://x"}\n', b"\xff"],
)
def test_another_line_is_no_ready_line(line: bytes) -> None:
    with pytest.raises(ValueError):
        read_ready(line)
