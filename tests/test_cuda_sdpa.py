"""enable_sdpa() and enable_transformers() on a GPU: PyTorch's calls reach our forward, its own gradient follows, and
what we refuse is as PyTorch has it."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_within_bound, calls_during, cuda_missing, hashed, hashed_qkv, max_error
from test_dropin import MODULES, calls_of_equal, gradients, largest, module_gradients
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

import flash_attn4
from flash_attn4 import enable_sdpa, enable_transformers

if cuda_missing():
    pytest.skip(cuda_missing(), allow_module_level=True)

HALVES = [torch.bfloat16, torch.float16]
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 3e-2}


def q_k_v(len_q=170, len_kv=170, **shape):
    return hashed_qkv(len_q, len_kv, **{"heads": 4, "dtype": torch.bfloat16, "device": "cuda"} | shape)


def compare(function, *, fwd=1, before=0):
    """function() with PyTorch's kernels and with ours: equal within rounding, of the same strides, and how many calls
    reached our kernels and went back to those that were there before."""
    calls = calls_of_equal(function, lambda b: TOLERANCE[b.dtype] * max(1.0, largest(b)))
    assert (calls["sdpa_fwd"], calls["sdpa_before"]) == (fwd, before)


BACKENDS = [None, SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]


@pytest.fixture(params=BACKENDS, ids=lambda b: b.name if b else "default")
def backend(request):
    if request.param is None:
        yield
        return
    with sdpa_kernel(request.param):
        yield


CALLS = {
    "plain": ({}, {}),
    "causal": ({}, {"is_causal": True}),
    "gqa": ({"heads": 8, "heads_kv": 2}, {"enable_gqa": True, "is_causal": True}),
    "scale": ({}, {"scale": 0.3}),
    "other_keys": ({"len_kv": 300}, {}),
    "one_query": ({"len_q": 1}, {}),
    "dim_128": ({"dim": 128}, {"is_causal": True}),
    "dim_96": ({"dim": 96}, {}),
}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", CALLS)
def test_forward_and_gradients(backend, name, dtype):
    shape, call = CALLS[name]
    q, k, v = q_k_v(dtype=dtype, **shape)
    compare(lambda: F.scaled_dot_product_attention(q, k, v, **call))
    dout = hashed(*q.shape, seed=9, dtype=dtype, device="cuda")
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]

    def both():
        out = F.scaled_dot_product_attention(*leaves, **call)
        return out.detach(), *torch.autograd.grad(out, leaves, dout)

    with enable_sdpa():
        results, calls = calls_during(both)
    assert calls["sdpa_fwd"] == 1
    exact = {"hi": 0 if call.get("is_causal") else None, "scale": call.get("scale"), "dout": dout}
    named = dict(zip(("out", "dq", "dk", "dv"), results, strict=True))
    assert_within_bound(named, q, k, v, **exact)


@pytest.mark.parametrize("len_q, len_kv", [(100, 333), (333, 100)])
def test_causal_with_unequal_lengths_is_aligned_at_the_top_left(len_q, len_kv):
    q, k, v = q_k_v(len_q, len_kv)
    with enable_sdpa():
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert_within_bound({"out": out}, q, k, v, hi=0)
    operator = torch.ops.aten._scaled_dot_product_flash_attention  # aligned at the bottom right
    compare(lambda: operator(q, k, v, 0.0, True)[0], fwd=0, before=1)


LAYOUTS = {
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "packed": lambda x: torch.stack([x, x, x], 3)[:, :, :, 1],
    "heads_outermost": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "sliced": lambda x: F.pad(x, (8, 8, 1, 2))[:, :, 1:-2, 8:-8],
    "one_head": lambda x: x[:, :1],
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_strides_of_the_replaced_operators(name):
    """Those of PyTorch's kernels, which its meta kernels promise to the compiler."""
    q, k, v = map(LAYOUTS[name], q_k_v())
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
    for run in (lambda: flash(q, k, v), lambda: cudnn(q, k, v, None, True)):
        with torch.no_grad():
            expected = run()
            with enable_sdpa():
                ours, calls = calls_during(run)
        assert calls["sdpa_fwd"] == 1
        for a, b in zip(ours, expected, strict=True):
            if not isinstance(b, torch.Tensor):
                assert a == b
                continue
            assert (a.shape, a.stride(), a.dtype, a.device) == (b.shape, b.stride(), b.dtype, b.device)
    compare(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    compare(lambda: gradients(F.scaled_dot_product_attention, q, k, v))


def odd(x):
    return F.pad(x, (0, 1))[..., :-1]


BACK = {  # what reaches us and goes back
    "mask": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, torch.ones(170, 170, device="cuda") > 0),
    "row_stride": lambda q, k, v: F.scaled_dot_product_attention(odd(q), odd(k), odd(v)),
    "nan_scale": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=float("nan")).isnan().bfloat16(),
}


