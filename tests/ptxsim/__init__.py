"""Runs PTX for sm_90a and the sm_100 family on a CPU, harsher than silicon.

    mod = Module(ptx_text)
    x, out = numpy.arange(64, dtype="f4"), ptxsim.empty(64, "f4")
    report = mod.launch("scale", grid=2, block=32, args=[x, out, 3.0], schedule="late")

Memory that nothing has written is poison, asynchronous operations happen when the schedule says, and every pair of
conflicting accesses must be ordered by the program. What is found raises Finding, which carries the report.
"""

import bisect
import contextlib
import numbers
import struct
import sys
import typing
import weakref

import numpy

from . import build

_path = build.module()
sys.path.insert(0, str(build.OUTPUT))
try:
    import _ptxsim
finally:
    sys.path.remove(str(build.OUTPUT))

__all__ = [
    "Finding",
    "Module",
    "Report",
    "TensorMap",
    "address",
    "alloc",
    "empty",
    "free",
    "launch",
    "poisoned",
    "registered",
    "unknown",
]

MAP_TYPES = ["u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f64", "bf16", "f32_ftz", "tf32", "tf32_ftz"]
SCHEDULES = "early", "late", "random"
MODELS = "ptx", "practice"


# ------------------------------------------------------------------------------------------------- global memory


class _Registry:
    """Host memory that the simulator knows, by host address."""

    def __init__(self):
        self.starts = []
        self.ranges = []  # (start, end, device address), sorted by start

    def add(self, start, end, poisoned=False):
        address = _ptxsim.register(start, end - start, poisoned)
        if not address:
            raise MemoryError(f"cannot register {end - start} bytes of global memory")
        at = bisect.bisect(self.starts, start)
        self.starts.insert(at, start)
        self.ranges.insert(at, (start, end, address))
        return address

    def remove(self, address):
        for at, entry in enumerate(self.ranges):
            if entry[2] == address:
                del self.starts[at], self.ranges[at]
                _ptxsim.unregister(address)
                return
        raise ValueError(f"{address:#x} is not the start of an allocation")

    def find(self, start, end):
        """The device address of that host range, or None."""
        at = bisect.bisect(self.starts, start) - 1
        if at >= 0 and end <= self.ranges[at][1]:
            return self.ranges[at][2] + start - self.ranges[at][0]
        return None


_registry = _Registry()
_kept = {}  # device address -> the array that alloc was given


def _is_array(x):
    return isinstance(x, numpy.ndarray) or (type(x).__module__.split(".")[0] == "torch" and hasattr(x, "data_ptr"))


def _extent(array):
    """Host addresses of an array's first byte, of its lowest and of the byte past its highest."""
    if isinstance(array, numpy.ndarray):
        return (array.ctypes.data, *numpy.lib.array_utils.byte_bounds(array))
    if array.device.type != "cpu":
        raise ValueError(f"the simulator runs on CPU tensors, not on {array.device}")
    size = array.element_size()
    last = sum((n - 1) * s for n, s in zip(array.shape, array.stride(), strict=True)) if array.numel() else -1
    return array.data_ptr(), array.data_ptr(), array.data_ptr() + (last + 1) * size


def alloc(array):
    """Registers the array's memory, which counts as written, and returns its device address. free() forgets it."""
    first, low, high = _extent(array)
    known = _registry.find(low, high)
    if known is not None:
        return known + first - low
    address = _registry.add(low, high)
    _kept[address] = array
    return address + first - low


@contextlib.contextmanager
def registered(*arrays):
    """Within it, arrays that are not registered yet are, as written memory. Views that overlap are one allocation."""
    merged = []
    for low, high in sorted(_extent(array)[1:] for array in arrays):
        if low == high or _registry.find(low, high) is not None:
            continue
        if merged and low < merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], high)
        else:
            merged.append([low, high])
    with contextlib.ExitStack() as stack:
        for low, high in merged:
            stack.callback(_registry.remove, _registry.add(low, high))
        yield


