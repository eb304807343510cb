"""No path whatsoever reaches a file outside the workspace."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tollway.errors import BadRequest
from tollway.sandboxes.workspace import parts_of, read_file, write_file

parts = st.sampled_from(["..", ".", "", "workspace", "secret", "in", "out", "loop", "f", "/", "a\0b", "é"])
paths = st.lists(parts, max_size=8).map("/".join)


@given(paths)
def test_reads_and_writes_stay_inside_the_workspace(path: str) -> None:
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        workspace = root / "workspace"
        (workspace / "in").mkdir(parents=True)
        (workspace / "f").write_bytes(b"inside")
        (root / "secret").write_bytes(b"outside")
        (workspace / "out").symlink_to(root)
        (workspace / "loop").symlink_to("loop")
        with contextlib.suppress(BadRequest):
            assert read_file(str(workspace), path, 100) == b"inside"
        try:
            write_file(str(workspace), path, b"inside", mode=0o644, uid=None)
        except BadRequest:
            pass
        else:
            assert workspace.joinpath(*parts_of(path)).read_bytes() == b"inside"
        assert (root / "secret").read_bytes() == b"outside"
        assert {entry.name for entry in root.iterdir()} == {"workspace", "secret"}
