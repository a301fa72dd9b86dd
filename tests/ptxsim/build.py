"""Compiles the simulator, when it is imported for the first time or a source has changed, into _build/."""

import concurrent.futures
import contextlib
import fcntl
import hashlib
import os
import pathlib
import shlex
import shutil
import subprocess
import sysconfig

HERE = pathlib.Path(__file__).resolve().parent
OUTPUT = HERE / "_build"
JOBS = 2
# Strict floating point: the simulator's results are compared bit for bit.
FLAGS = ["-O2", "-g1", "-fPIC", "-pthread", "-ffp-contract=off", "-fno-fast-math", "-Wall", "-Wextra"]
C_SOURCES = sorted(HERE.glob("*.c"))
CSRC = HERE.parents[1] / "csrc"


class BuildError(RuntimeError):
    """A compiler failed; the message is what it printed."""


def compiler(variable, *names):
    """The command in the environment variable (CC, CXX), or the first of names that exists."""
    given = os.environ.get(variable)
    if given:
        return shlex.split(given)
    for name in names:
        if shutil.which(name):
            return [name]
    raise BuildError(f"no compiler: none of {', '.join(names)} is on PATH and {variable} is not set")


def run(command):
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    if result.returncode:
        raise BuildError(shlex.join(map(str, command)) + "\n" + result.stderr)


@contextlib.contextmanager
def lock():
    """One build at a time, also among processes."""
    OUTPUT.mkdir(exist_ok=True)
    with open(OUTPUT / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def headers():
    """What every object depends on."""
    return list(HERE.glob("*.h"))


def plan_headers():
    return [*HERE.glob("*.h"), *(path for suffix in ("h", "def") for path in CSRC.rglob(f"*.{suffix}"))]


def is_fresh(target, sources):
    return target.exists() and target.stat().st_mtime_ns >= max(path.stat().st_mtime_ns for path in sources)


def build(target, sources, flags, link_flags=(), headers=headers):
    """target from C and C++ sources: compiles what has changed, links when anything was compiled."""
    c, cxx = (
        [*compiler("CC", "cc", "gcc", "clang"), "-std=c11"],
        [*compiler("CXX", "c++", "g++", "clang++"), "-std=c++17"],
    )
    # Objects of other flags (a sanitizer's) live beside these, under other names.
    key = hashlib.sha256(" ".join([*c, *cxx, *flags]).encode()).hexdigest()[:8]

    def compile_one(source):
        item = OUTPUT / f"{source.parent.name}_{source.stem}.{key}.o"
        if is_fresh(item, [source, *headers()]):
            return item, False
        language = cxx if source.suffix == ".cpp" else c
        partial = item.with_suffix(".partial.o")
        run([*language, *flags, "-c", source, "-o", partial])
        partial.replace(item)
        return item, True

    with concurrent.futures.ThreadPoolExecutor(JOBS) as pool:
        results = list(pool.map(compile_one, sources))
    objects = [item for item, _ in results]
    if any(compiled for _, compiled in results) or not is_fresh(target, objects):
        partial = target.with_suffix(".partial")
        run([*cxx, *flags, *link_flags, *objects, "-o", partial, "-lm"])
        partial.replace(target)
    return target


EXTENSION = sysconfig.get_config_var("EXT_SUFFIX")


def module_flags():
    import pybind11

    return [f"-I{pybind11.get_include()}", f"-I{sysconfig.get_path('include')}", "-fvisibility=hidden"]


def module():
    """The extension module _ptxsim for this interpreter."""
    with lock():
        flags = [*FLAGS, *module_flags()]
        return build(OUTPUT / f"_ptxsim{EXTENSION}", [*C_SOURCES, HERE / "module.cpp"], flags, ["-shared"])


def plan_module():
    """The extension module _fa4plan: the C API's plans of forward calls, without any kernel."""
    sources = [CSRC / path for path in ("dispatch.c", "cpu/cpuid.c", "cuda/maps.c", "cuda/tiles.c")]
    sources += sorted(CSRC.glob("*/plan.c"))
    weak = ["-DFA4_CUDA", f"-I{CSRC}", f"-include{CSRC / 'verify' / 'no_cpu.h'}"]
    with lock():
        flags = [*FLAGS, *weak, *module_flags()]
        return build(OUTPUT / f"_fa4plan{EXTENSION}", [*sources, HERE / "plan.cpp"], flags, ["-shared"], plan_headers)


def program(name, main, flags):
    """An executable of the simulator's C files and one more with main, compiled with extra flags (sanitizers)."""
    with lock():
        return build(OUTPUT / name, [*C_SOURCES, main], [*FLAGS, f"-I{HERE}", *flags])
