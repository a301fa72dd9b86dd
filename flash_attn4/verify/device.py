"""The GPU through the library that build.py makes: its launches are those of csrc/cuda/launch.c, which users run."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import torch

from .probes import BLANK, SHARED, Probe

STUCK_BYTES = 64 * 256
STUCK = np.dtype(
    [("block", "u4"), ("thread", "u4"), ("line", "u4"), ("parity", "u4"), ("barrier", "S48")]
)  # fa4_stuck_wait of csrc/cuda/bounded.h
OPEN = (-(2**63), 2**63 - 1)  # FA4_UNBOUNDED_LO, FA4_UNBOUNDED_HI
DTYPES = [torch.float16, torch.bfloat16]  # fa4_dtype


class DeviceError(RuntimeError):
    """What CUDA said; nothing more runs in this process."""


class KernelError(DeviceError):
    """What a kernel ended in."""


def compute_capability() -> int | None:
    """Of the first GPU, as 10 * major + minor; None without one. Asks the driver alone: nothing is built yet."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0):
        return None
    if driver.cuDeviceGetAttribute(ctypes.byref(major), 75, device):  # compute capability, major and minor
        return None
    if driver.cuDeviceGetAttribute(ctypes.byref(minor), 76, device):
        return None
    return 10 * major.value + minor.value


def driver_version() -> str | None:
    """As the kernel module says it."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    return text.splitlines()[0].removeprefix("NVRM version:").strip()


def launch_arguments(probe: Probe, given: int, out: int) -> tuple[list[int], bytes]:
    """A probe's tensor maps as verify.c takes them, and its struct of arguments, with in and out at these addresses."""
    maps = []
    for m in probe.maps:
        address = (given if m.of == "in" else out) + m.offset
        padded = [list(x) + [fill] * (n - len(x)) for x, n, fill in ((m.dims, 5, 1), (m.strides, 4, 16), (m.box, 5, 1))]
        maps += [address, 1, len(m.dims), *padded[0], *padded[1], *padded[2], m.swizzle]  # type 1: bf16
    numbers = np.array([n & 0xFFFFFFFF for n in probe.numbers], np.uint32)
    return maps, np.array([given, out], np.uint64).tobytes() + numbers.tobytes()


def declared(library: Path) -> ctypes.CDLL:
    """The library, its functions with the types of csrc/verify/verify.c."""
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    numbers = ctypes.POINTER(ctypes.c_int64)
    lib = ctypes.CDLL(str(library))
    for name, result, *arguments in (
        ("error", ctypes.c_char_p),
        ("describe", number, ctypes.c_char_p, size),
        ("device_memory", pointer, size),
        ("host_memory", pointer, size),
        ("free", number, pointer),
        ("copy", number, pointer, pointer, size),
        ("wait", number),
        ("launch", number, ctypes.c_char_p, ctypes.POINTER(ctypes.c_uint32), number, numbers, ctypes.c_char_p, size),
        ("forward", ctypes.c_char_p, numbers, ctypes.c_double, number, number, number),
    ):
        function = getattr(lib, f"fa4_verify_{name}")
        function.restype, function.argtypes = result, arguments
    return lib


def numbers_of(addresses, strides, sizes, lo, hi, dtype):
    """A forward call as verify.c takes it: addresses of q, k, v, o, lse and the lengths (0: none)."""
    band = [OPEN[0] if lo is None else lo, OPEN[1] if hi is None else hi]
    call = [*addresses, *(n for stride in strides for n in stride), *sizes, *band, dtype]
    return (ctypes.c_int64 * len(call))(*call)


def results_of(q, v):
    """Memory for o and lse."""
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)


