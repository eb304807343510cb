"""Buckets that other processes read on the device: they read the bytes, and the memory comes back whoever read it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tollway.fresh_model import ModelShape, write_fresh_model
from tollway.trainer.backends.base import BackendSpec
from tollway.trainer.backends.worker import Worker

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow(limit_s=120),
    pytest.mark.timeout(120),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SIZES: dict[str, object] = {"vocab_size": 32_000, "hidden_size": 1024, "head_dim": 64, "num_hidden_layers": 4}
BUCKET_BYTES = 32 << 20
# Reads a payload, prints the device that it names and the sum of its bytes, and keeps it until its input ends.
READER = """
import io, pickle, sys
from torch.multiprocessing import reductions
from tollway.trainer.weights.wire import stand_in

def here(*arguments):
    print(arguments[6], end=" ")
    return reductions.rebuild_cuda_tensor(*arguments[:6], 0, *arguments[7:])

class Reader(pickle.Unpickler):
    def find_class(self, module, name):
        return here if name == "rebuild_cuda_tensor" else super().find_class(module, name)

with stand_in():
    found = Reader(io.BytesIO(sys.stdin.buffer.read(int(sys.argv[1])))).load()
print(int(found["flattened_tensor"].sum()), flush=True)
sys.stdin.buffer.read()
"""


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Worker:
    folder = tmp_path_factory.mktemp("model")
    write_fresh_model(folder, ModelShape.model_validate(SIZES), seed=0)
    built = Worker()
    built.build(BackendSpec(kind="torch", model_dir=str(folder)))
    return built


def held(device: torch.device) -> tuple[int, int]:
    """Bytes that tensors of this process use, and that it has from the driver when it keeps none for later."""
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)


def reader(payload: bytes) -> subprocess.Popen[bytes]:
    started = subprocess.Popen(
        [sys.executable, "-c", READER, str(len(payload))], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert started.stdin is not None
    started.stdin.write(payload)
    started.stdin.flush()
    return started


@pytest.mark.parametrize("end", ["well", "killed", "after the memory went"])
@pytest.mark.parametrize("readers", [0, 1, 2])
def test_memory_of_a_bucket_comes_back_whoever_read_it(worker: Worker, readers: int, end: str) -> None:
    if not readers and end != "well":
        pytest.skip("nobody is there to end")
    device = torch.device("cuda", 0)
    worker.share_buckets(BUCKET_BYTES, device)
    worker.weight_buckets(1 << 30)  # drops them; what a first time leaves behind is there now
    before = held(device)
    sent = worker.share_buckets(BUCKET_BYTES, device)
    assert len(sent.buckets) > 1
    assert held(device)[0] >= before[0] + sent.weight_bytes
    wanted = f"{torch.cuda.get_device_properties(device).uuid} {int(worker.kept[1].flat.sum())}"
    running = [reader(sent.buckets[1]) for _ in range(readers)]
    try:
        for each in running:
            assert each.stdout is not None
            assert each.stdout.readline().decode().strip() == wanted
        if end != "after the memory went":
            finish(running, killed=end == "killed")
        worker.weight_buckets(1 << 30)
        assert worker.kept == []
        assert held(device) == before
    finally:
        finish(running, killed=False)


def finish(running: list[subprocess.Popen[bytes]], *, killed: bool) -> None:
    for each in running:
        if killed:
            each.kill()
        each.communicate()
