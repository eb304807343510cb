"""Write a Hugging Face model directory, all or nothing.

Runs where torch lives. A reader sees the old directory or the new one, never a half-written one: everything
goes to a sibling first, is flushed, and is renamed. Depends on torch and safetensors.
"""

from __future__ import annotations

import glob
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from tollway.trainer.atomic import fsync_tree, replace_directory

__all__ = ["export"]

_WEIGHTS = (".safetensors", ".bin", ".pt")


def export(named: Iterable[tuple[str, torch.Tensor]], source: Path, target: Path) -> None:
    """Write ``model.safetensors`` to ``target`` with the configuration and tokenizer files of ``source``.

    An existing ``target`` is replaced, and what a process that was killed at it left goes. Raises ``OSError`` when the
    disk refuses; ``target`` is then as before.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    for killed in target.parent.glob(f".{glob.escape(target.name)}.*.tmp"):
        shutil.rmtree(killed, ignore_errors=True)
    draft = target.parent / f".{target.name}.{os.getpid()}.tmp"
    draft.mkdir()
    try:
        for path in source.iterdir():
            if path.is_file() and path.suffix not in _WEIGHTS and not path.name.endswith(".index.json"):
                shutil.copyfile(path, draft / path.name)
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in named}
        save_file(tensors, draft / "model.safetensors", metadata={"format": "pt"})
        # As readable as what lies beside it: an engine may run as another user.
        (draft / "model.safetensors").chmod((draft / "config.json").stat().st_mode & 0o777)
        _name_type(draft / "config.json", tensors)
        fsync_tree(draft)
        replace_directory(draft, target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _name_type(config: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Let ``config.json`` name the type of the tensors: a server that is asked for none takes it from there."""
    kinds = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()}
    said = json.loads(config.read_text(encoding="utf-8"))
    # The old name and the new one of the same key.
    named = {"torch_dtype", "dtype"} & said.keys() or {"torch_dtype"}
    if len(kinds) == 1 and (kind := kinds.pop()) not in {said.get(key) for key in named}:
        config.write_text(json.dumps(said | dict.fromkeys(named, kind), indent=2) + "\n", encoding="utf-8")
