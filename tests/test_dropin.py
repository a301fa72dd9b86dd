"""enable_sdpa(): every way in which PyTorch and its modules call attention reaches our kernels, with PyTorch's results,
and what does not is as PyTorch has it."""

import copy
import math
import pickle
import subprocess
import sys
import threading
import types
import warnings

import pytest
import torch
import torch.nn.functional as F
from conftest import DTYPES, calls_during, hashed, hashed_qkv, max_error
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention as imported_before

import flash_attn4
from flash_attn4 import enable_sdpa, ops, sdpa

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def tensors_of(result):
    if isinstance(result, torch.Tensor):
        return [result]
    return [x for part in result for x in tensors_of(part)] if isinstance(result, (tuple, list)) else []


def largest(x):
    return float(x.detach().abs().max()) if x.numel() else 0.0


def calls_of_equal(function, allowed):
    """function() with PyTorch's kernels and with ours: of the same dtypes and strides, and no further apart than
    allowed(result). Returns how often which of our kernels ran."""
    expected = tensors_of(function())
    with enable_sdpa():
        result, calls = calls_during(function)
    ours = tensors_of(result)
    assert len(ours) == len(expected) > 0
    for a, b in zip(ours, expected, strict=True):
        assert a.dtype == b.dtype
        assert a.stride() == b.stride()
        assert max_error(a, b) <= allowed(b)
    assert calls["fwd"] == calls["bwd"] == 0
    return calls


def compare(function, *, reached=True, tolerance=None):
    """function() with PyTorch's kernels and with ours: equal within rounding, and whether ours ran as expected."""
    calls = calls_of_equal(
        function, lambda b: TOLERANCE[b.dtype] * max(1.0, largest(b)) if tolerance is None else tolerance
    )
    assert (calls["sdpa_fwd"] + calls["sdpa_math"] > 0) == reached, calls
    return calls


