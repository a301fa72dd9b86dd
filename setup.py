"""Builds flash_attn4.

The kernels and what calls them are plain C and CUDA without a torch header: this file compiles them itself, one command
per unit of csrc/variants.def, several at once, and again only what changed. torch's BuildExtension compiles the
bindings in csrc/torch and links.

FA4_CUDA=0      leaves the CUDA part out
FA4_ARCHS       the GPU architectures to compile, as "90a;100f;103f"; otherwise all that csrc/variants.def has
MAX_JOBS        how many compilers run at once; otherwise the cores, and one for each 2 GiB of memory
CC, CFLAGS      the C compiler and more flags for it
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension, is_ninja_available

if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10):
    raise SystemExit(
        f"torch {torch.__version__} is installed, and flash_attn4 needs 2.10 or newer: pip install -U torch"
    )

ROOT = Path(__file__).resolve().parent
PTX = Path("build/ptx")  # what nvcc's ptxas assembled, and what it said
COMMON = ["-std=c11", "-O3", "-g1", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-Wall", "-Wextra", "-Wpedantic"]
BINDING = ["-O2", "-g1", "-fvisibility=hidden", "-Wall"]
FOR_TESTS_ONLY = (
    f"flash_attn4: torch {torch.__version__} is for the CPU only: the CUDA kernels are compiled for the tests, and the "
    "package cannot load them; FA4_CUDA=0 leaves them out"
)
STABLE_ABI = "-DTORCH_TARGET_VERSION=0x020a000000000000"  # runs on torch 2.10 and all after it
MEMORY_PER_JOB = 2 << 30


@dataclass
class Unit:
    """One command that makes one object."""

    name: str
    command: list[str]  # without -o
    object: Path
    ptx: Path | None = None  # of a CUDA kernel: where its PTX goes

    @property
    def dependencies(self):
        return self.object.with_suffix(".d")

    @property
    def recipe(self):
        return self.object.with_suffix(".command")

    def is_current(self):
        """Whether the object came from this command and from files that have not changed since."""
        try:
            made = self.object.stat().st_mtime
            files = self.dependencies.read_text().replace("\\\n", " ").split(":", 1)[1].split()
            return (
                self.recipe.read_text() == shlex.join(self.command)
                and all(os.stat(file).st_mtime <= made for file in files)
                and (self.ptx is None or self.ptx.exists())
            )
        except (OSError, IndexError):
            return False

    def compile(self):
        self.object.parent.mkdir(parents=True, exist_ok=True)
        self.recipe.unlink(missing_ok=True)
        command = [*self.command, "-MMD", "-MF", str(self.dependencies), "-o", str(self.object)]
        if self.ptx:
            keep = self.object.with_suffix(".keep")
            shutil.rmtree(keep, ignore_errors=True)
            keep.mkdir()
            command += ["-keep", "-keep-dir", str(keep)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            killed = done.returncode < 0 or "Killed" in done.stdout or "terminated signal 9" in done.stdout
            hint = "\nThe compiler was killed, perhaps for want of memory: try MAX_JOBS=1." if killed else ""
            raise SystemExit(f"{shlex.join(command)}\n{done.stdout}\n{self.name} failed to compile.{hint}")
        if self.ptx:
            self.keep_ptx(keep, done.stdout)
        elif done.stdout:
            print(done.stdout, end="")
        self.recipe.write_text(shlex.join(self.command))

    def keep_ptx(self, keep, log):
        """The PTX that ptxas assembled, the cubin and ptxas' words go to build/ptx. Spilled registers are an error."""
        self.ptx.parent.mkdir(parents=True, exist_ok=True)
        self.ptx.with_suffix(".log").write_text(log)
        if re.search(r"[1-9]\d* bytes spill|setmaxnreg.*ignored|[Pp]otential [Pp]erformance [Ll]oss", log):
            raise SystemExit(f"{self.name}: ptxas spilled registers or ignored setmaxnreg:\n{log}")
        for suffix in (".ptx", ".cubin"):
            (made,) = keep.glob(f"*{suffix}")
            shutil.copyfile(made, self.ptx.with_suffix(suffix))


