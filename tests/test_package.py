"""The build and what it makes: symbols, sdist, wheel, moved folders, what is rebuilt."""

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

import flash_attn4
from flash_attn4 import _C

ROOT = Path(__file__).resolve().parent.parent
CHECKOUT = (ROOT / "setup.py").exists() and (ROOT / "csrc").exists()
needs_checkout = pytest.mark.skipif(not CHECKOUT, reason="needs the source tree")
needs_readelf = pytest.mark.skipif(not shutil.which("readelf"), reason="readelf is not installed")

# The newest symbol versions that the library may need: those of manylinux_2_28, and of libgcc no helper of _Float16.
# Built on Debian 12 it needs GLIBC 2.16, GLIBCXX 3.4.21 and GCC 3.0.
NEWEST_GLIBC = (2, 28)
NEWEST_GLIBCXX = (3, 4, 24)
NEWEST_LIBGCC = (4, 3, 0)


def readelf(*options):
    return subprocess.run(["readelf", "-W", *options, _C.__file__], capture_output=True, text=True, check=True).stdout


@needs_readelf
def test_nothing_of_torch_but_its_stable_c_shims_is_needed():
    out = subprocess.run(
        ["readelf", "-W", "--dyn-syms", _C.__file__], capture_output=True, text=True, check=True
    ).stdout
    names = [line.split()[7].split("@")[0] for line in out.splitlines() if " UND " in line and len(line.split()) > 7]
    assert names
    mangled = [name for name in names if re.match(r"_ZN?K?\d*(2at|3c10|5torch)", name)]
    assert not mangled
    shims = [name for name in names if name.startswith(("aoti_torch_", "torch_"))]
    assert 20 < len(shims) < 80
    assert not [name for name in names if name.startswith(("__extendhf", "__truncsf", "__truncdf", "__extendbf"))]


@needs_readelf
def test_only_the_module_is_exported():
    out = readelf("--dyn-syms")
    defined = [line.split()[7] for line in out.splitlines() if re.search(r"GLOBAL|WEAK", line) and " UND " not in line]
    ours = [name for name in defined if "fa4" in name or name.startswith("PyInit")]
    assert ours == ["PyInit__C"]


@needs_readelf
def test_libraries_and_the_newest_symbols_are_old_enough():
    needed = set(re.findall(r"NEEDED.*\[(.*)\]", readelf("--dynamic")))
    assert "libstdc++.so.6" in needed, "a second C++ runtime: exceptions would crash"
    allowed = r"lib(torch|torch_cpu|c10|stdc\+\+|m|gcc_s|c|pthread|python[\d.]+)\.so|ld-linux"
    assert not [name for name in needed if not re.match(allowed, name)]
    versions = readelf("--version-info")

    def newest(library):
        found = re.findall(rf"Name: {library}_([\d.]+)\b", versions)
        return max(tuple(map(int, version.split("."))) for version in found)

    assert newest("GLIBC") <= NEWEST_GLIBC
    assert newest("GLIBCXX") <= NEWEST_GLIBCXX
    assert newest("GCC") <= NEWEST_LIBGCC


def test_the_module_is_abi3_and_the_version_is_one():
    assert _C.__file__.endswith(".abi3.so")
    assert re.fullmatch(r"\d+\.\d+\.\d+", flash_attn4.__version__)


def test_a_build_for_cpu_only_torch_has_no_cuda_module():
    if torch.version.cuda:
        pytest.skip("torch has CUDA")
    assert not list(Path(_C.__file__).parent.glob("_C_cuda*"))


# ---- building


ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "CFLAGS")}


def build(folder, *command, **environment):
    """setup.py in a folder, quickly: what it returned and said."""
    environment = ENVIRONMENT | {"MAX_JOBS": "2", "CFLAGS": "-O0 -g0", "FA4_CUDA": "0"} | environment
    done = subprocess.run(
        [sys.executable, "setup.py", *command], cwd=folder, env=environment, capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr


def compiled(said):
    return re.findall(r"^\[\d+/\d+\] (\w+)$", said, re.MULTILINE)


def works(folder):
    program = "import torch, flash_attn4; q = torch.ones(1, 1, 2, 8); print(torch.ops.fa4.fwd(q, q, q)[0].sum().item())"
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True)
    return done.stdout.strip() == "16.0" or done.stderr


