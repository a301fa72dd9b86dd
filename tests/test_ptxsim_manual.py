"""The manual's own words: every instruction form that the simulator takes is one that ptxas 13.0 takes for the same
targets, and what it refuses it refuses by name."""

import re

import ptxsim
import pytest
from ptxsim_kernels import assemble
from ptxsim_kernels.manual import ALL, DECLARE, REFUSED, TABLES, WRONG, forms
from ptxsim_kernels.ptx import kernel

needs_ptxas = pytest.mark.skipif(
    (assemble.version() or (0, 0)) < (13, 0), reason="needs ptxas 13.0 or later on PATH to compare with"
)


def program(lines, target):
    return kernel(DECLARE + "\n".join(line + ";" for line in lines), [], target)


@pytest.mark.parametrize("target", ALL)
@pytest.mark.parametrize("table", TABLES)
def test_the_simulator_takes_what_the_table_says(table, target):
    accepted = [form for _, targets, form in forms(TABLES[table]) if target in targets]
    assert ptxsim.unknown(program(accepted, target)) == []


@needs_ptxas
@pytest.mark.parametrize("target", ALL)
@pytest.mark.parametrize("table", TABLES)
def test_ptxas_takes_what_the_table_says(table, target):
    accepted = [form for _, targets, form in forms(TABLES[table]) if target in targets]
    assert assemble.complaint(program(accepted, target), target) == ""


@pytest.mark.parametrize("target", ALL)
@pytest.mark.parametrize("table", TABLES)
def test_both_refuse_the_others_targets(table, target):
    """A sample of each section."""
    for section in {section for section, targets, _ in forms(TABLES[table]) if target not in targets}:
        form = next(f for s, _, f in forms(TABLES[table]) if s == section)
        text = program([form], target)
        assert ptxsim.unknown(text), f"{section}: {form}"
        assert assemble.version() is None or assemble.complaint(text, target), f"{section}: {form}"


@pytest.mark.parametrize("what, target, form", REFUSED, ids=[what for what, _, _ in REFUSED])
def test_refused_by_name(what, target, form):
    text = program([form], target)
    opcode = form.split()[0]
    (line,) = ptxsim.unknown(text)
    assert opcode in line
    with pytest.raises(ValueError, match=re.escape(opcode)):
        ptxsim.Module(text)
    if assemble.version():
        assert assemble.complaint(text, target) == ""


@pytest.mark.parametrize("target, form", WRONG, ids=[form for _, form in WRONG])
def test_wrong_forms_are_refused(target, form):
    text = program([form], target)
    assert ptxsim.unknown(text)
    if assemble.version():
        assert assemble.complaint(text, target)
