"""The worker of `python -m flash_attn4 verify` with the simulator for its GPU: python -m ptxsim.verify, and the
worker's arguments. FA4_SIMULATED is the compute capability, FA4_PTX the folder with the forward's PTX."""

import functools
import os
import pathlib

import numpy as np

import ptxsim
from flash_attn4.verify import build, probes, worker
from flash_attn4.verify.device import DeviceError, launch_arguments, results_of
from ptxsim import plan

ROOT = pathlib.Path(__file__).resolve().parents[2]
OBJECTS = ROOT / "build" / "verify" / "simulated"
MULTIPROCESSORS = 2


@functools.cache
def probe_units(capability):
    """The units of the probes, compiled, as build.py compiles them: without bounds on their waits."""
    with build.inside(ROOT):
        setup = build.setup_of(ROOT)
        folder = OBJECTS / f"sm_{capability}"
        units = build.probe_units(ROOT, setup, build.toolkit_of(setup), capability, folder)
        setup.compile_units(units)
    return units


@functools.cache
def module(path):
    return ptxsim.Module(pathlib.Path(path).read_text())


class Device:
    """What flash_attn4.verify.device.Device is, without a GPU."""

    def __init__(self, library=None, kernels=(), capability=None, ptx=None):
        self.capability = capability or int(os.environ["FA4_SIMULATED"])
        self.ptx = pathlib.Path(ptx or os.environ.get("FA4_PTX", ROOT / "build" / "ptx"))
        self.multiprocessors = MULTIPROCESSORS
        self.about = {"name": "ptxsim", "compute_capability": f"{self.capability / 10}"}

    def stuck_waits(self):
        return np.zeros(0, [])

    def module_of(self, kernel):
        for unit in probe_units(self.capability):
            if kernel in module(unit.ptx).kernels:
                return module(unit.ptx)
        raise KeyError(kernel)

    def run(self, probe, schedules=("early", "late"), **how):
        """What the probe writes under the last schedule, or under the first that makes it wrong."""
        code = self.module_of(probe.kernel)
        size, _ = code.kernels[probe.kernel][-1]
        for schedule in schedules:
            given = probe.given.copy()
            out = np.full(probe.expected.size, probes.BLANK, np.uint32) if probe.before is None else probe.before.copy()
            with ptxsim.registered(given, out):
                numbers, args = launch_arguments(probe, ptxsim.address(given), ptxsim.address(out))
                maps = [
                    ptxsim.TensorMap(address, "bf16", m.dims, m.strides, m.box, None, m.swizzle)
                    for address, m in zip(numbers[::18], probe.maps, strict=True)
                ]
                try:
                    code.launch(
                        probe.kernel, grid=probe.grid, block=128, cluster=probe.cluster, smem=probes.SHARED,
                        args=[*maps, args.ljust(size, b"\0")], schedule=schedule,
                        model="practice" if probe.practice else "ptx", **how,
                    )  # fmt: skip
                except ptxsim.Finding as found:
                    raise DeviceError(str(found)) from found
            if probes.wrong(probe, out).size:
                break
        return out

    def kernel_of(self, q, k, v, lengths, **how):
        call = plan.params(q, k, v, *results_of(q, v), len_kv_of=lengths, **how)
        return plan.fwd_plan(call, self.capability, MULTIPROCESSORS)["kernel"]

    def attention(self, q, k, v, lengths, **how):
        code = module(self.ptx / f"{self.kernel_of(q, k, v, lengths, **how)}.ptx")
        how |= {"len_kv_of": lengths, "arch": self.capability, "multiprocessors": MULTIPROCESSORS}
        try:
            return plan.forward(code, q, k, v, **how)[:2]
        except ptxsim.Finding as found:
            raise DeviceError(str(found)) from found


if __name__ == "__main__":
    worker.Device = Device
    worker.REPEATS = 1
    worker.variants.RUNS = 1
    worker.main()