def gradients(function, *inputs):
    """What function returns, and the gradients of its square sum."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*inputs)
    return [out, *torch.autograd.grad(out.square().sum(), inputs)]


def q_k_v(**shape):
    return hashed_qkv(shape.pop("len_q", 17), shape.pop("len_kv", 23), **shape)


# ---- eager


CALLS = {
    "plain": ({}, {}),
    "causal": ({}, {"is_causal": True}),
    "causal_more_queries": ({"len_q": 30, "len_kv": 9}, {"is_causal": True}),
    "mask_LS": ({}, {"attn_mask": hashed(17, 23, seed=1)}),
    "mask_1S": ({}, {"attn_mask": hashed(1, 23, seed=1)}),
    "mask_B1LS": ({}, {"attn_mask": hashed(2, 1, 17, 23, seed=1)}),
    "mask_B11S": ({}, {"attn_mask": hashed(2, 1, 1, 23, seed=1) > 0}),
    "mask_bool": ({}, {"attn_mask": hashed(17, 23, seed=1) > -1}),
    "gqa": ({"heads": 6, "heads_kv": 2}, {"enable_gqa": True}),
    "scale": ({}, {"scale": 0.3}),
    "scale_0": ({}, {"scale": 0.0}),
    "one_query": ({"len_q": 1}, {}),
    "dim_7": ({"dim": 7}, {}),
    "dim_300": ({"dim": 300}, {"is_causal": True}),
    "dim_300_mask": ({"dim": 300, "len_q": 200}, {"attn_mask": hashed(2, 1, 200, 23, seed=1)}),
    "dim_300_bool_gqa": (
        {"dim": 300, "heads": 4, "heads_kv": 2},
        {"attn_mask": hashed(17, 23) > 0, "enable_gqa": True},
    ),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CALLS)
def test_eager_forward_and_backward(name, dtype):
    shape, call = CALLS[name]
    mask = call.get("attn_mask")
    if mask is not None and mask.is_floating_point():
        call = call | {"attn_mask": mask.to(dtype)}
    q, k, v = q_k_v(dtype=dtype, **shape)
    calls = compare(lambda: F.scaled_dot_product_attention(q, k, v, **call))
    assert calls["sdpa_math" if "300" in name else "sdpa_fwd"] == 1

    def both():
        return gradients(lambda *x: F.scaled_dot_product_attention(*x, **call), q, k, v)

    if dtype == torch.float16:  # PyTorch's own gradient is the less accurate one: compare with float32's
        exact_call = {n: x.float() if torch.is_tensor(x) and x.dtype == dtype else x for n, x in call.items()}
        exact = gradients(lambda *x: F.scaled_dot_product_attention(*x, **exact_call), *(x.float() for x in (q, k, v)))
        with enable_sdpa():
            ours = both()
        assert all(max_error(a, b) <= 4e-3 * max(1, largest(b)) for a, b in zip(ours, exact, strict=True))
    else:
        calls = compare(both)
        assert calls["sdpa_bwd"] == (0 if "300" in name else 1)


def test_a_float32_mask_with_bfloat16():
    q, k, v = q_k_v(dtype=torch.bfloat16)
    compare(lambda: F.scaled_dot_product_attention(q, k, v, hashed(17, 23, seed=1)))


@pytest.mark.parametrize("layout", ["transposed", "packed", "expanded_kv", "sliced", "one_token", "expanded_q"])
def test_layouts(layout):
    packed = hashed(2, 9, 3, 4, 16)
    q, k, v = (packed[:, :, i].transpose(1, 2) for i in range(3))
    if layout == "transposed":
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    elif layout == "expanded_kv":
        k, v = (x[:, :1].expand(2, 4, 9, 16) for x in (k, v))
    elif layout == "sliced":
        q, k, v = (x[:, 1:3, 2:8] for x in (q, k, v))
    elif layout == "one_token":
        q, k, v = q[:, :, :1], k[:, :, :1], v[:, :, :1]
    elif layout == "expanded_q":
        q = q[:1, :1].expand(2, 4, 9, 16)
    compare(lambda: F.scaled_dot_product_attention(q, k, v))
    compare(lambda: gradients(F.scaled_dot_product_attention, q, k, v))


def test_strides_of_the_replaced_operators():
    """Those of PyTorch's kernels, which its meta kernels promise to the compiler."""
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    packed = hashed(2, 9, 3, 4, 16)
    for q in (packed[:, :, 0].transpose(1, 2), hashed(2, 4, 9, 16), hashed(2, 9, 4, 16).transpose(1, 2)):

        def run(q=q):
            out, lse = forward(q, q, q, 0.0, True)
            return [out, lse, *backward(out, q, q, q, out, lse, 0.0, True)]

        compare(run)


WAYS_TO_PYTORCH = {
    "dim_v_differs": lambda q, k, v: F.scaled_dot_product_attention(q, k, v[..., :8]),
    "dropout": lambda q, k, v: (torch.manual_seed(0), F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)),
    "mask_grad": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, torch.zeros(17, 23, requires_grad=True)),
    "empty": lambda q, k, v: F.scaled_dot_product_attention(q[:, :, :0], k, v),
    "last_stride": lambda q, k, v: F.scaled_dot_product_attention(*(x[..., ::2] for x in (q, k, v))),
}


@pytest.mark.parametrize("name", WAYS_TO_PYTORCH)
def test_what_pytorch_gives_to_its_math_path_stays_there(name):
    q, k, v = q_k_v()
    compare(lambda: WAYS_TO_PYTORCH[name](q, k, v), reached=False)


def test_three_dimensions():
    """PyTorch's math path has them before 2.14, its flash kernel after."""
    q, k, v = (x[0] for x in q_k_v())
    reached = torch._fused_sdp_choice(q, k, v) == SDPBackend.FLASH_ATTENTION.value
    compare(lambda: F.scaled_dot_product_attention(q, k, v), reached=reached)


def test_sdpa_kernel_math_is_obeyed():
    q, k, v = q_k_v()

    def function():
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(q, k, v)

    compare(function, reached=False)


