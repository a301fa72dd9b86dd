"""benchmarks/attention.py: its table on the CPU, its measurement on a device that the CPU plays, what is made of it."""

import json
import math
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))  # last: it has a ptxsim.py, and so has this folder

import attention  # noqa: E402
import gpu  # noqa: E402
import report  # noqa: E402
from report import Cell, Row  # noqa: E402

STORED = Path(__file__).parent / "data" / "gpu_results.csv"
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.csv"))


def forward(dim=128, dim_v=None, causal=False, length=1024, kind="forward"):
    return Cell(kind, "bfloat16", dim, dim_v or dim, causal, 2, 4, 4, length, length)


class PlayedGpu:
    """A CPU in the place of gpu.Gpu."""

    device = torch.device("cpu")
    l2_bytes = 1 << 16
    lost = False

    def seconds(self, run):
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    def capture(self, launches):
        last = []

        def run():
            for launch in launches[:3]:
                last[:] = [launch()]
            last[:] = [launches[-1]()]

        return gpu.Replay(run, lambda: last[0], "launches")

    def state_during(self, run):
        run()
        return {"sm_mhz": 1000, "watts": 2, "celsius": 3}

    def synchronize(self):
        pass

    def check(self):
        if self.lost:
            raise gpu.DeviceLost("an illegal memory access")


def measured(chosen, attentions, played=None):
    return list(gpu.run(chosen, attentions, played or PlayedGpu(), seconds=0, rounds=2))


def small_cells():
    return [
        Cell("forward", "bfloat16", 64, 64, False, 2, 4, 4, 33, 33),
        Cell("forward", "bfloat16", 64, 32, True, 1, 2, 2, 130, 130),
        Cell("decode", "bfloat16", 128, 128, False, 1, 4, 2, 3, 200),
    ]


# ---- the measurement


def test_every_implementation_takes_part_or_says_why_not():
    attentions, about = gpu.implementations(["cudnn", "fa2", "fa3"])
    assert list(attentions)[:3] == ["ours", "cudnn", "fa2"]
    if "fa3" not in attentions:
        assert about["fa3"].startswith("not there: ")
    for cell, rows in zip(small_cells(), measured(small_cells(), attentions), strict=True):
        by_name = {row.name: row for row in rows}
        assert {row.cell for row in rows} == {cell}
        assert by_name["ours"].error <= by_name["ours"].allowed
        assert by_name["ours"].us_low <= by_name["ours"].us <= by_name["ours"].us_high
        assert (by_name["ours"].runs, by_name["ours"].sm_mhz) == (2, 1000)
        assert by_name["cudnn"].us is None
        assert by_name["cudnn"].note
        if cell.dim == cell.dim_v:
            assert min(by_name["fa2"].ratio, by_name["fa2"].us) > 0
        else:
            assert "to have the same last dimension" in by_name["fa2"].note, "PyTorch warns of the reason"


def test_the_inputs_outgrow_the_cache_three_times():
    for cell in small_cells():
        sets = gpu.input_sets(cell, PlayedGpu())
        assert len(sets) * cell.bytes >= 3 * PlayedGpu.l2_bytes
        for q, k, v in sets:
            assert q.shape == (cell.batch, cell.heads_q, cell.len_q, cell.dim)
            assert k.shape == (cell.batch, cell.heads_kv, cell.len_kv, cell.dim)
            assert v.shape == (cell.batch, cell.heads_kv, cell.len_kv, cell.dim_v)
            assert q.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("cell", small_cells(), ids=lambda cell: cell.name)
def test_a_wrong_answer_is_not_timed(cell):
    def one_row_off(cell, q, k, v):
        out = gpu.ours(cell, q, k, v)
        out[-1, -1, -1, -1] += 0.1
        return out

    def unwritten(cell, q, k, v):
        return gpu.ours(cell, q, k, v).index_fill_(2, torch.tensor([1]), math.nan)

    def transposed(cell, q, k, v):
        return gpu.ours(cell, q, k, v).transpose(1, 2)

    for wrong in (one_row_off, unwritten):
        (rows,) = measured([cell], {"ours": wrong, "fa2": gpu.ours})
        assert rows[0].us is None
        assert rows[0].note.startswith("wrong: error")
        assert rows[1].us
        assert rows[1].ratio is None
    (rows,) = measured([cell], {"ours": transposed})
    assert "shape" in rows[0].note


