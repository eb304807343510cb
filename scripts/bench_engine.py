"""Generated tokens per second of the embedded engine over HTTP, against a bare loop over the same model.

The engine runs as its own process; the load comes from another one (64 calls of ``/generate`` with
log-probabilities in flight, 100 distinct prompt + 64 new tokens). The bare loop is the same decoder with static
keys and values, batched 64, same type, sampling and log-softmax, one thread, prefill and decode, no Python per
token beyond one gather. Rounds alternate so that load from elsewhere hits both. Where there are two cores the
load generator is kept off the engine's. The last line of stdout is JSON {"tokens_per_s", "ratio_to_bare", ...}.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

IN_FLIGHT, PROMPT, NEW = 64, 100, 64
SHAPE: dict[str, object] = {"vocab_size": 512, "num_hidden_layers": 4, "tie_word_embeddings": False}


def pin(core: int) -> None:
    """Keep this process on one core, when there is more than one."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:
        os.sched_setaffinity(0, {cores[core % len(cores)]})


def bare(model_path: str, rounds: int) -> None:
    """The loop to compare with; one JSON line per round, started by a line on stdin."""
    import torch

    from tollway.engine.batch import Batch
    from tollway.engine.forward import Forward
    from tollway.engine.rows import Rows
    from tollway.engine.weights import load_decoder

    pin(0)
    torch.set_num_threads(1)
    decoder = load_decoder(Path(model_path))
    rows = Rows(decoder.spec, decoder.dtype, max_rows=IN_FLIGHT, max_length=PROMPT + NEW + 1)
    batch = Batch(IN_FLIGHT, decoder.spec.vocab_size)
    forward = Forward(decoder, rows, batch)
    rows.ensure(IN_FLIGHT, PROMPT + NEW + 1)
    print("ready", flush=True)
    for _ in range(rounds):
        sys.stdin.readline()
        cpu, wall = time.process_time(), time.perf_counter()
        for _ in range(6):
            _bare_round(forward, batch, decoder.spec.vocab_size)
        used = {"cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - wall, "tokens": 6 * IN_FLIGHT * NEW}
        print(json.dumps(used), flush=True)


def _bare_round(forward, batch, vocab_size: int) -> None:  # type: ignore[no-untyped-def]  # torch is imported lazily
    import numpy as np
    import torch

    with torch.inference_mode():
        prompts = np.random.default_rng().integers(0, vocab_size, (IN_FLIGHT, PROMPT)).astype(np.int32)
        ids, logprobs = torch.zeros(IN_FLIGHT, NEW, dtype=torch.long), torch.zeros(IN_FLIGHT, NEW)
        step = 4  # rows per prefill pass: 400 tokens stay in the caches of a core, 6,400 do not
        batch.requests = [None] * IN_FLIGHT
        logits = torch.cat([
            forward.prefill(first, list(prompts[first : first + step]), np.zeros(step, np.int64))
            for first in range(0, IN_FLIGHT, step)
        ])  # fmt: skip
        for at in range(NEW):
            if at:
                logits = forward.decode()
            distribution = torch.log_softmax(logits, -1)
            sums = distribution.exp().cumsum(-1, dtype=torch.float64)
            tokens = torch.searchsorted(sums, torch.rand(IN_FLIGHT, 1, dtype=torch.float64) * sums[:, -1:])
            tokens.clamp_(max=vocab_size - 1)
            ids[:, at], logprobs[:, at] = tokens[:, 0], distribution.gather(1, tokens)[:, 0]
            batch.tokens[:] = tokens[:, 0].numpy()


async def load(url: str, rounds: int) -> None:
    """The load generator; one JSON line per round, started by a line on stdin."""
    import random

    import aiohttp
    import orjson

    pin(1)
    source = random.Random()

    async def one(http: aiohttp.ClientSession) -> int:
        ids = [source.randrange(512) for _ in range(PROMPT)]
        sampling = {"max_new_tokens": NEW, "temperature": 1.0, "ignore_eos": True}
        body = orjson.dumps({"input_ids": ids, "sampling_params": sampling, "return_logprob": True})
        async with http.post(f"{url}/generate", data=body, headers={"content-type": "application/json"}) as reply:
            meta = orjson.loads(await reply.read())["meta_info"]
        if len(meta["output_token_logprobs"]) != NEW or meta["cached_tokens"] > 4:
            raise RuntimeError(f"unexpected reply: {meta}")
        return int(meta["completion_tokens"])

    async def worker(http: aiohttp.ClientSession, share: int) -> int:
        return sum([await one(http) for _ in range(share)])

    print("ready", flush=True)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        for _ in range(rounds):
            await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
            wall = time.perf_counter()
            tokens = sum(await asyncio.gather(*[worker(http, 8) for _ in range(IN_FLIGHT)]))
            print(json.dumps({"tokens": tokens, "wall_s": time.perf_counter() - wall}), flush=True)


def _start(*arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return subprocess.Popen(
        arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, bufsize=1
    )


def _ask(process: subprocess.Popen[str], *, send: bool = True) -> dict[str, float]:
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("the process has no pipes")
    if send:
        process.stdin.write("\n")
        process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        raise RuntimeError("a benchmark process died; see its messages above")
    return json.loads(line) if line.startswith("{") else {}


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(rounds: int, verbose: bool) -> dict[str, float]:
    """Alternate bare and HTTP rounds; medians."""
    from tollway.fresh_model import ModelShape, write_fresh_model

    with tempfile.TemporaryDirectory() as scratch:
        write_fresh_model(Path(scratch), ModelShape.model_validate(SHAPE), seed=0, std=0.1)
        here = os.path.abspath(__file__)
        engine = _start(sys.executable, "-m", "tollway.engine", "--model-path", scratch)
        processes = [engine]
        try:
            ready = _ask(engine, send=False)
            os.sched_setaffinity(engine.pid, {sorted(os.sched_getaffinity(0))[0]})
            for thread in os.listdir(f"/proc/{engine.pid}/task"):
                os.sched_setaffinity(int(thread), {sorted(os.sched_getaffinity(0))[0]})
            loop = _start(sys.executable, here, "--bare", scratch, "--rounds", str(rounds + 2))
            client = _start(sys.executable, here, "--load", str(ready["url"]), "--rounds", str(rounds + 2))
            # One round more than are asked for: a helper that ends would do so on the core of the engine.
            processes += [loop, client]
            for process in (loop, client):
                _ask(process, send=False)
                _ask(process)  # warm-up round
            pairs = []
            for _ in range(rounds):
                bare_round = _ask(loop)
                cpu = _cpu_s(engine.pid)
                http_round = _ask(client)
                http_round["cpu_s"] = _cpu_s(engine.pid) - cpu
                pairs.append((bare_round, http_round))
                if verbose:
                    print(f"bare {_rate(bare_round):7.0f} tok/s  http {_rate(http_round):7.0f} tok/s", file=sys.stderr)
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait(20)
    return _summary(pairs)


def _rate(part: dict[str, float], clock: str = "wall_s") -> float:
    return part["tokens"] / part[clock]


def _summary(pairs: list[tuple[dict[str, float], dict[str, float]]]) -> dict[str, float]:
    ratios = [_rate(http) / _rate(bare) for bare, http in pairs]
    cpu_ratios = [_rate(http, "cpu_s") / _rate(bare, "cpu_s") for bare, http in pairs]
    return {
        "tokens_per_s": round(statistics.median(_rate(http) for _, http in pairs), 1),
        "ratio_to_bare": round(statistics.median(ratios), 3),
        "ratio_min": round(min(ratios), 3),
        "ratio_max": round(max(ratios), 3),
        "bare_tokens_per_s": round(statistics.median(_rate(bare) for bare, _ in pairs), 1),
        "tokens_per_cpu_s": round(statistics.median(_rate(http, "cpu_s") for _, http in pairs), 1),
        "ratio_cpu": round(statistics.median(cpu_ratios), 3),
    }


def main() -> None:
    """Parse flags; the flags that start helpers are for this script itself."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quiet", action="store_true")
    parser.add_argument("--bare", help=argparse.SUPPRESS)
    parser.add_argument("--load", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.bare:
        bare(arguments.bare, arguments.rounds)
    elif arguments.load:
        asyncio.run(load(arguments.load, arguments.rounds))
    else:
        print(json.dumps(measure(arguments.rounds, not arguments.quiet)))


if __name__ == "__main__":
    main()
