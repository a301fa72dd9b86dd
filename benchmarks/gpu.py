"""What `attention.py --device cuda` measures, and how.

Every implementation that is there takes the same tensors in one process. Its answer is checked first: against float32
by the formula, within twice the error of PyTorch's math path plus a rounding floor, the bound of the tests. A cell's
inputs are several sets, together at least three times the L2 cache, taken in turn. One run is a CUDA graph of many
launches between two events, so that host time does not count, however short the kernel; implementations run in turn,
every other round in the opposite order. After the last round the answer of the last launch is checked again.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import math
import subprocess
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from report import OURS, Cell, Row
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

import flash_attn4
from flash_attn4.measure import Timing, paired, ratio

Attention = Callable[[Cell, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

HEADS = {64: 32, 96: 16, 128: 16, 192: 16, 256: 8}  # hidden size 2,048 (1,536 at 96; 3,072 for q and k at 192)
DIMS = [(128, 128), (64, 64), (256, 256), (96, 96), (192, 128)]
LENGTHS = [512, 1024, 4096, 16384]
GROWTH = [32768, 65536, 131072]  # at head dim 128
TOKENS = 16384  # in all: the batch is that over the length, at least 1
DECODE = [  # batch, len_q, len_kv; 32 heads of q, 8 of k and v, head dim 128
    (1, 1, 8192),
    (16, 1, 8192),
    (1, 1, 32768),
    (1, 1, 65536),
    (1, 1, 131072),
    (1, 4, 8192),
    (1, 4, 65536),
    (1, 16, 8192),
    (16, 16, 8192),
    (1, 16, 65536),
]

METHOD = (
    "Medians of runs in turn in one process; a run is a CUDA graph of about 10 ms of launches, over inputs of three "
    "times the L2 cache or more."
)
RUN_SECONDS = 10e-3  # what a run aims at
MOST_LAUNCHES = 1000
OTHERS_SLACK = 4  # how another rounds is its own affair: this many times our bound is a wrong answer
SCORES = 1 << 28  # as many scores of a head's rows the check computes at once


def cells(
    kinds: list[str], dims: list[tuple[int, int]], masks: list[str], lengths: list[int], dtype: str
) -> list[Cell]:
    """The chosen part of the table, in the order in which it is measured: what matters most first."""

    def forward(kind: str, dim: int, dim_v: int, mask: str, length: int) -> Cell:
        heads = HEADS[dim]
        batch = max(1, TOKENS // length)
        return Cell(kind, dtype, dim, dim_v, mask == "causal", batch, heads, heads, length, length)

    chosen = []
    if "forward" in kinds:
        chosen += [forward("forward", *d, m, n) for d in dims for m in masks for n in lengths if n not in GROWTH]
    if "growth" in kinds and (128, 128) in dims:
        chosen += [forward("growth", 128, 128, m, n) for m in masks for n in GROWTH if n in lengths]
    if "decode" in kinds:
        chosen += [Cell("decode", dtype, 128, 128, False, b, 32, 8, n, m) for b, n, m in DECODE]
    return chosen


# ---- who takes part


def ours(cell: Cell, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.ops.fa4.fwd(q, k, v, hi=0 if cell.causal else None)[0]


def through_sdpa(backend: SDPBackend, cell: Cell, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(backend):
        return sdpa(q, k, v, is_causal=cell.causal, enable_gqa=cell.heads_q != cell.heads_kv)


def _flash_attention_3() -> Attention:
    function = importlib.import_module("fa3_fwd_interface").flash_attn_func

    def fa3(cell: Cell, *qkv: torch.Tensor) -> torch.Tensor:
        # 0: it chooses in how many parts it takes the keys. Its default is 1, the better where there are rows enough.
        splits = 0 if cell.kind == "decode" else 1
        return _first(function(*_swapped(qkv), causal=cell.causal, num_splits=splits)).transpose(1, 2)

    return fa3


def _flash_attention_4() -> Attention:
    function = importlib.import_module("flash_attn.cute").flash_attn_func
    return lambda cell, *qkv: _first(function(*_swapped(qkv), causal=cell.causal)).transpose(1, 2)


def _swapped(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """[b, h, len, d] as [b, len, h, d], and back."""
    return [x.transpose(1, 2) for x in tensors]


def _first(result):
    return result[0] if isinstance(result, tuple) else result


PACKAGES = {"fa3": ("fa3-fwd", _flash_attention_3), "fa4": ("flash-attn-4", _flash_attention_4)}
OTHERS = ["cudnn", "fa2", *PACKAGES]


def implementations(others: list[str]) -> tuple[dict[str, Attention], dict[str, str]]:
    """Ours and the others that are there; and for packages their version, or why they do not take part."""
    found: dict[str, Attention] = {OURS: ours}
    about = {}
    if "cudnn" in others:
        found["cudnn"] = partial(through_sdpa, SDPBackend.CUDNN_ATTENTION)
    if "fa2" in others:
        found["fa2"] = partial(through_sdpa, SDPBackend.FLASH_ATTENTION)
    for name, (package, load) in PACKAGES.items():
        if name not in others:
            continue
        try:
            found[name] = load()
            about[name] = importlib.metadata.version(package)
        except Exception as error:  # a package for another torch or driver fails in its own way
            about[name] = f"not there: {reason(error)}"
    return found, about


def reason(error: Exception, *said: warnings.WarningMessage) -> str:
    """An error, and what was warned of before it, on one line."""
    parts = [f"{type(error).__name__}: {error}", *(str(warning.message).split("(Triggered")[0] for warning in said)]
    return " ".join(" ".join(parts).split())[:400]


# ---- the right answer


class Reference:
    """Attention by the formula in float32, on the rows of one set of inputs: all of them as far as SCORES allows, else
    some of each head drawn at random, with the first and the last. allowed is the tests' bound."""

    def __init__(self, cell: Cell, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
        self.shape = (cell.batch, cell.heads_q, cell.len_q, cell.dim_v)
        count = max(2, min(cell.len_q, SCORES // (cell.heads_q * cell.len_kv)))
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randperm(cell.len_q, generator=generator)[:count]
        ends = torch.tensor([0, cell.len_q - 1])
        self.rows = torch.cat([drawn, ends]).unique().to(q.device)
        mask = None
        if cell.causal:
            mask = torch.arange(cell.len_kv, device=q.device) <= self.rows[:, None]
        group = cell.heads_q // cell.heads_kv
        exact, math_error, magnitude = [], 0.0, 0.0
        for b in range(cell.batch):
            rows = q[b : b + 1, :, self.rows]
            keys, values = (x[b : b + 1].repeat_interleave(group, 1) for x in (k, v))
            scores = rows.float() @ keys.float().transpose(2, 3) * cell.dim**-0.5
            p = torch.softmax(scores if mask is None else scores.masked_fill_(~mask, -math.inf), -1)
            del scores
            exact.append(p @ values.float())
            magnitude = max(magnitude, float((p @ values.float().abs()).max()))
            del p
            with sdpa_kernel(SDPBackend.MATH):
                theirs = sdpa(rows, keys, values, attn_mask=mask)
            math_error = max(math_error, float((theirs.float() - exact[-1]).abs().max()))
        self.exact = torch.cat(exact)
        eps = torch.finfo(q.dtype).eps
        self.allowed = 2 * math_error + 2 * eps * float(self.exact.abs().max()) + 0.5 * eps * magnitude

    def error(self, out: torch.Tensor) -> float:
        """The largest of the rows; infinite where any row of all is not finite."""
        if tuple(out.shape) != self.shape:
            raise ValueError(f"the result has shape {tuple(out.shape)}, and it should be {self.shape}")
        if not bool(out.isfinite().all()):
            return math.inf
        return float((out[:, :, self.rows].float() - self.exact).abs().max())


def after_poison(attention: Callable[[], torch.Tensor], cell: Cell, like: torch.Tensor) -> torch.Tensor:
    """The result of a call that most likely gets memory full of NaN for it: what it leaves unwritten shows."""
    shape = (cell.batch, cell.heads_q, cell.len_q, cell.dim_v)
    torch.full(shape, math.nan, dtype=like.dtype, device=like.device)  # freed at once, for the next of this size
    return attention()


# ---- the device


class DeviceLost(Exception):
    """After a fault every call on the device fails, whoever makes it."""


class Replay(NamedTuple):
    run: Callable[[], object]
    out: Callable[[], torch.Tensor]  # of the last launch of the last run
    timing: str  # as in Row
    note: str = ""


class Gpu:
    """A CUDA device: its clock, its graphs, its state."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.properties = torch.cuda.get_device_properties(self.device)
        self.l2_bytes = self.properties.L2_cache_size

    def seconds(self, run: Callable[[], object]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e-3

    def capture(self, launches: list[Callable[[], torch.Tensor]]) -> Replay:
        """One run of all launches, as a graph where that is possible."""
        graph, last = torch.cuda.CUDAGraph(), []
        try:
            # The outer one brings the stream back where the inner one's end raises.
            with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):
                for launch in launches:
                    last[:] = [launch()]
            return Replay(graph.replay, lambda: last[0], "graph")
        except Exception as error:
            why = f"no graph: {reason(error)}"
            self.check()

        def run() -> None:
            for launch in launches:
                last[:] = [launch()]

        return Replay(run, lambda: last[0], "launches", why)

    def state_during(self, run: Callable[[], object]) -> dict[str, int]:
        """Clock, power and temperature while run is on its way; nothing without NVML."""
        run()
        run()
        questions = {
            "sm_mhz": torch.cuda.clock_rate,
            "watts": lambda: round(torch.cuda.power_draw() / 1000),
            "celsius": torch.cuda.temperature,
        }
        state = {}
        for what, ask in questions.items():
            try:
                state[what] = ask()
            except Exception:  # no pynvml, or a driver that does not say: it has many ways
                continue
        torch.cuda.synchronize()
        return state

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def check(self) -> None:
        """Raises DeviceLost when the device takes no more work."""
        try:
            torch.cuda.synchronize()
            torch.ones(1, device=self.device).add_(1).item()
        except Exception as error:
            raise DeviceLost(reason(error)) from error

    def about(self) -> dict[str, object]:
        cudnn = torch.backends.cudnn.version() or 0
        return {
            "device": self.properties.name,
            "multiprocessors": self.properties.multi_processor_count,
            "l2_mib": self.l2_bytes >> 20,
            "driver": driver_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "cudnn": f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}",
        }

    def matmul_tflops(self, dtype: str, size: int = 8192) -> float:
        """What this card gives a plain matrix product today: clocks and power differ from run to run."""
        a, b = (torch.randn(size, size, device=self.device, dtype=getattr(torch, dtype)) for _ in range(2))
        replay = self.capture([lambda: a @ b] * 10)
        replay.run()
        seconds = sorted(self.seconds(replay.run) for _ in range(5))[2]
        return 10 * 2 * size**3 / seconds / 1e12


def driver_version() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown"


# ---- the measurement


def input_sets(cell: Cell, gpu) -> list[list[torch.Tensor]]:
    """Sets of random normal q, k, v, [b, h, len, d] by strides and [b, len, h, d] in memory, as models have them."""
    count = max(2, math.ceil(3 * gpu.l2_bytes / cell.bytes))
    generator = torch.Generator(gpu.device).manual_seed(0)
    shapes = (
        (cell.batch, cell.len_q, cell.heads_q, cell.dim),
        (cell.batch, cell.len_kv, cell.heads_kv, cell.dim),
        (cell.batch, cell.len_kv, cell.heads_kv, cell.dim_v),
    )
    dtype = getattr(torch, cell.dtype)
    return [
        _swapped(torch.randn(s, generator=generator, device=gpu.device, dtype=dtype) for s in shapes)
        for _ in range(count)
    ]


def measure(
    cell: Cell, attentions: dict[str, Attention], gpu, seconds: float, rounds: int | None, rows: list[Row]
) -> None:
    """Appends a row for each implementation to rows: one that fails has the reason in it. Raises DeviceLost."""
    sets = input_sets(cell, gpu)
    reference = Reference(cell, *sets[0])
    right: dict[str, list[Callable[[], torch.Tensor]]] = {}
    for name, attention in attentions.items():
        row = Row(cell, name, allowed=reference.allowed)
        rows.append(row)
        launches = [partial(attention, cell, *tensors) for tensors in sets]
        if check(row, launches[0], reference, sets[0][0], gpu):
            right[name] = launches
    if right:
        measured = {row.name: row for row in rows if row.name in right}
        time_in_turn(measured, right, reference, gpu, seconds, rounds)


def check(row: Row, attention: Callable[[], torch.Tensor], reference: Reference, like: torch.Tensor, gpu) -> bool:
    """Whether it runs and its answer is right; the row has the error, or why not."""
    with warnings.catch_warnings(record=True) as said:  # SDPA warns of what a backend lacks, and then raises little
        warnings.simplefilter("always")
        try:
            row.error = reference.error(after_poison(attention, row.cell, like))
            row.note = verdict(row)
        except Exception as error:
            row.note = reason(error, *said)
            gpu.check()
    return not row.note


def time_in_turn(
    rows: dict[str, Row],
    launches: dict[str, list[Callable[[], torch.Tensor]]],
    reference: Reference,
    gpu,
    seconds: float,
    rounds: int | None,
) -> None:
    """Fills the rows; launches has for each implementation a call on each set of inputs."""
    sets = len(launches[next(iter(rows))])
    shortest = min(gpu.seconds(calls[i]) for calls in launches.values() for i in (1, 0))
    count = min(MOST_LAUNCHES, max(sets, math.ceil(RUN_SECONDS / shortest)))
    order = [i % sets for i in range(count)][::-1]  # the first set last: its answer is known
    replays = {name: gpu.capture([calls[i] for i in order]) for name, calls in launches.items()}
    least, most = (rounds, rounds) if rounds else (5, 200)
    runs = {name: replay.run for name, replay in replays.items()}
    times = paired(runs, seconds=seconds, min_runs=least, max_runs=most, timer=gpu.seconds)
    for name, replay in replays.items():
        row, timing = rows[name], times[name]
        row.runs, row.launches, row.timing = len(timing.runs), count, replay.timing
        row.error = max(row.error, reference.error(replay.out()))
        row.note = verdict(row)
        if row.note:
            continue
        row.note = replay.note
        row.us, row.us_low, row.us_high = _microseconds(timing, count)
        if name != OURS and OURS in times:
            gain = ratio(timing, times[OURS])
            row.ratio, (row.ratio_low, row.ratio_high) = gain.median, gain.spread
    if OURS in replays:
        for what, value in gpu.state_during(replays[OURS].run).items():
            setattr(rows[OURS], what, value)


def _microseconds(timing: Timing, launches: int = 1) -> tuple[float, float, float]:
    return tuple(x / launches * 1e6 for x in (timing.median, *timing.spread))


def verdict(row: Row) -> str:
    """Why an answer counts as wrong; nothing when it is right."""
    limit = row.allowed * (1 if row.name == OURS else OTHERS_SLACK)
    return "" if row.error <= limit else f"wrong: error {row.error:.3g}, {row.allowed:.3g} allowed"


def run(
    chosen: list[Cell], attentions: dict[str, Attention], gpu, *, seconds: float, rounds: int | None = None
) -> Iterator[list[Row]]:
    """The rows of each cell in turn. A cell that fails as a whole has the reason in all of them; after a fault that the
    device does not survive its rows are the last, and DeviceLost is raised."""
    for cell in chosen:
        rows: list[Row] = []
        try:
            measure(cell, attentions, gpu, seconds, rounds, rows)
        except DeviceLost:
            yield rows
            raise
        except Exception as error:
            if not rows:
                rows.append(Row(cell, OURS))
            for row in rows:
                row.us, row.ratio, row.note = None, None, row.note or reason(error)
            yield rows
            gpu.check()
            continue
        yield rows


def host_rows(attentions: dict[str, Attention], dtype: str, gpu, seconds: float) -> list[Row]:
    """Host time of a call whose kernel is short: batch 1, 128 tokens, no gradient."""
    cell = Cell("host", dtype, 128, 128, False, 1, 8, 8, 128, 128)
    q, k, v = input_sets(cell, gpu)[0]
    functions = {
        "ours": lambda: ours(cell, q, k, v),
        "ours_sdpa": lambda: flash_attn4.scaled_dot_product_attention(q, k, v),
        "sdpa": lambda: sdpa(q, k, v),
    }
    for name in PACKAGES:
        if name in attentions:
            functions[name] = partial(attentions[name], cell, q, k, v)
    rows, usable = [], {}
    for name, function in functions.items():
        try:
            function()
            usable[name] = function
        except Exception as error:
            rows.append(Row(cell, name, note=reason(error)))
            gpu.check()
    # The device is done with a call before the next one comes, so what is waited for at the end is next to nothing.
    for name, timing in paired(usable, seconds=seconds, synchronize=gpu.synchronize).items():
        rows.append(Row(cell, name, *_microseconds(timing), runs=len(timing.runs)))
    return rows
