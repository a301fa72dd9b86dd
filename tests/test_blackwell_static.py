"""What the Blackwell kernels' machine code says without a GPU: registers, memory, the instructions that it has and has
not, how many a block of keys costs, and that the barriers are what the head of fwd.cu says of them.

    python tests/test_blackwell_static.py     writes the counts of what is in build/ptx to data/blackwell_counts.json
"""

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))  # last: it has a ptxsim.py, and so has this folder

import sass  # noqa: E402

PTX = ROOT / "build" / "ptx"
SOURCE = ROOT / "csrc" / "sm100"
STORED = Path(__file__).parent / "data" / "blackwell_counts.json"
KERNELS = re.findall(
    r'^FA4_CUDA_KERNEL\((fa4_sm10[03]_fwd_\w+), \w+, sm100/fwd\.cu, ".*-DFA4_SHAPE=(\w+)',
    (ROOT / "csrc" / "variants.def").read_text(),
    re.MULTILINE,
)
WARPS, TILES = 4, 2  # of a warpgroup, of a CTA
each_kernel = pytest.mark.parametrize("kernel, shape", KERNELS, ids=[name for name, _ in KERNELS])


def shapes():
    """The lines of shapes.def, and what their numbers are called."""
    text = (SOURCE / "shapes.def").read_text()
    names = [name.strip() for name in re.search(r"FA4_SM100_SHAPE\(name, ([\w, ]+)\)", text)[1].split(",")]
    return {
        name: dict(zip(names, map(int, values.split(",")), strict=True))
        for name, values in re.findall(r"^FA4_SM100_SHAPE\((\w+), ([\d, ]+)\)", text, re.MULTILINE)
    }


def made(kernel, suffix):
    path = PTX / f"{kernel}{suffix}"
    if not path.exists():
        pytest.skip(f"{path} does not exist: the build found no nvcc")
    return path


@functools.cache
def listing(kernel):
    cubin = made(kernel, ".cubin")
    try:
        return sass.instructions(cubin)
    except FileNotFoundError as error:  # nvdisasm, which has no wheel for every host
        pytest.skip(str(error))


def nvcc(kernel):
    return re.search(r"release [\d.]+, (V[\d.]+)", made(kernel, ".ptx").read_text()[:1000])[1]


def test_a_pair_takes_the_steps_that_a_cta_takes_alone():
    """So that both give the same bits."""
    pairs = [name for name, numbers in shapes().items() if numbers["ctas"] == 2]
    assert pairs
    for name in pairs:
        assert shapes()[name]["emulated"] == shapes()[name.removesuffix("_pair")]["emulated"]


# ---- Registers


def highest_register(instruction):
    """The last register that an instruction names, -1 for none."""
    opcode, text = instruction.opcode, instruction.text
    if opcode.startswith("LDTM.STAT"):
        text = text.split(",", 1)[1]  # behind the maximum, one register, which the loop around reads from too
    wide = re.search(r"\.x(\d+)", opcode) if opcode.startswith(("LDTM", "STTM")) else None
    width = int(wide[1]) if wide else 4 if ".128" in opcode else 2 if ".64" in opcode else 1
    if re.match(r"(FFMA2|FADD2|FMUL2|CS2R$|IMAD\.WIDE|CS2R )", opcode):
        width = 2
    addresses = re.findall(r"\[[^\]]*\]", text)
    found = [int(r) + (1 if suffix else 0) for a in addresses for r, suffix in re.findall(r"\bR(\d+)(\.64)?", a)]
    for r, suffix in re.findall(r"\bR(\d+)((?:\.\w+)*)", re.sub(r"\[[^\]]*\]", "", text)):
        found.append(int(r) + (0 if suffix == ".F32" else width - 1))
    return max(found, default=-1)


def reached(instructions, start):
    """All that control flow reaches from the instruction with this number."""
    at = {i.address: n for n, i in enumerate(instructions)}
    seen, todo = set(), [start]
    while todo:
        n = todo.pop()
        if n in seen or n >= len(instructions):
            continue
        seen.add(n)
        todo += [at[target] for target in instructions[n].targets]
        if not instructions[n].leaves:
            todo.append(n + 1)
    return [instructions[n] for n in sorted(seen)]


def test_registers_are_read_from_instructions():
    def last(opcode, text):
        return highest_register(sass.Instruction(0, "", opcode, text))

    assert last("LDTM.x32", "R36, tmem[UR8+0x20]") == 67
    assert last("STTM.x16", "tmem[UR8], R4") == 19
    assert last("LDTM.STAT.x32.MAX.F32.NAN", "R135, R100, tmem[UR21]") == 131
    assert last("FMUL2.FTZ", "R36, R36.F32x2.HI_LO, R73.F32") == 73
    assert last("FFMA2.FTZ", "R36, R40.F32x2.HI_LO, R2.F32x2.HI_LO, R6.F32") == 41
    assert last("STS.128", "[R70+0x10], R4") == 70
    assert last("LDS", "R9, [R8+UR4+0x38000]") == 9
    assert last("STG.E", "desc[UR4][R90.64], R3") == 91
    assert last("UIADD3", "UR6, UPT, UPT, UR9, -0x1, URZ") == -1
    assert last("IMAD.MOV.U32", "R5, RZ, RZ, RZ") == 5


