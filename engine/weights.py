"""Checkpoints in and out: Hugging Face names, safetensors, config.json.

Owns the agreement between a directory and a ``Decoder``: every tensor is checked by name and shape before any
is copied, and an error names the tensor. Must not know requests or HTTP. Depends on ``model`` and ``spec``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tollway.engine.model import Decoder
from tollway.engine.spec import ModelSpec, read_config
from tollway.errors import BadRequest, ConfigError

__all__ = [
    "WeightMismatch",
    "check_shapes",
    "copy_tensors",
    "load_decoder",
    "load_directory",
    "save_decoder",
]


class WeightMismatch(BadRequest):
    """A tensor's name, shape or type does not fit the model; nothing was copied."""

    code = "weight_mismatch"


def load_decoder(directory: Path, *, dtype: str = "auto", context_length: int | None = None) -> Decoder:
    """Build the model of a directory and load its weights. Every problem is a ``ConfigError``."""
    spec = ModelSpec.from_config(read_config(directory), source=str(directory / "config.json"))
    kind = getattr(torch, spec.dtype if dtype == "auto" else dtype)
    decoder = Decoder(spec, kind, context_length or spec.max_position)
    try:
        load_directory(decoder, directory)
    except WeightMismatch as error:
        raise ConfigError(f"{directory}: {error}") from error
    return decoder


def load_directory(decoder: Decoder, directory: Path) -> None:
    """Copy all weights of a directory into ``decoder``; raises before copying anything that cannot fit.

    A read error in the middle puts the old weights back. Raises ``WeightMismatch`` or ``ConfigError``.
    """
    try:
        files = _weight_files(directory)
    except OSError as error:  # such as a name that is too long for the file system
        raise ConfigError(f"cannot read the model directory: {error}") from error
    if (directory / "config.json").exists():
        found = ModelSpec.from_config(read_config(directory), source=str(directory / "config.json"))
        if (field := decoder.spec.computes_like(found)) is not None:
            raise WeightMismatch(
                f"{field} is {getattr(found, field)!r} in its config.json, {getattr(decoder.spec, field)!r} in the "
                "running model; start a new engine for another architecture"
            )
    try:
        shapes = {name: shape for file in files for name, shape in _shapes(file)}
        check_shapes(decoder, shapes)
        missing = sorted(decoder.named_tensors().keys() - shapes.keys())
        if missing:
            raise WeightMismatch(f"{len(missing)} tensors are missing, first {missing[0]!r}")
        before = [tensor.clone() for tensor in decoder.parameters()]
        try:
            for file in files:
                copy_tensors(decoder, list(_tensors(file)))
        except BaseException:
            for tensor, old in zip(decoder.parameters(), before, strict=True):
                tensor.copy_(old)
            raise
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"cannot read the weights in {directory}: {error}") from error


def check_shapes(decoder: Decoder, shapes: Mapping[str, Sequence[int]]) -> None:
    """Raise ``WeightMismatch`` for the first tensor that the model has not, or has in another shape."""
    known = decoder.named_tensors()
    for name, shape in shapes.items():
        if decoder.spec.tied and name == "lm_head.weight":
            continue  # a tied checkpoint may repeat the embedding; it is the same tensor
        if name not in known:
            raise WeightMismatch(f"tensor {name!r} does not exist in this model ({decoder.spec.architecture})")
        if tuple(shape) != tuple(known[name].shape):
            raise WeightMismatch(f"tensor {name!r} has shape {list(shape)}, the model wants {list(known[name].shape)}")


def copy_tensors(decoder: Decoder, tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Check all of ``tensors`` and only then copy them in, converting to the model's type."""
    check_shapes(decoder, {name: tuple(tensor.shape) for name, tensor in tensors})
    for name, tensor in tensors:
        if not tensor.is_floating_point():
            raise WeightMismatch(f"tensor {name!r} holds {tensor.dtype}, not floating point numbers")
    known = decoder.named_tensors()
    for name, tensor in tensors:
        if name in known:
            known[name].copy_(tensor)


def save_decoder(decoder: Decoder, directory: Path, config: Mapping[str, object]) -> None:
    """Write ``model.safetensors`` and ``config.json``."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.contiguous().clone() for name, tensor in decoder.named_tensors().items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n", encoding="utf-8")


def _weight_files(directory: Path) -> list[Path]:
    if not directory.is_dir():
        raise ConfigError(f"model directory {directory} does not exist; name a directory in HF layout")
    index = directory / "model.safetensors.index.json"
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            if not all(isinstance(name, str) for name in names):
                raise TypeError(f"weight_map names a file that is no text: {names[0]!r}")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"cannot read {index}: {error!r}") from error
        files = [directory / name for name in names]
    else:
        files = sorted(directory.glob("*.safetensors"))
    absent = [file.name for file in files if not file.is_file()]
    if not files or absent:
        raise ConfigError(
            f"{directory} has no weights ({', '.join(absent) or '*.safetensors'} missing); "
            "save or convert the model with model.safetensors in it"
        )
    return files


def _shapes(file: Path) -> Iterator[tuple[str, list[int]]]:
    with safe_open(file, framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118 - a safe_open handle is no mapping
            yield name, opened.get_slice(name).get_shape()


def _tensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    with safe_open(file, framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118 - a safe_open handle is no mapping
            yield name, opened.get_tensor(name)
