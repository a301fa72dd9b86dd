"""Fault injection: every wait, arrival, fence and commit of the Blackwell forward, removed or bent in its PTX, one at a
time. The simulator must object to each mutant: by a finding, by a deadlock, or by another result.

What nothing objects to must stand in EXPLAINED, with the reason. Of three kernels CI tries some of the mutants,
FA4_SIM_MUTANTS=all all.
"""

import os
import re

import ptxsim
import pytest
import test_blackwell
import torch
from ptxsim import plan
from reference import hashed
from test_blackwell import module, simulate

KERNELS = {  # those with the fewest places in the ring: every wait for one matters. Of how many mutants CI tries one
    "fa4_sm100_fwd_bf16_d128": 1,
    "fa4_sm100_fwd_bf16_d192_v128": 6,
    "fa4_sm100_fwd_bf16_d192_v128_pair": 4,
    "fa4_sm103_fwd_bf16_d128": 8,
}
ALL = os.environ.get("FA4_SIM_MUTANTS") == "all"
PLACE = 16384  # bytes of K or V that the tensor core takes at a time: half of 128 x 128, a third of 128 x 192
SCHEDULES = [("early", 0), ("late", 0), *(("random", seed) for seed in range(4))]

# Of mutants that nothing objects to, "kind: statement and the next two" as a regular expression, and why that is no
# fault.
EXPLAINED = {
    r"tcgen05\.fence::\w+ deleted: \w+\(\);.*(__syncthreads|TMEM_THREADS|tcgen05_dealloc|warp >= WARP_MMA)": """tensor
        memory is given and taken back by instructions that are not asynchronous: the barrier orders them. The manual's
        examples have the fences, so the kernel does.""",
    r"another barrier waited for: mbarrier_wait\(shared_address\(&s\.out_full\[t\]\)": """the correction warps fill
        out_full of tile 1 after that of tile 0.""",
    r"(wait deleted|another barrier waited for): (mbarrier_wait.*sm\.out_empty\[t\]|wait_smem\(free)": """the store warp
        says of both tiles at once that their places are free, which in the tight form are those of Q too.""",
    r"another barrier waited for: if \(TIGHT && at\.stage == 0\) wait_smem": """places become free in their order, and
        the place after that one later.""",
    r"arrivals \+1: mbarrier_init\(shared_address\(&s\.q_empty": """the tight form has no use for it.""",
    r"(wait|fence\.acquire\S*) deleted: .*kv_empty.*V_BYTES": """the place of a tile's first V had the last K of the
        tile before, and Q, loaded before it, waited for that tile's last S.""",
    r"commit deleted: if \(!inside && block == n\.of\[t\]\.begin\).*o_full": """unrolled for tile 0, whose
        first block is never after that of tile 1.""",
    r"commit to CTA . alone: if \(!inside && block == n\.of\[t\]\.begin\).*o_full": """the same.""",
    r"fence\.acquire\S* deleted: auto wait_kv": """of a tile's first K: the wait for Q comes after it, with a fence of
        its own.""",
    r"(wait deleted|parity flipped|another barrier waited for): for \(int (i|t) = 0; .*wait_tmem": """at the end of the
        load warp: the last commit is waited for, and the simulator lets those of a thread arrive in their order. The
        manual does not say that they do.""",
}


FENCE = r"fence\.(proxy|mbarrier_init|acquire)|tcgen05\.fence"


def sites(lines, pattern):
    """Line numbers of the instructions that match."""
    return [i for i, line in enumerate(lines) if re.search(pattern, line)]


def without(lines, i, instead=""):
    return [*lines[:i], instead, *lines[i + 1 :]]


def commit_block(lines, i):
    """First and last line of the braces around an instruction."""
    begin = max(n for n in range(i) if lines[n].strip() == "{")
    end = min(n for n in range(i, len(lines)) if lines[n].strip() == "}")
    return begin, end


