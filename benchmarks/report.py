"""What a run on a GPU left behind, as CSV, and what is made of it: summary, Markdown, plots.

    python benchmarks/report.py benchmarks/results/h200.csv --markdown - --plot benchmarks/results/h200

`attention.py --device cuda` writes the CSV after every cell and the rest at the end; from the CSV of a run that was cut
short this makes the rest later. A row is one implementation on one cell; lines that begin with # say on what machine.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from flash_attn4.arguments import new_file_or_stdout, new_files

OURS = "ours"
LABELS = {
    "ours": "ours",
    "ours_sdpa": "ours as SDPA",
    "cudnn": "cuDNN",
    "fa2": "FA2",
    "fa3": "FA3",
    "fa4": "flash-attn-4",
    "sdpa": "SDPA",
}
ENOUGH = 0.95  # a cell at this share of the best other, or more, is level with it


@dataclass(frozen=True)
class Cell:
    """One problem. kind: "forward"; "growth", a forward beyond the usual lengths; "decode", few queries against many
    keys; "host", what the call costs the processor."""

    kind: str
    dtype: str
    dim: int
    dim_v: int
    causal: bool
    batch: int
    heads_q: int
    heads_kv: int
    len_q: int
    len_kv: int

    @property
    def dims(self) -> str:
        return str(self.dim) if self.dim == self.dim_v else f"{self.dim}/{self.dim_v}"

    @property
    def mask(self) -> str:
        return "causal" if self.causal else "full"

    @property
    def name(self) -> str:
        if self.kind in ("forward", "growth"):
            return f"{self.dims} {self.mask} {short(self.len_kv)}"
        return f"{self.kind} {short(self.len_q)} x {short(self.len_kv)}, batch {self.batch}"

    @property
    def flop(self) -> float:
        work = 2.0 * self.batch * self.heads_q * self.len_q * self.len_kv * (self.dim + self.dim_v)
        return work / 2 if self.causal else work

    @property
    def bytes(self) -> int:
        """Each input read once, the output written once; 16-bit types."""
        queries = self.heads_q * self.len_q * (self.dim + self.dim_v)
        keys = self.heads_kv * self.len_kv * (self.dim + self.dim_v)
        return 2 * self.batch * (queries + keys)


@dataclass
class Row:
    """One implementation on one cell. A time that is None was not measured, and note says why."""

    cell: Cell
    name: str
    us: float | None = None  # median, with the quartiles
    us_low: float | None = None
    us_high: float | None = None
    ratio: float | None = None  # how many times faster ours is than this, by neighbouring run: median and quartiles
    ratio_low: float | None = None
    ratio_high: float | None = None
    error: float | None = None
    allowed: float | None = None
    runs: int | None = None
    launches: int | None = None  # in a run
    timing: str = ""  # "graph": a run is one CUDA graph; "launches": capture failed, so host time may count
    sm_mhz: int | None = None
    watts: int | None = None
    celsius: int | None = None
    note: str = ""

    @property
    def tflops(self) -> float | None:
        return self.cell.flop / self.us / 1e6 if self.us else None

    @property
    def gbs(self) -> float | None:
        return self.cell.bytes / self.us / 1e3 if self.us else None


def short(length: int) -> str:
    """512, 1k, 128k."""
    return f"{length // 1024}k" if length >= 1024 and length % 1024 == 0 else str(length)


# ---- CSV

DERIVED = ("tflops", "gbs")  # written for whoever reads the file, worked out again when we do
INTEGERS = {f.name for f in fields(Cell) if f.type == "int"} | {"runs", "launches", "sm_mhz", "watts", "celsius"}
TEXTS = {"kind", "dtype", "name", "timing", "note"}
COLUMNS = [*(f.name for f in fields(Cell)), *(f.name for f in fields(Row) if f.name != "cell"), *DERIVED]


def write_csv(path: str | Path, about: dict[str, object], rows: list[Row]) -> None:
    """The whole file at once, by way of a second one: a run that is killed leaves a complete file."""
    path = Path(path)
    unfinished = path.with_name(path.name + ".part")
    with open(unfinished, "w", newline="") as file:
        for name, value in about.items():
            print(f"# {name}: {' '.join(str(value).split())}", file=file)
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for row in rows:
            writer.writerow([_written(row, name) for name in COLUMNS])
    os.replace(unfinished, path)


def _written(row: Row, name: str) -> object:
    value = getattr(row, name) if hasattr(row, name) else getattr(row.cell, name)
    if value is None:
        return ""
    if isinstance(value, bool):
        return int(value)
    return f"{value:.6g}" if isinstance(value, float) else value


def read_csv(path: str | Path) -> tuple[dict[str, str], list[Row]]:
    """What write_csv wrote. Raises ValueError for a file that is something else."""
    lines = Path(path).read_text().splitlines()
    about = dict(line[1:].strip().split(": ", 1) for line in lines if line.startswith("#") and ": " in line)
    table = csv.DictReader(line for line in lines if not line.startswith("#"))
    missing = sorted(set(COLUMNS) - set(table.fieldnames or ()))
    if missing:
        raise ValueError(f"{path} has no column {', '.join(missing)}: it is not the CSV of a run on a GPU")
    rows = []
    for line in table:
        values = {name: _read(name, line[name]) for name in COLUMNS if name not in DERIVED}
        cell = Cell(**{f.name: values.pop(f.name) for f in fields(Cell)})
        rows.append(Row(cell, **values))
    return about, rows


def _read(name: str, text: str) -> object:
    if name in TEXTS:
        return text
    if text == "":
        return None
    if name == "causal":
        return bool(int(text))
    return int(text) if name in INTEGERS else float(text)


# ---- what it says


@dataclass(frozen=True)
class Verdict:
    """A cell, our row and that of the fastest other; None where there is no time."""

    cell: Cell
    ours: Row | None
    best: Row | None

    @property
    def ratio(self) -> float | None:
        return self.best.ratio if self.ours and self.best else None


def verdicts(rows: list[Row], *kinds: str) -> Iterator[Verdict]:
    cells: dict[Cell, list[Row]] = {}
    for row in rows:
        if row.cell.kind in kinds:
            cells.setdefault(row.cell, []).append(row)
    for cell, group in cells.items():
        timed = [row for row in group if row.us]
        ours = next((row for row in timed if row.name == OURS), None)
        others = [row for row in timed if not row.name.startswith(OURS)]
        yield Verdict(cell, ours, min(others, key=lambda row: row.us, default=None))


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def summary(rows: list[Row]) -> list[str]:
    """Sentences on the forward cells, by all, head dim and length, and on those that ran nothing of ours."""
    lines = []
    found = list(verdicts(rows, "forward", "growth"))
    compared = [v for v in found if v.ratio is not None]
    for kind, title in (("forward", "ours over the best other"), ("growth", "longer sequences")):
        some = [v for v in compared if v.cell.kind == kind]
        if some:
            failed = sum(v.ours is None and v.cell.kind == kind for v in found)
            lines.append(f"{title}: {_figures(some, failed)}")
    usual = [v for v in compared if v.cell.kind == "forward"]
    for title, key in (
        ("by head dim", lambda c: c.dims),
        ("by length", lambda c: short(c.len_kv)),
        ("by mask", lambda c: c.mask),
    ):
        groups: dict[str, list[float]] = {}
        for v in usual:
            groups.setdefault(key(v.cell), []).append(v.ratio)
        if len(groups) > 1:
            means = (f"{name} {geometric_mean(ratios):.3f}" for name, ratios in groups.items())
            lines.append(f"geometric mean {title}: {', '.join(means)}")
    if failed := [v.cell.name for v in found if v.ours is None]:
        lines.append(f"ours was not timed: {', '.join(failed)}")
    launched: dict[str, list[str]] = {}
    for row in rows:
        if row.timing == "launches" and row.us:
            launched.setdefault(LABELS[row.name], []).append(row.cell.name)
    for label, names in launched.items():
        lines.append(f"{label} ran without a graph, so host time may count: {', '.join(names)}")
    if alone := [v.cell.name for v in found if v.ours and v.best is None]:
        lines.append(f"nothing to compare with: {', '.join(alone)}")
    return lines


def _figures(some: list[Verdict], failed: int) -> str:
    """A cell that failed is not at ENOUGH; a mean has no place for it."""
    ratios = [v.ratio for v in some]
    enough, cells = sum(ratio >= ENOUGH for ratio in ratios), len(ratios) + failed
    lowest = min(some, key=lambda v: v.ratio)
    return (
        f"geometric mean {geometric_mean(ratios):.3f}, {enough} of {cells} cells ({enough / cells:.0%}) at "
        f"{ENOUGH} or more, lowest {lowest.ratio:.3f} ({lowest.cell.name}, {LABELS[lowest.best.name]})"
    )


def cell_line(rows: list[Row]) -> str:
    """One cell for a log: every implementation's figure, ours over the best other, clock and power."""
    (verdict,) = verdicts(rows, rows[0].cell.kind)
    parts = []
    for row in rows:
        if row.us is None:
            figure = "-"
        elif row.cell.kind in ("decode", "host"):
            figure = f"{row.us:.1f} us"
        else:
            figure = f"{row.tflops:.0f}"
        parts.append(f"{row.name} {figure}")
    text = f"{verdict.cell.name:<24}" + "  ".join(parts)
    if verdict.ratio is not None:
        text += f"  | {verdict.best.ratio:.3f} ({verdict.best.ratio_low:.3f}-{verdict.best.ratio_high:.3f})"
        text += f" {verdict.best.name}"
    if verdict.ours and verdict.ours.sm_mhz:
        text += f"  {verdict.ours.sm_mhz} MHz {verdict.ours.watts} W"
    return "\n".join([text, *(f"    {row.name}: {row.note}" for row in rows if row.name == OURS and row.note)])


