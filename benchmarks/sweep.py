"""Tries a Blackwell kernel with other shares of emulated exponentials, registers and stages, and times each.

    python benchmarks/sweep.py                                           # fa4_sm100_fwd_bf16_d128, shares 8 to 32
    python benchmarks/sweep.py fa4_sm100_fwd_bf16_d64 --emulated 32 40 48
    python benchmarks/sweep.py --softmax 184 192 --correction 80 88      # all combinations

Each is compiled by setup.py's own command with -D for the numbers of csrc/sm100/shapes.def, into build/sweep. What
spills registers is refused. Without such a GPU the table has the instruction counts and cycles of benchmarks/sass.py
alone; with one, teraflops too, after results have been compared with PyTorch's.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import sass  # noqa: E402

from flash_attn4.arguments import count  # noqa: E402
from flash_attn4.verify import build, device  # noqa: E402

TOKENS, WARM_UPS, RUNS = 32768, 5, 20
NUMBERS = ("emulated", "registers_softmax", "registers_correction", "stages")


def shape_of(flags: str) -> dict[str, int]:
    """What shapes.def says of the tiling that a kernel's flags name."""
    text = (ROOT / "csrc" / "sm100" / "shapes.def").read_text()
    names = re.search(r"FA4_SM100_SHAPE\(name, ([\w, ]+)\)", text)[1].split(", ")
    name = re.search(r"FA4_SHAPE=(\w+)", flags)[1]
    values = re.search(rf"^FA4_SM100_SHAPE\({name}, ([\d, ]+)\)", text, re.MULTILINE)[1].split(", ")
    return dict(zip(names, map(int, values), strict=True))


def share(text: str) -> int:
    if text not in map(str, range(0, 97, 2)):
        raise argparse.ArgumentTypeError(f"it must be even, from 0 to 96, and it is {text!r}")
    return int(text)


def others(numbers: dict[str, int]) -> int:
    """Registers that are left to each of the other warps' threads."""
    return 512 - 2 * numbers["registers_softmax"] - numbers["registers_correction"]


class Sweep:
    def __init__(self, kernel: str, folder: Path):
        listed = {
            name: (archs, flags)
            for name, archs, source, flags in build.entries(ROOT, "variants.def")
            if source == "sm100/fwd.cu"
        }
        if kernel not in listed:
            raise SystemExit(f"sweep.py: no Blackwell kernel {kernel}; there are {', '.join(listed)}")
        self.kernel, self.folder = kernel, folder
        (self.arch, *_), flags = listed[kernel]
        self.shape = shape_of(flags)
        with build.inside(ROOT):
            self.setup = build.setup_of(ROOT)
            self.toolkit = build.toolkit_of(self.setup)
            self.units, _ = self.setup.cuda_units(folder)

    def compile(self, numbers: dict[str, int]) -> Path:
        """The kernel's cubin with these numbers; a ValueError where it cannot be."""
        if others(numbers) < 24 or others(numbers) % 8:
            raise ValueError(f"{others(numbers)} registers for the other warps")
        define = [f"-DFA4_{name.upper()}={n}" for name, n in numbers.items()]
        place = self.folder / "_".join(map(str, numbers.values()))
        shipped = next(unit for unit in self.units if unit.name == self.kernel)
        unit = self.setup.Unit(
            self.kernel, [*shipped.command, *define], place / f"{self.kernel}.o", place / f"{self.kernel}.ptx"
        )
        with build.inside(ROOT):
            try:
                if not unit.is_current():
                    unit.compile()
            except SystemExit as error:
                said = [line for line in str(error).splitlines() if re.search("error|fatal", line)] or ["no reason"]
                spills = re.search(r"[1-9]\d* bytes spill", str(error))
                raise ValueError("spills" if spills else f"does not compile: {said[0]}") from None
        return unit.ptx.with_suffix(".cubin")

    def library(self, numbers: dict[str, int]) -> Path:
        """The host code and that kernel alone, as one library."""
        place = self.folder / "_".join(map(str, numbers.values()))
        with build.inside(ROOT):
            units = build.host_units(self.setup, self.units, place)
            stages = f"-DFA4_STAGES={numbers['stages']}"
            units = [self.setup.Unit(u.name, [*u.command, stages], place / u.object.name) for u in units]
            self.setup.compile_units(units)
            kernel = self.setup.Unit(self.kernel, [], place / f"{self.kernel}.o")
            return build.link([self.toolkit.nvcc, "-cudart", "static"], [*units, kernel], place / "libfa4_sweep.so")


