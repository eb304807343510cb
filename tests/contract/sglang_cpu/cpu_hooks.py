"""Import hooks that let the released SGLang 0.5.23 start on a machine without an accelerator.

The set-up copies this file into the server's own environment, where a ``.pth`` line imports it in every
interpreter, also in those that SGLang spawns. It must stay cheap to import, and it must never change what the
server computes: each hook stands in for something that the contract tests' code path imports but never calls,
and a stand-in that is called after all raises.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Sequence

KERNELS = "sgl_kernel"
"""Compiled CUDA kernels: 373 MB and no CPU build, yet imported by modules that every server loads."""


class _Missing:
    """A kernel that was imported; calling it is the error that importing it would have been."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> _Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self._name}.{name}")

    def __call__(self, *_args: object, **_kwargs: object) -> object:
        raise RuntimeError(f"{self._name} has no CPU build; the flags of the server should have avoided it")


class _KernelModule(types.ModuleType):
    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self.__name__}.{name}")


class _KernelFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module below ``sgl_kernel``."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != KERNELS:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _KernelModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run: attributes are made on demand."""


class _Around(importlib.abc.MetaPathFinder):
    """Runs one function before or after the real module of that name is executed."""

    def __init__(
        self,
        fullname: str,
        *,
        before: Callable[[], None] | None = None,
        after: Callable[[types.ModuleType], None] | None = None,
    ) -> None:
        self._fullname, self._before, self._after = fullname, before, after
        self._searching = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._fullname or self._searching:
            return None
        self._searching = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching = False
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def run(module: types.ModuleType) -> None:
            if self._before is not None:
                self._before()
            execute(module)
            if self._after is not None:
                self._after(module)

        spec.loader.exec_module = run  # type: ignore[method-assign]  # one loader object serves one module
        return spec


_libraries: list[object] = []
"""Operator libraries live as long as the object that declared them."""


def _declare_vision_operators() -> None:
    """torchvision's binary does not load on the CPU build of PyTorch; its Python side needs these two names."""
    import torch

    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _libraries.append(library)


def _leave_host_memory_unpinned(module: types.ModuleType) -> None:
    """The buffer that captures routed experts is registered with CUDA; without CUDA there is nothing to do."""
    if not hasattr(module, "_cuda_host_register"):
        raise ImportError(f"{module.__name__} has no _cuda_host_register: is this SGLang 0.5.23?")
    module._cuda_host_register = lambda *_args, **_kwargs: None  # type: ignore[attr-defined]


def install() -> None:
    """Put the hooks in front of the import system. Calling it again does nothing."""
    if any(isinstance(finder, _KernelFinder) for finder in sys.meta_path):
        return
    sys.meta_path.append(_KernelFinder())  # last: a real package of that name wins
    sys.meta_path.insert(0, _Around("torchvision", before=_declare_vision_operators))
    sys.meta_path.insert(0, _Around("sglang.srt.mem_cache.pool_host.common", after=_leave_host_memory_unpinned))


install()
