"""Load for the session server's benchmarks: a scripted engine, server processes, and tool-using conversations.

The engine is a process of its own that answers ``/generate`` with prepared ids, log-probabilities and routed
experts, so that only the server's work is measured. Texts are pieces of Python's own library: no two alike,
with the token statistics of code.
"""

from __future__ import annotations

import asyncio
import base64
import inspect
import itertools
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import numpy as np
import orjson
import uvicorn
import uvloop

from tollway.free_ports import free_ports
from tollway.heap import keep_freed_memory
from tollway.session_server.families.registry import load_family
from tollway.session_server.families.vocabularies import real_vocabulary

REPLY_TOKENS = 400
EXPERTS_PER_TOKEN = 8
LAYERS = 60
"""With eight experts each, 480 bytes of choices per token once narrowed."""
LAYERS_1MB = 19
"""A reply of 400 tokens after some 850 new prompt tokens is then 1 MB of base64 int32."""
ADMIN = "bench-admin-key"
_MODULES = ("argparse", "ast", "asyncio.base_events", "difflib", "email.message", "inspect", "tarfile")


def corpus() -> str:
    """Some hundred kilobytes of code."""
    return "\n".join(inspect.getsource(__import__(name, fromlist=["x"])) for name in _MODULES)


class Texts:
    """Endless pieces of code, each used once."""

    def __init__(self, seed: int) -> None:
        self._text = corpus()
        self._random = random.Random(seed)

    def piece(self, chars: int) -> str:
        """About ``chars`` characters."""
        parts, size = [], 0
        while size < chars:
            at = self._random.randrange(len(self._text) - 4000)
            part = self._text[at : at + min(4000, chars - size)]
            parts.append(part)
            size += len(part)
        return f"# {self._random.random()}\n" + "".join(parts)


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name}: " + "what it does and when to use it. " * 6,
            "parameters": {
                "type": "object",
                "properties": {key: {"type": "string", "description": "a value " * 8} for key in ("path", "command")},
                "required": ["command"],
            },
        },
    }
    for name in ("bash", "edit", "read", "search", "submit")
]
CALL = '\n<tool_call>\n{"name": "bash", "arguments": {"command": "python -m pytest -q tests/"}}\n</tool_call><|im_end|>'


def reply_ids(tokenizer_path: Path, count: int) -> list[list[int]]:
    """``count`` replies of REPLY_TOKENS ids: thought, text, one tool call."""
    from tollway.session_server.tokens import load_tokenizer

    tokenizer = load_tokenizer(tokenizer_path)
    texts = Texts(7)
    end = tokenizer.encode(CALL)
    replies = []
    for _ in range(count):
        start = tokenizer.encode("<think>\nLook at the failing test first.\n</think>\n\n")
        middle = tokenizer.encode(texts.piece(3000).replace("<", "("))
        replies.append([*start, *middle[: REPLY_TOKENS - len(start) - len(end)], *end])
    return replies


# -- the scripted engine ----------------------------------------------------------------------------