def address(array):
    """The device address of an array's first element, 0 for an empty array."""
    first, low, high = _extent(array)
    if low == high:
        return 0
    known = _registry.find(low, high)
    if known is None:
        raise ValueError("the array is not in the simulator's memory")
    return known + first - low


def free(address):
    """Forgets an allocation that alloc made."""
    _registry.remove(address)
    _kept.pop(address, None)


def empty(shape, dtype):
    """An array that no one has written: poison until a kernel writes it. Lives as long as the array does."""
    array = numpy.empty(shape, dtype)
    _, low, high = _extent(array)
    if high > low:
        weakref.finalize(array, _registry.remove, _registry.add(low, high, poisoned=True))
    return array


def poisoned(array):
    """How many bytes of an array (of empty() or alloc()) nothing has written yet."""
    first, low, high = _extent(array)
    return _ptxsim.poisoned(address(array) + low - first, high - low) if high > low else 0


class TensorMap:
    """What cuTensorMapEncodeTiled makes of the same arguments; ValueError where that refuses.

    dims and box: elements, innermost first. strides: bytes, one for each dimension but the innermost.
    """

    def __init__(self, base, dtype, dims, strides=(), box=(), element_strides=None, swizzle=0, fill="zero"):
        if dtype not in MAP_TYPES:
            raise ValueError(f"dtype is {dtype!r}; it can be one of {', '.join(MAP_TYPES)}")
        if fill not in ("zero", "nan"):
            raise ValueError(f"fill is {fill!r}; it can be 'zero' or 'nan'")
        rank = len(dims)
        element_strides = tuple(element_strides or (1,) * rank)
        for name, value, expected in (
            ("strides", strides, rank - 1),
            ("box", box, rank),
            ("element_strides", element_strides, rank),
        ):
            if len(value) != expected:
                raise ValueError(f"{name} has {len(value)} entries; {rank} dims need {expected}")
        self.base = base
        self._rest = MAP_TYPES.index(dtype), list(dims), list(strides), list(box), list(element_strides), swizzle
        self._fill_nan = fill == "nan"
        known = base if isinstance(base, numbers.Integral) else _registry.find(*_extent(base)[1:])
        self.encode(known or 1 << 32)

    def encode(self, address):
        type_, *rest = self._rest
        return _ptxsim.tensor_map(type_, address, *rest, self._fill_nan)


# ------------------------------------------------------------------------------------------------------- launches


class Found(typing.NamedTuple):
    """One finding: its kind, a sentence, its place, and the other place of a pair (or "")."""

    kind: str
    sentence: str
    where: str
    other: str
    ptx_line: int
    warp: int
    lane: int
    cta: int


class Report:
    """What a run showed. practice: how often "P1" .. "P5", "A1" were needed. executed: lane-instructions by class."""

    def __init__(self, raw):
        self.finished = raw["finished"]
        self.findings = [Found(*f) for f in raw["findings"]]
        self.practice = raw["practice"]
        self.executed = raw["executed"]
        self.executed_by_warp = raw["executed_by_warp"]
        self.text = raw["text"]

    @property
    def kinds(self):
        return {f.kind for f in self.findings}

    def __str__(self):
        return self.text

    __repr__ = __str__


class Finding(AssertionError):
    """A run found something wrong with the program; report has all of it."""

    def __init__(self, report):
        super().__init__(report.text)
        self.report = report


class Module:
    """Parsed PTX. kernels: a list of (size, alignment) of its parameters for each entry's name."""

    def __init__(self, text):
        if isinstance(text, bytes):
            text = text.decode("latin-1")
        self._parsed = _ptxsim.Parsed(text)
        self.entries = self._parsed.kernels()  # with "params", "shared" and "registers"
        self.kernels = {name: entry["params"] for name, entry in self.entries.items()}

    def launch(self, name, **how):
        """Runs one grid. how: grid, block, cluster, smem, args as launch() takes them, and launch()'s own words."""
        grid = {k: how.pop(k) for k in ("grid", "block", "cluster", "smem", "args") if k in how}
        return launch([(self, name, grid)], **how)