def test_a_row_that_sees_no_key_is_0_and_has_no_gradient():
    q, k, v = q_k_v()
    mask = torch.ones(17, 23, dtype=torch.bool)
    mask[3] = False
    with enable_sdpa():
        out, *grads = gradients(lambda *x: F.scaled_dot_product_attention(*x, mask), q, k, v)
    assert (out[:, :, 3] == 0).all()
    assert (grads[0][:, :, 3] == 0).all()
    assert all(g.isfinite().all() for g in grads)


def test_dropout_and_a_wrong_head_dim_are_errors_of_the_operator():
    q, k, v = q_k_v()
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    with enable_sdpa():
        with pytest.raises(RuntimeError, match=r"dropout_p is 0\.5"):
            operator(q, k, v, 0.5)
        with pytest.raises(RuntimeError, match="head dims 64 and 8"):
            operator(q, k, v[..., :8])
        with pytest.raises(RuntimeError, match="attn_mask has shape"):
            operator(q, k, v, attn_mask=torch.zeros(3, 3))


# ---- modes, names, threads


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_modes(mode):
    q, k, v = q_k_v(requires_grad=True)

    def function():
        with mode():
            return F.scaled_dot_product_attention(q, k, v)

    compare(function)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    q, k, v = q_k_v()

    def function(*x):
        with torch.autocast("cpu", dtype):
            out = F.scaled_dot_product_attention(*x)
        assert out.dtype == dtype
        return out

    compare(lambda: function(q, k, v))
    if dtype == torch.bfloat16:
        compare(lambda: gradients(function, q, k, v), tolerance=0.3)


def test_names_imported_before_scripts_and_operators():
    q, k, v = q_k_v()
    compare(lambda: imported_before(q, k, v))
    compare(lambda: torch._C._nn.scaled_dot_product_attention(q, k, v))
    compare(lambda: torch.ops.aten.scaled_dot_product_attention(q, k, v))
    compare(lambda: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        script = torch.jit.script(_scripted)
    compare(lambda: script(q, k, v))


def _scripted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, None, 0.0, True)


def test_another_thread():
    q, k, v = q_k_v()

    def function():
        results = []
        thread = threading.Thread(target=lambda: results.append(F.scaled_dot_product_attention(q, k, v)))
        thread.start()
        thread.join()
        return results

    compare(function)


def test_undo_nesting_and_removing_twice():
    q, k, v = q_k_v()

    def reached():
        _, calls = calls_during(lambda: F.scaled_dot_product_attention(q, k, v))
        return calls["sdpa_fwd"] == 1

    before = torch.backends.mha.get_fastpath_enabled()
    assert not reached()
    outer = enable_sdpa()
    assert reached()
    assert not torch.backends.mha.get_fastpath_enabled()
    with enable_sdpa():
        assert reached()
    assert reached(), "an inner handle must not undo the outer one"
    outer.remove()
    outer.remove()
    assert not reached()
    assert torch.backends.mha.get_fastpath_enabled() == before
    with pytest.raises(KeyError), enable_sdpa():
        raise KeyError
    assert not reached(), "an error in a with block must undo it too"
    for _ in range(3):
        with enable_sdpa(fused_encoder=True):
            assert reached()
            assert torch.backends.mha.get_fastpath_enabled() == before
    with enable_sdpa(), enable_sdpa(fused_encoder=True) as inner:
        inner.remove()
        assert not torch.backends.mha.get_fastpath_enabled(), "the outer one wants it off"
    assert torch.backends.mha.get_fastpath_enabled() == before


def test_pytorchs_registry_of_implementations_enables_and_restores():
    attention = torch.nn.attention
    if not hasattr(attention, "restore_flash_attention_impl"):
        pytest.skip("this torch has no such registry, or cannot restore")
    q, k, v = q_k_v()

    def reached():
        _, calls = calls_during(lambda: F.scaled_dot_product_attention(q, k, v))
        return calls["sdpa_fwd"] == 1

    assert "flash_attn4" in attention.list_flash_attention_impls()
    assert not reached()
    attention.activate_flash_attention_impl("flash_attn4")
    try:
        assert attention.current_flash_attention_impl() == "flash_attn4"
        with enable_sdpa():
            assert reached()
        assert reached()
    finally:
        attention.restore_flash_attention_impl()
    assert not reached()