def test_an_answer_that_goes_wrong_while_it_is_timed_does_not_count():
    calls = []

    def fails_later(cell, q, k, v):
        calls.append(1)
        return gpu.ours(cell, q, k, v) * (1 if len(calls) < 6 else 2)

    (rows,) = measured(small_cells()[:1], {"ours": fails_later})
    assert rows[0].us is None
    assert rows[0].note.startswith("wrong")


def test_another_may_round_worse_but_not_be_wrong():
    cell = small_cells()[0]
    row = Row(cell, "fa2", error=3.0, allowed=1.0)
    assert gpu.verdict(row) == ""
    row.error = math.nan
    assert gpu.verdict(row).startswith("wrong")
    assert gpu.verdict(Row(cell, "ours", error=1.1, allowed=1.0)).startswith("wrong")


def test_the_check_of_a_long_sequence_looks_at_some_rows(monkeypatch):
    monkeypatch.setattr(gpu, "SCORES", 4 * 33 * 5)
    cell = small_cells()[0]
    tensors = gpu.input_sets(cell, PlayedGpu())[0]
    reference = gpu.Reference(cell, *tensors)
    assert 5 <= len(reference.rows) <= 7
    assert {0, 32} <= set(reference.rows.tolist())
    assert reference.error(gpu.ours(cell, *tensors)) <= reference.allowed


def test_one_failure_loses_one_row():
    def broken(cell, q, k, v):
        if cell.causal:
            raise RuntimeError("no kernel\nfor this")
        return gpu.ours(cell, q, k, v)

    cells = small_cells()
    results = measured(cells, {"ours": gpu.ours, "fa3": broken})
    assert [[row.us is not None for row in rows] for rows in results] == [[True] * 2, [True, False], [True] * 2]
    assert results[1][1].note == "RuntimeError: no kernel for this"


def test_one_cell_that_fails_as_a_whole_has_the_reason():
    cells = [Cell("forward", "bfloat17", 64, 64, False, 1, 1, 1, 8, 8), small_cells()[0]]
    failed, right = measured(cells, {"ours": gpu.ours})
    assert "bfloat17" in failed[0].note
    assert right[0].us


def test_a_fault_that_shows_while_all_are_timed_is_nobodys_alone():
    class Faulty(PlayedGpu):
        def state_during(self, run):
            raise RuntimeError("a fault")

    (rows,) = measured(small_cells()[:1], {"ours": gpu.ours, "fa3": gpu.ours, "fa2": lambda *_: None}, Faulty())
    assert [row.note for row in rows[:2]] == ["RuntimeError: a fault"] * 2
    assert rows[2].note.startswith("AttributeError"), "it had a reason of its own"
    assert not any(row.us for row in rows)


def test_a_lost_device_ends_the_run_and_keeps_what_there_is():
    played, kept = PlayedGpu(), []

    def faults(cell, q, k, v):
        played.lost = cell.causal
        if cell.causal:
            raise RuntimeError("an illegal memory access")
        return gpu.ours(cell, q, k, v)

    run = gpu.run(small_cells(), {"ours": faults, "fa2": gpu.ours}, played, seconds=0, rounds=1)
    with pytest.raises(gpu.DeviceLost):
        kept.extend(run)
    assert [[row.name for row in rows] for rows in kept] == [["ours", "fa2"], ["ours"]]
    assert kept[1][0].note == "RuntimeError: an illegal memory access"


def test_the_cost_of_a_call():
    attentions, _ = gpu.implementations(["fa2"])
    rows = gpu.host_rows(attentions, "bfloat16", PlayedGpu(), 0.0)
    assert [row.name for row in rows] == ["ours", "ours_sdpa", "sdpa"]
    assert all(row.us > 0 for row in rows)