class Timing:
    """The kernel on the GPU here: pairs of CTAs run full attention, others causal."""

    def __init__(self, sweep: Sweep, length: int):
        self.sweep, self.causal = sweep, sweep.shape["ctas"] == 1
        dim, dim_v, heads = sweep.shape["dim"], sweep.shape["dim_v"], 2048 // sweep.shape["dim_v"]
        self.batch, self.heads, self.length = max(1, TOKENS // length), heads, length
        dtype = torch.bfloat16 if "_bf16_" in sweep.kernel else torch.float16
        make = torch.Generator("cuda").manual_seed(0)
        shape = (self.batch, heads, length)
        self.q, self.k, self.v = (
            torch.randn(*shape, d, device="cuda", dtype=dtype, generator=make) for d in (dim, dim, dim_v)
        )
        self.flop = 2 * self.batch * heads * length**2 * (dim + dim_v) // (2 if self.causal else 1)
        major, minor = torch.cuda.get_device_capability()
        self.arch, self.multiprocessors = 10 * major + minor, torch.cuda.get_device_properties(0).multi_processor_count

    def expected(self) -> torch.Tensor:
        sdpa = torch.nn.functional.scaled_dot_product_attention
        return sdpa(*(x[:1, :1].float() for x in (self.q, self.k, self.v)), is_causal=self.causal)

    def teraflops(self, library: Path, expected: torch.Tensor) -> float:
        lib = device.declared(library)
        q, k, v = self.q, self.k, self.v
        o, lse = v.new_empty(v.shape), v.new_empty(v.shape[:3], dtype=torch.float32)
        sizes = [self.batch, self.heads, self.heads, self.length, self.length, q.shape[3], v.shape[3]]
        strides, at = [x.stride() for x in (q, k, v, o, lse)], [x.data_ptr() for x in (q, k, v, o, lse)]
        dtype = device.DTYPES.index(q.dtype)
        call = device.numbers_of([*at, 0], strides, sizes, None, 0 if self.causal else None, dtype)

        def run():
            name = lib.fa4_verify_forward(call, q.shape[3] ** -0.5, self.arch, self.multiprocessors, 1)
            if name is None:
                raise ValueError(lib.fa4_verify_error().decode())
            if name.decode() != self.sweep.kernel:
                raise ValueError(f"the plan takes {name.decode()}")

        for _ in range(WARM_UPS):
            run()
        torch.cuda.synchronize()
        if not torch.allclose(o[:1, :1].float(), expected, atol=2e-2, rtol=2e-2):
            raise ValueError("wrong results")
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(RUNS):  # q, k, v and o are half a gigabyte: nothing stays in the L2 cache from run to run
            run()
        end.record()
        end.synchronize()
        return self.flop * RUNS / begin.elapsed_time(end) * 1e-9


def gpu_missing(arch: str) -> str | None:
    """Why nothing can be timed here."""
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    major, minor = torch.cuda.get_device_capability()
    return None if build.fits(arch, 10 * major + minor) else f"the GPU here is of compute capability {major}.{minor}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernel", nargs="?", default="fa4_sm100_fwd_bf16_d128")
    parser.add_argument("--emulated", type=share, nargs="+", help="of 128 exponentials, even, at most 96")
    parser.add_argument("--softmax", type=count, nargs="+", help="registers of a thread")
    parser.add_argument("--correction", type=count, nargs="+", help="registers of a thread")
    parser.add_argument("--stages", type=count, nargs="+", help="blocks of K or V in shared memory")
    parser.add_argument("--length", type=count, default=8192, help="queries and keys, where there is a GPU")
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "sweep", help="where to compile")
    options = parser.parse_args()
    folder = options.build.resolve() / options.kernel
    try:
        folder.mkdir(parents=True, exist_ok=True)
        sweep = Sweep(options.kernel, folder)
    except (build.Missing, OSError) as error:
        raise SystemExit(f"sweep.py: {error}") from None
    own = [sweep.shape[name] for name in NUMBERS]
    asked = [options.emulated, options.softmax, options.correction, options.stages]
    if not any(asked):
        asked[0] = [8, 16, 24, 32]
    missing = gpu_missing(sweep.arch)
    timing = None if missing else Timing(sweep, options.length)
    expected = timing.expected() if timing else None

    columns = [
        "emulated",
        "softmax",
        "correction",
        "others",
        "stages",
        "plain",
        "masked",
        "MUFU",
        "FMA",
        "ALU",
        "issue",
    ]
    columns += ["tensor core", *(["TF"] if timing else [])]
    print(f"{options.kernel}: registers, instructions a block, cycles of a 256 x 128 step", flush=True)
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|", flush=True)
    for values in itertools.product(*(some or [one] for some, one in zip(asked, own, strict=True))):
        numbers = dict(zip(NUMBERS, values, strict=True))
        row = [*values[:3], others(numbers), values[3]]
        try:
            cubin = sweep.compile(numbers)
            listing = sass.instructions(cubin)
            roles, cycles = sass.roles(cubin, listing), sass.pipes(cubin, listing)
            softmax = ("softmax, plain block", "softmax, masked block, one fragment cut")
            row += [sass.total(roles[role]) for role in softmax]
            mufu = "MUFU of B300" if sweep.arch.startswith("103") else "MUFU of B200"
            row += [cycles[pipe] for pipe in (mufu, "FMA", "ALU", "issue, beside the MMA warp", "tensor core")]
            if timing:
                row.append(f"{timing.teraflops(sweep.library(numbers), expected):.0f}")
        except ValueError as error:
            row.append(f"refused: {error}")
        print("| " + " | ".join(map(str, row)) + " |", flush=True)
    if missing:
        print(f"not timed: {missing}")


if __name__ == "__main__":
    main()