@pytest.mark.parametrize("fails", ["kernel before", "CUDA override", "CPU override"])
def test_enabling_that_fails_leaves_nothing_on(fails, monkeypatch):
    on = []

    def fail(where):
        if where == fails:
            raise RuntimeError(f"no {where}")

    def override(name):
        def now(yes):
            if name in on:
                on.remove(name)
            if yes:
                fail(f"{name} override")
                on.append(name)

        return types.SimpleNamespace(override_sdpa=now)

    def kernel_now(name):
        fail("kernel before")
        return lambda *_: None

    monkeypatch.setattr(sdpa, "_C", override("CPU"))
    monkeypatch.setattr(ops, "_C_cuda", override("CUDA"))
    monkeypatch.setattr(sdpa, "_kernel_now", kernel_now)
    with pytest.raises(RuntimeError, match=f"no {fails}"):
        enable_sdpa()
    assert not on
    assert not sdpa._handles
    assert sdpa._before is None
    fails = None
    with enable_sdpa():
        assert sorted(on) == ["CPU", "CUDA"]
        assert sdpa._before
    assert not on
    assert sdpa._before is None


def test_another_schema_is_refused(monkeypatch):
    monkeypatch.setitem(sdpa._REPLACED, "_scaled_dot_product_flash_attention_for_cpu", "(Tensor q) -> Tensor")
    with pytest.raises(NotImplementedError, match="another operator than we replace"):
        enable_sdpa()
    assert not sdpa._handles


def test_enabling_prints_nothing():
    program = "import flash_attn4; h = flash_attn4.enable_sdpa(); h.remove(); flash_attn4.enable_sdpa()"
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# ---- modules


def module_gradients(module, *inputs, **call):
    module.zero_grad()
    out = module(*inputs, **call)
    out = out[0] if isinstance(out, tuple) else out
    out.square().sum().backward()
    return [out, *(p.grad for p in module.parameters())]


def profiled(function):
    with torch.profiler.profile() as profile:
        function()
    return {event.key for event in profile.key_averages()}


MODULES = {
    "mha": lambda: torch.nn.MultiheadAttention(32, 4, batch_first=True),
    "encoder": lambda: torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True),
    "decoder": lambda: torch.nn.TransformerDecoderLayer(32, 4, 64, dropout=0.0, batch_first=True),
    "encoder_sequence_first": lambda: torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0),
}


def call_module(name, module, **call):
    x = hashed(2, 11, 32)
    if name == "mha":
        return module, (x, x, x), {"need_weights": False, **call}
    return module, (x, hashed(2, 7, 32, seed=2)) if name == "decoder" else (x,), call


@pytest.mark.parametrize("name", MODULES)
def test_modules_in_training_and_eval(name):
    torch.manual_seed(0)
    module, args, kwargs = call_module(name, MODULES[name]())
    compare(lambda: module_gradients(module, *args, **kwargs))
    module.eval()

    def evaluate():
        with torch.no_grad():
            return module(*args, **kwargs)

    expected = tensors_of(evaluate())
    with enable_sdpa():  # off with it: PyTorch's fused path, whose strides are its own
        result, calls = calls_during(evaluate)
        assert "aten::_scaled_dot_product_flash_attention_for_cpu" in profiled(evaluate)
    assert calls["sdpa_fwd"] == (2 if name == "decoder" else 1)
    assert all(max_error(a, b) < 1e-5 for a, b in zip(tensors_of(result), expected, strict=True))


