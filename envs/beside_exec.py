#!/usr/bin/python3 -IS
"""tollway-exec: run a command in the sandbox of the task, from the sandbox of the harness beside it.

usage: tollway-exec [--cwd DIR] [--timeout SECONDS] COMMAND          one argument: a line for /bin/sh
       tollway-exec [--cwd DIR] [--timeout SECONDS] -- PROGRAM ARG...

Standard input, both outputs and the exit status are the command's. 124: it ran out of time; 125: it could not be run.
``--stdin`` passes standard input on; without it the command has none. Must import nothing but the standard library.
"""

from __future__ import annotations

import json
import os
import socket
import sys

SOCKET = "/run/tollway/exec.sock"
KEY = os.path.join(os.path.expanduser("~"), ".tollway-exec")
TIMED_OUT, FAILED = 124, 125


def main() -> int:
    """Ask, show, pass the status on."""
    words, said = sys.argv[1:], b""
    request: dict[str, object] = {"cwd": None, "timeout_s": None}
    while words and words[0].startswith("--"):
        option = words.pop(0)
        if option == "--":
            break
        if option == "--stdin":
            said = sys.stdin.buffer.read()
        elif option == "--cwd" and words:
            request["cwd"] = words.pop(0)
        elif option == "--timeout" and words:
            request["timeout_s"] = float(words.pop(0))
        else:
            sys.exit(__doc__)
    else:
        words = ["/bin/sh", "-c", words[0]] if len(words) == 1 else words
    if not words:
        sys.exit(__doc__)
    with open(KEY, encoding="utf-8") as file:
        request |= {"key": file.read().strip(), "argv": words, "stdin": len(said)}
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(SOCKET)
        link.sendall(json.dumps(request).encode() + b"\n" + said)
        with link.makefile("rb") as answers:
            answer = json.loads(answers.readline() or b'{"error": "the episode is over"}')
            if "error" in answer:
                sys.stderr.write(f"tollway-exec: {answer['error']}\n")
                return FAILED
            sys.stdout.buffer.write(answers.read(answer["stdout"]))
            sys.stderr.buffer.write(answers.read(answer["stderr"]))
    return TIMED_OUT if answer["timed_out"] else int(answer["exit_code"])


if __name__ == "__main__":
    sys.exit(main())
