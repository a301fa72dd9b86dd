"""Triton and Gluon kernels: compiled without a GPU, run in the simulator as Triton's launcher would run them."""

import dataclasses
import os

import numpy
import ptxsim
import torch
from ptxsim.build import OUTPUT

os.environ.setdefault("TRITON_CACHE_DIR", str(OUTPUT / "triton"))
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

# torch's name, Triton's, the tensor map's
TYPES = {
    torch.bfloat16: ("bf16", "bf16"),
    torch.float16: ("fp16", "f16"),
    torch.float32: ("fp32", "f32"),
    torch.float8_e4m3fn: ("fp8e4nv", "u8"),
    torch.float8_e5m2: ("fp8e5", "u8"),
    torch.int32: ("i32", "s32"),
    torch.uint8: ("u8", "u8"),
}


@dataclasses.dataclass
class Descriptor:
    """A contiguous tensor that the kernel sees through a tensor map with boxes of that shape (innermost last)."""

    tensor: torch.Tensor
    block: list
    layout: object = None  # Gluon's shared layout of a block

    def signature(self):
        layout = f",{self.layout!r}" if self.layout is not None else ""
        return f"tensordesc<{TYPES[self.tensor.dtype][0]}{list(self.block)}{layout}>"

    def arguments(self, meta):
        """The map, then shape and strides in elements."""
        size, sizes, strides = self.tensor.element_size(), list(self.tensor.shape), list(self.tensor.stride())
        return [
            ptxsim.TensorMap(
                self.tensor,
                TYPES[self.tensor.dtype][1],
                sizes[::-1],
                [stride * size for stride in strides[-2::-1]],
                list(meta["block_size"])[::-1],
                swizzle=(0, 32, 64, 128)[meta["swizzle"]],
            ),
            *sizes,
            *strides,
        ]


def signature_of(value):
    if isinstance(value, Descriptor):
        return value.signature()
    if isinstance(value, torch.Tensor):
        return "*" + TYPES[value.dtype][0]
    return "i32" if isinstance(value, int) else "fp32"


def compiled(function, values, constants, capability, **options):
    """function for those arguments (by name) and compile-time constants."""
    signature = {name: "constexpr" if name in constants else signature_of(values[name]) for name in function.arg_names}
    aligned = [["tt.divisibility", 16]]
    attrs = {
        (i,): aligned
        for i, name in enumerate(function.arg_names)
        if isinstance(values.get(name), torch.Tensor) or (isinstance(values.get(name), int) and values[name] % 16 == 0)
    }
    source = GluonASTSource if isinstance(function, GluonJITFunction) else ASTSource
    return triton.compile(
        source(function, signature=signature, constexprs=constants, attrs=attrs),
        target=GPUTarget("cuda", capability, 32),
        options={"ptx_version": 90, **options},
    )


def run(function, grid, values, constants, capability, options=None, **launch):
    """Runs it on values, written in place; the report."""
    kernel = compiled(function, values, constants, capability, **(options or {}))
    meta = kernel.metadata
    metas = iter(meta.tensordesc_meta or [])
    args = []
    for name in function.arg_names:
        if name in constants:
            continue
        value = values[name]
        if isinstance(value, Descriptor):
            args += value.arguments(next(metas))
        else:
            args.append(value)
    grid = (grid, 1, 1) if isinstance(grid, int) else (*grid, 1, 1)[:3]
    clusters = grid[0] * grid[1] * grid[2]
    scratch = ptxsim.empty(max(1, meta.global_scratch_size * clusters * meta.num_ctas), numpy.uint8)
    return ptxsim.Module(kernel.asm["ptx"]).launch(
        meta.name,
        grid=(grid[0] * meta.num_ctas, *grid[1:]),
        block=32 * meta.num_warps,
        cluster=meta.num_ctas,
        smem=meta.shared,
        args=[*args, scratch, 0],
        **{"model": "practice", **launch},
    )