@pytest.mark.parametrize("name", BACK)
def test_what_we_refuse_runs_on_the_kernel_that_was_there_before(name):
    q, k, v = q_k_v()
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]):
        compare(lambda: BACK[name](q, k, v), fwd=0, before=1)
        if name != "nan_scale":
            compare(lambda: gradients(lambda *x: BACK[name](*x), q, k, v), fwd=0, before=1)


def test_dropout_is_pytorchs():
    q, k, v = q_k_v()

    def function():
        torch.manual_seed(0)
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)

    compare(function, fwd=0, before=1)


ELSEWHERE = {  # what PyTorch gives to kernels that we leave alone
    "float32": lambda q, k, v: F.scaled_dot_product_attention(q.float(), k.float(), v.float()),
    "empty": lambda q, k, v: F.scaled_dot_product_attention(q[:, :, :0], k, v),
    "mask_grad": lambda q, k, v: F.scaled_dot_product_attention(
        q, k, v, torch.zeros(170, 170, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    ),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_is_not_for_flash_or_cudnn_does_not_reach_us(name):
    q, k, v = q_k_v()
    expected = ELSEWHERE[name](q, k, v)
    with enable_sdpa():
        ours, calls = calls_during(lambda: ELSEWHERE[name](q, k, v))
    assert torch.equal(ours, expected)
    assert calls["sdpa_fwd"] == 0


@pytest.mark.parametrize("kernel", [SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION])
def test_sdpa_kernel_is_obeyed(kernel):
    q, k, v = q_k_v()
    with sdpa_kernel(kernel):
        compare(lambda: F.scaled_dot_product_attention(q, k, v), fwd=0)


def test_errors_are_pytorchs():
    q, k, v = q_k_v()
    operator = torch.ops.aten._scaled_dot_product_flash_attention
    for bad in ((q[0], k, v), (q, k[:1], v), (q, k.half(), v)):
        with pytest.raises((RuntimeError, IndexError)):
            operator(*bad)
        with enable_sdpa(), pytest.raises((RuntimeError, IndexError)):
            operator(*bad)


def test_undo_nesting_and_the_cpu_beside_it():
    q, k, v = q_k_v()

    def reached():
        _, calls = calls_during(lambda: F.scaled_dot_product_attention(q, k, v))
        return calls["sdpa_fwd"] == 1

    assert not reached()
    outer = enable_sdpa()
    assert reached()
    with enable_sdpa():
        assert reached()
        _, calls = calls_during(lambda: F.scaled_dot_product_attention(q.cpu(), k.cpu(), v.cpu()))
        assert calls["sdpa_fwd"] == 1
    assert reached()
    outer.remove()
    assert not reached()
    for _ in range(3):
        with enable_sdpa():
            assert reached()
    assert not reached()


@pytest.mark.parametrize("dtype", HALVES)
def test_autocast(dtype):
    q, k, v = q_k_v(dtype=torch.float32)

    def function(*x):
        with torch.autocast("cuda", dtype):
            out = F.scaled_dot_product_attention(*x)
        assert out.dtype == dtype
        return out

    compare(lambda: function(q, k, v))
    compare(lambda: gradients(function, q, k, v))


@pytest.mark.parametrize("how", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_functions_reach_us_before_and_after_enabling(how):
    """compare() runs it first without us, so that the graph was compiled before enabling."""

    def function(q, k, v):
        return F.scaled_dot_product_attention(q * 2, k, v, is_causal=True) + 1

    compiled = torch.compile(function, fullgraph=True, backend=how)
    q, k, v = q_k_v()
    compare(lambda: gradients(compiled, q, k, v))
    _, calls = calls_during(lambda: compiled(q, k, v))
    assert calls["sdpa_fwd"] == 0, "after undo the compiled function must run PyTorch's kernel again"
    with enable_sdpa():
        again = torch.compile(lambda q, k, v: function(q, k, v) - 1, fullgraph=True, backend=how)
        _, calls = calls_during(lambda: again(q, k, v))
    assert calls["sdpa_fwd"] == 1


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_transforms():
    q, k, v = q_k_v(64, 64)

    def loss(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).float().square().sum()

    batched = [torch.stack([x, 2 * x]) for x in (q, k, v)]
    compare(lambda: torch.vmap(F.scaled_dot_product_attention)(*batched))
    compare(lambda: torch.func.grad(loss, (0, 1, 2))(q, k, v))


def test_causal_bias_and_checkpoint():
    q, k, v = q_k_v()
    compare(lambda: F.scaled_dot_product_attention(q, k, v, causal_lower_right(170, 170)))
    compare(
        lambda: gradients(
            lambda *x: torch.utils.checkpoint.checkpoint(F.scaled_dot_product_attention, *x, use_reentrant=False),
            q,
            k,
            v,
        ),
        fwd=2,
    )


def test_a_graph_is_captured_and_replayed():
    q, k, v = q_k_v()
    with enable_sdpa():
        expected = F.scaled_dot_product_attention(q, k, v)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = F.scaled_dot_product_attention(q, k, v)
    graph.replay()
    assert torch.equal(out, expected)


@pytest.mark.parametrize("name", MODULES)
def test_modules_in_training_and_eval(name):
    torch.manual_seed(0)
    module = MODULES[name]().to("cuda", torch.bfloat16)
    x = hashed(2, 24, 32, dtype=torch.bfloat16, device="cuda")
    memory = hashed(2, 16, 32, seed=2, dtype=torch.bfloat16, device="cuda")
    args = {"mha": (x, x, x), "decoder": (x, memory)}.get(name, (x,))
    call = {"need_weights": False} if name == "mha" else {}
    calls = 2 if name == "decoder" else 1
    compare(lambda: module_gradients(module, *args, **call), fwd=calls)
    module.eval()
    with enable_sdpa(), torch.no_grad():
        _, counts = calls_during(lambda: module(*args, **call))
    assert counts["sdpa_fwd"] == calls


# ---- transformers


@pytest.fixture(scope="module")
def llama():
    """Random weights, 32 query heads on 8 of keys and values, in float32."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=1000, hidden_size=2048, intermediate_size=2048, num_hidden_layers=3, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=4096,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval().cuda()


@pytest.mark.parametrize("way", ["fa4", "enable_sdpa"])
@pytest.mark.parametrize("length", [100, 2048])
def test_the_logits_of_a_llama_are_as_near_to_float32s_as_sdpas(llama, way, length):
    tokens = torch.randint(1000, (2, length), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    llama.set_attn_implementation("sdpa")
    half = copy.deepcopy(llama).bfloat16()
    with torch.no_grad():
        exact = llama(tokens).logits.double()
        theirs = half(tokens).logits
        if way == "fa4":
            with enable_transformers():
                half.set_attn_implementation("fa4")
                ours, calls = calls_during(lambda: half(tokens).logits)
        else:
            with enable_sdpa():
                ours, calls = calls_during(lambda: half(tokens).logits)
    assert calls["fwd" if way == "fa4" else "sdpa_fwd"] == 3

    def error(logits):
        return float((logits.double() - exact).square().mean().sqrt())

    print(f"{way}, {length} tokens: error of the logits {error(ours):.3e}, of SDPA's {error(theirs):.3e}")
    assert error(ours) <= 1.05 * error(theirs)


@pytest.mark.parametrize("way", ["fa4", "enable_sdpa"])
def test_a_llama_trains_and_generates(llama, way):
    model = copy.deepcopy(llama).bfloat16()
    tokens = torch.randint(1000, (2, 130), device="cuda", generator=torch.Generator("cuda").manual_seed(0))

    def train():
        model.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    def generate():
        return model.generate(tokens, max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=-1)

    model.set_attn_implementation("sdpa")
    expected = train()
    with enable_transformers(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if way == "fa4":
            model.set_attn_implementation("fa4")
            ours, calls = calls_during(train)
            assert (calls["fwd"], calls["bwd"]) == (3, 3)
            assert generate().shape == (2, 138)
        else:
            with enable_sdpa():
                ours, calls = calls_during(train)
                assert generate().shape == (2, 138)
            assert calls["sdpa_fwd"] == 3
    for a, b in zip(ours, expected, strict=True):
        scale = float(b.float().square().mean().sqrt())
        assert float((a.float() - b.float()).square().mean().sqrt()) <= 0.1 * scale + 1e-8


def test_padding_on_the_left_goes_to_pytorch_and_is_kept(llama):
    model = copy.deepcopy(llama).bfloat16()
    tokens = torch.randint(1000, (2, 60), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    padding = torch.ones_like(tokens)
    padding[1, :20] = 0
    results = {}
    with torch.no_grad(), enable_transformers(), flash_attn4.set_fallback("silent"):
        for name in ("sdpa", "fa4"):
            model.set_attn_implementation(name)
            results[name] = model(tokens, attention_mask=padding).logits[padding.bool()]
        model.set_attn_implementation("sdpa")
        with enable_sdpa():
            results["enable_sdpa"] = model(tokens, attention_mask=padding).logits[padding.bool()]
    for name in ("fa4", "enable_sdpa"):
        assert max_error(results[name], results["sdpa"]) <= 0.05 * largest(results["sdpa"])