def test_masks_of_modules():
    torch.manual_seed(0)
    layer = MODULES["encoder"]()
    x = hashed(2, 11, 32)
    padding = torch.zeros(2, 11, dtype=torch.bool)
    padding[1, 6:] = True
    causal = torch.nn.Transformer.generate_square_subsequent_mask(11)
    compare(lambda: module_gradients(layer, x, src_key_padding_mask=padding))
    compare(lambda: module_gradients(layer, x, src_mask=causal, is_causal=True))


def test_need_weights_is_pytorchs():
    module, args, _ = call_module("mha", MODULES["mha"]())
    compare(lambda: module(*args, need_weights=True), reached=False)


def test_fused_encoder_keeps_pytorchs_fused_path():
    layer = MODULES["encoder"]().eval()
    x = hashed(2, 11, 32)
    with enable_sdpa(fused_encoder=True), torch.no_grad():
        _, calls = calls_during(lambda: layer(x))
    assert calls["sdpa_fwd"] == 0


def test_the_latest_handle_decides_on_the_fused_path():
    enabled = torch.backends.mha.get_fastpath_enabled
    assert enabled()
    outer = enable_sdpa(fused_encoder=True)
    inner = enable_sdpa()
    assert not enabled()
    inner.remove()
    assert enabled()
    inner = enable_sdpa()
    outer.remove()
    assert not enabled()
    inner.remove()
    assert enabled()


def test_a_removed_handle_opens_no_block():
    handle = enable_sdpa()
    with handle:
        pass
    with pytest.raises(RuntimeError, match="removed"), handle:
        pass


def test_the_first_override_disturbs_no_other_thread():
    q = hashed(1, 2, 16, 16)
    stop, errors = threading.Event(), []

    def attend():
        while not stop.is_set():
            try:
                F.scaled_dot_product_attention(q, q, q)
            except Exception as error:
                errors.append(error)

    thread = threading.Thread(target=attend)
    thread.start()
    for _ in range(500):
        flash_attn4.sdpa._told = False
        flash_attn4.sdpa._hear_torch_out()
    stop.set()
    thread.join()
    assert not errors


def test_modules_copy_and_pickle_while_enabled():
    with enable_sdpa():
        layer = MODULES["encoder"]().eval()
        x = hashed(2, 11, 32)
        assert torch.equal(copy.deepcopy(layer)(x), layer(x))
        assert torch.equal(pickle.loads(pickle.dumps(layer))(x), layer(x))


# ---- torch.func, nested tensors, biases, derivatives


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_transforms():
    q, k, v = (hashed(3, 2, 9, 16, seed=i) for i in range(3))

    def loss(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).square().sum()

    batched = [torch.stack([x, 2 * x]) for x in (q, k, v)]
    compare(lambda: torch.vmap(F.scaled_dot_product_attention)(*batched))
    compare(lambda: torch.func.grad(loss, (0, 1, 2))(q, k, v))
    compare(lambda: torch.vmap(torch.func.grad(loss, (0, 1, 2)))(*batched))
    compare(lambda: torch.func.jacrev(loss)(q, k, v))


def test_functional_call_and_checkpoint():
    q, k, v = q_k_v(dtype=torch.float64)
    compare(
        lambda: gradients(
            lambda *x: torch.utils.checkpoint.checkpoint(F.scaled_dot_product_attention, *x, use_reentrant=False),
            q,
            k,
            v,
        )
    )


def test_gradcheck():
    q, k, v = (hashed(1, 2, n, 3, seed=n, dtype=torch.float64, spread=1.0).requires_grad_() for n in (4, 5, 5))
    with enable_sdpa():
        _, calls = calls_during(lambda: torch.autograd.gradcheck(F.scaled_dot_product_attention, (q, k, v)))
    assert calls["sdpa_bwd"] > 0


def test_jagged_tensors_and_causal_bias():
    nested = torch.nested.nested_tensor([hashed(n, 2, 16) for n in (3, 7)], layout=torch.jagged).transpose(1, 2)
    expected = F.scaled_dot_product_attention(nested, nested, nested)
    with enable_sdpa():
        ours = F.scaled_dot_product_attention(nested, nested, nested)
    assert max_error(ours.values(), expected.values()) < 1e-5
    q, k, v = q_k_v()
    compare(lambda: F.scaled_dot_product_attention(q, k, v, causal_lower_right(17, 23)))


