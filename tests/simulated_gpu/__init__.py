"""`python -m flash_attn4 verify` with the simulator for a GPU: its own library, host code and all, linked to a CUDA
runtime (cudart.c) whose device is here. `python -m simulated_gpu`, and the worker's arguments, is the worker;
FA4_SIMULATED is the compute capability, FA4_PTX the folder with the forward's PTX."""

import ctypes
import functools
import os
import pathlib

import numpy as np
import ptxsim

from flash_attn4.verify import build, device, probes

ROOT = pathlib.Path(__file__).resolve().parents[2]
OBJECTS = ROOT / "build" / "verify" / "simulated"
MULTIPROCESSORS = 2
LAUNCH_FAILURE = 719  # cudaErrorLaunchFailure
SWIZZLES = [0, 32, 64, 128]  # CUtensorMapSwizzle
TYPES = {6: "f16", 9: "bf16"}  # CUtensorMapDataType


class RecordedMap(ctypes.Structure):
    _fields_ = [
        ("address", ctypes.c_uint64),
        ("size", ctypes.c_uint64 * 5),
        ("stride", ctypes.c_uint64 * 4),
        ("type", ctypes.c_uint32),
        ("rank", ctypes.c_uint32),
        ("box", ctypes.c_uint32 * 5),
        ("element_stride", ctypes.c_uint32 * 5),
        ("swizzle", ctypes.c_uint32),
    ]


ALLOCATE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)
RELEASE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
COPY = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(ctypes.c_uint32), ctypes.POINTER(ctypes.c_void_p)
)


class Callbacks(ctypes.Structure):
    _fields_ = [
        ("capability", ctypes.c_int),
        ("multiprocessors", ctypes.c_int),
        ("allocate", ALLOCATE),
        ("release", RELEASE),
        ("copy", COPY),
        ("launch", LAUNCH),
    ]


@functools.cache
def library():
    """verify's host side and the runtime."""
    with build.inside(ROOT):
        setup = build.setup_of(ROOT)
        cuda_units, _ = setup.cuda_units(OBJECTS)
        units = build.host_units(setup, cuda_units, OBJECTS)
        dispatch = next(unit.command for unit in units if "csrc/dispatch.c" in unit.command)
        command = ["tests/simulated_gpu/cudart.c" if word == "csrc/dispatch.c" else word for word in dispatch]
        units.append(setup.Unit("cudart", command, OBJECTS / "cudart.o"))
        setup.compile_units(units)
        return build.link(setup.c_compiler(), units, OBJECTS / "libfa4_simulated.so")


@functools.cache
def probe_units(capability):
    """The units of the probes, compiled as build.py compiles them, without bounds on their waits."""
    with build.inside(ROOT):
        setup = build.setup_of(ROOT)
        folder = OBJECTS / f"sm_{capability}"
        units = build.probe_units(ROOT, setup, build.toolkit_of(setup), capability, folder)
        setup.compile_units(units)
    return units


@functools.cache
def module(path):
    return ptxsim.Module(pathlib.Path(path).read_text())


class Device(device.Device):
    """A GPU that is the simulator. Probes run under more than one schedule."""

    def __init__(self, _library=None, _units=(), capability=None, ptx=None):
        self.simulated = capability or int(os.environ["FA4_SIMULATED"])
        self.ptx = pathlib.Path(ptx or os.environ.get("FA4_PTX", ROOT / "build" / "ptx"))
        self.memory = {}  # device address -> array
        self.how, self.found = {}, ""
        lib = ctypes.CDLL(str(library()))
        self.callbacks = Callbacks(
            self.simulated,
            MULTIPROCESSORS,
            ALLOCATE(self.allocate),
            RELEASE(self.release),
            COPY(self.copy),
            LAUNCH(self.launch),
        )
        self.maps = (RecordedMap * 64).in_dll(lib, "fa4_recorded_maps")
        self.connect()
        super().__init__(library())

    def connect(self):
        """This device is the runtime's, and has no error."""
        ctypes.CDLL(str(library())).fa4_set_device(ctypes.byref(self.callbacks))

    def allocate(self, size):
        array = np.empty(size, np.uint8)
        address = ptxsim.alloc(array)
        self.memory[address] = array
        return address

    def release(self, address):
        ptxsim.free(address)
        del self.memory[address]

    def copy(self, to, source, size):
        ctypes.memmove(self.host(to), self.host(source), size)

    def host(self, address):
        """Where a device address is in this process; other addresses are already."""
        return self.memory[address].ctypes.data if address in self.memory else address

    def code(self, kernel):
        if not kernel.startswith("fa4_probe"):
            return module(self.ptx / f"{kernel}.ptx")
        return next(m for m in (module(unit.ptx) for unit in probe_units(self.simulated)) if kernel in m.kernels)

    def tensor_map(self, number):
        m = self.maps[number]
        rank = m.rank
        return ptxsim.TensorMap(
            m.address, TYPES[m.type], m.size[:rank], m.stride[: rank - 1], m.box[:rank], m.element_stride[:rank],
            SWIZZLES[m.swizzle],
        )  # fmt: skip

    def launch(self, name, shape, arguments):
        try:
            kernel, args = name.decode(), []
            code = self.code(kernel)
            for i, (size, alignment) in enumerate(code.kernels[kernel]):
                raw = ctypes.string_at(arguments[i], size)
                args.append(self.tensor_map(int.from_bytes(raw[:4], "little")) if alignment == 128 else raw)
            code.launch(
                kernel, grid=shape[0:3], block=shape[3:6], cluster=shape[6:9], smem=shape[9], args=args, **self.how
            )
        except Exception as error:  # a callback has no caller that could catch it
            self.found = f"{type(error).__name__}: {error}"
            return LAUNCH_FAILURE
        return 0

    def attention(self, *call, **how):
        self.connect()
        return super().attention(*call, **how)

    def check(self, status):
        try:
            super().check(status)
        except device.DeviceError as error:
            found, self.found = self.found, ""
            raise device.DeviceError(f"{error} {found}") from None

    def run(self, probe, schedules=("early", "late"), **how):
        """What the probe writes under the last schedule, or under the first that makes it wrong."""
        self.connect()
        for schedule in schedules:
            self.how = {"schedule": schedule, "model": "practice" if probe.practice else "ptx", **how}
            out = super().run(probe)
            if probes.wrong(probe, out).size:
                break
        self.how = {}
        return out
