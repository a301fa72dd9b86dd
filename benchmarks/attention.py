"""Attention, ours against what PyTorch runs, side by side in one process.

    python benchmarks/attention.py                       # the table of the README
    python benchmarks/attention.py --dtype bfloat16 --direction backward --json out.json
    FA4_CPU_ISA=avx2 python benchmarks/attention.py --dtype float16
    python benchmarks/attention.py --device cuda --csv h200.csv --markdown h200.md --plot h200

On the CPU every cell checks the answer against float64 before it is timed. Ours and theirs run in turn; a cell gives
both medians, GFLOP/s by 4 b h len_q len_kv d (half if causal, 2.5 times that for backward), and the median and
quartiles of the ratio of neighbouring runs: above 1 we are faster.

On a GPU, forward: ours, cuDNN and FlashAttention-2 through SDPA, and the packages fa3-fwd and flash-attn-4 where they
are there. How it is measured is in gpu.py, what is made of it in report.py, beside this file.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import json
import os
import platform
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import gpu
import report
import torch

import flash_attn4
from flash_attn4.__main__ import progress
from flash_attn4.arguments import count, duration, new_file, new_file_or_stdout
from flash_attn4.measure import Timing, paired, ratio

SHAPES = [  # batch, heads, len, dim
    (8, 12, 128, 64),
    (1, 12, 1024, 64),
    (1, 8, 1024, 128),
    (1, 12, 2048, 64),
    (1, 8, 2048, 128),
    (1, 2, 4096, 64),
    (1, 1, 8192, 64),
]


@dataclass(frozen=True)
class Cell:
    shape: tuple[int, int, int, int]
    dtype: str
    causal: bool
    direction: str

    @property
    def name(self) -> str:
        mask = "causal" if self.causal else "full"
        return f"{self.direction} {self.dtype} {'x'.join(map(str, self.shape))} {mask}"

    @property
    def flop(self) -> float:
        b, h, length, d = self.shape
        work = 4.0 * b * h * length * length * d * (0.5 if self.causal else 1.0)
        return work * (2.5 if self.direction == "backward" else 1.0)


@dataclass
class Result:
    cell: str
    ours_ms: float
    sdpa_ms: float
    ours_gflops: float
    sdpa_gflops: float
    ratio: float
    ratio_low: float
    ratio_high: float
    error: float
    sdpa_error: float
    share_of_peak: float | None


def inputs(cell: Cell) -> list[torch.Tensor]:
    """Random normal q, k, v, dout; for backward q, k, v require a gradient."""
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, cell.dtype)
    q, k, v, dout = (torch.randn(cell.shape, generator=generator).to(dtype) for _ in range(4))
    if cell.direction == "backward":
        q, k, v = (x.requires_grad_() for x in (q, k, v))
    return [q, k, v, dout]


def runner(attention, cell: Cell, tensors: list[torch.Tensor]):
    """A function that does the cell's work once and returns its results."""
    q, k, v, dout = tensors
    if cell.direction == "forward":

        def forward():
            with torch.no_grad():
                return (attention(q, k, v, is_causal=cell.causal),)

        return forward
    out = attention(q, k, v, is_causal=cell.causal)
    return lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)


def max_error(results, exact) -> float:
    return max(float((r.double() - e).abs().max()) for r, e in zip(results, exact, strict=True))


def measure(cell: Cell, seconds: float, peak: float | None) -> Result:
    tensors = inputs(cell)
    ours = runner(flash_attn4.scaled_dot_product_attention, cell, tensors)
    theirs = runner(torch.nn.functional.scaled_dot_product_attention, cell, tensors)
    doubles = [x.detach().double().requires_grad_(x.requires_grad) for x in tensors]
    exact = runner(torch.nn.functional.scaled_dot_product_attention, cell, doubles)()
    error, sdpa_error = max_error(ours(), exact), max_error(theirs(), exact)
    allowed = 2 * sdpa_error + 2 * torch.finfo(tensors[0].dtype).eps * max(float(e.abs().max()) for e in exact)
    if not error <= allowed:
        raise SystemExit(f"{cell.name}: wrong by {error:.3g}, {allowed:.3g} allowed: not timed")
    del doubles, exact
    times = paired({"ours": ours, "sdpa": theirs}, seconds=seconds)
    gain: Timing = ratio(times["sdpa"], times["ours"])
    ours_s, sdpa_s = times["ours"].median, times["sdpa"].median
    return Result(
        cell=cell.name,
        ours_ms=ours_s * 1e3,
        sdpa_ms=sdpa_s * 1e3,
        ours_gflops=cell.flop / ours_s / 1e9,
        sdpa_gflops=cell.flop / sdpa_s / 1e9,
        ratio=gain.median,
        ratio_low=gain.spread[0],
        ratio_high=gain.spread[1],
        error=error,
        sdpa_error=sdpa_error,
        share_of_peak=cell.flop / ours_s / peak if peak else None,
    )