@pytest.fixture
def setup(monkeypatch):
    """setup.py as a module."""
    spec = importlib.util.spec_from_file_location("fa4_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "fa4_setup", module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """An unpacked sdist, made and unpacked without git, and built in place."""
    if not CHECKOUT:
        pytest.skip("needs the source tree")
    if not (shutil.which("c++") or os.environ.get("CXX")):
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("source")
    copy = folder / "copy"
    skipped = shutil.ignore_patterns(
        ".git", "build", "*.so", "__pycache__", ".venv", "*.egg-info", "_build", ".hypothesis"
    )
    shutil.copytree(ROOT, copy, ignore=skipped)
    if not (copy / "README.md").exists():
        (copy / "README.md").write_text("")
    code, said = build(copy, "-q", "sdist", "--dist-dir", str(folder))
    assert code == 0, said
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        if hasattr(tarfile, "data_filter"):
            tar.extractall(folder, filter="data")
        else:
            tar.extractall(folder)
    (unpacked,) = (path for path in folder.iterdir() if path.is_dir() and path != copy)
    code, said = build(unpacked, "build_ext", "--inplace")
    assert code == 0, said
    return unpacked, said


def test_an_sdist_builds_without_git(source):
    folder, said = source
    assert {"dispatch", "cpuid"} <= set(compiled(said))
    assert works(folder) is True
    assert folder.name == f"torch_fa4-{flash_attn4.__version__}"


def test_only_what_changed_is_built_again(source):
    folder, _ = source
    assert compiled(build(folder, "build_ext", "--inplace")[1]) == []
    os.utime(folder / "csrc/dispatch.c")
    assert compiled(build(folder, "build_ext", "--inplace")[1]) == ["dispatch"]


@needs_checkout
def test_what_makes_an_object_out_of_date(tmp_path, monkeypatch, setup):
    monkeypatch.chdir(tmp_path)
    Path("one.h").write_text("enum { ONE = 1 };\n")
    Path("one.c").write_text('#include "one.h"\nint one(void) { return ONE; }\n')
    unit = setup.Unit("one", [*setup.c_compiler(), "-c", "one.c"], Path("objects/one.o"))
    assert not unit.is_current()
    unit.compile()
    assert unit.is_current()
    assert not setup.Unit("one", [*unit.command, "-O1"], unit.object).is_current(), "other flags"
    os.utime("one.h", (2**31, 2**31))
    assert not unit.is_current(), "a newer header"
    os.utime("one.h", (0, 0))
    assert unit.is_current()
    Path("one.h").rename("other.h")
    assert not unit.is_current(), "a header that is gone"
    Path("one.c").write_text("no C")
    with pytest.raises(SystemExit, match="one failed to compile"):
        unit.compile()
    assert not unit.is_current(), "after a failure"


@needs_checkout
def test_uc_131_the_number_of_jobs_follows_memory_and_max_jobs(monkeypatch, setup):
    monkeypatch.setenv("MAX_JOBS", "7")
    assert setup.jobs() == 7
    monkeypatch.delenv("MAX_JOBS")
    assert 1 <= setup.jobs() <= os.cpu_count()
    monkeypatch.setattr(setup, "MEMORY_PER_JOB", 1 << 60)
    assert setup.jobs() == 1


@needs_checkout
def test_uc_132_without_nvcc_the_rest_is_built_and_a_line_says_so(monkeypatch, capsys, setup):
    monkeypatch.delenv("FA4_CUDA", raising=False)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(setup.shutil, "which", lambda name: None)
    assert setup.cuda_units(Path("objects")) == ([], None)
    assert "no nvcc found" in capsys.readouterr().out


def test_the_wheel_is_one_abi3_file_without_tests(source):
    folder, _ = source
    code, said = build(folder, "-q", "bdist_wheel")
    assert code == 0, said
    (wheel,) = (folder / "dist").glob("*.whl")
    assert re.fullmatch(rf"torch_fa4-{re.escape(flash_attn4.__version__)}-cp310-abi3-linux_\w+\.whl", wheel.name)
    names = zipfile.ZipFile(wheel).namelist()
    assert "flash_attn4/_C.abi3.so" in names
    assert not [name for name in names if "test" in name or "csrc" in name]
    metadata = zipfile.ZipFile(wheel).read(next(name for name in names if name.endswith("METADATA"))).decode()
    assert "License-Expression: BSD-3-Clause" in metadata
    assert "Requires-Python: >=3.10" in metadata
    assert "Requires-Dist: torch>=2.10" in metadata


def test_a_build_that_moved_works_and_rebuilds(source, tmp_path):
    folder, _ = source
    moved = tmp_path / "moved here"
    shutil.copytree(folder, moved)
    assert works(moved) is True
    code, said = build(moved, "build_ext", "--inplace")
    assert code == 0, said
    assert compiled(said) == [], "paths of the old place must not matter"
    assert works(moved) is True


def test_errors_of_the_build_say_what_to_do(source, tmp_path):
    folder, _ = source
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    with (broken / "csrc/dispatch.c").open("a") as file:
        file.write("this is no C\n")
    code, said = build(broken, "build_ext", "--inplace")
    assert code != 0
    assert "dispatch failed to compile" in said
    killer = broken / "killed"
    killer.write_text('#!/bin/sh\ncase "$*" in *dumpmachine*) exec cc "$@";; esac\nkill -9 $$\n')
    killer.chmod(0o755)
    code, said = build(broken, "build_ext", "--inplace", CC=str(killer))
    assert code != 0
    assert "MAX_JOBS=1" in said


@needs_checkout
def test_kept_ptx_is_what_the_kernel_is_named_for():
    files = sorted((ROOT / "build/ptx").glob("*.ptx"))
    if not files:
        pytest.skip("no CUDA kernels were built")
    for file in files:
        assert f".entry {file.stem}" in file.read_text()
        assert file.with_suffix(".log").exists()
        (keep,) = (ROOT / "build").glob(f"temp*/kernels/{file.stem}.keep")
        (assembled,) = keep.glob("*.ptx")
        assert hashlib.sha256(assembled.read_bytes()).digest() == hashlib.sha256(file.read_bytes()).digest()