def test_the_default_table_has_the_usual_cells():
    kinds = ["forward", "growth", "decode"]
    cells = gpu.cells(kinds, gpu.DIMS, ["full", "causal"], [*gpu.LENGTHS, *gpu.GROWTH], "bfloat16")
    assert len(set(cells)) == len(cells) == 40 + 6 + len(gpu.DECODE)
    by_name = {cell.name: cell for cell in cells}
    cell = by_name["192/128 causal 512"]
    assert (cell.batch, cell.heads_q, cell.flop) == (32, 16, 32 * 16 * 512 * 512 * (192 + 128))
    assert by_name["128 full 128k"].flop == 4 * 16 * 131072**2 * 128
    assert by_name["64 full 16k"].heads_q == 32
    assert {cell.len_q for cell in cells if cell.kind == "decode"} == {1, 4, 16}
    one = by_name["decode 1 x 8k, batch 16"]
    assert one.bytes == 2 * 16 * (2 * 8 * 8192 * 128 + 2 * 32 * 128)
    assert gpu.cells(["forward"], [(64, 64)], ["full"], [2048], "float16") == [
        Cell("forward", "float16", 64, 64, False, 8, 32, 32, 2048, 2048)
    ]


# ---- what is made of it


def timed(cell, name, us, ratio=None, **other):
    spread = {"ratio_low": ratio - 0.01, "ratio_high": ratio + 0.01} if ratio else {}
    return Row(cell, name, us, us * 0.99, us * 1.01, ratio, **spread, **other)


def results():
    a, b, c = forward(), forward(causal=True, length=4096), forward(192, 128, length=512)
    grown = forward(length=131072, kind="growth")
    few = Cell("decode", "bfloat16", 128, 128, False, 1, 32, 8, 1, 8192)
    return [
        timed(a, "ours", 10.0, sm_mhz=1700, watts=600, celsius=60, error=1e-3, allowed=2e-3, runs=9, launches=100),
        timed(a, "cudnn", 11.0, 1.1),
        timed(a, "fa2", 20.0, 2.0),
        timed(b, "ours", 20.0, timing="launches", sm_mhz=1500, watts=700),
        timed(b, "cudnn", 25.0, 1.25),
        timed(b, "fa3", 18.0, 0.9),
        Row(c, "ours", note="wrong: error 1, 0.1 allowed"),
        timed(c, "cudnn", 5.0),
        timed(grown, "ours", 9000.0),
        timed(few, "ours", 30.0),
        timed(few, "cudnn", 20.0, 0.667),
        Row(few, "fa3", note="no, it said: \"not this\", 'nor that'"),
    ]


ABOUT = {"date": "2026-11-30", "device": "NVIDIA H200", "driver": "580.1", "torch": "2.11.0", "cudnn": "9.19.0"}


def test_the_csv_comes_back(tmp_path):
    path = tmp_path / "a.csv"
    report.write_csv(path, {**ABOUT, "fa3": "not there:\nno module"}, results())
    about, rows = report.read_csv(path)
    assert about == {**ABOUT, "fa3": "not there: no module"}
    assert rows == results()
    assert [p.name for p in tmp_path.iterdir()] == ["a.csv"]


