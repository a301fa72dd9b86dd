"""Planted bugs: small kernels, each wrong in one way that real code gets wrong, and right by one change.

The wrong one is reported by kind, under every schedule or (when it takes luck) under some; its fixed twin never is,
and computes what it should.
"""

import numpy
import ptxsim
import pytest
from ptxsim_kernels import assemble
from ptxsim_kernels.bugs import BUGS
from ptxsim_kernels.ptx import MAP, POINTER, SMEM, kernel

SCHEDULES = [("early", 0), ("late", 0), *(("random", seed) for seed in range(1, 9))]

# What one mistake may bring about besides.
CONSEQUENCES = {"race", "poison", "exit", "deadlock", "mbarrier"}


def text_and_arguments(case, fixed):
    data = numpy.arange(16384, dtype=numpy.uint32)
    out = ptxsim.empty(case.grid * case.threads, numpy.uint32)
    maps = case.maps(data)
    params = [POINTER, POINTER] + [MAP] * len(maps)
    text = kernel(case.body(fixed), params, case.target, case.threads, case.minnctapersm or fixed)
    return text, [data, out, *maps]


def run(case, fixed, schedule, seed, model="ptx"):
    """The report, and whether out is what it should be."""
    text, args = text_and_arguments(case, fixed)
    report = ptxsim.Module(text).launch(
        "k",
        grid=case.grid,
        block=case.threads,
        cluster=case.cluster,
        smem=SMEM,
        args=args,
        schedule=schedule,
        seed=seed,
        model=model,
        check=False,
        **case.options,
    )
    expected = numpy.array([case.expected(t) for t in range(args[1].size)], numpy.uint32)
    return report, numpy.array_equal(args[1], expected)


@pytest.mark.parametrize("name", BUGS)
def test_the_bug_is_reported_by_kind(name):
    case = BUGS[name]
    silent = []
    for schedule, seed in SCHEDULES:
        report, right = run(case, False, schedule, seed)
        kinds = report.kinds or (set() if right else {"wrong"})
        assert kinds <= case.kinds | CONSEQUENCES, f"{schedule} {seed}: {report}"
        if not kinds & case.kinds:
            silent.append((schedule, seed))
    assert len(silent) < len(SCHEDULES), "no schedule reports it"
    assert not silent or not case.every, f"not reported under {silent}"


@pytest.mark.parametrize("name", BUGS)
def test_the_fixed_twin_is_clean_and_right(name):
    case = BUGS[name]
    for schedule, seed in SCHEDULES:
        report, right = run(case, True, schedule, seed)
        assert report.finished, f"{schedule} {seed}: {report}"
        assert not report.findings, f"{schedule} {seed}: {report}"
        assert right, f"{schedule} {seed}"


@pytest.mark.parametrize("name", [name for name, case in BUGS.items() if case.practice])
def test_practice_counts_what_published_code_does(name):
    report, _ = run(BUGS[name], False, "random", 1, model="practice")
    assert report.finished, report
    assert not report.findings, report
    assert report.practice[BUGS[name].practice] > 0


@pytest.mark.skipif(assemble.version() is None, reason="needs ptxas: these programs are what a compiler takes")
@pytest.mark.parametrize("name", BUGS)
def test_ptxas_takes_both(name):
    for fixed in (False, True):
        text, _ = text_and_arguments(BUGS[name], fixed)
        assert assemble.complaint(text, BUGS[name].target) == ""


def test_there_are_enough():
    assert len(BUGS) >= 40