def mutants(text):
    """(name, line number, mutated text) for each fault."""
    lines = text.splitlines()

    def made(kind, i, changed):
        return f"{kind}@{i + 1}", i, "\n".join(changed)

    for i in sites(lines, r"mbarrier\.try_wait"):
        yield made("wait deleted", i, without(lines, i, "setp.eq.u32 p, 0, 0;"))
        flipped = re.sub(r", (%r\d+);", r", fa4_parity;", lines[i])
        parity = re.search(r", (%r\d+);", lines[i])[1]
        yield made(
            "parity flipped", i, without(lines, i, f".reg .b32 fa4_parity; xor.b32 fa4_parity, {parity}, 1; {flipped}")
        )
        yield made("another barrier waited for", i, without(lines, i, re.sub(r"\[(%r\d+)\]", r"[\1+8]", lines[i])))
    for i in sites(lines, r"mbarrier\.arrive\.(shared|relaxed|release)"):
        yield made("arrive deleted", i, without(lines, i))
        yield made("arrive twice", i, without(lines, i, lines[i].replace("];", "], 2;")))
    for i in sites(lines, r"mbarrier\.arrive\.expect_tx"):
        bytes_ = re.search(r", (%r\d+);", lines[i])[1]
        for change in (16, -16):
            bent = re.sub(r", %r\d+;", ", fa4_bytes;", lines[i])
            instead = f"{{ .reg .b32 fa4_bytes; add.s32 fa4_bytes, {bytes_}, {change}; {bent} }}"
            yield made(f"expected bytes {change:+}", i, without(lines, i, instead))
        yield made("expect_tx deleted", i, without(lines, i))
    for i in sites(lines, rf"{FENCE}|tcgen05\.wait|bulk\.wait_group|bar\.(sync|arrive) %|barrier\.cluster"):
        yield made(f"{lines[i].split()[0].rstrip(';')} deleted", i, without(lines, i))
    for i in sites(lines, r"tcgen05\.commit"):
        yield made("commit deleted", i, without(lines, i))
        before = [n for n in range(i) if "tcgen05.mma" in lines[n]]
        if before:
            begin, end = commit_block(lines, i)
            mma, _ = commit_block(lines, before[-1])
            address = re.search(r"\[(%r\d+)\]", lines[i])[1]
            made_at = [n for n in range(mma, begin) if re.search(rf"\s{address},", lines[n])]  # its address moves along
            moved = [*(lines[n] for n in made_at), *lines[begin : end + 1]]
            rest = [line for n, line in enumerate(lines[mma:begin], mma) if n not in made_at]
            yield made("commit before its last product", i, [*lines[:mma], *moved, *rest, *lines[end + 1 :]])
    for i in sites(lines, r"tcgen05\.commit.*multicast"):
        for ctas in (1, 2):
            bent = re.sub(r", %rs\d+;", ", fa4_ctas;", lines[i])
            instead = f"{{ .reg .b16 fa4_ctas; mov.b16 fa4_ctas, {ctas}; {bent} }}"
            yield made(f"commit to CTA {ctas - 1} alone", i, without(lines, i, instead))
    for i in sites(lines, r"mbarrier\.arrive\.release\.cluster"):
        yield made("release made relaxed", i, without(lines, i, lines[i].replace("release", "relaxed")))
    for i in sites(lines, r"mapa\."):
        yield made("of the other CTA", i, without(lines, i, re.sub(r", [^,]+;", ", 1;", lines[i])))
    for i in sites(lines, r"mbarrier\.init"):
        count = re.search(r", (%r\d+|\d+);", lines[i])[1]
        bent = re.sub(r", (%r\d+|\d+);", ", fa4_count;", lines[i])
        for change in (1, -1):
            instead = f"{{ .reg .b32 fa4_count; add.s32 fa4_count, {count}, {change}; {bent} }}"
            yield made(f"arrivals {change:+}", i, without(lines, i, instead))
    for i in sites(lines, r"cp\.async\.bulk\.tensor.*\.shared::\w+\.global"):
        place = re.search(r"\[(%r\d+)\]", lines[i])[1]
        bent = lines[i].replace(f"[{place}]", "[fa4_place]", 1)
        instead = f"{{ .reg .b32 fa4_place; add.s32 fa4_place, {place}, {PLACE}; {bent} }}"
        yield made("loaded a place further", i, without(lines, i, instead))
    for i in sites(lines, r"tcgen05\.mma\.")[::8]:
        of_b = re.findall(r", (%rd\d+)", lines[i])[-1]
        bent = lines[i].replace(f", {of_b},", ", fa4_b,")
        instead = f"{{ .reg .b64 fa4_b; add.s64 fa4_b, {of_b}, {PLACE // 16}; {bent} }}"
        yield made("B from a place further", i, without(lines, i, instead))


