"""Run as a program: find and save distribution files with pip's own index, proxy and certificate settings.

``pip download`` of a source distribution runs the project's build to learn its metadata: code of the package,
on this machine. This program uses pip's finder and session and stops after the bytes are there. It reads
``{"into": DIR, "wanted": [{"name", "version", "sdist"}]}`` from standard input and prints one line of JSON,
``{"saved": [file name or null]}``. It checks no hashes: the caller does. Depends on pip alone.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    """Serve one request."""
    request = json.load(sys.stdin)
    create_command = importlib.import_module("pip._internal.commands").create_command
    command = create_command("download", isolated=False)
    options, _ = command.parse_args(["--no-deps", "--quiet", "--quiet", "nothing"])
    saved = []
    with command.main_context():
        session = command.get_default_session(options)
        finder = command._build_package_finder(options=options, session=session)
        for wanted in request["wanted"]:
            saved.append(_save(finder, session, wanted, Path(request["into"])))
    sys.stdout.write(json.dumps({"saved": saved}) + "\n")


def _save(finder: Any, session: Any, wanted: dict[str, Any], into: Path) -> str | None:
    for candidate in reversed(finder.find_all_candidates(wanted["name"])):
        link = candidate.link
        if str(candidate.version) != wanted["version"] or link.is_wheel is bool(wanted["sdist"]):
            continue
        name = link.filename
        if link.is_file:
            (into / name).write_bytes(Path(link.file_path).read_bytes())
        else:
            answer = session.get(link.url_without_fragment, headers={"Accept-Encoding": "identity"})
            answer.raise_for_status()
            (into / name).write_bytes(answer.content)
        return str(name)
    return None


if __name__ == "__main__":
    main()