# ---- Markdown


FOLDER = "benchmarks/results"  # where the README finds the CSV and the plots


def markdown(about: dict[str, object], rows: list[Row], csv_path: str | None, plots: list[str]) -> str:
    """The results section of the README: a line on the machine, tables, summary, plots, and where it all comes from."""
    parts = [_machine_line(about, rows)]
    forward = list(verdicts(rows, "forward", "growth"))
    if forward:
        parts.append(
            "Forward: TFLOP/s by 2 b h len_q len_kv (d + d_v), half if causal / **ours over the best of the others**, "
            "and which that is."
        )
        parts.append(_forward_table(forward))
    if decode := list(verdicts(rows, "decode")):
        first = decode[0].cell
        parts.append(
            f"Few queries against many keys, {first.heads_q} heads of q and {first.heads_kv} of k and v, head dim "
            f"{first.dims}: microseconds (GB/s)."
        )
        parts.append(_decode_table(rows, decode))
    if host := [row for row in rows if row.cell.kind == "host" and row.us]:
        costs = ", ".join(f"{LABELS[row.name]} {row.us:.1f}" for row in host)
        parts.append(f"Host time of a call, batch {host[0].cell.batch}, {host[0].cell.len_q} tokens, us: {costs}.")
    if lines := summary(rows):
        parts.append("\n".join(f"- {line}" for line in lines))
    if failures := [f"- {r.cell.name}: {r.note}" for r in rows if r.name == OURS and r.us is None]:
        parts.append("Ours, not timed:\n\n" + "\n".join(failures))
    for path in plots:
        name = Path(path).name
        parts.append(f"![TFLOP/s over sequence length, {Path(path).stem}]({FOLDER}/{name})")
    if csv_path:
        parts.append(
            f"From `{FOLDER}/{Path(csv_path).name}`, which also has quartiles, errors, launches and clocks; made by "
            "`python benchmarks/attention.py --device cuda`."
        )
    return "\n\n".join(parts) + "\n"


