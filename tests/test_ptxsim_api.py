"""The simulator's Python face: arguments, memory, tensor maps, reports, the command, programmatic dependent launch."""

import pathlib
import subprocess
import sys

import numpy as np
import ptxsim
import pytest
import torch
from ptxsim_kernels.ptx import MAP, POINTER, U32, kernel, load_word, loop, store_word, when

TESTS = pathlib.Path(__file__).parent
COPY = "{ .reg .b32 n; mov.u32 n, %ntid.x; mad.lo.u32 i, cta, n, tid; }" + load_word("x", "g0", "i")
ADD = kernel(COPY + "add.u32 x, x, u0;" + store_word("g1", "i", "x"), [POINTER, POINTER, U32], threads=32)


def test_arrays_are_read_and_written_in_place():
    module = ptxsim.Module(ADD)
    assert module.kernels == {"k": [(8, 8), (8, 8), (4, 4)]}
    x, out = np.arange(64, dtype=np.uint32), np.zeros(64, np.uint32)
    report = module.launch("k", grid=2, block=32, args=[x, out, 5])
    assert report.finished
    assert np.array_equal(out, x + 5)
    assert report.executed["store"] == 64
    assert report.executed_by_warp[0]["store"] == 64


def test_torch_tensors_and_views():
    x, out = torch.arange(100, dtype=torch.int32), torch.zeros(100, dtype=torch.int32)
    ptxsim.Module(ADD).launch("k", block=32, args=[x[10:42], out[50:82], 1])
    assert torch.equal(out[50:82], x[10:42] + 1)
    assert out.sum() == out[50:82].sum()


def test_views_of_one_array_see_each_other():
    x = np.arange(64, dtype=np.uint32)
    ptxsim.Module(ADD).launch("k", block=32, args=[x[:32], x[32:], 1])
    assert np.array_equal(x[32:], x[:32] + 1)


def test_empty_is_poison_until_a_kernel_writes_it():
    x, out = ptxsim.empty(32, np.uint32), ptxsim.empty(48, np.uint32)
    assert ptxsim.poisoned(x) == 128
    report = ptxsim.Module(ADD).launch("k", block=32, args=[x, out, 5], check=False)
    assert report.kinds == {"poison"}
    ptxsim.Module(ADD).launch("k", block=32, args=[np.zeros(32, np.uint32), out, 5])
    assert ptxsim.poisoned(out) == 64


def test_findings_raise_and_carry_the_report():
    x, out = np.zeros(32, np.uint32), np.zeros(31, np.uint32)
    with pytest.raises(ptxsim.Finding, match="out-of-bounds") as caught:
        ptxsim.Module(ADD).launch("k", block=32, args=[x, out, 5])
    (finding,) = caught.value.report.findings
    assert finding.kind == "out-of-bounds"
    assert (finding.warp, finding.lane, finding.cta) == (0, 31, 0)
    assert f"PTX {finding.ptx_line}" in finding.where


def test_device_addresses_in_structs():
    x, out = np.arange(32, dtype=np.uint32), np.zeros(32, np.uint32)
    text = ADD.replace(".param .u64 k_param_0, .param .u64 k_param_1", ".param .align 8 .b8 k_param_0[16]")
    text = text.replace("ld.param.u64 g1, [k_param_1]", "ld.param.u64 g1, [k_param_0+8]").replace(
        "k_param_2", "k_param_1"
    )
    addresses = [ptxsim.alloc(x), ptxsim.alloc(out)]
    ptxsim.Module(text).launch("k", block=32, args=[b"".join(a.to_bytes(8, "little") for a in addresses), 7])
    for a in addresses:
        ptxsim.free(a)
    assert np.array_equal(out, x + 7)
    with pytest.raises(ValueError, match="not the start of an allocation"):
        ptxsim.free(addresses[0])


@pytest.mark.parametrize(
    "how, error, match",
    [
        ({"args": [1, 2]}, ValueError, "takes 3 parameters, not 2"),
        ({"args": [1, 2, "x"]}, TypeError, "str means nothing"),
        ({"args": [1, 2, b"12345"]}, ValueError, "parameter 2 of k has 4 bytes, the argument 5"),
        ({"args": [1, 2, 3], "grid": (1, 0)}, ValueError, "grid is"),
        ({"args": [1, 2, 3], "schedule": "soon"}, ValueError, "schedule is 'soon'"),
        ({"args": [1, 2, 3], "model": "amd"}, ValueError, "model is 'amd'"),
    ],
)
def test_wrong_launches_are_named(how, error, match):
    with pytest.raises(error, match=match):
        ptxsim.Module(ADD).launch("k", **how)
    with pytest.raises(ValueError, match="no kernel 'q'"):
        ptxsim.Module(ADD).launch("q", args=[])


@pytest.mark.parametrize("how", [{"block": 64}, {"block": 32, "smem": 300000}, {"block": 32, "grid": 3, "cluster": 2}])
def test_launches_that_the_driver_refuses(how):
    x = np.zeros(256, np.uint32)
    report = ptxsim.Module(ADD).launch("k", args=[x, x, 0], check=False, **how)
    assert report.kinds == {"launch"}


# The driver's limits, PTX ISA "Tensors" and cuTensorMapEncodeTiled.
TILE = {"dtype": "bf16", "dims": (64, 64), "strides": (128,), "box": (64, 8), "swizzle": 128}


