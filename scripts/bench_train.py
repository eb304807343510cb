#!/usr/bin/env python3
"""One training step of the Megatron backend through the training process: time, throughput, share of peak, memory.

Variants: plain; fused (activation and dropout fusions and compiled layers). ``qwen3-0.6b`` has random weights in that
model's shape, ``tiny`` suits a CPU. The floor, in the same run: the same products (forward, and two for each in the
backward pass) as bare torch matrix multiplications of the same type, one process, without attention's; the ratio is
the rate of the fastest step over the floor's. Offload and onload are timed with the whole optimizer state. The last
line is JSON.

    scripts/bench_train.py [--shape qwen3-0.6b|tiny] [--rows N] [--seq N] [--steps N] [--variants plain,fused]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from model_shapes import QWEN3_06B

from tollway.fresh_model import ModelShape, write_fresh_model
from tollway.trainer.backends.base import BackendSpec
from tollway.trainer.backends.proxy import BackendProxy
from tollway.trainer.backends.shape import read_shape
from tollway.trainer.batch import Batch, Row
from tollway.trainer.flops import train_flops

SHAPES = {
    "qwen3-0.6b": QWEN3_06B,
    "tiny": ModelShape(vocab_size=2048, hidden_size=256, head_dim=64, intermediate_size=768),
}
VARIANTS: dict[str, dict[str, object]] = {
    "plain": {},
    "fused": {
        "compile_layers": True,
        "options": {"bias_activation_fusion": True, "bias_dropout_fusion": True},
    },
}


def random_batch(shape: ModelShape, rows: int, seq: int) -> Batch:
    """Rows of ``seq`` tokens at temperature 1, half of them sampled."""
    draw = np.random.default_rng(0)
    made = []
    for _ in range(rows):
        mask = (np.arange(seq) >= seq // 2).astype(np.uint8)
        old = np.where(mask, -np.log(shape.vocab_size), np.nan).astype(np.float32)
        ids = draw.integers(0, shape.vocab_size, seq).astype(np.int32)
        weights, advantages = mask / (rows * mask.sum()), draw.normal(size=seq)
        made.append(Row(token_ids=ids, loss_mask=mask, weights=weights, advantages=advantages, old_logprobs=old))
    return Batch(rows=tuple(made))


async def measured(worker: BackendProxy, batch: Batch, steps: int, peak_tflops: float) -> dict[str, float | None]:
    """Median of ``steps`` steps after two that warm up, and the memory's way to the host and back, twice."""
    started = time.perf_counter()
    for _ in range(2):
        await worker.step(batch, lr=1e-6)
    warm_s = time.perf_counter() - started
    reports = [await worker.step(batch, lr=1e-6) for _ in range(steps)]
    seconds = statistics.median(report.seconds for report in reports)
    flops = reports[0].flops
    if flops is None:
        raise RuntimeError("the training process counted no operations")
    peak = reports[-1].peak_bytes
    out: dict[str, float | None] = {
        "step_ms": round(seconds * 1e3, 1),
        "step_ms_min": round(min(report.seconds for report in reports) * 1e3, 1),
        "step_ms_max": round(max(report.seconds for report in reports) * 1e3, 1),
        "tokens_per_s": round(batch.tokens / seconds, 1),
        "tflops": round(flops / seconds / 1e12, 4),
        "mfu": None if peak is None else round(flops / seconds / 1e12 / peak_tflops, 4),
        "peak_gib": None if peak is None else round(peak / 2**30, 2),
        "warm_up_s": round(warm_s, 1),
        "loss_first": round(reports[0].loss, 6),
    }
    for turn in ("first", "again"):
        for name, call in (("offload", worker.offload), ("onload", worker.onload)):
            started = time.perf_counter()
            before = await worker.device_memory()
            await call()
            out[f"{name}_{turn}_s"] = round(time.perf_counter() - started, 3)
            after = await worker.device_memory()
            if name == "offload" and before and after:
                out["freed_gib"] = round((after[0] - before[0]) / 2**30, 2)
    out["step_after_ms"] = round((await worker.step(batch, lr=1e-6)).seconds * 1e3, 1)
    return out


