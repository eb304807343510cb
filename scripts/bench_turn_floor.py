"""The floor of one agent turn: what no server can leave out, in one process without a server.

Used by bench_turn.py. Per turn: find the known prefix of the body by comparing bytes, parse what is new, write its
template text, encode it, join the prompt, post it, take the reply apart, write the record to a file of the journal's
kind, and write the answer. No sessions, no checks, no forest, no families.
"""

from __future__ import annotations

import json
import sqlite3
import sys
import time
from pathlib import Path

import aiohttp
import fastokens
import numpy as np
import orjson
import pybase64
import session_load as load
import uvloop

from tollway.heap import keep_freed_memory

OPEN = "\n<|im_start|>user\n<tool_response>\n"
CLOSE = "\n</tool_response><|im_end|>\n<|im_start|>assistant\n"


async def run(engine: str, folder: Path, turns: int, context: int, tool_chars: int) -> float:
    """CPU per turn in milliseconds."""
    keep_freed_memory()
    encoder = fastokens.Tokenizer.from_json_str(load.real_vocabulary("qwen3").read_text())
    texts = load.Texts(5)
    journal = sqlite3.connect(folder / "floor.sqlite", isolation_level=None)
    for pragma in ("page_size=32768", "journal_mode=WAL", "synchronous=FULL", "wal_autocheckpoint=512"):
        journal.execute(f"PRAGMA {pragma}")
    journal.execute("CREATE TABLE turns (n INTEGER, a BLOB, b BLOB, c BLOB, routes BLOB, messages BLOB)")
    messages: list[dict[str, object]] = [{"role": "user", "content": texts.piece(load.chars_for(context - 3000))}]
    known = orjson.dumps({"model": "m", "messages": messages})[:-2]
    prompt = encoder.encode(known.decode()).ids
    chunks = [b",".join(str(token).encode() for token in prompt)]
    size = len(prompt)
    used = 0.0
    async with aiohttp.ClientSession() as http:
        for turn in range(turns + 2):
            messages.append({"role": "assistant", "content": texts.piece(1500), "tool_calls": []})
            messages.append({"role": "tool", "tool_call_id": "c", "content": texts.piece(tool_chars)})
            body = orjson.dumps({"model": "m", "messages": messages})
            before = time.process_time()
            if not body.startswith(known):
                raise RuntimeError("the prefix changed")
            new = orjson.loads(b"[" + body[len(known) + 1 : -1])
            text = OPEN + new[-1]["content"] + CLOSE
            suffix = np.array(encoder.encode(text).ids, np.int32)
            chunk = orjson.dumps(suffix, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
            start = size - 1
            size += suffix.size
            upstream = b"".join(
                (
                    b'{"input_ids":[', b",".join((*chunks, chunk)),
                    b'],"sampling_params":{},"return_routed_experts":true,"routed_experts_start_len":%d}' % start,
                )
            )  # fmt: skip
            async with http.post(f"{engine}/generate", data=upstream) as response:
                data = await response.read()
            routes = None
            at = data.find(b'"routed_experts":"')
            if at > 0:
                end = data.index(b'"', at + 18)
                wide = np.frombuffer(pybase64.b64decode(memoryview(data)[at + 18 : end]), "<i4")
                routes = wide.astype(np.uint8)
                data = data[: at + 18] + data[end:]
            reply = orjson.loads(data)
            ids = np.array(reply["output_ids"], np.int32)
            logprobs = np.array([entry[0] for entry in reply["meta_info"]["output_token_logprobs"]], np.float32)
            answer_text = encoder.decode(ids.tolist())
            journal.execute("BEGIN IMMEDIATE")
            journal.execute(
                "INSERT INTO turns VALUES (?,?,?,?,?,?)",
                (turn, suffix.tobytes(), ids.tobytes(), logprobs.tobytes(),
                 memoryview(routes) if routes is not None else None, orjson.dumps(new)),
            )  # fmt: skip
            journal.execute("COMMIT")
            orjson.dumps(
                {
                    "choices": [{"message": {"role": "assistant", "content": answer_text}}],
                    "usage": {"prompt_tokens": size},
                }
            )
            known = body[:-2]
            chunks += [chunk, orjson.dumps(ids, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]]
            size += ids.size
            if turn >= 2:
                used += time.process_time() - before
    return used * 1e3 / turns


if __name__ == "__main__":
    engine, folder, turns, context, tool_chars = sys.argv[1:]
    floor_ms = uvloop.run(run(engine, Path(folder), int(turns), int(context), int(tool_chars)))
    print(json.dumps({"floor_ms": floor_ms}))