@pytest.mark.parametrize(
    "change",
    [
        {"box": (72, 8)},  # wider than the swizzle's span
        {"box": (4, 8)},  # 8 bytes
        {"box": (64, 257)},
        {"box": (64, 0)},
        {"strides": (136,)},
        {"strides": (1 << 40,)},
        {"dims": (0, 64)},
        {"dims": ((1 << 32) + 1, 64)},
        {"swizzle": 48},
        {"element_strides": (1, 9)},
        {"dtype": "u16", "fill": "nan"},
        {"dims": (64, 64, 1, 1, 1, 1), "strides": (128,) * 5, "box": (64, 8, 1, 1, 1, 1)},
    ],
    ids=str,
)
def test_tensor_maps_that_the_driver_refuses(change):
    ptxsim.TensorMap(1 << 32, **TILE)
    with pytest.raises(ValueError, match=r"\w"):
        ptxsim.TensorMap(1 << 32, **{**TILE, **change})
    with pytest.raises(ValueError, match=r"\w"):
        ptxsim.TensorMap((1 << 32) + 8, **TILE)


def test_tensor_map_words_are_checked():
    with pytest.raises(ValueError, match="dtype is 'b16'"):
        ptxsim.TensorMap(1 << 32, **{**TILE, "dtype": "b16"})
    with pytest.raises(ValueError, match="strides has 2 entries; 2 dims need 1"):
        ptxsim.TensorMap(1 << 32, **{**TILE, "strides": (128, 256)})


def test_a_tensor_map_of_another_kernels_is_no_pointer():
    x = np.zeros((64, 64), np.uint16)
    text = kernel("ld.global.b32 x, [g0];", [POINTER, MAP], threads=32)
    with pytest.raises(ValueError, match="parameter 0 of k has 8 bytes, the argument 128"):
        ptxsim.Module(text).launch("k", block=32, args=[ptxsim.TensorMap(x, **TILE), x])


def test_the_same_seed_gives_the_same_run():
    body = loop(20, "{ .reg .b64 t; mov.b64 t, g0; red.global.add.u32 [t], tid; }")
    module = ptxsim.Module(kernel(body, [POINTER], threads=128))
    reports = [
        str(module.launch("k", grid=4, block=128, args=[np.zeros(1, np.uint32)], schedule="random", seed=7, threads=n))
        for n in (1, 2, 2)
    ]
    assert len(set(reports)) == 1


def test_a_kernel_that_never_ends_is_a_livelock():
    report = ptxsim.Module(kernel("L: bra L;", threads=32)).launch("k", block=32, max_steps=1000, check=False)
    assert report.kinds == {"livelock"}
    assert not report.finished


# ------------------------------------------------------------------------------------- programmatic dependent launch

FIRST = kernel("griddepcontrol.launch_dependents;" + store_word("g0", "tid", "tid"), [POINTER], threads=32)


def second(wait):
    return kernel(
        ("griddepcontrol.wait;" if wait else "") + load_word("x", "g0", "tid") + store_word("g1", "tid", "x"),
        [POINTER, POINTER],
        threads=32,
    )


@pytest.mark.parametrize("schedule", ptxsim.SCHEDULES)
@pytest.mark.parametrize("pdl, wait, kinds", [(True, True, set()), (False, False, set()), (True, False, {"race"})])
def test_dependent_launch(pdl, wait, kinds, schedule):
    data, out = ptxsim.empty(32, np.uint32), ptxsim.empty(32, np.uint32)
    grids = [
        (ptxsim.Module(FIRST), "k", {"block": 32, "args": [data]}),
        (ptxsim.Module(second(wait)), "k", {"block": 32, "args": [data, out]}),
    ]
    report = ptxsim.launch(grids, pdl=pdl, schedule=schedule, check=False)
    assert report.kinds - {"poison"} == kinds, report
    if not kinds:
        assert np.array_equal(out, np.arange(32))


# --------------------------------------------------------------------------------------------------------- processes


def test_the_command_lists_kernels_and_what_is_unknown(tmp_path):
    good, bad = tmp_path / "good.ptx", tmp_path / "bad.ptx"
    good.write_text(ADD)
    bad.write_text(ADD.replace("add.u32 x", "bad.u32 x"))
    command = [sys.executable, "-m", "ptxsim"]
    result = subprocess.run([*command, good], check=True, capture_output=True, text=True, cwd=TESTS)
    assert "k: " in result.stdout
    assert "parameter 2: 4 bytes" in result.stdout
    result = subprocess.run([*command, good, bad], check=False, capture_output=True, text=True, cwd=TESTS)
    assert result.returncode == 1
    assert "bad.u32" in result.stdout


def test_processes_that_import_at_once_share_one_build():
    command = [sys.executable, "-c", "import ptxsim; print(len(ptxsim.MAP_TYPES))"]
    children = [subprocess.Popen(command, cwd=TESTS, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [child.communicate()[0] for child in children] == [f"{len(ptxsim.MAP_TYPES)}\n"] * 3


def test_clusters_without_ties_run_side_by_side():
    """Each cluster counts up a word of its own, on however many threads."""
    body = when("tid == 0", loop(50, "{ .reg .b64 t; mad.wide.u32 t, cta, 4, g0; red.global.add.u32 [t], 1; }"))
    module, counts = ptxsim.Module(kernel(body, [POINTER], threads=32)), np.zeros(32, np.uint32)
    module.launch("k", grid=32, block=32, args=[counts], threads=2)
    assert (counts == 50).all()