def floor(shape: ModelShape, tokens: int, steps: int) -> float:
    """Operations per second of the bare products, fastest of ``steps`` rounds; in bfloat16 on a GPU. For a child."""
    import torch

    torch.set_num_threads(1)
    on_gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    heads, kv, hidden = shape.num_attention_heads, shape.num_key_value_heads, shape.hidden_size
    inner = shape.intermediate_size
    layer = [
        ((heads + 2 * kv) * shape.head_dim, hidden),
        (hidden, heads * shape.head_dim),
        (2 * inner, hidden),
        (hidden, inner),
    ]
    # One layer's weights stand for all layers': what each layer reads is far larger than a cache.
    sizes = [*((size, shape.num_hidden_layers) for size in layer), ((shape.vocab_size, hidden), 1)]
    matrices = [(torch.randn(size, device=device, dtype=dtype, requires_grad=True), times) for size, times in sizes]
    inputs = [
        torch.randn(tokens, weight.shape[1], device=device, dtype=dtype, requires_grad=True) for weight, _ in matrices
    ]
    operations = sum(6.0 * tokens * weight.numel() * times for weight, times in matrices)
    taken = []
    for _ in range(steps + 1):
        started = time.perf_counter()
        for (weight, times), given in zip(matrices, inputs, strict=True):
            for _ in range(times):
                out = torch.nn.functional.linear(given, weight)
                torch.autograd.grad(out, (given, weight), out)
                del out
        if on_gpu:
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - started)
    return operations / min(taken[1:])


def bare(args: argparse.Namespace) -> float:
    """The floor in a process of its own, so that this one holds no device memory."""
    command = [sys.executable, __file__, "--floor", "--shape", args.shape, "--rows", str(args.rows)]
    command += ["--seq", str(args.seq), "--steps", str(args.steps)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return float(done.stdout)


async def run(args: argparse.Namespace) -> dict[str, object]:
    shape = SHAPES[args.shape]
    batch = random_batch(shape, args.rows, args.seq)
    per_s = bare(args)
    print(f"floor  {per_s / 1e12:.3f} TFLOP/s of bare products", flush=True)
    result: dict[str, object] = {"shape": args.shape, "rows": args.rows, "seq": args.seq, "floor_tflops": per_s / 1e12}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_fresh_model(folder / "model", shape, seed=0)
        sizes = read_shape(folder / "model")
        for name in args.variants.split(","):
            spec = BackendSpec(
                kind="megatron",
                model_dir=str(folder / "model"),
                micro_batch_tokens=args.micro_rows * (args.seq + 16),
                **VARIANTS[name],  # type: ignore[arg-type]
            )
            log = folder / f"{name}.log"
            try:
                async with BackendProxy(spec, log_path=log) as worker:
                    found = await measured(worker, batch, args.steps, args.peak_tflops)
            finally:
                sys.stderr.write(log.read_text()[-2000:] if log.exists() else "")
            fastest = train_flops(sizes, [args.seq] * args.rows) / (found["step_ms_min"] or float("inf")) * 1e3
            found["ratio_to_floor"] = round(fastest / per_s, 3)
            result[name] = found
            print(f"{name:6s} " + "  ".join(f"{key} {value}" for key, value in found.items()), flush=True)
    return result


def main() -> None:
    """Parse flags; ``--floor`` is for this script itself."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--seq", type=int, default=4096, help="tokens per row")
    parser.add_argument("--micro-rows", type=int, default=4, help="rows in one forward pass")
    parser.add_argument("--steps", type=int, default=8, help="measured steps of each variant")
    parser.add_argument("--variants", default="plain,fused")
    parser.add_argument("--peak-tflops", type=float, default=989.0, help="of the device, dense, in the trained type")
    parser.add_argument("--floor", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.floor:
        print(floor(SHAPES[args.shape], args.rows * args.seq, args.steps))
    else:
        print(json.dumps(asyncio.run(run(args))))


if __name__ == "__main__":
    main()