class Engine:
    """An ASGI application that answers as SGLang does."""

    def __init__(self, replies: Sequence[Sequence[int]], *, layers: int) -> None:
        rng = np.random.default_rng(0)
        self._ids = [orjson.dumps(ids) for ids in replies]
        self._logprobs = [
            orjson.dumps([[float(p), token, None] for p, token in zip(-rng.random(len(ids)), ids, strict=True)])
            for ids in replies
        ]
        self._next = itertools.cycle(range(len(replies)))
        self._layers = layers
        self._routes = rng.integers(0, 128, 4096 * layers * EXPERTS_PER_TOKEN, dtype=np.int32).tobytes()
        self.last_body = b""
        self.last_reply = b""

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        path = scope["path"]
        if path == "/generate":
            data = self.last_reply = self._generate(body)
            self.last_body = body
        elif path == "/last_body":
            data = self.last_body
        elif path == "/last_reply":
            data = self.last_reply
        else:
            data = orjson.dumps(self._info(path))
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": data})

    def _info(self, path: str) -> dict[str, object]:
        if path == "/model_info":
            return {
                "model_path": "bench", "weight_version": "1", "num_hidden_layers": self._layers,
                "num_experts_per_tok": EXPERTS_PER_TOKEN,
            }  # fmt: skip
        return {"version": "0.5.23", "context_length": 262144, "page_size": 1, "max_total_num_tokens": 10**9}

    def _generate(self, body: bytes) -> bytes:
        at = body.index(b'"input_ids":[') + len(b'"input_ids":[')
        prompt = body.count(b",", at, body.index(b"]", at)) + 1
        which = next(self._next)
        sampled = REPLY_TOKENS
        routes = b""
        if self._routes:
            name = b'"routed_experts_start_len":'
            start = int(re.match(rb"\d+", body[body.index(name) + len(name) :]).group())
            rows = prompt + sampled - 1 - start
            width = self._layers * EXPERTS_PER_TOKEN * 4
            size = rows * width
            data = (self._routes * (size // len(self._routes) + 1))[:size]
            routes = b',"routed_experts":"' + base64.b64encode(data) + b'"'
        return b"".join(
            (
                b'{"text":"","output_ids":', self._ids[which],
                b',"meta_info":{"id":"x","prompt_tokens":%d,"completion_tokens":%d,' % (prompt, sampled),
                b'"cached_tokens":%d,' % (prompt - 1),
                b'"finish_reason":{"type":"stop","matched":151645},"weight_version":"1",',
                b'"weight_versions":[{"version":"1","start":0,"end":%d}],"output_token_logprobs":' % sampled,
                self._logprobs[which], routes, b"}}",
            )
        )  # fmt: skip


def serve_app(app: object, port: int) -> None:
    """Run an ASGI application on loopback until killed, with the session server's memory settings."""
    keep_freed_memory()
    config = uvicorn.Config(
        app, host="127.0.0.1", port=port, http="httptools", log_level="error", lifespan="off", timeout_keep_alive=75
    )
    uvloop.run(uvicorn.Server(config).serve())


# -- processes --------------------------------------------------------------------------------------


@dataclass
class Process:
    """A child process and what it has used."""

    popen: subprocess.Popen[bytes]
    url: str

    def cpu_s(self) -> float:
        """Time on a CPU of all its threads, to the nanosecond."""
        tasks = Path(f"/proc/{self.popen.pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9

    def rss_bytes(self) -> int:
        """Resident memory."""
        return int(Path(f"/proc/{self.popen.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def stop(self) -> None:
        """End it."""
        self.popen.terminate()
        try:
            self.popen.wait(20)
        except subprocess.TimeoutExpired:
            self.popen.kill()


def start_engine(*, layers: int) -> Process:
    """The scripted engine as a process; 0 layers send no routed experts."""
    (port,) = free_ports()
    replies = "s.reply_ids(s.real_vocabulary('qwen3'), 32)"
    code = f"import session_load as s; s.serve_app(s.Engine({replies}, layers={layers}), {port})"
    popen = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parent)
    return Process(popen, f"http://127.0.0.1:{port}")


def start_server(folder: Path, engine_url: str, *, routes: bool, more: str = "") -> Process:
    """``tollway serve`` over ``engine_url`` with the real Qwen3 vocabulary."""
    config = folder / "tollway.toml"
    config.write_text(
        textwrap.dedent(f"""
        [server]
        port = 0
        family = "qwen3"
        tokenizer = "{real_vocabulary("qwen3")}"
        journal = "{folder}/journal.sqlite"
        routed_experts = {str(routes).lower()}
        capacity = 100000
        engine_wait_s = 120.0
        """)
        + more
    )
    popen = subprocess.Popen(
        [sys.executable, "-m", "tollway", "serve", "--config", str(config), "--engine", engine_url],
        stdout=subprocess.PIPE,
        env={**os.environ, "TOLLWAY_ADMIN_KEY": ADMIN},
    )
    line = popen.stdout.readline() if popen.stdout else b""
    return Process(popen, str(json.loads(line)["url"]))


async def wait_http(url: str) -> None:
    """Until something answers."""
    async with aiohttp.ClientSession() as http:
        for _ in range(1200):
            try:
                async with http.get(url):
                    return
            except aiohttp.ClientError:
                await asyncio.sleep(0.1)
    raise RuntimeError(f"{url} never answered")


# -- conversations ----------------------------------------------------------------------------------


@dataclass
class Talk:
    """One harness: sends its whole conversation again with every call."""

    http: aiohttp.ClientSession
    server: str
    texts: Texts
    session_id: str = ""
    token: str = ""
    messages: list[dict[str, object]] = field(default_factory=list)
    prompt_tokens: int = 0
    last_body: bytes = b""

    async def open(self, first_chars: int) -> None:
        """Create the session and its first messages."""
        headers = {"authorization": f"Bearer {ADMIN}"}
        async with self.http.post(f"{self.server}/sessions", json={}, headers=headers) as response:
            value = await response.json()
            self.session_id, self.token = value["session_id"], value["token"]
        self.messages = [
            {"role": "system", "content": "You are a coding agent. " * 20},
            {"role": "user", "content": self.texts.piece(first_chars)},
        ]

    def body(self) -> bytes:
        """The next request."""
        self.last_body = orjson.dumps({"model": "m", "messages": self.messages, "tools": TOOLS, "temperature": 1.0})
        return self.last_body

    async def turn(self, tool_chars: int) -> None:
        """One call, its answer taken over, and the tool's result."""
        url = f"{self.server}/sessions/{self.session_id}/v1/chat/completions"
        headers = {"authorization": f"Bearer {self.token}", "content-type": "application/json"}
        async with self.http.post(url, data=self.body(), headers=headers) as response:
            data = await response.read()
            if response.status != 200:
                raise RuntimeError(f"{response.status}: {data[:500]!r}")
        value = orjson.loads(data)
        self.prompt_tokens = value["usage"]["prompt_tokens"]
        message = value["choices"][0]["message"]
        self.messages.append(message)
        for call in message.get("tool_calls", []):
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": self.texts.piece(tool_chars)})
        if not message.get("tool_calls"):
            raise RuntimeError(f"the scripted reply holds no tool call: {message}")


def chars_for(tokens: int) -> int:
    """Characters of our texts that make about ``tokens`` ids."""
    return round(tokens * _CHARS_PER_TOKEN)


_CHARS_PER_TOKEN = 4.6


def family():
    """The Qwen3 family over the real vocabulary."""
    return load_family("qwen3", tokenizer=real_vocabulary("qwen3"))


def scratch() -> tempfile.TemporaryDirectory[str]:
    """A folder on the disk that journals lie on."""
    runs = Path(__file__).parents[1] / "runs"
    runs.mkdir(exist_ok=True)
    return tempfile.TemporaryDirectory(prefix="bench-", dir=runs)
