"""Handles in place of bytes: what the pickle says, whom it names, and that only these pickles say it.

Nothing here has a GPU, so the handle itself is that of shared memory; everything around it is the same.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import subprocess
from inspect import signature
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
import torch
from torch.multiprocessing import reductions

from tollway.errors import ConfigError
from tollway.trainer.backends.worker import Worker
from tollway.trainer.weights import ipc
from tollway.trainer.weights.wire import FlattenedTensorMetadata, flatten

CPU = torch.device("cpu")
NAMED = [("half", torch.tensor([1, 2, 3], dtype=torch.bfloat16)), ("word", torch.tensor([[1.5], [-2.5]]))]
SGLANG = Path(__file__).resolve().parents[3] / ".venv-sglang" / "bin" / "python"
CUDA_ARGUMENTS = (
    *(torch.Tensor, torch.Size([4]), (1,), 0, torch.UntypedStorage, torch.uint8, 3, b"handle"),
    *(4, 0, False, b"counter", 7, b"event", True),
)
FOR_ANY = ipc.for_any_reader(CUDA_ARGUMENTS, "GPU-3", (b"decoy", 1))


def names_in(payload: bytes) -> set[tuple[str, str]]:
    """Every (module, name) that unpickling would look up."""
    found, words, memo = set(), [], {}
    for op, argument, _ in pickletools.genops(payload):
        if op.name == "MEMOIZE":
            memo[len(memo)] = words[-1] if words else ""
        elif op.name in ("BINGET", "LONG_BINGET"):
            words.append(memo[argument])  # type: ignore[index]  # an int
        elif op.name == "STACK_GLOBAL":
            found.add((words[-2], words[-1]))
            words.append("(a global)")
        else:
            words.append(argument if isinstance(argument, str) else "(something)")
    return found


def test_a_reader_is_told_the_devices_uuid_and_a_counter_that_is_not_the_buckets() -> None:
    parameters = list(signature(reductions.rebuild_cuda_tensor).parameters)
    named, before = dict(zip(parameters, FOR_ANY, strict=True)), dict(zip(parameters, CUDA_ARGUMENTS, strict=True))
    changed = {name: value for name, value in named.items() if value != before[name]}
    assert changed == {"storage_device": "GPU-3", "ref_counter_handle": b"decoy", "ref_counter_offset": 1}


class Reader(pickle.Unpickler):
    """Has no sglang either."""

    def find_class(self, module: str, name: str) -> object:
        if name == "FlattenedTensorMetadata":
            return FlattenedTensorMetadata
        return super().find_class(module, name)


def test_whoever_unpickles_a_bucket_reads_the_memory_of_whoever_made_it() -> None:
    shared = ipc.share(NAMED, CPU)
    flat, metadata = flatten(NAMED)
    assert torch.equal(shared.flat, flat)
    found = Reader(io.BytesIO(shared.payload)).load()
    assert found["metadata"] == metadata
    shared.flat[0] += 1
    assert found["flattened_tensor"][0] == shared.flat[0] != flat[0], "one memory, not a copy"


def test_a_bucket_of_a_device_names_nothing_that_sglang_would_not_load() -> None:
    """As a CUDA tensor reduces, with the names that this takes; the list is that of the released server."""
    buffer = io.BytesIO()

    class Cuda:
        def __reduce__(self) -> tuple[object, tuple[object, ...]]:
            return reductions.rebuild_cuda_tensor, FOR_ANY

    _, metadata = flatten(NAMED)
    with ipc.stand_in():
        ForkingPickler(buffer).dump({"flattened_tensor": Cuda(), "metadata": metadata})
    assert names_in(buffer.getvalue()) == {
        ("torch.multiprocessing.reductions", "rebuild_cuda_tensor"),
        ("torch", "Tensor"),
        ("torch", "Size"),
        ("torch.storage", "UntypedStorage"),
        ("torch", "uint8"),
        ("torch", "float32"),
        ("torch", "bfloat16"),
        ("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata"),
    }


@pytest.mark.all
@pytest.mark.timeout(120)
def test_the_released_sglang_allows_every_name_of_such_a_bucket() -> None:
    if not SGLANG.is_file():
        pytest.skip("tests/contract/sglang_cpu/setup makes the environment of the released server")
    names = [
        ("torch.multiprocessing.reductions", "rebuild_cuda_tensor"),
        ("torch", "Tensor"),
        ("torch", "Size"),
        ("torch.storage", "UntypedStorage"),
        *(("torch", kind) for kind in ("uint8", "float32", "bfloat16", "float16")),
        ("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata"),
    ]
    code = (
        "import io\nfrom sglang.srt.utils.common import SafeUnpickler\n"
        f"print([n for n in {names} if SafeUnpickler(io.BytesIO()).find_class(*n) is None])"
    )
    done = subprocess.run([SGLANG, "-c", code], capture_output=True, text=True, timeout=110, check=False)
    assert done.stdout.strip().splitlines()[-1:] == ["[]"], done.stderr


def test_nothing_else_in_the_process_pickles_differently() -> None:
    before = reductions.reduce_tensor
    ipc.share(NAMED, CPU)
    assert reductions.reduce_tensor is before
    assert torch.Tensor not in ipc._HandlePickler._extra_reducers or (
        ipc._HandlePickler._extra_reducers[torch.Tensor] is before
    )


def test_an_empty_bucket_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        ipc.share([], CPU)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU says")
def test_without_a_gpu_handles_are_refused_by_name_and_nobody_knows_the_devices_memory(tmp_path: Path) -> None:
    from trainer_helpers import model_dir

    from tollway.trainer.backends.base import BackendSpec

    worker = Worker()
    assert worker.device_memory() is None
    worker.build(BackendSpec(kind="torch", model_dir=str(model_dir(tmp_path / "model"))))
    with pytest.raises(ConfigError, match=r'has no GPU.*refit_transport = "tensor"'):
        worker.weight_buckets(1 << 20, "cuda_ipc")


def test_kept_buckets_go_with_the_next_payload_and_with_the_memory_of_the_trainer(tmp_path: Path) -> None:
    from trainer_helpers import model_dir

    from tollway.trainer.backends.base import BackendSpec

    worker = Worker()
    worker.build(BackendSpec(kind="torch", model_dir=str(model_dir(tmp_path / "model"))))
    sent = worker.share_buckets(4096, CPU)
    assert len(sent.buckets) > 1
    assert sent.weight_bytes == sum(kept.flat.nbytes for kept in worker.kept)
    first = worker.kept[0]
    assert len(worker.share_buckets(1 << 20, CPU).buckets) == len(worker.kept) == 1
    assert worker.kept[0] is not first
    worker.weight_buckets(1 << 20)
    assert worker.kept == []
    worker.share_buckets(1 << 20, CPU)
    worker.offload()
    assert worker.kept == []
    worker.onload()
    assert worker.weight_buckets(1 << 20).weight_bytes == sent.weight_bytes