def _machine_line(about: dict[str, object], rows: list[Row]) -> str:
    def between(values: list[int]) -> str:
        return str(values[0]) if values[0] == values[-1] else f"{values[0]}-{values[-1]}"

    text = f"{about.get('device', 'GPU')}, {about.get('date', 'no date')}: driver {about.get('driver', 'unknown')}, "
    text += f"PyTorch {about.get('torch', 'unknown')}, cuDNN {about.get('cudnn', 'unknown')}"
    for name in ("fa3", "fa4"):
        if any(row.name == name and row.us for row in rows):
            text += f", {LABELS[name]} {about.get(name, '')}".rstrip()
    text += f", flash_attn4 {about.get('flash_attn4', 'unknown')}"
    clocks, watts = (sorted(getattr(r, n) for r in rows if getattr(r, n)) for n in ("sm_mhz", "watts"))
    if clocks and watts:
        text += f"; SM clock {between(clocks)} MHz, {between(watts)} W"
    if "matmul_tflops" in about:
        text += f"; an 8192³ matrix product of the same dtype, TFLOP/s: {about['matmul_tflops']}"
    return f"{text}. {about.get('method', '')}".rstrip()


def _table(header: list[str], lines: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, ["---"] * len(header), *lines))


def _forward_table(found: list[Verdict]) -> str:
    lengths = sorted({v.cell.len_kv for v in found})
    lines: dict[tuple[str, str], dict[int, str]] = {}
    for v in found:
        lines.setdefault((v.cell.dims, v.cell.mask), {})[v.cell.len_kv] = _entry(v)
    header = ["head dim", "mask", *map(short, lengths)]
    return _table(header, [[*key, *(entries.get(n, "") for n in lengths)] for key, entries in lines.items()])


