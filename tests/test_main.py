"""`python -m flash_attn4`, and the timing behind it."""

import importlib.util
import json
import subprocess
import sys
import time

import pytest

import flash_attn4
from flash_attn4.__main__ import MODEL_PACKAGE, SHAPES, main, model_missing
from flash_attn4.measure import Timing, paired, ratio


def run(*arguments):
    done = subprocess.run(
        [sys.executable, "-m", "flash_attn4", "--seconds", "0.01", *arguments], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done


def test_the_main_job_as_json():
    done = run("--json")
    document = json.loads(done.stdout)
    assert done.stderr == "", "something odd is printed"
    assert document["installed"]["flash_attn4"] == flash_attn4.__version__
    assert document["installed"]["cpu_isa"] == flash_attn4.cpu_isa()
    assert set(document["installed"]["backends"]) == {"cpu", "sm_90", "sm_100"}
    assert len(document["shapes"]) == len(SHAPES)
    for row in document["shapes"]:
        assert 0 < row["error"] <= 2 * row["sdpa_error"] + 1e-6
        assert min(row["ours_ms"], row["sdpa_ms"], row["ratio"]) > 0
    model = document["model"]
    if model_missing():
        assert model == {"skipped": model_missing()}
    else:
        assert model["kernel_calls"] == 6, "one for each layer of MiniLM"
        assert model["max_difference"] < 1e-5
        assert min(model["ours_ms"], model["sdpa_ms"], model["ratio"]) > 0
        pairs = {pair["sentence"]: pair["nearest"] for pair in model["nearest"]}
        sentences = list(pairs)
        for a, b in zip(sentences[::2], sentences[1::2], strict=True):  # neighbours say the same
            assert pairs[a] == b


def test_the_main_job_for_people_without_the_model():
    out = run("--no-model").stdout
    for words in (
        f"flash_attn4 {flash_attn4.__version__}",
        "in use",
        "left out by --no-model",
        "SDPA ms",
        "8x12x128x64",
    ):
        assert words in out
    assert "\x1b" not in out


@pytest.mark.parametrize("seconds", ["nan", "inf", "-1", "x"])
def test_seconds_that_are_none(seconds, capsys):
    with pytest.raises(SystemExit) as raised:
        main(["--seconds", seconds])
    assert raised.value.code == 2
    assert f"--seconds: it must be a number from 0 on, and it is {seconds!r}" in capsys.readouterr().err


@pytest.mark.parametrize("module", ["transformers", MODEL_PACKAGE])
def test_it_says_by_itself_what_the_model_needs(module, monkeypatch):
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == module else there(name) or True)
    assert module.replace("_", "-") in model_missing().replace("_", "-")


def test_paired_runs_in_turn_and_gives_ratios_of_neighbours():
    order = []
    times = paired(
        {"slow": lambda: (order.append("slow"), time.sleep(4e-3)), "fast": lambda: order.append("fast")},
        seconds=0,
        min_runs=4,
        min_run_seconds=0,
    )
    assert order == ["slow"] * 2 + ["fast"] * 2 + ["slow", "fast", "fast", "slow"] * 2
    assert len(times["slow"].runs) == 4
    assert ratio(times["slow"], times["fast"]).median > 2
    assert Timing((1.0, 2.0, 3.0, 4.0, 9.0)).median == 3
    assert Timing((1.0, 2.0, 3.0, 4.0, 9.0)).spread == (2, 4)
    assert Timing((7.0,)).spread == (7, 7)
