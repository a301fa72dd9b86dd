"""python -m flash_attn4 verify: its probes in the simulator, and what it says when an assumption does not hold, when a
kernel hangs, when something is missing."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from flash_attn4 import verify
from flash_attn4.verify import build, device, items, probes, variants, worker

ROOT = Path(__file__).parents[1]
pytest.importorskip("pybind11", reason="the simulator needs pybind11: pip install -e '.[test]'")
if not (ROOT / "csrc/verify").exists():
    pytest.skip("needs the source tree", allow_module_level=True)
with build.inside(ROOT):
    if not build.setup_of(ROOT).Toolkit.find():
        pytest.skip("the build found no nvcc", allow_module_level=True)

import ptxsim  # noqa: E402
import simulated_gpu as simulated  # noqa: E402

BLACKWELL = probes.probes(simulated.MULTIPROCESSORS, 100)
HOPPER = probes.probes(simulated.MULTIPROCESSORS, 90)
B300 = [p for p in probes.probes(simulated.MULTIPROCESSORS, 103) if "B300" in p.chips]  # what B200 has not
BY_NAME = {p.name: p for p in BLACKWELL + B300}
ANSWERS = [p for p in {p.name: p for p in HOPPER + BLACKWELL + B300}.values() if not p.faults]
named = {"ids": lambda p: p.name}


@pytest.fixture(autouse=True)
def once(monkeypatch):
    """The simulator has schedules for what a chip shows by luck."""
    monkeypatch.setattr(worker, "REPEATS", 1)


@pytest.fixture(scope="module")
def blackwell():
    return simulated.Device(capability=100)


@pytest.fixture(scope="module")
def b300():
    return simulated.Device(capability=103)


@pytest.fixture(scope="module")
def hopper():
    return simulated.Device(capability=90)


# ---- The probes


@pytest.mark.parametrize("probe", BLACKWELL, **named)
def test_blackwell(probe, blackwell):
    found = worker.run(blackwell, items.Item(probe.name, probe=probe))
    assert found["result"] == "pass", found


@pytest.mark.parametrize("probe", HOPPER, **named)
def test_hopper(probe, hopper):
    found = worker.run(hopper, items.Item(probe.name, probe=probe))
    assert found["result"] == "pass", found


@pytest.mark.parametrize("probe", B300, **named)
def test_b300(probe, b300):
    found = worker.run(b300, items.Item(probe.name, probe=probe))
    assert found["result"] == "pass", found


@pytest.mark.parametrize("probe", ANSWERS, **named)
def test_a_probe_sees_one_wrong_word_wherever_it_is(probe, blackwell, b300, hopper):
    chip = {"Blackwell": blackwell, "B300": b300, "Hopper": hopper}[probe.chips[-1]]
    out = chip.run(probe, schedules=("early",))
    assert not probes.wrong(probe, out).size
    for at in np.random.default_rng(0).integers(0, out.size, 20):
        bent = out.copy()
        bent[at] ^= 0x40000001
        assert list(probes.wrong(probe, bent)) == [at]
    assert probes.wrong(probe, np.full_like(out, probes.BLANK)).size > out.size // 2, "nothing was written"


def bend_numbers(probe, **changed):
    """The probe with other launch numbers: {position: xor}."""
    numbers = list(probe.numbers)
    for at, bits in changed.items():
        numbers[int(at[1:])] ^= bits
    return dataclasses.replace(probe, numbers=tuple(numbers))


@pytest.mark.parametrize(
    "name, changed",
    [
        ("scores_128", {"n7": 1}),  # another stride between groups of rows
        ("scores_128", {"n7": 3 << 30}),  # another swizzle
        ("output_128", {"n14": 1 << 20}),  # another distance of slabs
        ("output_128", {"n3": 1 << 16}),  # K-major
        ("scores_negated", {"n3": 1 << 13}),
        ("base_offset", {"n7": 1 << 17}),
        ("a_in_tensor_memory", {"n3": 1 << 7}),  # f16
        ("d_of_64_rows", {"n3": 12 << 24}),  # M = 128
        ("pair_d_of_256_rows", {"n3": 24 << 24}),
        ("lanes_left_out", {"n18": 1}),
        ("pair_lanes_left_out", {"n22": 1}),
        ("cp_32x128b", {"n0": 3}),
        ("load_16x64b", {"n0": 1}),
        ("ex2", {"n1": 1}),
        ("max_nan", {"n1": 7}),
        ("add_rm_f32x2", {"n1": 3}),
        ("load_128_inside", {"n1": 1}),  # the row
    ],
)
def test_a_chip_that_does_something_else_fails_the_probe(name, changed, blackwell):
    probe = bend_numbers(BY_NAME[name], **changed)
    assert worker.run(blackwell, items.Item(name, probe=probe))["result"] in ("fail", "error")


@pytest.mark.parametrize(
    "name, other",
    [("numbers", "min.NaN"), ("numbers", "max.abs.NaN"), ("nan", "max"), ("small", "max.abs.NaN")],
)
def test_a_chip_that_finds_another_maximum_fails_the_probe(name, other, b300, monkeypatch):
    (unit,) = (u for u in simulated.probe_units(103) if u.name == "fa4_probe_load_red")
    text, count = re.subn(r"(tcgen05\.ld\.red\.[\w.]+\.x32)\.max\.NaN\.", rf"\1.{other}.", unit.ptx.read_text())
    assert count == 4
    monkeypatch.setattr(b300, "code", lambda _: ptxsim.Module(text))
    found = worker.run(b300, items.Item(name, probe=BY_NAME[f"load_red_{name}"]))
    assert found["result"] == "fail"
    assert {place["register"] for place in found["at"]} == {32}


@pytest.mark.parametrize("name", ["order", "order_pair", "pair_relaxed"])
def test_the_order_probe_leans_on_the_order_of_issue_alone(name, blackwell):
    with pytest.raises(device.DeviceError) as raised:
        blackwell.run(BY_NAME[name], strict_mma_order=True)
    text = str(raised.value)
    assert re.findall(r"^(\w[\w-]*): a write of tensor memory", text, re.MULTILINE) == ["race"] * 8
    assert set(re.findall(r"\): ([\w.:]+), CTA", text)) == {f"tcgen05.mma.cta_group::{BY_NAME[name].cluster}.kind::f16"}


def test_a_fault_that_does_not_come_is_a_failure(blackwell):
    probe = bend_numbers(BY_NAME["fault_unaligned"], n0=1)  # coordinate 0
    found = worker.run(blackwell, items.Item("x", probe=probe))
    assert found["result"] == "fail"
    assert "no error" in found["detail"]


def test_a_wait_that_stops_a_kernel_is_not_the_fault_that_was_asked_for(blackwell, monkeypatch):
    monkeypatch.setattr(blackwell, "stuck_waits", lambda: np.zeros(1, device.STUCK))
    assert worker.run(blackwell, items.Item("x", probe=BY_NAME["fault_unaligned"]))["result"] == "error"


def test_nor_is_an_error_before_the_kernel(blackwell, monkeypatch):
    def no_memory(array):
        raise device.DeviceError("cudaMalloc: out of memory")

    monkeypatch.setattr(blackwell, "upload", no_memory)
    assert worker.run(blackwell, items.Item("x", probe=BY_NAME["fault_unaligned"]))["result"] == "error"


def test_a_failure_says_where(blackwell):
    probe = BY_NAME["d_of_128_rows"]
    out = probe.expected.ravel().copy()
    out[5 * 128 + 7] = 3
    said = worker.excerpt(probe, out, probes.wrong(probe, out))
    assert said["at"] == [{"CTA": 0, "lane": 5, "column": 7}]
    assert said["got"] == ["00000003"]
    assert said["expected"] == [f"{np.float32(5 * 128 + 7).view(np.uint32):08x}"]


def test_every_line_of_the_list_has_a_probe_or_a_reason():
    probed = {p.section for p in BLACKWELL}
    assert probed | probes.NOT_PROBED.keys() == probes.SECTIONS.keys()
    assert probes.SECTIONS.keys() - probed == {"13", "15"}
    assert {p.part for p in BLACKWELL} - {None} == {
        "CTA pairs", "descriptors", "layouts of tensor memory", "order of products", "exponentials"
    }  # fmt: skip


def test_b300_is_asked_what_b200_is_and_more():
    asked = {p.name for p in probes.probes(1, 103)}
    assert asked > {p.name for p in BLACKWELL}
    assert asked - {p.name for p in BLACKWELL} == {f"load_red_{name}" for name in ("numbers", "nan", "small")}


def test_every_kernel_is_listed_and_asked():
    listed = {name for name, *_ in build.entries(ROOT, "verify/kernels.def")}
    defined = set()
    for file in (ROOT / "csrc/verify").glob("*.cu"):
        defined |= set(re.findall(r"FA4_PROBE\(\d+\)\s+(\w+)\(", file.read_text()))
    assert listed == defined == {p.kernel for p in BLACKWELL + B300 + HOPPER}


# ---- The forward with bounded waits


@pytest.fixture(scope="module")
def bounded(tmp_path_factory):
    """PTX of three kernels as verify compiles them."""
    folder = tmp_path_factory.mktemp("bounded")
    with build.inside(ROOT):
        setup = build.setup_of(ROOT)
        units, _ = setup.cuda_units(folder)
        for unit in units:
            if unit.name in tuple(f"fa4_sm{n}_fwd_bf16_d64" for n in (90, 100, 103)):
                command = ["-ptx" if word == "-c" else word for word in unit.command]
                command += [f"-DFA4_BOUNDED_WAITS={build.WAIT_NANOSECONDS}u", "-o", str(folder / f"{unit.name}.ptx")]
                subprocess.run(command, check=True)
    return folder


@pytest.mark.parametrize("capability", [90, 100, 103])
@pytest.mark.parametrize("name", ["one_block", "causal", "lengths", "negative_scale"])
def test_the_forward_is_right_with_bounded_waits(capability, name, bounded, monkeypatch):
    monkeypatch.setattr(variants, "RUNS", 1)
    (call,) = (c for c in variants.calls(ROOT, capability) if c.name == f"bf16_64_64_{name}")
    chip = simulated.Device(capability=capability, ptx=bounded)
    assert worker.run(chip, items.Item(name, call=call))["result"] == "pass"


def test_a_wrong_forward_is_told(bounded, monkeypatch):
    (call,) = (c for c in variants.calls(ROOT, 100) if c.name == "bf16_64_64_one_block")
    monkeypatch.setattr(variants, "RUNS", 2)
    right = simulated.Device(capability=100, ptx=bounded).attention(*call.tensors(), **call.how)

    def check(change):
        answers = iter([right, tuple(map(change, right))])

        class Wrong:
            def attention(self, *_, **__):
                return next(answers)

        return variants.check(Wrong(), call)["wrong"]

    assert check(lambda x: x) is None
    assert "differ in their bits" in check(lambda x: x + 1)
    right = tuple(x.clone() for x in right)
    right[0][0, 1, 77, 3] += 0.1
    assert check(lambda x: x) == "the output is wrong, most at [b, h, i, d] = [0, 1, 77, 3]"
    right[0][0, 1, 77, 3] = torch.nan
    assert "not finite" in check(lambda x: x)
    right[0][0, 1, 77, 3] = right[0][0, 0, 0, 0] * 0
    right[1][0, 0, 5] += 1
    right[0][:] = simulated.Device(capability=100, ptx=bounded).attention(*call.tensors(), **call.how)[0]
    assert check(lambda x: x) == "the log-sum-exp is wrong"


def test_a_wait_that_does_not_end_is_written_down(bounded):
    """More bytes are expected than arrive: who waits for them says so, and those who wait for him."""
    text = (bounded / "fa4_sm100_fwd_bf16_d64.ptx").read_text()
    waits = np.zeros(device.STUCK_BYTES, np.uint8)
    address = ptxsim.alloc(waits)
    text, count = re.subn(r"(\.global \.align 8 \.u64 stuck_waits);", rf"\1 = {address};", text)
    assert count == 1
    longest = build.WAIT_NANOSECONDS // 4 * 5 - 2**32  # nvcc writes it as a signed number
    for nanoseconds, short in ((build.WAIT_NANOSECONDS, 40000), (longest, 50000)):
        assert str(nanoseconds) in text
        text = text.replace(str(nanoseconds), str(short))
    # The simulator calls it a deadlock at once when all suspend themselves.
    text = text.replace("mbarrier.try_wait", "mbarrier.test_wait")
    text, count = re.subn(r"(mbarrier\.arrive\.expect_tx\.shared::cta\.b64 _, \[%r\d+\], )%r\d+;", r"\1 1048560;", text)
    assert count
    path = bounded / "stuck" / "fa4_sm100_fwd_bf16_d64.ptx"
    path.parent.mkdir()
    path.write_text(text)
    (call,) = (c for c in variants.calls(ROOT, 100) if c.name == "bf16_64_64_one_block")
    found = worker.run(simulated.Device(capability=100, ptx=path.parent), items.Item("x", call=call))
    assert found["result"] == "error"
    assert "trap" in found["detail"]
    count = int(waits[:4].view(np.uint32)[0])
    written = waits[64 : 64 + 64 * count].view(device.STUCK)
    said = worker.stuck(written, ROOT, "sm100/fwd.cu")
    ptxsim.free(address)
    assert any("kv_full" in w["barrier"] and "mma_warp" in w["where"] for w in said), said


def test_a_shipped_kernel_has_no_bounds():
    files = list((ROOT / "build/ptx").glob("*.ptx"))
    if not files:
        pytest.skip("no CUDA kernels were built")
    for file in files:
        assert "globaltimer" not in file.read_text()
        assert "stuck_waits" not in file.read_text()


@pytest.mark.parametrize("capability", [90, 100, 103])
def test_the_calls_reach_every_kernel(capability):
    """As far as the plan is concerned; what none reaches is a failure in the report."""
    chip = simulated.Device(capability=capability)
    reached = {variants.kernel_of(chip, call) for call in variants.calls(ROOT, capability)}
    assert reached >= build.best_kernels(ROOT, capability)
    assert reached <= build.kernels(ROOT, capability).keys()


# ---- The library's host side


def test_the_library_plans_as_the_simulator_does_and_has_its_errors(tmp_path):
    """With one kernel, and that without code for a GPU."""
    (tmp_path / "kernel.c").write_text("void fa4_sm100_fwd_bf16_d64(void) {}")
    with build.inside(ROOT):
        setup = build.setup_of(ROOT)
        units, toolkit = setup.cuda_units(tmp_path)
        units = build.host_units(setup, units, tmp_path)
        command = [*setup.c_compiler(), "-fPIC", "-c", str(tmp_path / "kernel.c")]
        units.append(setup.Unit("kernel", command, tmp_path / "kernel.o"))
        setup.compile_units(units)
        library = build.link([toolkit.nvcc, "-cudart", "static"], units, tmp_path / "libfa4_verify.so")
    lib = device.declared(library)
    strides = [(4 * 300 * 64, 300 * 64, 64, 1)] * 4 + [(1200, 300, 1)]
    call = device.numbers_of([0x1000] * 6, strides, (2, 4, 4, 300, 300, 64, 64), None, 5, 1)
    for capability in (100, 103):  # 10.3 runs it where the build left out its own
        name = lib.fa4_verify_forward(call, 0.125, capability, 100, 0).decode()
        assert name == f"fa4_sm{capability}_fwd_bf16_d64"
    assert lib.fa4_verify_forward(call, 0.125, 100, 100, 1) is None
    assert "cuda" in lib.fa4_verify_error().decode().lower()
    assert lib.fa4_verify_forward(call, 0.125, 80, 100, 0) is None
    assert "8.0" in lib.fa4_verify_error().decode()
    for capability in (90, 100):
        call = device.numbers_of([0x1000] * 6, strides, (2, 4, 4, 300, 300, 64, 128), None, 5, 1)
        assert lib.fa4_verify_forward(call, 0.125, capability, 100, 0) is None
        assert re.search(f"left out the kernel fa4_sm{capability}_fwd_bf16_d128", lib.fa4_verify_error().decode())
    if device.compute_capability() is None:
        with pytest.raises(device.DeviceError, match="cuda"):
            device.Device(library)


# ---- The command


@pytest.fixture
def command(monkeypatch, tmp_path):
    """verify's main with the simulator for a GPU, and its report: (exit status, document, what it printed)."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("FA4_SIMULATED", "100")
    monkeypatch.setattr(verify, "compute_capability", lambda: 100)
    monkeypatch.setattr(build, "build", lambda *_: tmp_path / "none.so")

    def start(root, library, _):
        return [sys.executable, "-m", "simulated_gpu", "--library", str(library), "--source", str(root)]

    monkeypatch.setattr(verify, "worker_command", start)
    report = tmp_path / "verify.json"

    def run(*arguments):
        status = verify.main(["--json", str(report), *arguments])
        return status, json.loads(report.read_text())

    run.monkeypatch = monkeypatch
    return run