@each_kernel
def test_nothing_is_spilled(kernel, shape):
    log = made(kernel, ".log").read_text()
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in log
    assert "setmaxnreg" not in log
    assert not [i for i in listing(kernel) if re.match(r"(STL|LDL)\b", i.opcode)]


@each_kernel
def test_each_role_keeps_within_its_registers(kernel, shape):
    instructions, numbers = listing(kernel), shapes()[shape]
    softmax, correction = numbers["registers_softmax"], numbers["registers_correction"]
    budgets = []
    for n, instruction in enumerate(instructions):
        if instruction.opcode.startswith("USETMAXREG"):
            budget = int(instruction.text.split(",")[-1], 16)
            used = max(map(highest_register, reached(instructions, n + 1))) + 1
            assert 16 < used <= budget, f"{used} registers of {budget} behind {instruction.address:#x}"
            budgets.append(budget)
    assert sorted(budgets) == sorted([softmax, correction, 512 - 2 * softmax - correction])


# ---- Memory, instructions


@each_kernel
def test_shared_memory_fits_and_tensor_memory_is_freed(kernel, shape):
    plan = pytest.importorskip("ptxsim.plan", reason="the plan needs pybind11: pip install -e '.[test]'")
    torch = pytest.importorskip("torch")
    numbers = shapes()[shape]
    dtype = torch.bfloat16 if "bf16" in kernel else torch.float16
    q, v = (torch.empty(1, 1, 512, numbers[d], dtype=dtype) for d in ("dim", "dim_v"))
    call = plan.params(q, q, v, v, torch.empty(1, 1, 512))
    made_plan = plan.fwd_plan(call, int(kernel[6:9]), 148, numbers["ctas"])
    assert made_plan["kernel"] == kernel
    assert 100 << 10 < made_plan["shared_bytes"] <= 227 << 10

    text = made(kernel, ".ptx").read_text()
    values = dict(re.findall(r"mov\.b32\s+(%r\d+), (\d+);", text))
    taken = [int(values[r]) for r in re.findall(r"tcgen05\.alloc[.\w:]+ \[%r\d+\], (%r\d+);", text)]
    freed = [int(values[r]) for r in re.findall(r"tcgen05\.dealloc[.\w:]+ %r\d+, (%r\d+);", text)]
    assert len(taken) == 1
    assert taken[0] <= 512
    assert taken == freed
    assert any(re.match(r"UTCATOMSWS.*\.FIND_AND_SET", i.opcode) for i in listing(kernel))
    assert any(re.match(r"UTCATOMSWS.*\.AND\b", i.opcode) for i in listing(kernel))


@each_kernel
def test_the_machine_code_is_the_fast_path(kernel, shape):
    opcodes = {i.opcode for i in listing(kernel)}
    for wanted in ("UTCHMMA", "LDTM", "STTM", "UTMALDG", "UTMASTG", "FFMA2", "SYNCS", "USETMAXREG"):
        assert any(opcode.startswith(wanted) for opcode in opcodes), wanted
    finds_maxima = any(opcode.startswith("LDTM.STAT") for opcode in opcodes)
    assert finds_maxima == kernel.startswith("fa4_sm103")
    assert any(".2CTA" in o for o in opcodes if o.startswith("UTCHMMA")) == (shapes()[shape]["ctas"] == 2)
    assert not [o for o in opcodes if re.match(r"(HMMA|LDGSTS|WARPGROUP)", o)]


# ---- Counts


@functools.cache
def counts(kernel):
    """The total of each role, spills of uniform registers in all loops, and the pipes' cycles."""
    cubin, instructions = made(kernel, ".cubin"), listing(kernel)
    roles, cycles = sass.roles(cubin, instructions), sass.pipes(cubin, instructions)
    spills = sum(c["UR spill/fill"] for role, c in roles.items() if "masked" not in role)
    return {**{role: sass.total(c) for role, c in roles.items()}, "UR spill/fill": spills, "pipes": cycles}


# What the published kernels execute, for head dim 128 with 16 emulated exponentials of 128; never more.
PUBLISHED = {
    "softmax, plain block": 515,
    "softmax, masked block, one fragment cut": 687,
    "correction, both rescales skipped": 21,
    "correction, one executed rescale": 83,
    "mma": 226,
    "UR spill/fill": 4,
}


