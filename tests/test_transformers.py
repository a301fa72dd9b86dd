"""Hugging Face models, tiny and with random weights, on our kernels by either way."""

import pytest
import torch
from conftest import calls_during, max_error

import flash_attn4
from flash_attn4 import enable_sdpa, enable_transformers
from flash_attn4.transformers import attention

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

COMMON = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
MODELS = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**COMMON, num_key_value_heads=2)),
    "mistral_window": lambda: transformers.MistralForCausalLM(
        transformers.MistralConfig(**COMMON, num_key_value_heads=2, sliding_window=5)
    ),
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**COMMON)),
}
LAYERS = 2
TOKENS = torch.randint(2, 99, (2, 13), generator=torch.Generator().manual_seed(0))
PADDING = torch.ones_like(TOKENS)
PADDING[1, :4] = 0


def model_of(name):
    torch.manual_seed(0)
    return MODELS[name]().eval()


def train(model, **call):
    model.zero_grad()
    output = model(TOKENS, labels=TOKENS, **call)
    output.loss.backward()
    return [output.logits, *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.fixture
def fa4():
    with enable_transformers():
        yield


@pytest.mark.parametrize("way", ["fa4", "enable_sdpa"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_are_sdpas(fa4, name, padded, way):
    model = model_of(name)
    call = {"attention_mask": PADDING} if padded else {}
    model.set_attn_implementation("sdpa")
    expected = train(model, **call)
    if way == "fa4":
        model.set_attn_implementation("fa4")
        ours, calls = calls_during(lambda: train(model, **call))
        assert (calls["fwd"], calls["bwd"]) == (LAYERS, LAYERS)
    else:
        with enable_sdpa():
            ours, calls = calls_during(lambda: train(model, **call))
        assert (calls["sdpa_fwd"], calls["sdpa_bwd"]) == (LAYERS, LAYERS)
    if padded:  # what a padded position computes is nobody's business
        real = PADDING.bool()
        ours[0], expected[0] = ours[0][real], expected[0][real]
    assert len(ours) == len(expected)
    assert all(max_error(a, b) < 1e-5 for a, b in zip(ours, expected, strict=True))


@pytest.mark.parametrize("name", ["llama", "mistral_window"])
def test_generate_gives_the_same_tokens(fa4, name):
    model = model_of(name)
    tokens = []
    for implementation in ("sdpa", "fa4"):
        model.set_attn_implementation(implementation)
        tokens.append(
            model.generate(
                TOKENS, attention_mask=PADDING, max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=-1
            )
        )
    assert torch.equal(*tokens)
    assert tokens[0].shape[1] == TOKENS.shape[1] + 8


def test_a_compiled_model(fa4):
    model = model_of("llama")
    model.set_attn_implementation("fa4")
    with torch.no_grad():
        expected = model(TOKENS, use_cache=False).logits
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        ours, calls = calls_during(lambda: compiled(TOKENS, use_cache=False).logits)
    assert calls["fwd"] == LAYERS
    assert max_error(ours, expected) < 1e-6


def test_bfloat16(fa4):
    model = model_of("llama").bfloat16()
    results = {}
    for implementation in ("sdpa", "fa4"):
        model.set_attn_implementation(implementation)
        results[implementation] = model(TOKENS).logits
    assert results["fa4"].dtype == torch.bfloat16
    assert max_error(results["fa4"], results["sdpa"]) < 0.05


def test_undo_and_twice():
    model = model_of("llama")
    assert "fa4" not in transformers.AttentionInterface._global_mapping
    first, second = enable_transformers(), enable_transformers()
    model.set_attn_implementation("fa4")
    model(TOKENS)
    second.remove()
    model(TOKENS)
    first.remove()
    assert "fa4" not in transformers.AttentionInterface._global_mapping
    assert "fa4" not in transformers.AttentionMaskInterface._global_mapping


@pytest.mark.parametrize("word", ["s_aux", "softcap"])
def test_what_a_model_wants_and_we_do_not_have_is_refused_by_name(word):
    q = torch.zeros(1, 2, 3, 8)
    with pytest.raises(NotImplementedError, match=f"{word} of Linear"):
        attention(torch.nn.Linear(1, 1), q, q, q, None, **{word: torch.ones(2)})


def test_dropout_in_training_goes_to_pytorch():
    q = torch.ones(1, 2, 3, 8)
    with flash_attn4.set_fallback("error"), pytest.raises(NotImplementedError, match="dropout_p"):
        attention(torch.nn.Linear(1, 1), q, q, q, None, dropout=0.1)