def test_another_csv_is_refused(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("cell,ours_ms\nforward,1\n")
    with pytest.raises(ValueError, match=r"a\.csv has no column allowed, batch"):
        report.read_csv(path)


def test_the_summary_is_of_the_best_other():
    lines = report.summary(results())
    mean = math.sqrt(1.1 * 0.9)
    assert lines[0] == (
        f"ours over the best other: geometric mean {mean:.3f}, 1 of 3 cells (33%) at 0.95 or more, "
        "lowest 0.900 (128 causal 4k, FA3)"
    )
    assert "geometric mean by length: 1k 1.100, 4k 0.900" in lines
    assert "geometric mean by mask: full 1.100, causal 0.900" in lines
    assert "ours was not timed: 192/128 full 512" in lines
    assert "nothing to compare with: 128 full 128k" in lines
    assert "ours ran without a graph, so host time may count: 128 causal 4k" in lines


def test_a_line_for_the_log():
    rows = results()
    assert report.cell_line(rows[:3]) == (
        f"{'128 full 1k':<24}ours {rows[0].tflops:.0f}  cudnn {rows[1].tflops:.0f}  fa2 {rows[2].tflops:.0f}"
        "  | 1.100 (1.090-1.110) cudnn  1700 MHz 600 W"
    )
    assert report.cell_line(rows[6:8]) == (
        f"{'192/128 full 512':<24}ours -  cudnn {rows[7].tflops:.0f}\n    ours: wrong: error 1, 0.1 allowed"
    )


def test_the_markdown():
    text = report.markdown(ABOUT, results(), "x/h200.csv", ["y/h200-full.svg"])
    first = text.splitlines()[0]
    assert first.startswith("NVIDIA H200, 2026-11-30: driver 580.1, PyTorch 2.11.0, cuDNN 9.19.0, FA3,")
    assert "SM clock 1500-1700 MHz, 600-700 W" in first
    a, b = (next(row for row in results() if row.cell.mask == mask) for mask in ("full", "causal"))
    grown = forward(length=131072).flop / 9000 / 1e6
    assert "| head dim | mask | 512 | 1k | 4k | 128k |" in text
    assert f"| 128 | full |  | {a.tflops:.0f} / **1.10** cuDNN |  | {grown:.0f} |" in text
    assert f"| 128 | causal |  |  | {b.tflops:.0f} / **0.90** FA3 |  |" in text
    assert "| 192/128 | full | not timed |  |  |  |" in text
    assert "| queries | keys | batch | ours | cuDNN | ratio to the best |" in text
    assert "| 1 | 8k | 1 | 30.0 (1119) | 20.0 (1679) | **0.67** |" in text
    assert "- 192/128 full 512: wrong: error 1, 0.1 allowed" in text
    assert "](benchmarks/results/h200-full.svg)" in text
    assert "From `benchmarks/results/h200.csv`" in text
    for table in re.findall(r"(?:^\|.*\n)+", text, flags=re.M):
        assert len({line.count("|") for line in table.splitlines()}) == 1


def test_the_plots(tmp_path):
    pytest.importorskip("matplotlib")
    about, rows = report.read_csv(STORED)
    paths = report.plot(str(tmp_path / "x"), about, rows)
    assert paths == [str(tmp_path / "x-full.svg"), str(tmp_path / "x-causal.svg")]
    for path in paths:
        text = Path(path).read_text()
        for words in ("An example", "head dim 128", "head dim 192/128", "16k", "cuDNN", "ours"):
            assert words in text
        assert len(text) < 100_000
    again = report.plot(str(tmp_path / "y"), about, rows)
    assert Path(again[0]).read_text() == Path(paths[0]).read_text()


def test_report_from_a_stored_run():
    def run(*arguments):
        return subprocess.run(
            [sys.executable, str(ROOT / "benchmarks" / "report.py"), *arguments], capture_output=True, text=True
        )

    assert run(str(STORED)).stdout.startswith("ours over the best other: geometric mean ")
    assert run(str(STORED), "--markdown", "-").stdout == report.markdown(*report.read_csv(STORED), str(STORED), [])
    refused = run(str(ROOT / "pyproject.toml"))
    assert refused.returncode == 2
    assert "pyproject.toml has no column" in refused.stderr


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_the_readme_has_the_stored_results(path):
    readme = (ROOT / "README.md").read_text()
    plots = [str(plot) for mask in ("full", "causal") if (plot := path.with_name(f"{path.stem}-{mask}.svg")).exists()]
    assert report.markdown(*report.read_csv(path), str(path), plots) in readme


# ---- the script


def test_the_table_on_the_cpu(tmp_path, capsys):
    files = ["--csv", str(tmp_path / "a.csv"), "--json", str(tmp_path / "a.json")]
    attention.main(["--dtype", "float32", "--shape", "1x2x33x16", "--seconds", "0.01", *files])
    out = capsys.readouterr().out
    names = [f"{way} float32 1x2x33x16 {mask}" for way in ("forward", "backward") for mask in ("full", "causal")]
    assert re.findall(r"^\| (\S+ float32 \S+ \S+) \|", out, flags=re.M) == names
    assert "us  sdpa, enabled, grad mode" in out
    assert [row["cell"] for row in json.loads((tmp_path / "a.json").read_text())["results"]] == names
    assert (tmp_path / "a.csv").read_text().startswith("cell,ours_ms,sdpa_ms,")


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--plot x", "--plot is not for --device cpu"),
        ("--device cuda --shape 1x1x1x1", "--shape is not for --device cuda"),
        ("--device cuda --dim 100", "argument --dim: it must be one of 128, 64, 256, 96, 192/128, and it is '100'"),
        ("--device cuda --csv nowhere/a.csv", "nowhere/a.csv: there is no folder nowhere"),
        ("--rounds 0 --device cuda", "--rounds: it must be a whole number from 1 to 2147483647, and it is '0'"),
        ("--threads -1", "--threads: it must be a whole number from 1 to 2147483647, and it is '-1'"),
        ("--seconds nan", "--seconds: it must be a number from 0 on, and it is 'nan'"),
        (
            "--shape 1x2x3",
            "argument --shape: it must be batch x heads x length x dim, as 1x8x1024x64, and it is '1x2x3'",
        ),
        ("--shape 1x0x5x5", "--shape: it must be a whole number from 1 to 2147483647, and it is '0'"),
        ("--json .", "argument --json: .: it is a folder"),
        ("--csv -", "argument --csv: -: it is no file"),
        ("--device cuda --plot nowhere/x", "argument --plot: nowhere/x: there is no folder nowhere"),
        ("--device cuda --dtype float32", "--dtype is float32, and on a GPU it must be bfloat16 or float16"),
    ],
)
def test_what_does_not_fit_is_named(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(SystemExit):
        attention.parse(arguments.split())
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--csv /proc/a.csv", "/proc/a.csv: it cannot be written"),
        ("--shape 1x1x8x300 --dtype float32", "forward float32 1x1x8x300 full: .*head dim.*256"),
    ],
)
def test_what_cannot_be_measured_ends_the_run_at_once(arguments, message):
    with pytest.raises(SystemExit, match=message):
        attention.main(["--seconds", "0.01", *arguments.split()])


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        attention.parse(["--device", "cuda"])
    assert f"--device cuda: PyTorch {torch.__version__} finds no CUDA device" in capsys.readouterr().err