ITEM_KEYS = {"name", "kind", "assumes", "result"}


def test_the_report(command, bounded, capsys):
    command.monkeypatch.setenv("FA4_PTX", str(bounded))
    wanted = ["probe_fault", "probe_order", "probe_ex2", "forward_bf16_64_64_one_block"]
    status, document = command(*(word for text in wanted for word in ("--only", text)))
    printed = capsys.readouterr().out
    assert status == 0
    assert document["finished"]
    assert document["passed"]
    assert document["failed"] == []
    assert document["missing"] is None
    assert document["device"]["compute_capability"] == "10.0"
    assert document["flash_attn4"]
    assert "release" in document["nvcc"]
    assert document["date"]
    assert [entry["line"] for entry in document["not_probed"]] == ["3", "13", "15"]
    names = [item["name"] for item in document["items"]]
    assert names == [
        "probe_order",
        "probe_order_pair",
        "probe_ex2",
        "probe_fault_unaligned",
        "probe_fault_negative",
        f"{wanted[3]}",
    ]
    for item in document["items"]:
        assert item.keys() >= ITEM_KEYS
        assert item["result"] == "pass"
        assert item["kernel"]
        assert f"PASS  {item['name']}" in printed
    order = document["items"][0]
    assert (order["line"], order["part"]) == ("5", "order of products")
    assert "S(n - 1) overwrites the P" in order["used_by"]
    assert document["items"][-1]["error"] <= document["items"][-1]["allowed"]