def fma_peak(threads: int, seconds: float = 0.5) -> float | None:
    """Fused multiply-adds a second that `threads` cores can do in registers, FLOP/s; None without a C compiler."""
    source = Path(__file__).with_name("peak.c")
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "peak.so"
        command = [*compiler, "-O3", "-march=native", "-shared", "-fPIC", str(source), "-o", str(library)]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"no FMA peak: {error}", file=sys.stderr)
            return None
        rounds = ctypes.CDLL(str(library)).fma_rounds
    rounds.restype, rounds.argtypes = ctypes.c_int64, [ctypes.c_int64, ctypes.POINTER(ctypes.c_float)]
    from concurrent.futures import ThreadPoolExecutor

    def work(_: int) -> float:
        sink, done, start = ctypes.c_float(), 0, time.perf_counter()
        while time.perf_counter() - start < seconds:
            done += rounds(1_000_000, ctypes.byref(sink))  # ctypes lets go of the interpreter lock
        return done / (time.perf_counter() - start)

    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(work, range(threads)))


def host_cost(seconds: float) -> dict[str, float]:
    """Microseconds of one 1 x 1 x 16 x 16 float32 call, by way in."""
    q = torch.randn(1, 1, 16, 16)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    costs = {}

    def add(prefix: str, functions) -> None:
        for name, timing in paired(functions, seconds=seconds).items():
            costs[f"{name}, {prefix}"] = timing.median * 1e6

    with torch.inference_mode():
        add("inference mode", {"sdpa": lambda: sdpa(q, q, q), "ops.fa4.fwd": lambda: torch.ops.fa4.fwd(q, q, q)})
    add("grad mode", {"sdpa": lambda: sdpa(q, q, q), "ops.fa4.fwd": lambda: torch.ops.fa4.fwd(q, q, q)})
    add(
        "grad mode",
        {"flash_attn4.scaled_dot_product_attention": lambda: flash_attn4.scaled_dot_product_attention(q, q, q)},
    )
    with flash_attn4.enable_sdpa():
        add("grad mode", {"sdpa, enabled": lambda: sdpa(q, q, q)})
    grad = torch.randn(1, 1, 16, 16, requires_grad=True)

    def both(attention):
        return lambda: attention(grad, grad, grad).sum().backward()

    add("forward and backward", {"sdpa": both(sdpa)})
    with flash_attn4.enable_sdpa():
        add("forward and backward", {"sdpa, enabled": both(sdpa)})
    return costs


def machine() -> dict[str, object]:
    cpu = platform.processor() or platform.machine()
    try:
        names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].split(":", 1)[1].strip()
    except (OSError, IndexError):
        pass
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": cpu,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "flash_attn4": flash_attn4.__version__,
        "isa": flash_attn4.cpu_isa(),
    }


def write_table(results: list[Result], stream) -> None:
    print(
        "| cell | ours ms | SDPA ms | ours GFLOP/s | SDPA GFLOP/s | ratio (quartiles) | error | SDPA error | of peak |",
        file=stream,
    )
    print("|---|---|---|---|---|---|---|---|---|", file=stream)
    for r in results:
        share = "" if r.share_of_peak is None else f"{r.share_of_peak:.0%}"
        print(
            f"| {r.cell} | {r.ours_ms:.3f} | {r.sdpa_ms:.3f} | {r.ours_gflops:.0f} | {r.sdpa_gflops:.0f} | "
            f"**{r.ratio:.2f}** ({r.ratio_low:.2f}-{r.ratio_high:.2f}) | {r.error:.1e} | {r.sdpa_error:.1e} | "
            f"{share} |",
            file=stream,
        )


