"""The simulator and an H200 give the same bits: whole outputs of the Hopper forward, of inputs that make them exact.
What the chip answered is stored; tests/exact.py makes it again. On a GPU its answer is compared, too."""

import json
from pathlib import Path

import exact
import pytest
import torch
from conftest import Reference, cuda_missing, max_error

STORED = Path(__file__).parent / "data" / "exact_h200.json"
NAMES = [f"{dtype}_{name}" for name in exact.CASES for dtype in exact.DTYPES]


def inputs(name):
    dtype, case = name.split("_", 1)
    return exact.inputs(case, dtype)


def check(name, q, k, v, hi, out, lse):
    """Equal to the formula, and to what the chip said."""
    reference = Reference(q, k, v, hi=hi, scale=exact.SCALE)
    weights = torch.exp2(torch.log2(reference.lse.exp()).round())
    assert max_error(weights, reference.lse.exp()) < 1e-9, "the weights of a row do not sum to a power of two"
    expected = exact_output(q, k, v, hi)
    assert torch.equal(out.cpu(), expected.to(out.dtype))
    assert max_error(lse.cpu(), reference.lse) < 2e-6
    answers = json.loads(STORED.read_text())["answers"]
    assert [exact.digest(out), exact.digest(lse)] == answers[name]


def exact_output(q, k, v, hi):
    """By whole numbers and powers of two in float64: nothing is rounded."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    weights = torch.exp2(q.double() @ k.transpose(2, 3))
    if hi is not None:
        weights = weights.tril(hi)
    return (weights @ v) / weights.sum(-1, keepdim=True)


@pytest.mark.parametrize("name", NAMES)
def test_the_simulator_gives_the_bits_of_an_h200(name):
    simulator = pytest.importorskip("test_blackwell", reason="it needs pybind11: pip install -e '.[test]'")
    q, k, v, hi = inputs(name)
    tensors = simulator.plan.params(q, k, v, q.new_empty(*q.shape[:3], v.shape[3]), torch.empty(q.shape[:3]), hi=hi)
    kernel = simulator.plan.fwd_plan(tensors, 90)["kernel"]
    assert kernel == f"fa4_sm90_fwd_{name.rsplit('_', 1)[0]}"
    out, lse, report = simulator.plan.forward(
        simulator.module(kernel), q, k, v, hi=hi, scale=exact.SCALE, arch=90, schedule="early"
    )
    assert report.finished
    check(name, q, k, v, hi, out, lse)


@pytest.mark.parametrize("name", NAMES)
def test_cuda_gives_the_bits_of_an_h200(name):
    if cuda_missing():
        pytest.skip(cuda_missing())
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("not a Hopper GPU")
    q, k, v, hi = inputs(name)
    check(name, q, k, v, hi, *torch.ops.fa4.fwd(q.cuda(), k.cuda(), v.cuda(), hi=hi, scale=exact.SCALE))


def test_the_data_says_where_it_is_from():
    about = json.loads(STORED.read_text())["about"]
    assert "H200" in about["chip"]
    assert about["date"]
