"""What a thread of each role of the Blackwell forward executes for one block of keys, counted from the machine code.

    python benchmarks/sass.py build/ptx/fa4_sm100_fwd_bf16_d128.cubin [...]     # Markdown tables, a column a cubin
    python benchmarks/sass.py --json FILE.cubin

Reads cubins of sm_100 and its family (sm_103 too), of this kernel. Needs nvdisasm: of the CUDA toolkit, or of the PyPI
package nvidia-cuda-nvdisasm.

Counted is a path through a role's loop, from the target of a backward branch to that branch. Blocks that only spin on
an mbarrier stand outside of it: a wait counts as one that succeeds at the first try. In a masked block each warp looks
at what its 32 rows see of the four fragments of 32 keys: "one fragment cut" is the longest path of a block on the
diagonal (the other fragments are seen whole, or skipped where they are not seen), "all cut" the longest of all. NOP has
a row of its own and is not in the total; nor are spills of uniform registers, which are moves and counted there.

The last table has the cycles of each pipe of one of the four parts of a multiprocessor for a step of 256 queries by 128
keys, beside those of the tensor core: two softmax warps and a correction warp; of the issue slots the MMA warp's too.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

# Class, and what opcodes it has. The first that matches counts.
CLASSES = [
    ("MUFU.EX2", r"MUFU\.EX2"),
    ("FFMA2", r"FFMA2"),
    ("FADD2", r"FADD2"),
    ("FMUL2", r"FMUL2"),
    ("FFMA/FADD/FMUL", r"(FFMA|FADD|FMUL)(\.|$)"),
    ("FMNMX3", r"FMNMX3"),
    ("FMNMX", r"FMNMX"),
    ("FSETP/FSEL", r"FSETP|FSEL"),
    ("F2FP", r"F2FP"),
    ("LDTM", r"LDTM"),
    ("STTM", r"STTM"),
    ("LDS", r"LDS"),
    ("STS", r"STS"),
    ("NOP", r"NOP"),
    ("ISETP/PLOP3/ELECT/VOTE", r"U?ISETP|U?PLOP3|ELECT|VOTE"),
    ("UMOV", r"UMOV"),
    ("R2UR", r"R2UR"),
    ("UTCHMMA", r"UTC.*MMA"),
    ("UTCBAR", r"UTCBAR"),
    ("TMA/bulk", r"UTMA|UBLK"),
    ("SYNCS.TRYWAIT", r"SYNCS\.PHASECHK"),
    ("SYNCS.ARRIVE", r"SYNCS"),
    ("BAR", r"BAR"),
    ("FENCE/MEMBAR/DEPBAR/WARPSYNC", r"FENCE|MEMBAR|DEPBAR|WARPSYNC|ERRBAR|CCTL"),
    ("BRA", r"BRA|BSSY|BSYNC|EXIT|RET|CALL|JMP|BREAK"),
    ("S2R/S2UR/LDC/LDCU", r"S2R|S2UR|CS2R|LDCU?(\.|$)|UCS2R"),
    ("MOV-vec", r"MOV|PRMT"),
    ("U-int", r"U[A-Z]"),
    (
        "int/logic (vec)",
        r"IADD|IMAD|LEA|LOP|SHF|SEL|R2P|P2R|VIADD|VIMNMX|IMNMX|IABS|SGXT|BMSK|POPC|FLO|I2F|F2I|I2I|SHFL",
    ),
]
NOT_IN_TOTAL = ("NOP", "UR spill/fill")

# Cycles that an instruction of a warp takes of a pipe of its part of a multiprocessor. What is not here takes of none,
# but an issue slot.
PIPES = {
    "FMA": [(r"FFMA2|FADD2|FMUL2|IMAD", 2), (r"(FFMA|FADD|FMUL)(\.|$)", 1)],
    "ALU": [(r"FMNMX|FSETP|FSEL|F2FP|IADD|LEA|LOP|SHF|SEL|R2P|P2R|VIADD|VIMNMX|ISETP|PLOP3|MOV|PRMT|CS2R", 2)],
    "MUFU of B200": [(r"MUFU", 8)],
    "MUFU of B300": [(r"MUFU", 4)],
}
MMA_FLOP_PER_CYCLE = 8192


@dataclass
class Instruction:
    address: int
    predicate: str
    opcode: str
    text: str
    targets: list[int] = field(default_factory=list)

    @property
    def klass(self) -> str:
        if self.opcode.startswith("IMAD.MOV") or (self.opcode.startswith("IMAD.U32") and ", RZ, RZ," in self.text):
            return "MOV-vec"
        return next((name for name, pattern in CLASSES if re.match(pattern, self.opcode)), "other")

    @property
    def leaves(self) -> bool:
        """Whether what follows is not reached."""
        always = not self.predicate and ("UP" not in self.text.split("`")[0] if self.opcode == "BRA.U" else True)
        return always and bool(re.match(r"(BRA|BRX|EXIT|RET|JMP)", self.opcode)) and not re.match(r"U?P\d", self.text)

    @property
    def jump(self) -> int | None:
        return self.targets[0] if self.targets and self.opcode.startswith("BRA") else None


BLACKWELL = (100, 103)


def disassembler() -> str:
    """The path of nvdisasm."""
    found = shutil.which("nvdisasm")
    if found:
        return found
    for package in ("nvidia.cu13", "nvidia"):
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            continue
        for folder in spec.submodule_search_locations if spec else ():
            for path in Path(folder).rglob("nvdisasm"):
                return str(path)
    raise FileNotFoundError("no nvdisasm: install the CUDA toolkit, or pip install nvidia-cuda-nvdisasm")


def instructions(cubin: str | Path, chips: tuple[int, ...] = (90, *BLACKWELL)) -> list[Instruction]:
    """The instructions of the cubin's one kernel, in order; of another chip than these: ValueError."""
    if not Path(cubin).is_file():
        raise ValueError(f"{cubin}: no such file; the build leaves the kernels' cubins in build/ptx")
    done = subprocess.run([disassembler(), "-c", str(cubin)], capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"{cubin}: nvdisasm cannot read it: {done.stderr.strip()}")
    target = re.search(r"\.target\s+(sm_(\d+)\w*)", done.stdout)
    if not target or int(target[2]) not in chips:
        names = " and ".join(f"sm_{chip}" for chip in chips)
        raise ValueError(f"{cubin}: is of {target[1] if target else 'no GPU'}, and this reads {names} only")
    listing: list[Instruction] = []
    labels: dict[str, int] = {}
    waiting: list[str] = []
    for line in done.stdout.splitlines():
        if label := re.match(r"\s*([.$][\w$.]+):", line):
            waiting.append(label[1])
        if not (match := re.match(r"\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)(.*)", line)):
            continue
        address = int(match[1], 16)
        labels.update(dict.fromkeys(waiting, address))
        waiting = []
        listing.append(Instruction(address, (match[2] or "").strip(), match[3], match[4].split("/*")[0].strip(" ;")))
    for instruction in listing:
        names = re.findall(r"`\(([.$][\w$.]+)\)", instruction.text)
        if several := re.search(r'BRANCH_TARGETS ([^"]*)"', instruction.text):
            names += several[1].split(",")
        instruction.targets = [labels[name] for name in names if name in labels]
    return listing