def scripted(tmp_path, body):
    """A worker that says what the body prints, given the names of items in the list names."""
    script = tmp_path / "scripted.py"
    script.write_text(
        "import json, os, sys, time\n"
        "def say(**what): print(json.dumps(what), flush=True)\n"
        "names = sys.stdin.read().split()\n" + body
    )
    return [sys.executable, str(script)]


def test_a_wrong_answer_a_fault_and_a_hang_leave_the_others(command, tmp_path, capsys):
    body = """
say(device={"name": "script", "compute_capability": "10.0"})
for name in names:
    say(begins=name, kernel="k")
    if "pair_load" in name:
        say(ends=name, result="fail", detail="12 words are wrong", got=["1"], expected=["2"], stuck=[])
        break
    if "alloc" in name:
        time.sleep(100)
    if "words" in name:
        print("some last words", file=sys.stderr)
        os._exit(139)
    if "addresses" in name:
        wait = {"where": "csrc/sm100/fwd.cu:1, mma_warp", "warp": 12, "block": 3, "barrier": "s.p_full"}
        say(ends=name, result="error", detail="unspecified launch failure", stuck=[wait])
        break
    say(ends=name, result="pass")
"""
    command.monkeypatch.setattr(verify, "worker_command", lambda *_: scripted(tmp_path, body))
    command.monkeypatch.setattr(verify, "SECONDS_FOR_ONE", 3)
    wanted = ["probe_alloc", "probe_words", "probe_pair_load", "probe_addresses", "probe_collector"]
    status, document = command(*(word for text in wanted for word in ("--only", text)))
    printed = capsys.readouterr().out
    assert status == 1
    assert document["finished"]
    assert not document["passed"]
    results = {item["name"]: item["result"] for item in document["items"]}
    assert results == {
        "probe_alloc": "hang",
        "probe_words": "error",
        "probe_pair_load": "fail",
        "probe_addresses": "error",
        "probe_collector": "pass",
    }
    failed = {entry["name"]: entry for entry in document["failed"]}
    assert failed.keys() == results.keys() - {"probe_collector"}
    assert failed["probe_pair_load"]["assumes"] == BY_NAME["pair_load"].assumes
    assert failed["probe_pair_load"]["detail"] == "12 words are wrong"
    assert "some last words" in failed["probe_words"]["detail"]
    for text in (BY_NAME["alloc"].assumes, "[line 9]", "mma_warp, warp 12 of block 3: s.p_full", "1 of 5 passed"):
        assert text in printed


