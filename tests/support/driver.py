"""Launches through Triton's own binder and front end, for GPUs that need not be there.

A driver of the test's own stands for the GPU's. Arguments are bound and specialised, and each new
kernel is generated as Triton's IR (not machine code), as in a launch on the GPU; nothing runs.
Tensors have no data. Needs a process without TRITON_INTERPRET::

    with Driver(H200) as driver, driver.mode:
        reductions.forward(operands, spec, plan)
        driver.launched, driver.compiled
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import triton
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.runtime import driver as active

from fxpass.kernels import call, chunked, reductions
from fxpass.kernels.call import Gpu
from fxpass.plan.devices import target_of
from tests.support.gpus import Card, Gpus

CUDA = torch.device("cuda", 0)


class Launched(NamedTuple):
    """One launch: the kernel, and its sizes of blocks and options."""

    name: str
    options: frozenset[tuple[str, int]]


class Pointer:
    """A tensor as Triton's binder sees it."""

    def __init__(self, tensor: torch.Tensor, base: int):
        self.dtype, self.shape = tensor.dtype, tensor.shape
        self._at = base + tensor.storage_offset() * tensor.itemsize

    def data_ptr(self) -> int:
        return self._at


class Driver:
    """A GPU whose launches are bound, compiled to Triton's IR, and taken down.

    Attributes:
        gpu: as the launchers see it.
        mode: the mode of tensors without data; those on the CPU stand for the GPU's.
        launched: all launches.
        compiled: what was generated: the name of a kernel, and its key, with types, the divisors of
            arguments, and options.
    """

    def __init__(self, card: Card, hip: str | None = None):
        self.card, self.hip = card, hip
        self.patch = pytest.MonkeyPatch()
        self.mode = FakeTensorMode()
        self.launched: list[Launched] = []
        self.compiled: list[tuple[str, str]] = []

    def __enter__(self) -> Driver:
        patch = self.patch
        Gpus(patch).have(self.card, hip=self.hip)
        name = target_of(CUDA)
        self.gpu = Gpu(self.card.name, name)
        target = GPUTarget("hip", name, 64) if self.hip else GPUTarget("cuda", int(name[3:]), 32)
        patch.setattr(
            active,
            "_active",
            SimpleNamespace(
                get_current_target=lambda: target,
                get_current_device=lambda: name,
                get_current_stream=lambda device: 0,
            ),
        )
        patch.setattr(triton.compiler, "compile", self._compile)
        patch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
        patch.setattr(torch, "addmm", self._addmm)
        patch.setattr(call, "gpu_of", lambda device: self.gpu)
        load = chunked.jit_function
        for module in (chunked, reductions):
            patch.setattr(module, "jit_function", lambda kernel: _Function(load(kernel), self))
        return self

    def __exit__(self, *_: object) -> None:
        self.patch.undo()
        Gpus.forget()

    @staticmethod
    def _addmm(add, a, b, *, out, **more):
        assert (a @ b).shape == out.shape
        assert out.dtype == more.get("out_dtype", a.dtype) == add.dtype
        return out

    def _compile(self, source: Any, target: GPUTarget, options: dict[str, Any]) -> Any:
        from triton._C.libtriton import ir
        from triton.compiler.compiler import make_backend

        backend = make_backend(target)
        parsed = backend.parse_options(dict(options))
        context = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        functions = backend.get_codegen_implementation(parsed)
        module = source.make_ir(target, parsed, functions, backend.get_module_map(), context)
        stages: dict[str, Any] = {}
        backend.add_stages(stages, parsed, source.language)
        stages["ttir"](module, {})
        return SimpleNamespace(
            launch_metadata=lambda *_: None,
            run=lambda *_: None,
            function=None,
            packed_metadata=None,
        )


class _Function:
    """A kernel whose launches are taken down."""

    def __init__(self, function: Any, driver: Driver):
        self.function, self.driver = function, driver
        self.arg_names = function.arg_names

    def __getitem__(self, grid: tuple[int, ...]):
        return lambda **arguments: self._launch(grid, arguments)

    def _launch(self, grid: tuple[int, ...], arguments: dict[str, Any]) -> None:
        function = self.function
        device = active.active.get_current_device()
        before = set(function.device_caches[device][0])
        bound = {name: _bound(argument) for name, argument in arguments.items()}
        assert all(0 < size < 1 << 31 for size in grid)
        function[grid](**bound)
        name = function.fn.__name__
        cached = function.device_caches[device][0]
        self.driver.compiled += [(name, key) for key in cached if key not in before]
        options = {k: v for k, v in arguments.items() if k in OPTIONS}
        self.driver.launched.append(Launched(name, frozenset(options.items())))


OPTIONS = {"BLOCK_V", "LANES", "VECTOR", "num_warps", "enable_fp_fusion"}


def _bound(argument: Any) -> Any:
    return Pointer(argument, 1 << 12) if isinstance(argument, FakeTensor) else argument
