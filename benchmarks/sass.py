"""What a thread of each role executes for one block of keys: instructions of the loops, counted from the machine code.

    python benchmarks/sass.py build/ptx/fa4_sm100_fwd_bf16_d128.cubin [...]     # a Markdown table, a column a cubin
    python benchmarks/sass.py --json FILE.cubin

Needs nvdisasm: of the CUDA toolkit, or of the PyPI package nvidia-cuda-nvdisasm. A loop is the region from the target
of a backward branch to the branch; blocks that only spin on an mbarrier stand outside of it and are not counted, so a
wait counts as one that succeeds at the first try. NOP has a row of its own and is not in the total.
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
from dataclasses import dataclass
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


@dataclass
class Instruction:
    address: int
    predicate: str
    opcode: str
    text: str
    target: int | None = None

    @property
    def klass(self) -> str:
        if self.opcode.startswith("IMAD.MOV") or (self.opcode.startswith("IMAD.U32") and ", RZ, RZ," in self.text):
            return "MOV-vec"
        return next((name for name, pattern in CLASSES if re.match(pattern, self.opcode)), "other")


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


def instructions(cubin: str | Path) -> list[Instruction]:
    """The instructions of the cubin's one kernel, in order."""
    text = subprocess.run([disassembler(), "-c", str(cubin)], check=True, capture_output=True, text=True).stdout
    listing: list[Instruction] = []
    labels: dict[str, int] = {}
    waiting: list[str] = []
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            waiting.append(label[1])
        if not (match := re.match(r"\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)(.*?);", line)):
            continue
        address = int(match[1], 16)
        for name in waiting:
            labels[name] = address
        waiting = []
        listing.append(Instruction(address, (match[2] or "").strip(), match[3], match[4].strip()))
    for instruction in listing:
        if target := re.search(r"`\((\.L_x_\d+)\)", instruction.text):
            instruction.target = labels.get(target[1])
    return listing


def loops(listing: list[Instruction]) -> list[list[Instruction]]:
    """The regions of all backward branches, smallest first."""
    regions = []
    for branch in listing:
        if branch.target is not None and branch.target < branch.address:
            regions.append([i for i in listing if branch.target <= i.address <= branch.address])
    return sorted(regions, key=len)


def count(region: list[Instruction]) -> Counter:
    return Counter(i.klass for i in region)


def total(counts: Counter) -> int:
    return sum(n for name, n in counts.items() if name != "NOP")


def without_rescale(region: list[Instruction]) -> list[Instruction]:
    """The region less the parts that a forward branch jumps over and that read tensor memory."""
    skipped: set[int] = set()
    for branch in region:
        if branch.target is not None and branch.target > branch.address:
            over = [i for i in region if branch.address < i.address < branch.target]
            if over and len(over) < len(region) / 2 and sum(i.opcode.startswith("LDTM") for i in over) >= 2:
                skipped |= {i.address for i in over}
    return [i for i in region if i.address not in skipped]


def roles(cubin: str | Path) -> dict[str, Counter]:
    """Counts of the loop of each role, for one block of keys."""
    regions = loops(instructions(cubin))

    def smallest(condition) -> list[Instruction]:
        return next((r for r in regions if condition(count(r))), [])

    softmax = smallest(lambda c: c["LDTM"] == 4 and c["FSETP/FSEL"] < 64 and c["MUFU.EX2"] > 32)
    masked = smallest(lambda c: c["LDTM"] == 4 and c["FSETP/FSEL"] >= 64 and c["MUFU.EX2"] > 32)
    correction = smallest(lambda c: c["STTM"] >= 4 and c["LDS"] > 0 and c["MUFU.EX2"] == 0)
    skipped = without_rescale(correction)
    rescale = [i for i in correction if i not in skipped]
    return {
        "softmax, plain block": count(softmax),
        "softmax, masked block": count(masked),
        "correction, both rescales skipped": count(skipped),
        "correction, one rescale": Counter({name: (n + 1) // 2 for name, n in count(rescale).items()}),
        "mma": count(smallest(lambda c: c["UTCHMMA"] >= 16)),
        "load": count(smallest(lambda c: c["TMA/bulk"] > 0 and c["SYNCS.TRYWAIT"] >= 2)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cubin", nargs="+")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = {Path(cubin).stem: roles(cubin) for cubin in options.cubin}
    if options.json:
        json.dump({k: {role: {**c, "total": total(c)} for role, c in v.items()} for k, v in found.items()}, sys.stdout)
        return
    for role in next(iter(found.values())):
        print(f"\n| {role} | " + " | ".join(found) + " |")
        print("|---" * (len(found) + 1) + "|")
        names = [name for name, _ in CLASSES] + ["other"]
        for name in names:
            row = [v[role][name] for v in found.values()]
            if any(row):
                print(f"| {name} | " + " | ".join(map(str, row)) + " |")
        print("| **total** | " + " | ".join(str(total(v[role])) for v in found.values()) + " |")


if __name__ == "__main__":
    main()