@pytest.mark.parametrize("form", ["d128", "d128_pair"])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("arch", [100, 103])
def test_no_more_instructions_than_the_published_kernels(arch, dtype, form):
    ours = counts(f"fa4_sm{arch}_fwd_{dtype}_{form}")
    for role, most in PUBLISHED.items():
        assert ours[role] <= most, role


@pytest.mark.parametrize("dims", ["d128", "d128_pair", "d192_v128", "d192_v128_pair"])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("arch, chip", [(100, "B200"), (103, "B300")])
def test_no_pipe_takes_as_long_as_the_tensor_core(dims, dtype, arch, chip):
    cycles = counts(f"fa4_sm{arch}_fwd_{dtype}_{dims}")["pipes"]
    tensor_core = cycles["tensor core"]
    assert tensor_core == {"128": 2048, "192": 2560}[dims[1:4]]
    for name in ("FMA", "ALU", f"MUFU of {chip}", "issue", "issue, beside the MMA warp"):
        assert cycles[name] < tensor_core, name


@pytest.mark.parametrize("arch, chip", [(100, "B200"), (103, "B300")])
def test_at_head_dim_64_no_pipe_stands_out(arch, chip):
    """Exponentials take longer than products there: as many are emulated as make MUFU, FMA and issue slots meet."""
    cycles = counts(f"fa4_sm{arch}_fwd_bf16_d64")["pipes"]
    most = max(cycles["FMA"], cycles["ALU"], cycles[f"MUFU of {chip}"], cycles["issue, beside the MMA warp"])
    assert most <= (1400 if arch == 100 else 1.01 * cycles["tensor core"])


@each_kernel
def test_counts_grow_by_3_percent_at_most(kernel, shape):
    stored = json.loads(STORED.read_text())
    if nvcc(kernel) != stored["nvcc"]:
        pytest.skip(f"the counts are of nvcc {stored['nvcc']}, the kernels of {nvcc(kernel)}")
    ours = counts(kernel)
    assert stored["counts"].keys() == {name for name, _ in KERNELS}, f"python {Path(__file__).name} writes them anew"
    for role, n in stored["counts"][kernel].items():
        assert ours[role] <= 1.03 * n, f"{role}: {ours[role]}, it was {n}"


# ---- sass.py


def test_sass_says_what_it_cannot_read(tmp_path):
    with pytest.raises(ValueError, match="no such file"):
        sass.roles(tmp_path / "none.cubin")
    listing(KERNELS[0][0])
    (tmp_path / "text.cubin").write_text("text")
    with pytest.raises(ValueError, match="nvdisasm cannot read it"):
        sass.roles(tmp_path / "text.cubin")
    with pytest.raises(ValueError, match="is of sm_90a, and this reads sm_100"):
        sass.roles(made("fa4_sm90_fwd_bf16_d128", ".cubin"))


def test_sass_prints_tables(capsys, monkeypatch):
    listing("fa4_sm100_fwd_bf16_d64")
    monkeypatch.setattr(sys, "argv", ["sass.py", str(made("fa4_sm100_fwd_bf16_d64", ".cubin"))])
    sass.main()
    out = capsys.readouterr().out
    for row in ("| softmax, plain block |", "| MUFU.EX2 | ", "| **total** | ", "| tensor core | 1024 |"):
        assert row in out
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--json"])
    sass.main()
    assert json.loads(capsys.readouterr().out)["fa4_sm100_fwd_bf16_d64"]["mma"]["UTCHMMA"] == 24


def test_the_readmes_table_is_what_is_counted():
    table = (ROOT / "README.md").read_text().split("<!-- counts -->\n")[1].split("\n\n")[0]
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines())
    columns = {
        "64": "fa4_sm100_fwd_bf16_d64",
        "128": "fa4_sm100_fwd_bf16_d128",
        "192, 128": "fa4_sm100_fwd_bf16_d192_v128",
        "64 on B300": "fa4_sm103_fwd_bf16_d64",
        "128 on B300": "fa4_sm103_fwd_bf16_d128",
    }
    if nvcc(columns["64"]) != json.loads(STORED.read_text())["nvcc"]:
        pytest.skip("the README has the counts of another nvcc")
    for n, title in enumerate(head[1:], 1):
        ours = counts(columns[title])
        mufu = "MUFU of B300" if "B300" in title else "MUFU of B200"
        order = [
            role for role in ours if role not in ("softmax, masked block, all cut", "load", "UR spill/fill", "pipes")
        ]
        pipes = [mufu, "FMA", "ALU", "issue, beside the MMA warp", "tensor core"]
        expected = [ours[role] for role in order] + [ours["pipes"][name] for name in pipes]
        assert [int(row[n]) for row in rows] == expected, title