def test_meta_tensors_are_pytorchs():
    q, k, v = (x.to("meta") for x in q_k_v())
    with enable_sdpa():
        out, calls = calls_during(lambda: F.scaled_dot_product_attention(q, k, v))
    assert out.shape == q.shape
    assert calls["sdpa_fwd"] == 0


def test_second_derivative_and_forward_mode_raise_as_in_pytorch():
    q, k, v = q_k_v(requires_grad=True)

    def second():
        (dq,) = torch.autograd.grad(F.scaled_dot_product_attention(q, k, v).sum(), q, create_graph=True)
        dq.sum().backward()

    def forward_mode():
        torch.func.jvp(lambda q: F.scaled_dot_product_attention(q, k, v), (q,), (q,))

    for function in (second, forward_mode):
        with pytest.raises((RuntimeError, NotImplementedError)) as theirs:
            function()
        with enable_sdpa(), pytest.raises(theirs.type) as ours:
            function()
        assert str(ours.value).splitlines()[0] == str(theirs.value).splitlines()[0]


# ---- compile, export


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_forward_and_backward(dynamic):
    def function(q, k, v):
        return F.scaled_dot_product_attention(q * 2, k, v, is_causal=True) + 1

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for length in (9, 13) if dynamic else (9,):
        q, k, v = q_k_v(len_q=length, len_kv=length + 3)
        calls = compare(lambda tensors=(q, k, v): gradients(compiled, *tensors))
        assert (calls["sdpa_fwd"], calls["sdpa_bwd"]) == (1, 1)


@pytest.mark.slow
def test_inductor_reaches_us_before_and_after_enabling():
    """compare() runs it first without us, so that the graph was compiled before enabling."""
    torch.manual_seed(0)
    compiled = torch.compile(MODULES["mha"](), fullgraph=True)
    x = hashed(2, 11, 32)

    def train():
        return module_gradients(compiled, x, x, x, need_weights=False)

    calls = compare(train)
    assert (calls["sdpa_fwd"], calls["sdpa_bwd"]) == (1, 1)
    _, calls = calls_during(train)
    assert calls["sdpa_fwd"] == 0, "after undo the compiled function must run PyTorch's kernel again"


def test_compiled_torch_func():
    def loss(q, k, v):
        return F.scaled_dot_product_attention(q, k, v).square().sum()

    compiled = torch.compile(torch.func.grad(loss), backend="aot_eager")
    q, k, v = q_k_v()
    compare(lambda: compiled(q, k, v))


def test_exported_programs_reach_us():
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    q, k, v = q_k_v()
    with enable_sdpa():
        program = torch.export.export(Model(), (q, k, v))
    compare(lambda: program.module()(q, k, v))
    with torch.no_grad():
        decomposed = program.run_decompositions()
    compare(lambda: decomposed.module()(q, k, v), reached="flash_attention_for_cpu" in str(decomposed.graph))


def test_rows_of_the_math_operators_meet_at_block_edges():
    """The way for head dims over 256 works through blocks of 128 rows."""
    for len_q in (127, 128, 129, 257):
        q, k, v = hashed_qkv(len_q, 40, dim=264, batch=1, dtype=torch.float64)
        compare(lambda x=(q, k, v): gradients(lambda *x: F.scaled_dot_product_attention(*x, is_causal=True), *x))


def test_an_infinite_scale_is_as_nan_as_in_pytorch():
    q, k, v = q_k_v()
    with enable_sdpa():
        assert F.scaled_dot_product_attention(q, k, v, scale=math.nan).isnan().all()


def test_counts_are_public():
    q, k, v = q_k_v()
    before = flash_attn4.call_counts()["sdpa_fwd"]
    with enable_sdpa():
        F.scaled_dot_product_attention(q, k, v)
    assert flash_attn4.call_counts()["sdpa_fwd"] == before + 1