def loops(listing: list[Instruction]) -> list[list[Instruction]]:
    """The regions of all backward branches, smallest first."""
    regions = []
    for branch in listing:
        if branch.jump is not None and branch.jump < branch.address:
            regions.append([i for i in listing if branch.jump <= i.address <= branch.address])
    return sorted(regions, key=len)


def count(region: list[Instruction]) -> Counter:
    counts = Counter(i.klass for i in region)
    counts["UR spill/fill"] = sum(bool(re.match(r"MOV\.SPILL|R2UR\.FILL", i.opcode)) for i in region)
    return counts


def total(counts: Counter) -> int:
    return sum(n for name, n in counts.items() if name not in NOT_IN_TOTAL)


def hides(over: list[Instruction]) -> bool:
    """Whether a branch jumps over what is done with a fragment only where it is cut."""
    skipped = count(over)
    asks = any(i.jump is not None and not i.leaves for i in over)  # as what is done with one that is seen does
    return skipped["FSETP/FSEL"] >= 24 and not skipped["MUFU.EX2"] and not asks


def rescales(over: list[Instruction]) -> bool:
    """Whether a branch jumps over what multiplies O."""
    skipped = count(over)
    return skipped["FMUL2"] > 0 and skipped["LDTM"] > 0 and skipped["BAR"] == 0


def path(region: list[Instruction], cut: int = 4, rescaled: int = 2) -> list[Instruction]:
    """The instructions of a loop that are executed when all fragments are seen, this many of them in part, and this
    many tiles are rescaled."""
    at = {i.address: n for n, i in enumerate(region)}
    executed, n = [], 0
    while n < len(region):
        instruction = region[n]
        executed.append(instruction)
        n += 1
        if instruction.jump is None or instruction.jump <= instruction.address or instruction.jump not in at:
            continue
        after = at[instruction.jump]
        over = region[n:after]
        if instruction.leaves:
            n = after
        elif hides(over):
            n, cut = (n, cut - 1) if cut else (after, 0)
        elif rescales(over):
            n, rescaled = (n, rescaled - 1) if rescaled else (after, 0)
    return executed