def on_cpu(options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    cells = [
        Cell(shape, dtype, mask == "causal", direction)
        for direction in options.direction
        for dtype in options.dtype
        for shape in options.shape
        for mask in options.mask
    ]
    for path in filter(None, (options.csv, options.json)):  # an error now, not after the last cell
        if path != "-":
            try:
                open(path, "a").close()
            except OSError as error:
                raise SystemExit(f"{path}: it cannot be written: {error.strerror}") from None
    about = machine()
    peak = fma_peak(options.threads)
    about["fma_peak_gflops"] = round(peak / 1e9) if peak else None
    results = []
    for i, cell in enumerate(cells):
        progress(f"[{i + 1}/{len(cells)}] {cell.name}")
        # The peak is that of 32-bit multiply-adds: a share of it means nothing for bf16 dot products.
        try:
            with flash_attn4.set_fallback("error"):
                results.append(measure(cell, options.seconds, peak if cell.dtype == "float32" else None))
        except NotImplementedError as error:
            raise SystemExit(f"{cell.name}: {error}") from None
    progress("")
    host = {} if options.no_host else host_cost(options.seconds)
    document = {"machine": about, "results": [asdict(r) for r in results], "host_us": host}
    if options.csv:
        with open(options.csv, "w", newline="") as file:
            writer = csv.DictWriter(file, list(asdict(results[0])))
            writer.writeheader()
            writer.writerows(asdict(r) for r in results)
    if options.json == "-":
        json.dump(document, sys.stdout, indent=1)
        return
    if options.json:
        Path(options.json).write_text(json.dumps(document, indent=1))
    print(", ".join(f"{k} {v}" for k, v in about.items()))
    write_table(results, sys.stdout)
    for name, cost in host.items():
        print(f"{cost:8.2f} us  {name}")


# ---- on a GPU


def on_gpu(options: argparse.Namespace) -> None:
    chosen = gpu.cells(options.kind, options.dim, options.mask, options.len, options.dtype)
    if not chosen and options.no_host:
        raise SystemExit("no cell has such a kind, head dim, mask and length")
    device = gpu.Gpu()
    attentions, packages = gpu.implementations(options.other)
    about = {"date": time.strftime("%Y-%m-%d"), **device.about(), "flash_attn4": flash_attn4.__version__, **packages}
    with torch.no_grad():
        rows, lost = gpu_rows(options, chosen, device, attentions, about)
    if options.csv:
        report.write_csv(options.csv, about, rows)
        about, rows = report.read_csv(options.csv)  # so that report.py says the same of it, to the last digit
    print("\n".join(report.summary(rows)))
    report.write(about, rows, csv_path=options.csv, to_markdown=options.markdown, to_plot=options.plot)
    if lost:
        raise SystemExit(f"the run ended before its time: {lost}")


def gpu_rows(options, chosen, device, attentions, about) -> tuple[list[report.Row], Exception | None]:
    """Every row, in the CSV too after each cell; and the error that ended it before its time."""
    rows: list[report.Row] = []
    about["method"] = gpu.METHOD

    def keep(new: list[report.Row]) -> None:
        rows.extend(new)
        if options.csv:
            report.write_csv(options.csv, about, rows)

    keep([])  # a file that cannot be written is an error now, not after the first cell
    try:
        about["matmul_tflops"] = f"{device.matmul_tflops(options.dtype):.0f}"
        print(", ".join(f"{k} {v}" for k, v in about.items() if k != "method"), flush=True)
        for new in gpu.run(chosen, attentions, device, seconds=options.seconds, rounds=options.rounds):
            keep(new)
            print(report.cell_line(new), flush=True)
        about["matmul_tflops"] += f" before, {device.matmul_tflops(options.dtype):.0f} after"
        if not options.no_host:
            host = gpu.host_rows(attentions, options.dtype, device, options.seconds)
            keep(host)
            print("host " + ", ".join(f"{r.name} {r.us:.1f} us" if r.us else f"{r.name}: {r.note}" for r in host))
    except (gpu.DeviceLost, RuntimeError) as error:
        return rows, error
    return rows, None


# ---- command line


def dims(text: str) -> tuple[int, int]:
    """128, or 192/128 where v has another."""
    known = {"/".join(map(str, sorted(set(pair), reverse=True))): pair for pair in gpu.DIMS}
    if text not in known:
        raise argparse.ArgumentTypeError(f"it must be one of {', '.join(known)}, and it is {text!r}")
    return known[text]


def shape(text: str) -> tuple[int, int, int, int]:
    """BxHxLxD."""
    numbers = text.split("x")
    if len(numbers) != 4:
        raise argparse.ArgumentTypeError(f"it must be batch x heads x length x dim, as 1x8x1024x64, and it is {text!r}")
    batch, heads, length, dim = map(count, numbers)
    return batch, heads, length, dim


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--mask", nargs="+", choices=["full", "causal"], default=["full", "causal"])
    parser.add_argument(
        "--dtype",
        nargs="+",
        choices=["float32", "bfloat16", "float16", "float64"],
        help="default: float32 bfloat16 float16; on a GPU one of the 16-bit ones, default bfloat16",
    )
    parser.add_argument("--seconds", type=duration, help="time a cell (default 2; on a GPU 1, and at least 5 rounds)")
    parser.add_argument("--no-host", action="store_true", help="leave out the cost of a call on the smallest problem")
    parser.add_argument("--csv", type=new_file, metavar="FILE")
    cpu = parser.add_argument_group("on the CPU")
    cpu.add_argument("--direction", nargs="+", choices=["forward", "backward"])
    cpu.add_argument(
        "--shape",
        nargs="+",
        type=shape,
        metavar="BxHxLxD",
        help="default: seven shapes from 8x12x128x64 to 1x1x8192x64",
    )
    cpu.add_argument("--threads", type=count)
    cpu.add_argument(
        "--json", type=new_file_or_stdout, metavar="FILE", help="- for standard output, instead of the table"
    )
    cuda = parser.add_argument_group("on a GPU (--device cuda)")
    cuda.add_argument("--kind", nargs="+", choices=["forward", "growth", "decode"], help="default: all")
    cuda.add_argument("--dim", nargs="+", type=dims, help="of 64 96 128 192/128 256; default: all")
    cuda.add_argument("--len", nargs="+", type=count, help="default: 512 1024 4096 16384, growth 32768 65536 131072")
    cuda.add_argument("--other", nargs="*", choices=gpu.OTHERS, help="whom to compare with; default: who is there")
    cuda.add_argument("--rounds", type=count, help="rounds of a cell, instead of --seconds")
    report.add_outputs(cuda)
    options = parser.parse_args(arguments)
    on_cuda = options.device == "cuda"
    for action in (cpu if on_cuda else cuda)._group_actions:
        if getattr(options, action.dest) is not None:
            parser.error(f"{action.option_strings[0]} is not for --device {options.device}")
    if on_cuda:
        if not torch.cuda.is_available():
            parser.error(f"--device cuda: PyTorch {torch.__version__} finds no CUDA device")
        options.dtype = options.dtype or ["bfloat16"]
        if len(options.dtype) != 1 or options.dtype[0] not in ("bfloat16", "float16"):
            parser.error(f"--dtype is {' '.join(options.dtype)}, and on a GPU it must be bfloat16 or float16")
        (options.dtype,) = options.dtype
    defaults = {
        "dtype": ["float32", "bfloat16", "float16"],
        "seconds": 1.0 if on_cuda else 2.0,
        "shape": SHAPES,
        "direction": ["forward", "backward"],
        "threads": torch.get_num_threads(),
        "kind": ["forward", "growth", "decode"],
        "dim": gpu.DIMS,
        "len": [*gpu.LENGTHS, *gpu.GROWTH],
        "other": gpu.OTHERS,
    }
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    if options.device == "cuda":
        on_gpu(options)
    else:
        on_cpu(options)


if __name__ == "__main__":
    main()
