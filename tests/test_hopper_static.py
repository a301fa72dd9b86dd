"""What the machine code of the Hopper kernels must be, whatever compiled it.

wgmma reads the registers of its first operand and writes its result's while it runs, but neither compiler knows that
they are in use until the wait: they may give them to something else, or read them early. A kernel whose code has that
is wrong on the chip, and right in the simulator, which runs PTX.
"""

import functools
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))
import sass  # noqa: E402

CUBINS = sorted((ROOT / "build" / "ptx").glob("fa4_sm90_*.cubin"))
if not CUBINS:
    pytest.skip("the build found no nvcc: there are no kernels", allow_module_level=True)
try:
    sass.disassembler()
except FileNotFoundError as error:
    pytest.skip(str(error), allow_module_level=True)

instructions = functools.cache(sass.instructions)
each_kernel = pytest.mark.parametrize("cubin", CUBINS, ids=lambda path: path.stem.removeprefix("fa4_sm90_fwd_"))


def written(instruction):
    """The registers that an instruction writes."""
    if instruction.opcode.startswith(("ST", "BAR", "SYNCS", "RED", "UTMA")):
        return set()
    first = re.match(r"(?:U?P\w+, )*R(\d+)\b", instruction.text)  # after predicates
    if not first:
        return set()
    width = 2 if ".WIDE" in instruction.opcode else {"64": 2, "128": 4}.get(instruction.opcode.rpartition(".")[2], 1)
    return set(range(int(first[1]), int(first[1]) + width))


def does(instruction):
    """What it does to registers: ("writes", its number), and ("names", its number) of all."""
    named = {int(r) for r in re.findall(r"\bR(\d+)\b", instruction.text)}
    return {("writes", r) for r in written(instruction)} | {("names", r) for r in named}


def forbids(product):
    """What may not be done to registers while a wgmma runs."""
    result, columns = re.match(r"R(\d+),", product.text), re.match(r"HGMMA\.64x(\d+)x16", product.opcode)
    found = {("names", int(result[1]) + r) for r in range(int(columns[1]) // 2)}
    if operand := re.match(r"R\d+, R(\d+), gdesc", product.text):
        found |= {("writes", int(operand[1]) + r) for r in range(4)}
    return found


def disturbing(listing):
    """Instructions that do what a wgmma forbids that began before them, on some way to them, and may still run."""
    at = {i.address: n for n, i in enumerate(listing)}
    found, seen = [], set()
    todo = [(0, (), frozenset())]  # a place; what each group of products forbids, oldest first; the open group
    while todo:
        n, groups, group = todo.pop()
        while n < len(listing) and (n, groups, group) not in seen:
            seen.add((n, groups, group))
            i = listing[n]
            if i.opcode.startswith("HGMMA"):
                group |= forbids(i)
                if "gsb0" in i.text:
                    groups, group = (*groups, group), frozenset()
            elif i.opcode.startswith("WARPGROUP.DEPBAR"):
                pending = int(re.search(r"gsb0, 0x(\d+)", i.text)[1])
                groups = groups[max(0, len(groups) - pending) :]
            elif does(i) & group.union(*groups):
                found.append(i)
            if not i.opcode.startswith("BSSY"):  # which names a place to meet, and does not jump
                todo += [(at[target], groups, group) for target in i.targets]
            if i.leaves:
                break
            n += 1
    return found


@each_kernel
def test_nothing_disturbs_a_running_product(cubin):
    listing = instructions(cubin)
    assert sum(i.opcode.startswith("HGMMA") and ", gdesc" in i.text for i in listing) >= 8
    assert not disturbing(listing)


def test_what_disturbs_is_found():
    def listing(*lines, back_to=0):
        found = [sass.Instruction(16 * n, "", *line.split(" ", 1)) for n, line in enumerate(lines)]
        for i in found:
            i.targets = [16 * back_to] if i.opcode == "BRA" else []
        return found

    first = "HGMMA.64x128x16.F32.BF16 R24, R152, gdesc[UR4].tnspB, R24"
    last = "HGMMA.64x128x16.F32.BF16 R24, R156, gdesc[UR4].tnspB, R24, gsb0"
    wait = "WARPGROUP.DEPBAR.LE gsb0, 0x"
    assert disturbing(listing(first, last, "MUFU.EX2 R155, R8"))
    assert disturbing(listing(first, last, "LDS.128 R150, [R8]"))
    assert disturbing(listing(first, last, wait + "1", "MOV R159, R8"))
    assert disturbing(listing(first, "MOV R152, R8"))
    assert disturbing(listing(first, "SHFL.BFLY PT, R152, R8, 0x1, 0x1f"))
    assert disturbing(listing(first, last, "FADD R8, R8, R87"))
    assert disturbing(listing(first, last, wait + "1", "MOV R24, RZ"))
    assert not disturbing(listing(first, last, "FADD R8, R8, R88"))
    loop = "MOV R156, R8", wait + "0", "MOV R152, R8", first, last, "BRA `(.L_1)"
    assert [i.address for i in disturbing(listing(*loop))] == [0]
    assert not disturbing(listing(*loop, back_to=1))
    assert not disturbing(listing(first, last, "MOV R160, R152", "STS [R152], R8"))
    assert not disturbing(listing(first, last, wait + "0", "MOV R152, R8"))


@each_kernel
def test_instructions(cubin):
    """The tensor cores' and the copies' own, registers handed over, nothing in local memory, and no older tensor core
    instruction."""
    opcodes = {i.opcode.split(".")[0] for i in instructions(cubin)}
    assert opcodes >= {"HGMMA", "UTMALDG", "UTMASTG", "USETMAXREG", "SYNCS", "STSM"}
    assert not opcodes & {"STL", "LDL", "HMMA"}