def variants():
    """The entries of csrc/variants.def: [(name, [argument, ...]), ...]."""
    entry = re.compile(r"^(FA4_\w+)\((.*)\)\s*$", re.MULTILINE)
    argument = re.compile(r'\s*(?:"([^"]*)"|([^",]+))\s*(?:,|$)')
    text = Path("csrc/variants.def").read_text()
    return [
        (name, [quoted or plain.strip() for quoted, plain in argument.findall(values)])
        for name, values in entry.findall(text)
    ]


def jobs():
    if os.environ.get("MAX_JOBS"):
        return max(1, int(os.environ["MAX_JOBS"]))
    limits = [MEMORY_PER_JOB * 64]
    try:
        (available,) = re.findall(r"MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text())
        limits.append(int(available) << 10)
        limits.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))  # "max" without a limit
    except (OSError, ValueError):
        pass
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, *(limit // MEMORY_PER_JOB for limit in limits)))


def c_compiler():
    for text in (os.environ.get("CC"), sysconfig.get_config_var("CC"), "cc"):
        if text and shutil.which(shlex.split(text)[0]):
            return shlex.split(text)
    raise SystemExit("flash_attn4 needs a C compiler: set CC, or install gcc or clang.")


def cpu_units(folder):
    compiler = c_compiler()
    target = subprocess.run([*compiler, "-dumpmachine"], capture_output=True, text=True).stdout.split("-")[0]
    flags = [*COMMON, *shlex.split(os.environ.get("CFLAGS", ""))]

    def unit(name, source, extra=()):
        return Unit(name, [*compiler, *flags, *extra, "-c", source], folder / f"{name}.o")

    entries = variants()
    units = [unit("dispatch", "csrc/dispatch.c"), unit("cpuid", "csrc/cpu/cpuid.c")]
    for _, (file,) in (entry for entry in entries if entry[0] == "FA4_CPU_KERNEL"):
        for _, (isa, host, extra) in (entry for entry in entries if entry[0] == "FA4_CPU_ISA"):
            if host in ("any", target):
                define = [*shlex.split(extra), f"-DFA4_CPU_ISA_NAME={isa}"]
                units.append(unit(f"{file}_{isa}", f"csrc/cpu/{file}.c", define))
    return units


@dataclass
class Toolkit:
    nvcc: str
    top: Path

    @staticmethod
    def find():
        """nvcc on the path may be a script that calls another: it says itself where its toolkit is."""
        nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
        if not nvcc:
            return None
        said = subprocess.run([nvcc, "--dryrun", "x.cu"], capture_output=True, text=True).stderr
        top = re.search(r"^#\$ TOP=(.*)$", said, re.MULTILINE)
        return Toolkit(nvcc, Path(top[1]).resolve()) if top else None

    def knows(self, arch):
        """Whether this nvcc is new enough for sm_<arch>; it lists architectures without their a or f. Families (f) came
        with 12.9, as compute_103 did."""
        listed = subprocess.run([self.nvcc, "--list-gpu-arch"], capture_output=True, text=True).stdout.split()
        return f"compute_{arch.rstrip('af')}" in listed and (not arch.endswith("f") or "compute_103" in listed)

    def library_folder(self):
        for folder in (self.top / "lib64", self.top / "lib", *sorted(self.top.glob("targets/*/lib"))):
            if (folder / "libcudart_static.a").exists():
                return folder
        raise SystemExit(f"{self.top} has no libcudart_static.a: install the CUDA runtime's development files.")


def cuda_units(folder):
    """The units of the CUDA part and the toolkit; nothing and None without them, and a line that says why.

    FA4_CUDA_KERNEL(name, arch, file, "flags"): csrc/<file> compiled for sm_<arch> with -DFA4_KERNEL=<name>; its PTX is
    build/ptx/<name>.ptx. The host side is csrc/sm*/*.c, csrc/cuda/*.c and dispatch.c once more, with -DFA4_CUDA.
    """
    kernels = [arguments for name, arguments in variants() if name == "FA4_CUDA_KERNEL"]
    if not kernels:
        return [], None
    if os.environ.get("FA4_CUDA") == "0":
        print("flash_attn4: FA4_CUDA=0: the CUDA part is left out")
        return [], None
    toolkit = Toolkit.find()
    if not toolkit:
        print("flash_attn4: no nvcc found: the CUDA part is left out")
        return [], None
    have = {arch for _, arch, _, _ in kernels}
    wanted = set(filter(None, re.split(r"[;, ]+", os.environ.get("FA4_ARCHS", "")))) or have
    if wanted - have:
        raise SystemExit(f"FA4_ARCHS: no kernels for {', '.join(sorted(wanted - have))}; there are {sorted(have)}")
    for arch in sorted(wanted):
        if not toolkit.knows(arch):
            print(f"flash_attn4: {toolkit.nvcc} does not know sm_{arch}: its kernels are left out")
            wanted.remove(arch)
    units = []
    for name, arch, file, extra in kernels:
        if arch not in wanted:
            continue
        flags = ["-std=c++17", "-O3", "-lineinfo", "-Xptxas", "-v", "-Xcompiler", "-fPIC,-fvisibility=hidden"]
        target = f"-gencode=arch=compute_{arch},code=sm_{arch}"
        command = [toolkit.nvcc, *flags, target, *shlex.split(extra), f"-DFA4_KERNEL={name}", "-c", f"csrc/{file}"]
        units.append(Unit(name, command, folder / f"{name}.o", PTX / f"{name}.ptx"))
    compiler = [*c_compiler(), *COMMON, f"-isystem{toolkit.top / 'include'}", "-DFA4_CUDA", "-c"]
    for source in [
        "csrc/dispatch.c",
        *map(str, sorted([*Path("csrc").glob("sm*/*.c"), *Path("csrc/cuda").glob("*.c")])),
    ]:
        name = "cuda_" + source.removeprefix("csrc/").removesuffix(".c").replace("/", "_")
        units.append(Unit(name, [*compiler, source], folder / f"{name}.o"))
    return units, toolkit


def compile_units(units):
    stale = [unit for unit in units if not unit.is_current()]
    done = 0

    def run(unit):
        nonlocal done
        unit.compile()
        done += 1
        print(f"[{done}/{len(stale)}] {unit.name}", flush=True)

    with ThreadPoolExecutor(jobs()) as pool:
        for result in [pool.submit(run, unit) for unit in stale]:
            result.result()


class Build(BuildExtension):
    def build_extensions(self):
        os.environ.setdefault("MAX_JOBS", str(jobs()))  # torch's ninja runs as many
        if self.editable_mode:  # where setup.py build_ext --inplace builds, not in a folder that is thrown away
            self.build_temp = f"build/temp.{self.plat_name}-{sys.implementation.cache_tag}"
        folder = Path(os.path.relpath(self.build_temp)) / "kernels"
        units = cpu_units(folder)
        cuda, toolkit = cuda_units(folder)
        if cuda and not torch.version.cuda:
            print(FOR_TESTS_ONLY)
        compile_units(units + cuda)
        by_name = {extension.name.rpartition(".")[2]: extension for extension in self.extensions}
        by_name["_C"].extra_objects = [str(unit.object) for unit in units]
        if "_C_cuda" in by_name:
            if cuda:
                # dispatch.c with CUDA calls the CPU kernels too
                both = cuda + [unit for unit in units if unit.name != "dispatch"]
                by_name["_C_cuda"].extra_objects = [str(unit.object) for unit in both]
                by_name["_C_cuda"].library_dirs.append(str(toolkit.library_folder()))
                by_name["_C_cuda"].include_dirs.append(str(toolkit.top / "include"))
            else:
                self.extensions.remove(by_name["_C_cuda"])
        # A binding is linked again when an object of ours is newer.
        for extension in self.extensions:
            extension.depends = [*extension.depends, *extension.extra_objects]
        super().build_extensions()


def binding(name, sources, **more):
    return CppExtension(
        f"flash_attn4.{name}",
        sources,
        depends=sorted(map(str, Path("csrc").glob("**/*.h"))),
        extra_compile_args={"cxx": [*BINDING, STABLE_ABI]},
        py_limited_api=True,
        **more,
    )


def extensions():
    found = [binding("_C", [f"csrc/torch/{name}.cpp" for name in ("module", "cpu", "sdpa", "call", "questions")])]
    if torch.version.cuda:
        sources = [f"csrc/torch/{name}.cpp" for name in ("cuda", "cuda_sdpa", "call", "questions")]
        found.append(binding("_C_cuda", sources, libraries=["torch_cuda", "cudart_static", "dl", "rt", "pthread"]))
    return found


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.stdout.reconfigure(line_buffering=True)
    setup(
        ext_modules=extensions(),
        cmdclass={"build_ext": Build.with_options(use_ninja=is_ninja_available())},
        options={"bdist_wheel": {"py_limited_api": "cp310"}},
    )
