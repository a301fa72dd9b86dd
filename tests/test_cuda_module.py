"""What of the CUDA module can be asked where there is no GPU: what it is linked to, that importing and enabling it
start nothing, and how calls that it refuses go back to PyTorch. Needs a build for a torch with CUDA."""

import re
import shutil
import subprocess
import sys

import pytest
import torch

import flash_attn4
from flash_attn4 import enable_sdpa, ops, sdpa

if ops._C_cuda is None:
    pytest.skip("the build has no CUDA module: torch is for the CPU only", allow_module_level=True)


@pytest.mark.skipif(not shutil.which("readelf"), reason="readelf is not installed")
def test_it_needs_torchs_stable_c_shims_and_no_driver():
    def readelf(option):
        command = ["readelf", "-W", option, ops._C_cuda.__file__]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    rows = [line.split() for line in readelf("--dyn-syms").splitlines() if re.search(r"GLOBAL|WEAK", line)]
    needed = [row[7].split("@")[0] for row in rows if row[6] == "UND"]
    assert not [name for name in needed if re.match(r"_ZN?K?\d*(2at|3c10|5torch)", name)]
    assert not [name for name in needed if re.match(r"cu[A-Z]|cuda[A-Z]", name)], (
        "the CUDA runtime is linked statically"
    )
    assert [row[7] for row in rows if row[6] != "UND" and ("fa4" in row[7] or "PyInit" in row[7])] == ["PyInit__C_cuda"]
    libraries = set(re.findall(r"NEEDED.*\[(.*)\]", readelf("--dynamic")))
    assert {"libtorch_cuda.so", "libstdc++.so.6"} <= libraries
    assert not [name for name in libraries if name.startswith(("libcuda", "libc10_cuda", "libtorch_python"))]
    assert ops._C_cuda.__file__.endswith(".abi3.so")


def test_importing_and_enabling_start_no_cuda_and_print_nothing():
    program = """
import torch, flash_attn4
from flash_attn4 import ops
assert ops._C_cuda
handle = flash_attn4.enable_sdpa()
q = torch.ones(1, 1, 4, 8)
torch.nn.functional.scaled_dot_product_attention(q, q, q)
flash_attn4.scaled_dot_product_attention(q, q, q)
handle.remove()
assert not torch.cuda.is_initialized()
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_why_it_cannot_run():
    found = flash_attn4.backends()
    q = torch.ones(1, 1, 4, 8)
    explained = flash_attn4.explain(q, q, q)
    assert explained.backend == "cpu"
    for name in ("sm_90", "sm_100"):
        assert found[name] == explained.not_faster[name] == "torch finds no CUDA device"


@pytest.mark.parametrize("arch", [90, 100, 103])
def test_the_kernels_are_in_it(arch):
    for dtype in ("float16", "bfloat16"):
        assert ops.ask(False, arch, dtype, 128, 128) is None
    assert "only" in ops.ask(False, arch, "float32", 128, 128)


def test_the_kernel_of_a_call_is_that_of_the_plan():
    def kernel(arch, len_q, len_kv, lo=None, hi=None, dim=128):
        contiguous = (len_q * dim, len_q * dim, dim, 1)
        layout = (1, 1, 1, len_q, len_kv), contiguous * 4, (0, 0, 0)
        return ops._C_cuda.kernel(arch, "bfloat16", dim, dim, lo, hi, *layout)

    assert kernel(90, 128, 2048) == "fa4_sm90_fwd_bf16_d128_long"
    assert kernel(90, 128, 2047) == kernel(90, 128, 2048, hi=0) == "fa4_sm90_fwd_bf16_d128"
    assert kernel(100, 512, 512) == "fa4_sm100_fwd_bf16_d128_pair"
    assert kernel(103, 512, 512, lo=-3) == "fa4_sm103_fwd_bf16_d128"
    assert kernel(100, 512, 512, dim=8) == "fa4_sm100_fwd_bf16_d64"
    with pytest.raises(ValueError, match="257"):
        kernel(90, 128, 128, dim=257)
    with pytest.raises(TypeError, match="tuple of 5 numbers"):
        ops._C_cuda.kernel(90, "bfloat16", 64, 64, None, None, (1, 2), None, None)


def replaced(name):
    return "cuda_sdpa.cpp" in repr(torch.library.get_kernel(f"aten::{name}", "CUDA"))


def test_enabling_replaces_the_kernels_and_removing_restores_them():
    for _ in range(2):
        with enable_sdpa(), enable_sdpa():
            assert all(map(replaced, sdpa._REPLACED_CUDA))
        assert not any(map(replaced, sdpa._REPLACED_CUDA))


# The kernels on CUDA, called with tensors of the CPU, and something on the CPU in the place of what was there before.
CUDA = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
TENSORS = 7


@pytest.mark.parametrize("name", sdpa._REPLACED_CUDA)
def test_what_is_refused_reaches_the_kernel_before_with_every_argument(name):
    q, k, v = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    results = [torch.full((1,), float(i)) for i in range(TENSORS)]
    results[2] = None
    called = []

    def before(*args, **kwargs):
        called.append((args, kwargs))
        return tuple(results)

    bias = torch.ones(3, 5)
    args = (0.25, True, True) if name.endswith("flash_attention") else (bias, True, 0.25, True, True)
    with enable_sdpa():
        sdpa._before.impl(f"_before{name}", before, "CPU")
        kernel = torch.library.get_kernel(f"aten::{name}", "CUDA")
        counted = flash_attn4.call_counts()["sdpa_before"]
        found = kernel.call_boxed(CUDA, q, k, v, *args, scale=0.5)
        assert flash_attn4.call_counts()["sdpa_before"] == counted + 1
    ((seen, kwargs),) = called
    assert kwargs == {"scale": 0.5}
    assert all(torch.equal(a, b) if torch.is_tensor(b) else a == b for a, b in zip(seen, (q, k, v, *args), strict=True))
    assert found[4:6] == (3, 5)
    for a, b in zip((*found[:4], *found[6:]), results, strict=True):
        assert a is b is None or torch.equal(a, b)


def test_another_schema_is_refused(monkeypatch):
    monkeypatch.setitem(sdpa._REPLACED_CUDA, "_scaled_dot_product_flash_attention", "(Tensor q) -> Tensor")
    with pytest.raises(NotImplementedError, match="another operator than we replace"):
        enable_sdpa()
    assert not sdpa._handles
    assert not any(map(replaced, sdpa._REPLACED_CUDA))
