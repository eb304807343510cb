"""Ports for slow programs: free, different, and none that the kernel may give to a connection."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tollway import free_ports as module
from tollway.free_ports import free_ports


def test_ports_are_different_free_and_not_of_the_range_of_connections() -> None:
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    found = free_ports(20)
    assert len(set(found)) == 20
    assert not set(found) & set(range(low, high + 1))
    for port in found:
        socket.create_server(("127.0.0.1", port)).close()


def test_where_every_port_may_go_to_a_connection_the_kernel_gives_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = tmp_path / "range"
    everything.write_text("1024\t65535\n")
    monkeypatch.setattr(module, "_RANGE", everything)
    found = free_ports(3)
    assert len(set(found)) == 3
    assert min(found) > 0


def test_taken_ports_are_left_out_and_an_address_that_is_not_ours_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", free_ports()[0])) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(module, "_candidates", lambda: iter([port, port]))
        with pytest.raises(OSError, match=r"1 free ports of 127\.0\.0\.1 are wanted, and there are 0"):
            free_ports()
    monkeypatch.undo()
    with pytest.raises(OSError, match="assign requested address"):
        free_ports(1, "192.0.2.1")
