"""Nothing that looks like PTX, or does not, crashes the parser: mutated kernels, under the sanitizers."""

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

FUZZ = pathlib.Path(__file__).parent / "ptxsim_fuzz" / "fuzz.c"
SECONDS = 10


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


@pytest.fixture(scope="module")
def fuzzer():
    try:
        flags = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O1"]
        return build.program("fuzz", FUZZ, flags)
    except build.BuildError as error:
        if "asan" in str(error) or "ubsan" in str(error):
            pytest.skip("the compiler has no sanitizers")
        raise


@pytest.mark.parametrize("seed", [1, 2])
def test_mutated_texts_do_not_crash(fuzzer, seeds, seed):
    command = [fuzzer, str(SECONDS), str(seed), *seeds]
    environment = {**os.environ, "ASAN_OPTIONS": "allocator_may_return_null=1:detect_leaks=1"}
    result = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=200)
    assert result.returncode == 0, result.stderr[-4000:]
    assert int(result.stdout.split()[0]) > 100


NO_PROGRAMS = ["", "\0", "{", ".version 9.0", ".version 9.0\n.target sm_100a\n.entry k(", "\xff" * 50]


@pytest.mark.parametrize("text", NO_PROGRAMS)
def test_what_is_no_program_is_an_error_with_a_line(text):
    with pytest.raises(ValueError, match=r"line|version|target|kernel"):
        ptxsim.Module(text)