def launch(
    grids,
    *,
    pdl=False,
    schedule="early",
    seed=0,
    model="ptx",
    strict_mma_order=False,
    check=True,
    threads=0,
    max_steps=0,
):
    """Runs grids of one stream, in order: a list of (module, kernel, {"grid", "block", "cluster", "smem", "args"}).

    grid, block, cluster: an int or up to three. smem: dynamic shared memory in bytes. args: arrays (numpy, or CPU torch
    tensors, written in place), ints and floats (sized by the parameter), bytes (a struct), TensorMaps. With pdl the
    grids overlap as programmatic dependent launch allows. Findings raise Finding unless check is False.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule is {schedule!r}; it can be one of {', '.join(SCHEDULES)}")
    if model not in MODELS:
        raise ValueError(f"model is {model!r}; it can be one of {', '.join(MODELS)}")
    with contextlib.ExitStack() as stack:
        stack.enter_context(registered(*_arrays_of(grids)))
        prepared = [_prepare(*grid) for grid in grids]
        raw = _ptxsim.run(prepared, schedule, seed, model == "practice", strict_mma_order, pdl, threads, max_steps)
    report = Report(raw)
    if check and (report.findings or not report.finished):
        raise Finding(report)
    return report


def _arrays_of(grids):
    for _, _, how in grids:
        for arg in how.get("args", ()):
            array = arg.base if isinstance(arg, TensorMap) else arg
            if _is_array(array):
                yield array


def _prepare(module, name, how):
    unknown_words = how.keys() - {"grid", "block", "cluster", "smem", "args"}
    if unknown_words:
        raise TypeError(f"a launch does not take {', '.join(sorted(unknown_words))}")
    if name not in module.kernels:
        raise ValueError(f"no kernel {name!r}; the module has {', '.join(module.kernels) or 'none'}")
    params, args = module.kernels[name], list(how.get("args", ()))
    if len(params) != len(args):
        raise ValueError(f"{name} takes {len(params)} parameters, not {len(args)}")
    block = b""
    for i, (arg, (size, alignment)) in enumerate(zip(args, params, strict=True)):
        block += bytes(-len(block) % alignment)
        value = _argument(arg, size)
        if len(value) != size:
            raise ValueError(f"parameter {i} of {name} has {size} bytes, the argument {len(value)}")
        block += value
    dims = [_three(how.get(word, 1), word) for word in ("grid", "block", "cluster")]
    return (module._parsed, name, *dims, how.get("smem", 0), block)


def _argument(arg, size):
    if isinstance(arg, bytes):
        return arg
    if isinstance(arg, TensorMap):
        return arg.encode(arg.base if isinstance(arg.base, numbers.Integral) else address(arg.base))
    if _is_array(arg):
        return address(arg).to_bytes(8, "little")
    if isinstance(arg, numbers.Integral):
        return (int(arg) & (1 << 8 * size) - 1).to_bytes(size, "little")
    if isinstance(arg, numbers.Real):
        formats = {2: "<e", 4: "<f", 8: "<d"}
        if size not in formats:
            raise ValueError(f"a float cannot fill a parameter of {size} bytes")
        return struct.pack(formats[size], arg)
    raise TypeError(f"an argument of type {type(arg).__name__} means nothing to a kernel")


def _three(value, word):
    dims = (value,) if isinstance(value, numbers.Integral) else tuple(value)
    if not 1 <= len(dims) <= 3 or any(d < 1 for d in dims):
        raise ValueError(f"{word} is {value!r}; it needs one to three positive numbers")
    return list(dims) + [1] * (3 - len(dims))


def unknown(text):
    """What the simulator does not know of a PTX text: a list of lines, empty when it can run all of it."""
    return _ptxsim.unknown(text).splitlines()
