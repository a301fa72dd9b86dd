"""Under the sanitizers: neither kernels nor what mutations make of them crash the parser or the machine."""

import os
import pathlib
import subprocess

import numpy
import ptxsim
import pytest
from ptxsim import build
from ptxsim_kernels import manual, ptx
from ptxsim_kernels.bugs import BUGS
from ptxsim_probes.probes import PROBES

SOURCES = pathlib.Path(__file__).parent / "ptxsim_fuzz"
TEXTS = 800


@pytest.fixture(scope="module")
def seeds(tmp_path_factory):
    """Kernels of every kind, in files."""
    folder = tmp_path_factory.mktemp("seeds")
    texts = [PROBES[name].text for name in list(PROBES)[::40]]
    for case in list(BUGS.values())[::10]:
        maps = case.maps(numpy.zeros(16384, numpy.uint32))
        texts.append(ptx.kernel(case.body(True), ["pointer"] * 2 + ["map"] * len(maps), case.target, case.threads))
    for table in manual.TABLES.values():
        lines = [form for _, _, form in manual.forms(table)][::7]
        texts.append(ptx.kernel(manual.DECLARE + "".join(line + ";\n" for line in lines)))
    for i, text in enumerate(texts):
        (folder / f"{i}.ptx").write_text(text)
    return sorted(folder.iterdir())


def built(source, sanitizers):
    try:
        flags = [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", "-O1"]
        return build.program(f"{source}_{sanitizers.replace(',', '_')}", SOURCES / f"{source}.c", flags)
    except build.BuildError as error:
        if any(f"lib{name}" in str(error) for name in ("asan", "ubsan", "tsan")):
            pytest.skip(f"the compiler has no -fsanitize={sanitizers}")
        raise


def run(command):
    environment = {**os.environ, "ASAN_OPTIONS": "allocator_may_return_null=1:detect_leaks=1"}
    result = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=250)
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout


@pytest.mark.parametrize("seed", [1, 2])
def test_mutated_kernels_do_not_crash(seeds, seed):
    fuzzer = built("fuzz", "address,undefined")
    run([fuzzer, str(TEXTS), str(seed), *seeds])


@pytest.mark.parametrize("sanitizers, threads", [("address,undefined", 1), ("thread", 3)])
def test_kernels_that_run(tmp_path, sanitizers, threads):
    """Planted bugs and their twins; with several threads, every fourth and three of it side by side."""
    arguments = []
    for name, case in list(BUGS.items())[:: 4 if threads > 1 else 1]:
        if case.maps(numpy.zeros(16384, numpy.uint32)) or case.options:
            continue
        for fixed in (False, True):
            path = tmp_path / f"{name}_{fixed}.ptx"
            path.write_text(ptx.kernel(case.body(fixed), ["pointer"] * 2, case.target, case.threads))
            grid = case.grid * (3 if threads > 1 else 1)
            arguments += [path, str(grid), str(case.threads), str(case.cluster)]
    findings = run([built("run", sanitizers), str(threads), *arguments]).split()
    assert len(findings) == len(arguments) // 4
    assert sum(map(int, findings)) > 0


NO_PROGRAMS = ["", "\0", "{", ".version 9.0", ".version 9.0\n.target sm_100a\n.entry k(", "\xff" * 50]


@pytest.mark.parametrize("text", NO_PROGRAMS)
def test_what_is_no_program_is_an_error_with_a_line(text):
    with pytest.raises(ValueError, match=r"line|version|target|kernel"):
        ptxsim.Module(text)