def inputs(dim, heads, len_q, len_kv, *, batch=1, heads_kv=1, seed=0):
    shapes = (batch, heads, len_q, dim), (batch, heads_kv, len_kv, dim), (batch, heads_kv, len_kv, 128)
    q, k, v = hashed(*shapes, dtype=torch.bfloat16, seed=seed)
    return q, 4 * k, v


def cases(kernel):
    """(q, k, v), the call. More tiles than CTAs, a ring that wraps, a batch that ends inside a block."""
    lengths = torch.tensor([601], dtype=torch.int32)
    if kernel.endswith("pair"):
        yield inputs(192, 1, 900, 900), {"ctas": 2, "len_kv_of": lengths}
        yield inputs(192, 1, 900, 900), {"ctas": 2, "lo": -300, "hi": 200}
        yield inputs(192, 1, 600, 100, batch=2, seed=1), {"ctas": 2}  # one block
        return
    alone, dim = {"ctas": 1, "multiprocessors": 1}, 192 if "_d192_" in kernel else 128
    yield inputs(dim, 3, 300, 700), {**alone, "hi": 420, "lo": 0, "len_kv_of": lengths}  # a tile is half empty
    yield inputs(dim, 1, 600, 100, batch=2, seed=1), alone  # one block
    yield inputs(dim, 2, 256, 500, heads_kv=2, seed=2), alone  # two tiles that have the same blocks


def objection(text, arch, runs):
    """What the simulator has against the kernel; None when it finds it right."""
    mutant = ptxsim.Module(text)
    for schedule, seed in SCHEDULES:
        for tensors, how, expected in runs:
            try:
                out, lse, _ = plan.forward(
                    mutant,
                    *tensors,
                    arch=arch,
                    schedule=schedule,
                    seed=seed,
                    max_steps=400_000,
                    **how,
                )
            except (ptxsim.Finding, AssertionError) as found:
                return f"{schedule} {seed}: {str(found).splitlines()[0]}"
            if not (torch.equal(out, expected[0]) and torch.equal(lse, expected[1])):
                return f"{schedule} {seed}: another result"
    return None


def statement(lines, source, i):
    """The line of fwd.cu that an instruction was made from, and the two after it."""
    for line in reversed(lines[: i + 1]):
        if match := re.search(r"\.loc\s+1 (\d+) |inlined_at 1 (\d+) ", line):
            n = int(match[1] or match[2])
            return " ".join(text.strip() for text in source[n - 1 : n + 2])
    return ""


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_simulator_objects_to_every_fault(kernel, monkeypatch):
    arch = 103 if "_sm103_" in kernel else 100
    monkeypatch.setattr(test_blackwell, "ARCH", arch)
    module(kernel)  # skips when the build has made none
    root = plan.build.CSRC.parent
    text = (root / "build" / "ptx" / f"{kernel}.ptx").read_text()
    lines, source = text.splitlines(), (root / "csrc" / "sm100" / "fwd.cu").read_text().splitlines()
    runs = [(tensors, how, simulate(*tensors, **how)) for tensors, how in cases(kernel)]
    made = list(mutants(text))
    tried, survived = made[:: 1 if ALL else KERNELS[kernel]], []
    for name, i, mutated in tried:
        if objection(mutated, arch, runs) is None:
            survived.append(f"{name.split('@')[0]}: {statement(lines, source, i)}")
    unexplained = [s for s in survived if not any(re.search(pattern, s) for pattern in EXPLAINED)]
    print(f"{len(tried)} mutants, {len(survived)} without an objection:", *survived, sep="\n")
    assert len(made) > 300
    assert len(unexplained) <= len(tried) // 20, "\n".join(unexplained)
