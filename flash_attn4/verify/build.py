"""The library that verify runs: the host code as it ships, the kernels with bounded waits, the probes. From the source
tree, by setup.py's own commands, into a folder of its own."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

WAIT_NANOSECONDS = 2_000_000_000


class Missing(Exception):
    """What verify needs and does not find, as a sentence."""


def source_folder(given: str | None = None) -> Path:
    root = Path(given).resolve() if given else Path(__file__).resolve().parents[2]
    for needed in ("setup.py", "csrc/variants.def", "csrc/verify/kernels.def"):
        if not (root / needed).exists():
            raise Missing(
                f"no source: {root} has no {needed}. verify compiles kernels, so it needs a checkout or an unpacked "
                "sdist of torch-fa4: run it there, or name the folder by --source"
            )
    return root


def fits(arch: str, capability: int) -> bool:
    """Whether code for sm_<arch> runs on that chip: 90a on its own, 100f on its family."""
    base = int(arch.rstrip("af"))
    if arch.endswith("f"):
        return base // 10 == capability // 10 and base <= capability
    return base == capability


@contextlib.contextmanager
def inside(root: Path):
    """setup.py's commands take paths from its folder."""
    before, environment = Path.cwd(), dict(os.environ)
    os.chdir(root)
    os.environ.pop("FA4_CUDA", None)
    os.environ.pop("FA4_ARCHS", None)
    try:
        yield
    finally:
        os.chdir(before)
        os.environ.clear()
        os.environ.update(environment)


def setup_of(root: Path):
    """setup.py as a module."""
    spec = importlib.util.spec_from_file_location("fa4_setup", root / "setup.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["fa4_setup"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def entries(root: Path, file: str) -> list[tuple[str, list[str], str, str]]:
    """name, architectures, source and flags of the kernels that csrc/<file> lists."""
    line = re.compile(r'^FA4_CUDA_KERNEL\(([^,]+), ([^,]+), ([^,]+), "(.*)"\)$', re.MULTILINE)
    return [
        (name, archs.split(), source, flags)
        for name, archs, source, flags in line.findall((root / "csrc" / file).read_text())
    ]


def kernels(root: Path, capability: int) -> dict[str, str]:
    """Source of each of the forward's kernels that the chip can run."""
    listed = entries(root, "variants.def")
    return {name: source for name, archs, source, _ in listed if any(fits(a, capability) for a in archs)}


def best_kernels(root: Path, capability: int) -> set[str]:
    """Those that were compiled for the nearest chip: what others of the family have may be there for these alone."""
    listed = [(name, a) for name, archs, _, _ in entries(root, "variants.def") for a in archs if fits(a, capability)]
    nearest = max(arch.rstrip("af") for _, arch in listed)
    return {name for name, arch in listed if arch.rstrip("af") == nearest}


def nvcc_version(root: Path) -> str:
    """The line of nvcc --version that says it."""
    with inside(root):
        nvcc = toolkit_of(setup_of(root)).nvcc
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    return next((line for line in said.splitlines() if "release" in line), said.strip())


def probe_unit(source: str) -> str:
    """The name of what a file of probes is compiled to."""
    return f"fa4_probe_{Path(source).stem}"


def probe_units(root: Path, setup, toolkit, capability: int, folder: Path, flags=()):
    """A unit for each file of probes, with its PTX kept."""
    found = {}
    for _, archs, source, _ in entries(root, "verify/kernels.def"):
        arch = next((a for a in archs if fits(a, capability)), None)
        if arch is None or source in found:
            continue
        name = probe_unit(source)
        command = [
            toolkit.nvcc,
            "-std=c++17",
            "-O3",
            "-lineinfo",
            "-Xcompiler",
            "-fPIC",
            f"-DFA4_KERNEL={name}",
            *flags,
        ]
        command += [f"-gencode=arch=compute_{arch},code=sm_{arch}", "-c", f"csrc/{source}"]
        found[source] = setup.Unit(name, command, folder / f"{name}.o", folder / "ptx" / f"{name}.ptx")
    return list(found.values())


def toolkit_of(setup):
    toolkit = setup.Toolkit.find()
    if not toolkit:
        raise Missing("no nvcc: install the CUDA toolkit (12.9 or newer for Blackwell) and put nvcc on the PATH")
    return toolkit


def host_units(setup, cuda_units, folder: Path):
    """The host code as it ships, and what verify calls it through."""
    extra = ["-include", "csrc/verify/no_cpu.h", '-DFA4_KERNELS="../verify/kernels.def"']
    shipped = [unit for unit in cuda_units if not unit.ptx]
    units = [setup.Unit(unit.name, [*unit.command, *extra], unit.object) for unit in shipped]
    dispatch = next(unit.command for unit in units if "csrc/dispatch.c" in unit.command)
    for source in ("csrc/verify/verify.c", "csrc/cpu/cpuid.c"):
        command = [source if word == "csrc/dispatch.c" else word for word in dispatch]
        units.append(setup.Unit(Path(source).stem, command, folder / f"{Path(source).stem}.o"))
    return units


def link(linker: list[str], units, library: Path) -> Path:
    objects = [str(unit.object) for unit in units]
    if library.exists() and library.stat().st_mtime >= max(os.stat(o).st_mtime for o in objects):
        return library
    partial = library.with_suffix(".partial")
    command = [*linker, "-shared", "-o", str(partial), *objects]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    partial.replace(library)
    return library


def build(root: Path, capability: int, folder: Path | None = None) -> Path:
    """The library for that chip."""
    try:
        return compile_library(root, capability, folder)
    except SystemExit as error:  # how setup.py ends
        raise Missing(f"the library cannot be compiled: {error}") from error
    except OSError as error:
        raise Missing(
            f"the library that verify runs cannot be written: {error}; --build names another folder"
        ) from error


def compile_library(root: Path, capability: int, folder: Path | None) -> Path:
    folder = (folder or root / "build" / "verify").resolve() / f"sm_{capability}"
    bounded = f"-DFA4_BOUNDED_WAITS={WAIT_NANOSECONDS}u"
    with inside(root):
        setup = setup_of(root)
        wanted = kernels(root, capability)
        listed = {arch for _, archs, _, _ in entries(root, "variants.def") for arch in archs}
        if not wanted:
            raise Missing(
                f"no kernels for compute capability {capability / 10}: "
                f"there are some for sm_{', sm_'.join(sorted(listed))}"
            )
        toolkit = toolkit_of(setup)
        for arch in listed:
            if fits(arch, capability) and not toolkit.knows(arch):
                raise Missing(f"{toolkit.nvcc} is too old for sm_{arch}: Blackwell needs CUDA 12.9 or newer")
        cuda_units, _ = setup.cuda_units(folder)
        units = host_units(setup, cuda_units, folder)
        quiet = ("-Xptxas", "-v")  # what ptxas says of each kernel
        units += [
            setup.Unit(unit.name, [*(word for word in unit.command if word not in quiet), bounded], unit.object)
            for unit in cuda_units
            if unit.ptx and unit.name in wanted
        ]
        units += probe_units(root, setup, toolkit, capability, folder, [bounded])
        setup.compile_units(units)
        return link([toolkit.nvcc, "-cudart", "static"], units, folder / "libfa4_verify.so")