def test_a_process_that_ends_before_an_item_begins_does_not_come_back_for_it(command, tmp_path):
    body = """
say(device={"name": "script", "compute_capability": "10.0"})
if "probe_order" in names:
    raise SystemExit("nothing to plan")
for name in names:
    say(begins=name, kernel="k")
    say(ends=name, result="pass")
"""
    command.monkeypatch.setattr(verify, "worker_command", lambda *_: scripted(tmp_path, body))
    status, document = command("--only", "probe_order", "--only", "probe_ex2")
    assert status == 1
    results = {item["name"]: item["result"] for item in document["items"]}
    assert results == {"probe_order": "error", "probe_order_pair": "pass", "probe_ex2": "pass"}
    assert "nothing to plan" in document["failed"][0]["detail"]


def test_time_runs_out(command, tmp_path):
    body = """
say(device={"name": "script", "compute_capability": "10.0"})
for name in names:
    say(begins=name, kernel="k")
    say(ends=name, result="pass")
    time.sleep(1)
"""
    command.monkeypatch.setattr(verify, "worker_command", lambda *_: scripted(tmp_path, body))
    status, document = command("--only", "probe_load", "--minutes", "0.05")
    assert status == 1
    assert document["items"][0]["result"] == "pass"
    assert document["items"][-1]["result"] == "not run"
    assert document["items"][-1]["detail"] == "no time was left"