class WholePlayedGpu(PlayedGpu):
    def about(self):
        return dict(ABOUT)

    def matmul_tflops(self, dtype):
        return 700.4


def test_the_whole_run_on_a_played_gpu(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "Gpu", WholePlayedGpu)
    monkeypatch.setattr(gpu, "cells", lambda *_: small_cells())
    paths = {name: str(tmp_path / name) for name in ("csv", "markdown")}
    files = [word for name, path in paths.items() for word in (f"--{name}", path)]
    attention.main(["--device", "cuda", "--rounds", "1", "--seconds", "0", "--other", "cudnn", "fa2", *files])
    out = capsys.readouterr().out
    assert "64 full 33" in out
    assert "matmul_tflops 700" in out
    about, rows = report.read_csv(paths["csv"])
    assert about["matmul_tflops"] == "700 before, 700 after"
    assert len(rows) == 3 * len(small_cells()) + 3
    assert Path(paths["markdown"]).read_text() == report.markdown(about, rows, paths["csv"], [])
    assert out.rstrip().endswith(report.summary(rows)[-1])


def test_a_lost_device_is_an_error_after_the_files_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "cells", lambda *_: small_cells())

    class Lost(WholePlayedGpu):
        def state_during(self, run):
            raise gpu.DeviceLost("gone")

    monkeypatch.setattr(gpu, "Gpu", Lost)
    with pytest.raises(SystemExit, match="the run ended before its time: gone"):
        attention.main(["--device", "cuda", "--rounds", "1", "--csv", str(tmp_path / "a"), "--other", "fa2"])
    _, rows = report.read_csv(tmp_path / "a")
    assert [row.name for row in rows] == ["ours", "fa2"]
    assert rows[0].us