def _entry(v: Verdict) -> str:
    if v.ours is None:
        return "not timed"
    if v.best is None:
        return f"{v.ours.tflops:.0f}"
    return f"{v.ours.tflops:.0f} / **{v.ratio:.2f}** {LABELS[v.best.name]}"


def _decode_table(rows: list[Row], found: list[Verdict]) -> str:
    timed = {(row.cell, row.name): row for row in rows if row.us}
    names = [name for name in LABELS if any(n == name and c.kind == "decode" for c, n in timed)]
    lines = []
    for v in found:
        line = [str(v.cell.len_q), short(v.cell.len_kv), str(v.cell.batch)]
        for name in names:
            row = timed.get((v.cell, name))
            line.append(f"{row.us:.1f} ({row.gbs:.0f})" if row else "")
        lines.append([*line, "" if v.ratio is None else f"**{v.ratio:.2f}**"])
    return _table(["queries", "keys", "batch", *(LABELS[n] for n in names), "ratio to the best"], lines)


# ---- plots

COLOURS = {"ours": "#c0392b", "cudnn": "#2e7d32", "fa2": "#9e9e9e", "fa3": "#1565c0", "fa4": "#f9a825"}


def plot(prefix: str, about: dict[str, object], rows: list[Row]) -> list[str]:
    """TFLOP/s over sequence length, a panel for each head dim: PREFIX-full.svg and PREFIX-causal.svg, as far as there
    are such cells. Returns the paths. Raises ImportError without matplotlib."""
    import matplotlib
    from matplotlib.figure import Figure  # without pyplot: no display is looked for

    shown = [row for row in rows if row.us and row.cell.kind in ("forward", "growth")]
    paths = []
    # Text stays text, and nothing depends on the time: small files, and the same data give the same file.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "flash_attn4", "font.size": 10}):
        for mask in ("full", "causal"):
            some = [row for row in shown if row.cell.mask == mask]
            if not some:
                continue
            figure = _panels(Figure, some)
            figure.suptitle(f"{about.get('device', 'GPU')}, forward, {some[0].cell.dtype}, {mask}: TFLOP/s")
            paths.append(f"{prefix}-{mask}.svg")
            figure.savefig(paths[-1], metadata={"Date": None})
    return paths