class Device:
    def __init__(self, library: Path, kernels=()):
        self.lib = declared(library)
        self.stuck_list = self.checked(self.lib.fa4_verify_host_memory(STUCK_BYTES))
        for unit in kernels:
            report = getattr(self.lib, f"{unit}_stuck_waits")
            self.check(report(ctypes.c_void_p(self.stuck_list)))
        text = ctypes.create_string_buffer(1024)
        self.check(self.lib.fa4_verify_describe(text, len(text)))
        name, capability, multiprocessors, driver, runtime, bus = text.value.decode().split("\n")
        self.capability, self.multiprocessors = int(capability), int(multiprocessors)
        self.about = {
            "name": name,
            "compute_capability": f"{self.capability // 10}.{self.capability % 10}",
            "multiprocessors": self.multiprocessors,
            "cuda_of_driver": f"{int(driver) // 1000}.{int(driver) % 1000 // 10}",
            "cuda_of_build": f"{int(runtime) // 1000}.{int(runtime) % 1000 // 10}",
            "pci_bus": bus,
            "driver": driver_version(),
        }

    def check(self, status):
        if status:
            raise DeviceError(self.lib.fa4_verify_error().decode() or f"error {status}")

    def checked(self, pointer):
        self.check(not pointer)
        return pointer

    def upload(self, array: np.ndarray) -> int:
        array = np.ascontiguousarray(array)
        at = self.checked(self.lib.fa4_verify_device_memory(max(array.nbytes, 256)))
        self.check(self.lib.fa4_verify_copy(at, array.ctypes.data, array.nbytes))
        return at

    def download(self, at: int, like: np.ndarray) -> np.ndarray:
        out = np.empty_like(like, order="C")
        self.check(self.lib.fa4_verify_copy(out.ctypes.data, at, out.nbytes))
        return out

    def wait(self):
        try:
            self.check(self.lib.fa4_verify_wait())
        except DeviceError as error:
            raise KernelError(str(error)) from None

    def free(self, *addresses):
        for at in addresses:
            self.check(self.lib.fa4_verify_free(at))

    def stuck_waits(self) -> np.ndarray:
        """Waits that took too long, in the order in which they were written down."""
        raw = np.frombuffer(ctypes.string_at(self.stuck_list, STUCK_BYTES), np.uint8)
        count = min(int(raw[:4].view(np.uint32)[0]), STUCK_BYTES // 64 - 1)
        return raw[64 : 64 + 64 * count].view(STUCK)

    def run(self, probe: Probe) -> np.ndarray:
        """The words that the probe writes."""
        before = np.full(probe.expected.size, BLANK, np.uint32) if probe.before is None else probe.before
        given, out = self.upload(probe.given), self.upload(before)
        maps, args = launch_arguments(probe, given, out)
        shape = (ctypes.c_uint32 * 10)(probe.grid, 1, 1, 128, 1, 1, probe.cluster, 1, 1, SHARED)
        numbers = (ctypes.c_int64 * max(1, len(maps)))(*maps)
        name = probe.kernel.encode()
        self.check(self.lib.fa4_verify_launch(name, shape, len(probe.maps), numbers, args, len(args)))
        self.wait()
        result = self.download(out, before)
        self.free(given, out)
        return result

    def plan(self, q, k, v, o, lse, at, *, scale, lo, hi, launch) -> str:
        """The kernel that runs a call on these tensors, whose memory is at these addresses of the device."""
        strides = [x.contiguous().stride() for x in (q, k, v, o, lse)]
        sizes = [q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3]]
        call = numbers_of(at, strides, sizes, lo, hi, DTYPES.index(q.dtype))
        name = self.lib.fa4_verify_forward(call, scale, self.capability, self.multiprocessors, launch)
        self.check(name is None)
        return name.decode()

    def kernel_of(self, q, k, v, lengths, **how) -> str:
        """The kernel that would run the call; the tensors need no memory."""
        o, lse = results_of(q, v)
        somewhere = 1 << 20
        return self.plan(q, k, v, o, lse, [somewhere] * 5 + [0 if lengths is None else somewhere], launch=0, **how)

    def attention(self, q, k, v, lengths, **how):
        """o and lse of a forward call on CPU tensors [batch, heads, len, dim], run on the GPU. What the kernel does not
        write is NaN."""
        o, lse = (x.fill_(torch.nan) for x in results_of(q, v))
        tensors = [q, k, v, o, lse] + ([] if lengths is None else [lengths])
        arrays = [x.contiguous().view(torch.int16).numpy() if x.element_size() == 2 else x.numpy() for x in tensors]
        at = [self.upload(x) for x in arrays]
        self.plan(q, k, v, o, lse, at if len(at) == 6 else [*at, 0], launch=1, **how)
        self.wait()
        o_bits, lse = (torch.from_numpy(self.download(at[i], arrays[i])) for i in (3, 4))
        self.free(*at)
        return o_bits.view(q.dtype), lse