def test_a_kernel_that_no_call_reaches_is_a_failure(command, tmp_path):
    body = """
say(device={"name": "script", "compute_capability": "10.0"})
for name in names:
    say(begins=name, kernel="fa4_sm100_fwd_f16_d64" if name.startswith("forward") else "k")
    say(ends=name, result="pass")
"""
    command.monkeypatch.setattr(verify, "worker_command", lambda *_: scripted(tmp_path, body))
    status, document = command()
    assert status == 1
    unreached = {entry["kernel"] for entry in document["failed"]}
    assert unreached == build.best_kernels(ROOT, 100) - {"fa4_sm100_fwd_f16_d64"}


def test_what_is_missing_is_said(command, tmp_path, monkeypatch, capsys):
    def said(*arguments):
        status, document = command(*arguments)
        assert status == 2
        assert not document["passed"]
        assert document["missing"] in capsys.readouterr().err
        return document["missing"]

    monkeypatch.undo()
    if device.compute_capability() is None:
        assert "no GPU" in said()
    monkeypatch.setattr(verify, "compute_capability", lambda: 120)
    assert "no kernels for compute capability 12.0" in said()
    monkeypatch.setattr(verify, "compute_capability", lambda: 100)
    assert f"no source: {tmp_path} has no setup.py" in said("--source", str(tmp_path))
    monkeypatch.setattr(verify, "worker_command", lambda *_: scripted(tmp_path, "say(cannot='no device')"))
    monkeypatch.setattr(build, "build", lambda *_: tmp_path)
    assert "no item's name contains nothing_like_it" in said("--only", "nothing_like_it")
    assert "cannot be used: no device" in said()
    monkeypatch.setattr(verify, "worker_command", lambda *_: [sys.executable, "-c", "raise SystemExit('no torch')"])
    assert "does not start: no torch" in said()
    monkeypatch.undo()
    monkeypatch.setattr(verify, "compute_capability", lambda: 100)
    (tmp_path / "file").write_text("")
    assert "cannot be written" in said("--build", str(tmp_path / "file"))
    with monkeypatch.context() as without:
        without.setattr("shutil.which", lambda name: None)
        assert "no nvcc" in said()

    def failing(*_):
        raise SystemExit("fa4_probe_order failed to compile.")

    monkeypatch.setattr(build, "compile_library", failing)
    assert "cannot be compiled: fa4_probe_order failed to compile." in said()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--json", "/no/such/folder/x.json"), "--json: /no/such/folder/x.json: there is no folder /no/such/folder"),
        (("--json", "x" * 300), "File name too long"),
        *((("--minutes", n), f"--minutes: it must be a number above 0, and it is {n}") for n in ("0", "nan", "inf")),
        (("--seconds", "1"), "unrecognized arguments: --seconds 1"),
    ],
)
def test_bad_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit) as raised:
        verify.main(list(arguments))
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("path", ["/", "/proc/verify.json"])
def test_a_report_that_cannot_be_written(path, capsys):
    with pytest.raises(SystemExit) as raised:
        verify.main(["--json", path])
    assert raised.value.code == 2
    assert f"argument --json: {path}: " in capsys.readouterr().err


def test_which_code_fits_which_chip():
    assert build.fits("90a", 90)
    assert not build.fits("90a", 100)
    assert build.fits("100f", 100)
    assert build.fits("100f", 103)
    assert build.fits("103f", 103)
    assert not build.fits("103f", 100)
    assert not build.fits("100f", 120)
    assert not build.fits("100a", 103)


@pytest.mark.parametrize("capability, listed", [(None, BLACKWELL + B300), (80, BLACKWELL + B300), (90, HOPPER)])
def test_the_list(capability, listed, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(verify, "compute_capability", lambda: capability)
    assert verify.main(["--list"]) == 0
    printed = capsys.readouterr().out
    assert set(re.findall(r"^probe_(\w+) ", printed, re.MULTILINE)) == {p.name for p in listed}
    assert "forward_bf16_128_128_causal" in printed
    assert verify.main(["--list", "--only", "probe_ex2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [line for line in printed.splitlines() if "probe_ex2" in line.split()[0]]
    assert verify.main(["--list", "--only", "no such"]) == 2
    assert "no item's name contains no such" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