def _panels(figure_class, rows: list[Row]):
    dims = sorted({(row.cell.dim, row.cell.dim_v, row.cell.dims) for row in rows})
    across = min(3, len(dims) + 1)
    down = -(-(len(dims) + 1) // across)  # one place is the legend's
    figure = figure_class(figsize=(3.4 * across, 2.9 * down), layout="constrained")
    axes = figure.subplots(down, across, squeeze=False).flatten()
    top = 1.08 * max(row.tflops for row in rows)
    handles = {}
    for ax, (_, _, title) in zip(axes, dims, strict=False):
        for name in (n for n in LABELS if any(r.name == n and r.cell.dims == title for r in rows)):
            line = sorted((r for r in rows if r.name == name and r.cell.dims == title), key=lambda r: r.cell.len_kv)
            style = {"color": COLOURS[name], "marker": "o", "markersize": 3, "linewidth": 2.2 if name == OURS else 1.2}
            lengths = [r.cell.len_kv for r in line]
            (handles[name],) = ax.plot(lengths, [r.tflops for r in line], zorder=3 if name == OURS else 2, **style)
            low, high = ([r.tflops * r.us / us for r, us in spread] for spread in _quartiles(line))
            ax.fill_between(lengths, low, high, color=COLOURS[name], alpha=0.2, linewidth=0)
        ticks = sorted({r.cell.len_kv for r in rows if r.cell.dims == title})
        ax.set_xscale("log", base=2)
        ax.set_xticks(ticks, [short(n) for n in ticks], fontsize=8)
        ax.minorticks_off()
        ax.set_ylim(0, top)
        ax.set_title(f"head dim {title}", fontsize=10)
        ax.grid(alpha=0.3)
    for ax in axes[len(dims) :]:
        ax.axis("off")
    names = [name for name in LABELS if name in handles]
    axes[len(dims)].legend([handles[n] for n in names], [LABELS[n] for n in names], loc="center", frameon=False)
    return figure


def _quartiles(line: list[Row]) -> tuple[list[tuple[Row, float]], ...]:
    return [(r, r.us_high or r.us) for r in line], [(r, r.us_low or r.us) for r in line]


# ---- command line


def write(
    about: dict[str, object], rows: list[Row], *, csv_path: str | None, to_markdown: str | None, to_plot: str | None
) -> None:
    """to_markdown: a file, or - for standard output; to_plot: what the files' names begin with."""
    plots, no_plot = [], ""
    if to_plot:
        try:
            plots = plot(to_plot, about, rows)
        except ImportError as error:
            no_plot = f"no plot: {error} (pip install matplotlib)"
    if to_markdown:
        text = markdown(about, rows, csv_path, plots)
        if to_markdown == "-":
            print(text, end="")
        else:
            Path(to_markdown).write_text(text)
    if no_plot:
        raise SystemExit(no_plot)


def add_outputs(parser) -> None:
    parser.add_argument(
        "--markdown",
        type=new_file_or_stdout,
        metavar="FILE",
        help="the tables as the README has them; - for standard output",
    )
    parser.add_argument(
        "--plot",
        type=new_files,
        metavar="PREFIX",
        help="PREFIX-full.svg and PREFIX-causal.svg; needs matplotlib",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", help="what attention.py --device cuda --csv wrote")
    add_outputs(parser)
    options = parser.parse_args()
    try:
        about, rows = read_csv(options.csv)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if not options.markdown and not options.plot:
        print("\n".join(summary(rows)))
    write(about, rows, csv_path=options.csv, to_markdown=options.markdown, to_plot=options.plot)


if __name__ == "__main__":
    main()