def rescale(region: list[Instruction]) -> list[Instruction]:
    """What one executed rescale adds."""
    for n, branch in enumerate(region):
        over = [i for i in region[n + 1 :] if branch.jump is not None and i.address < branch.jump]
        if branch.jump in {i.address for i in region} and rescales(over):
            return over
    return []


def roles(cubin: str | Path, listing: list[Instruction] | None = None) -> dict[str, Counter]:
    """Counts of the loop of each role, for one block of keys. listing: the cubin's instructions, if they are there."""
    regions = loops(listing or instructions(cubin, BLACKWELL))

    def smallest(what, condition) -> list[Instruction]:
        found = next((r for r in regions if condition(count(r))), None)
        if found is None:
            raise ValueError(f"{cubin}: has no loop of {what}: it is not the Blackwell forward")
        return found

    softmax = smallest("softmax", lambda c: c["LDTM"] == 4 and c["FSETP/FSEL"] < 64 and c["MUFU.EX2"] > 32)
    masked = smallest("softmax", lambda c: c["LDTM"] == 4 and c["FSETP/FSEL"] >= 64 and c["MUFU.EX2"] > 32)
    correction = smallest("correction", lambda c: c["BAR"] == c["LDS"] == 2 and c["STTM"] >= 4 and not c["MUFU.EX2"])
    return {
        "softmax, plain block": count(path(softmax)),
        "softmax, masked block, one fragment cut": count(path(masked, cut=1)),
        "softmax, masked block, all cut": count(path(masked)),
        "correction, both rescales skipped": count(path(correction, rescaled=0)),
        "correction, one executed rescale": count(rescale(correction)),
        "mma": count(path(smallest("products", lambda c: c["UTCHMMA"] >= 16))),
        "load": count(path(smallest("copies", lambda c: c["TMA/bulk"] > 0 and c["SYNCS.TRYWAIT"] >= 2))),
    }


def pipes(cubin: str | Path, listing: list[Instruction] | None = None) -> dict[str, int]:
    """Cycles of each pipe for a step of 256 queries by 128 keys, without a mask and without a rescale."""
    regions = loops(listing or instructions(cubin, BLACKWELL))
    softmax = path(next(r for r in regions if count(r)["LDTM"] == 4 and 32 < count(r)["MUFU.EX2"]))
    correction = path(next(r for r in regions if count(r)["BAR"] == count(r)["LDS"] == 2), rescaled=0)
    mma = path(next(r for r in regions if count(r)["UTCHMMA"] >= 16))
    executed = [*softmax, *softmax, *correction]

    def cycles(rates) -> int:
        return sum(next((n for pattern, n in rates if re.match(pattern, i.opcode)), 0) for i in executed)

    taken = {name: cycles(rates) for name, rates in PIPES.items()}
    taken["issue"] = total(count(executed))
    taken["issue, beside the MMA warp"] = taken["issue"] + total(count(mma))
    if dims := re.search(r"_d(\d+)(?:_v(\d+))?", Path(cubin).stem):
        dim, dim_v = int(dims[1]), int(dims[2] or dims[1])
        taken["tensor core"] = 2 * 256 * 128 * (dim + dim_v) // MMA_FLOP_PER_CYCLE
    return taken


def table(title: str, names: list[str], columns: dict[str, dict[str, int]]) -> None:
    print(f"\n| {title} | " + " | ".join(columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for name in names:
        row = [column.get(name, 0) for column in columns.values()]
        if any(row):
            print(f"| {name} | " + " | ".join(map(str, row)) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cubin", nargs="+")
    parser.add_argument("--json", action="store_true", help="the counts as JSON")
    options = parser.parse_args()
    try:
        listings = {cubin: instructions(cubin, BLACKWELL) for cubin in options.cubin}
        found = {Path(cubin).stem: roles(cubin, listing) for cubin, listing in listings.items()}
        cycles = {Path(cubin).stem: pipes(cubin, listing) for cubin, listing in listings.items()}
    except (ValueError, FileNotFoundError) as error:
        raise SystemExit(f"sass.py: {error}") from None
    if options.json:
        counts = {k: {role: {**c, "total": total(c)} for role, c in v.items()} for k, v in found.items()}
        json.dump({k: {**v, "pipes": cycles[k]} for k, v in counts.items()}, sys.stdout)
        return
    for role in next(iter(found.values())):
        columns = {k: {**v[role], "**total**": total(v[role])} for k, v in found.items()}
        table(role, [*(name for name, _ in CLASSES), "other", "UR spill/fill", "**total**"], columns)
    table("cycles of a 256 x 128 step", [*next(iter(cycles.values()))], cycles)


if __name__ == "__main__":
    main()