def test_a_sweep_counts_and_refuses_what_spills(tmp_path):
    """Without a GPU, one combination that is the kernel as it ships, and one with too few registers."""
    kernel = "fa4_sm100_fwd_f16_d64"
    ours = counts(kernel)
    command = [sys.executable, ROOT / "benchmarks" / "sweep.py", kernel, "--softmax", "208", "176", "248"]
    nowhere = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([*command, "--build", tmp_path], capture_output=True, text=True, env=nowhere)
    assert done.returncode == 0, done.stderr
    title, head, _, shipped, spilling, impossible, end = done.stdout.splitlines()
    assert kernel in title
    row = dict(zip(*([cell.strip() for cell in line.strip("|").split("|")] for line in (head, shipped)), strict=True))
    assert int(row["plain"]) == ours["softmax, plain block"]
    assert int(row["MUFU"]) == ours["pipes"]["MUFU of B200"]
    assert int(row["others"]) == 512 - 2 * 208 - int(row["correction"])
    assert "refused: spills" in spilling
    assert "refused: -48 registers for the other warps" in impossible
    assert end.startswith("not timed: torch finds no CUDA device")
    unknown = subprocess.run([*command[:2], "fa4_nothing"], capture_output=True, text=True)
    assert unknown.returncode == 1
    assert "no Blackwell kernel fa4_nothing" in unknown.stderr


# ---- The barrier table at the head of fwd.cu


def barrier_table(source, ctas, tight):
    """{barrier: arrivals} as the comment says them; in a pair those at barriers of the first CTA count twice."""
    rows = re.findall(r"^//     (\w+)\s+((?:\w+ \d+[^>]*?)) +-> +\w+", source, re.MULTILINE)
    twice = re.search(r"at barriers of the first CTA alone \(([\w, ]+)\)\s*(?://)?\s*that count twice", source)
    pair_barriers = twice[1].split(", ") if twice else []
    table = {}
    for name, who in rows:
        who = who if tight else re.sub(r"\(tight: .*?\)", "", who)
        arrivals = sum(int(n) for n in re.findall(r"(?<=\w )(\d+)", who))
        table[name] = arrivals * (ctas if name in pair_barriers else 1)
    return table


def barriers_of_the_code(source, ctas, tight):
    """{barrier: count} as the code initialises them, and {barrier: how many of it there are} as it declares them."""
    code = "\n".join(line for line in source.splitlines() if not line.lstrip().startswith("//"))
    counts = {
        name: eval(count, {"CTAS": ctas, "WARPS": WARPS, "TILES": TILES, "TIGHT": tight})
        for name, count in re.findall(r"mbarrier_init\(shared_address\(&s\.(\w+)(?:\[\w\])?\), ([\w*+ ]+)\)", code)
    }
    declared = {
        name: size or "1"
        for line in re.findall(r"uint64_t ([^;=()*]+);", code)
        for name, size in re.findall(r"(\w+)(?:\[(\w+)\])?", re.sub(r"\s+", " ", line))
        if name in counts
    }
    return counts, declared


@pytest.mark.parametrize("ctas, tight", [(1, False), (1, True), (2, False)])
def test_the_barrier_table_is_what_the_code_initialises(ctas, tight):
    source = (SOURCE / "fwd.cu").read_text()
    table, (code, declared) = barrier_table(source, ctas, tight), barriers_of_the_code(source, ctas, tight)
    assert len(table) == 11
    own = {"v_end": 1}  # the load warp's, of a copy that only it waits for
    assert {**table, **own} == code
    assert declared.keys() == code.keys()
    in_sets = {name: size for name, size in declared.items() if size not in ("STAGES", "TILES")}
    assert in_sets == {"v_end": "1"}


@each_kernel
def test_as_many_barriers_are_initialised_as_declared(kernel, shape):
    numbers, source = shapes()[shape], (SOURCE / "fwd.cu").read_text()
    code, declared = barriers_of_the_code(source, numbers["ctas"], numbers["o_places"] == 0)
    size = {"STAGES": numbers["stages"], "TILES": TILES, "1": 1}
    expected = sorted(code[name] for name, of in declared.items() for _ in range(size[of]))
    text = made(kernel, ".ptx").read_text()
    values = dict(re.findall(r"mov\.b32\s+(%r\d+), (\d+);", text))
    found = re.findall(r"mbarrier\.init[.\w:]* \[%r\d+\], (%r\d+|\d+);", text)
    assert sorted(int(values.get(r, r)) for r in found) == expected


if __name__ == "__main__":
    taken = {name: counts(name) for name, _ in KERNELS}
    kept = {name: {role: n for role, n in ours.items() if role != "pipes"} for name, ours in taken.items()}
    STORED.write_text(json.dumps({"nvcc": nvcc(KERNELS[0][0]), "counts": kept}, indent=1) + "\n")
