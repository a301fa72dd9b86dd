"""Our own forward in the simulator: the C API's plan of a call, run as csrc/cuda/launch.c would launch it."""

import sys

import numpy
import torch

import ptxsim

from . import build

_path = build.plan_module()
sys.path.insert(0, str(build.OUTPUT))
try:
    import _fa4plan
finally:
    sys.path.remove(str(build.OUTPUT))

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]  # fa4_dtype
MAP_TYPES = ["f16", "bf16", "f32", "f64"]


def params(q, k, v, o, lse, *, scale=None, lo=None, hi=None, len_kv_of=None, address=lambda tensor: 0):
    """fa4_fwd_params of tensors [batch, heads, len, dim] as a dict."""
    batch, heads_q, len_q, dim = q.shape
    return {
        **{name: address(x) for name, x in zip("qkvo", (q, k, v, o), strict=True)},
        **{f"stride_{name}": x.stride() for name, x in zip("qkvo", (q, k, v, o), strict=True)},
        "lse": address(lse),
        "stride_lse": lse.stride(),
        "len_kv_of": 0 if len_kv_of is None else address(len_kv_of),
        "batch": batch,
        "heads_q": heads_q,
        "heads_kv": k.shape[1],
        "len_q": len_q,
        "len_kv": k.shape[2],
        "dim": dim,
        "dim_v": v.shape[3],
        "lo": lo,
        "hi": hi,
        "scale": dim**-0.5 if scale is None else scale,
        "dtype": DTYPES.index(q.dtype),
    }


def unsupported(fwd_params, arch):
    """Why that chip cannot run the call; None when it can."""
    return _fa4plan.fwd_unsupported(fwd_params, arch)


def fwd_plan(fwd_params, arch, multiprocessors=2, ctas=0):
    """The launch that runs the call: kernel, grid, block, cluster, shared_bytes, maps, args.

    ctas: on Blackwell the form to take, CTAs alone (1) or in pairs (2); 0 leaves it to the plan."""
    return _fa4plan.fwd_plan(fwd_params, arch, multiprocessors, ctas)


def fwd_tiles(fwd_params, arch, multiprocessors):
    """What each CTA of the call's launch takes: [[(place in the list that CTAs are dealt, batch, head, head of k and v,
    block of queries), ...], ...]. Heads that are packed into a tile count as one."""
    return _fa4plan.fwd_tiles(fwd_params, arch, multiprocessors)


def run_plan(module, plan, **how):
    """Runs a plan; how as Module.launch takes it (schedule, seed, model, check, ...). A plan without work: None."""
    if not all(plan["grid"]):
        return None
    maps = [
        ptxsim.TensorMap(
            m["address"],
            MAP_TYPES[m["type"]],
            m["size"],
            m["stride"],
            m["box"],
            m["element_stride"],
            m["swizzle"],
        )
        for m in plan["maps"]
    ]
    return module.launch(
        plan["kernel"],
        grid=plan["grid"],
        block=plan["block"],
        cluster=plan["cluster"],
        smem=plan["shared_bytes"],
        args=[*maps, plan["args"]],
        **how,
    )


def forward(module, q, k, v, *, scale=None, lo=None, hi=None, len_kv_of=None, arch, multiprocessors=2, ctas=0, **how):
    """(o, lse, report) of our forward in the simulator. What it did not write is an error."""
    shape = (*q.shape[:3], v.shape[3])
    kept = [ptxsim.empty(shape, numpy.uint16), ptxsim.empty(q.shape[:3], numpy.float32)]
    o, lse = torch.from_numpy(kept[0]).view(q.dtype), torch.from_numpy(kept[1])
    inputs = [x for x in (q, k, v, len_kv_of) if x is not None]
    with ptxsim.registered(*inputs):
        call = params(q, k, v, o, lse, scale=scale, lo=lo, hi=hi, len_kv_of=len_kv_of, address=ptxsim.address)
        report = run_plan(module, fwd_plan(call, arch, multiprocessors, ctas), **how)
    for name, array in zip(("o", "lse"), kept, strict=True):
        if array.size and ptxsim.poisoned(array):
            raise AssertionError(f"the kernel left {ptxsim.poisoned(array)} bytes of {name} unwritten")
    return o, lse, report
