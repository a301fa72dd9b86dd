"""Runs the probes on the GPU of this machine and stores what it answers: python tests/ptxsim_probes/run_h200.py OUT.npz

Needs nothing but numpy and the driver (libcuda, by ctypes); ptxas assembles the probes where there is one, otherwise
the driver does. A probe that faults or hangs ends the process it runs in; another one goes on with the next, and the
probe is reported and left out.
"""

import concurrent.futures
import ctypes
import datetime
import json
import multiprocessing
import os
import pathlib
import queue
import shutil
import subprocess
import sys
import tempfile

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from ptxsim_probes.probes import PROBES, Map

SECONDS_TO_START, SECONDS_FOR_ONE, FAILURES_AT_MOST = 60, 8, 12
MAP_TYPES = ["u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f64", "bf16"]  # CUtensorMapDataType


class LaunchAttribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_uint * 16)]


class LaunchConfig(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("count", ctypes.c_uint),
    ]


CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class Cuda:
    """The driver's functions, with their errors as exceptions."""

    def __init__(self):
        self.lib = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)
        self.device = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(self.device), 0)
        context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self.device)
        self.call("cuCtxSetCurrent", context)

    def call(self, name, *args):
        status = getattr(self.lib, name)(*args)
        if status:
            text = ctypes.c_char_p()
            self.lib.cuGetErrorName(status, ctypes.byref(text))
            raise RuntimeError(f"{name}: {text.value.decode() if text.value else status}")

    def describe(self):
        name, version = ctypes.create_string_buffer(100), ctypes.c_int()
        self.call("cuDeviceGetName", name, 100, self.device)
        self.call("cuDriverGetVersion", ctypes.byref(version))
        smi = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(smi, check=False, capture_output=True, text=True).stdout if shutil.which(smi[0]) else ""
        return {
            "date": datetime.date.today().isoformat(),
            "chip": name.value.decode(),
            "cuda_driver_api": version.value,
            "driver": driver.split("\n")[0],
        }

    def upload(self, array):
        pointer = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(max(array.nbytes, 16)))
        self.call("cuMemcpyHtoD_v2", pointer, array.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(array.nbytes))
        return pointer

    def tensor_map(self, m, pointer):
        out = (ctypes.c_ubyte * 192)()
        start = -ctypes.addressof(out) % 64
        rank = len(m.dims)
        self.call(
            "cuTensorMapEncodeTiled",
            ctypes.byref(out, start),
            MAP_TYPES.index(m.dtype),
            ctypes.c_uint(rank),
            pointer,
            (ctypes.c_uint64 * rank)(*m.dims),
            (ctypes.c_uint64 * max(1, rank - 1))(*m.strides),
            (ctypes.c_uint32 * rank)(*m.box),
            (ctypes.c_uint32 * rank)(*(m.element_strides or (1,) * rank)),
            0,  # no interleave
            {0: 0, 32: 1, 64: 2, 128: 3}[m.swizzle],
            0,  # no promotion in L2
            1 if m.fill == "nan" else 0,
        )
        return (ctypes.c_ubyte * 128).from_buffer_copy(bytes(out)[start : start + 128])

    def run(self, p, code):
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(module), code)
        self.call("cuModuleGetFunction", ctypes.byref(function), module, b"k")
        self.call("cuFuncSetAttribute", function, MAX_DYNAMIC_SHARED, p.smem)
        arrays = [self.upload(a) if isinstance(a, np.ndarray) else None for a in p.args]
        values = []
        for a, pointer in zip(p.args, arrays, strict=True):
            if pointer is not None:
                values.append(pointer)
            elif isinstance(a, Map):
                values.append(self.tensor_map(a, arrays[a.array]))
            else:
                values.append(ctypes.c_uint32(a))
        params = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        attribute = LaunchAttribute(CLUSTER_DIMENSION, 0, (ctypes.c_uint * 16)(p.cluster, 1, 1))
        config = LaunchConfig(
            (ctypes.c_uint * 3)(p.grid, 1, 1),
            (ctypes.c_uint * 3)(p.block, 1, 1),
            p.smem,
            None,
            ctypes.pointer(attribute),
            1,
        )
        self.call("cuLaunchKernelEx", ctypes.byref(config), function, params, None)
        self.call("cuCtxSynchronize")
        results = {}
        for i in p.results:
            out = np.empty_like(p.args[i])
            self.call("cuMemcpyDtoH_v2", out.ctypes.data_as(ctypes.c_void_p), arrays[i], ctypes.c_size_t(out.nbytes))
            results[f"{p.name}/{i}"] = out
        for pointer in arrays:
            if pointer is not None:
                self.call("cuMemFree_v2", pointer)
        self.call("cuModuleUnload", module)
        return results


def assembled(text):
    """The text's machine code, or without ptxas the text."""
    if shutil.which("ptxas") is None:
        return text.encode()
    with tempfile.TemporaryDirectory() as folder:
        source, target = pathlib.Path(folder, "k.ptx"), pathlib.Path(folder, "k.cubin")
        source.write_text(text)
        subprocess.run(["ptxas", "-arch=sm_90a", "-o", target, source], check=True, stderr=subprocess.DEVNULL)
        return target.read_bytes()


def work(names, code, answers):
    """Child process: a result for each name, or the error that ends it."""
    try:
        cuda = Cuda()
        answers.put(("about", cuda.describe()))
        for name in names:
            answers.put((name, cuda.run(PROBES[name], code[PROBES[name].text])))
    except (RuntimeError, OSError) as error:
        answers.put((None, str(error)))


def run_some(names, code, results, failed):
    """Runs probes in a process of their own until one fails; returns what the driver says of the chip."""
    spawn = multiprocessing.get_context("spawn")
    answers, about = spawn.Queue(), {}
    child = spawn.Process(target=work, args=(names, code, answers))
    child.start()
    while names:
        try:
            name, value = answers.get(timeout=SECONDS_FOR_ONE if about else SECONDS_TO_START)
        except queue.Empty:
            name, value = None, "no answer in time"
        if name == "about":
            about = value
        elif name is None:
            failed[names.pop(0)] = value
            break
        else:
            results |= value
            names.remove(name)
    child.kill()
    child.join()
    return about


def main():
    target = pathlib.Path(sys.argv[1])
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        texts = list({p.text for p in PROBES.values()})
        code = dict(zip(texts, pool.map(assembled, texts), strict=True))
    names, results, failed, about = list(PROBES), {}, {}, {}
    while names and len(failed) < FAILURES_AT_MOST:
        about = run_some(names, code, results, failed)
        if not about:
            raise SystemExit(f"the driver does not start: {failed}")
    np.savez_compressed(target, about=np.array(json.dumps(about)), **results)
    print(json.dumps(about), len(results), "arrays,", target.stat().st_size, "bytes")
    for name, why in failed.items():
        print("left out:", name, why)


if __name__ == "__main__":
    main()
