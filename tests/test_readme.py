"""The README says what is so: its examples run, its masks and its table of support are what the code does."""

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import Reference, assert_within_bound, band, hashed_qkv, max_error
from test_package import NEWEST_GLIBC, NEWEST_GLIBCXX, NEWEST_LIBGCC

from flash_attn4 import _C, flash_attn_func, scaled_dot_product_attention

README = (Path(__file__).parents[1] / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, flags=re.S)


def marked(name):
    """The code block, or the table, after a mark."""
    text = README.split(f"<!-- {name} -->")[1]
    return text.split("```")[1].split("\n", 1)[1] if text.lstrip().startswith("```") else text.lstrip().split("\n\n")[0]


def test_there_is_an_example_for_each_way_in():
    for way in ("enable_sdpa()", "enable_transformers()", "flash_attn_func(", "torch.ops.fa4.fwd("):
        assert any(way in example for example in EXAMPLES)


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_the_examples_run(example):
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_masks_are_the_printed_ones():
    printed = []
    for len_q, len_kv in ((2, 5), (5, 2)):
        q, k = torch.zeros(1, 1, len_q, 4), torch.zeros(1, 1, len_kv, 4)
        v = torch.eye(len_kv)[None, None]
        top_left = scaled_dot_product_attention(q, k, v, is_causal=True)[0, 0]
        flash = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=True)[0, :, 0]
        printed.append([(x > 0).int().tolist() for x in (top_left, flash)])
    lines = marked("masks").splitlines()
    assert re.findall(r"len_q (\d), len_kv (\d)", lines[0]) == [("2", "5"), ("5", "2")]
    for which, first in ((0, "is_causal"), (1, "causal")):
        start = next(i for i, line in enumerate(lines) if line.startswith(first))
        for row in range(5):
            digits = re.sub(r"^\S+ \(\S+\)", "", lines[start + row]) if row == 0 else lines[start + row]
            shown = [int(x) for x in digits.split()]
            expected = (printed[0][which][row] if row < 2 else []) + printed[1][which][row]
            assert shown == expected


def can(dtype="float32", dim=64, dim_v=64, mask="", scale=1.0):
    return all(_C.unsupported(backward, 0, dtype, dim, dim_v, mask, scale) is None for backward in (False, True))


def right(q, k, v, **call):
    out, lse = torch.ops.fa4.fwd(q, k, v, **call)
    assert_within_bound({"out": out, "lse": lse}, q, k, v, **call)
    return True


def with_strides():
    q, k, v = hashed_qkv(9, 11, dim=16)
    q = q.transpose(-1, -2).contiguous().transpose(-1, -2)
    return right(q, k[:, :1].expand(-1, 2, -1, -1), v.flip(2)[..., ::2])


def lengths():
    return all(right(*hashed_qkv(a, b)) for a, b in ((1, 1), (0, 3), (3, 0), (130, 257), (257, 130)))


def causal_and_window():
    q, k, v = hashed_qkv(7, 12)
    for window, lo, hi in (((None, None), None, 5), ((2, 0), 3, 5)):
        out = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=True, window_size=window).transpose(1, 2)
        assert_within_bound({"out": out}, q, k, v, lo=lo, hi=hi)
    out = scaled_dot_product_attention(q, k, v, is_causal=True)
    assert max_error(out, Reference(q, k, v, attn_mask=band(7, 12, hi=0)).out) < 1e-5
    return True


def mask_gradient():
    q, k, v = hashed_qkv(4, 4)
    try:
        torch.ops.fa4.fwd(q, k, v, attn_mask=torch.zeros(4, 4, requires_grad=True))
    except (RuntimeError, NotImplementedError, ValueError):
        return False
    return True


def has_argument(*names):
    """Whether the operator or a function has an argument of such a name: what is reserved has none yet."""
    schema = str(torch.ops.fa4.fwd.default._schema)
    return any(name in schema for name in names)


def runs_dropout():
    q = torch.ones(1, 1, 2, 4)
    with pytest.warns(RuntimeWarning, match="dropout_p"):
        scaled_dot_product_attention(q, q, q, dropout_p=0.5)
    return False


SUPPORT = {
    "float16, bfloat16, float32, float64": lambda: all(map(can, ("float16", "bfloat16", "float32", "float64"))),
    "head dim of q and k 1 to 256, that of v 1 to 256, each its own": lambda: all(
        can(dim=a, dim_v=b) for a in (1, 7, 64, 256) for b in (1, 96, 255, 256)
    ),
    "head dim above 256": lambda: can(dim=257) or can(dim_v=257),
    "heads_q any whole multiple of heads_kv": lambda: all(
        right(*hashed_qkv(5, 6, heads=h, heads_kv=g)) for h, g in ((1, 1), (6, 2), (7, 1), (12, 4))
    ),
    "any strides, 0 included": with_strides,
    "any lengths, 0 included": lengths,
    "causal at either corner, sliding window": causal_and_window,
    "boolean mask": lambda: can(mask="bool"),
    "additive mask, float32 or the dtype of q": lambda: all(
        can(dtype=d, mask=m) for d in ("float16", "bfloat16", "float32") for m in ("float32", d)
    ),
    "gradient to an additive mask": mask_gradient,
    "keys that exist in each batch (len_kv)": lambda: right(
        *hashed_qkv(5, 9), len_kv=torch.tensor([0, 7], dtype=torch.int32)
    ),
    "any finite scale, 0 and negative included": lambda: (
        all(can(scale=s) for s in (0.0, -1.0, 1e-20, 1e4)) and not can(scale=math.inf)
    ),
    "dropout": runs_dropout,
    "softcap": lambda: has_argument("softcap"),
    "attention sink": lambda: has_argument("sink"),
    "ALiBi slopes": lambda: has_argument("alibi"),
    "packed variable lengths": lambda: has_argument("cu_seqlens", "start_q"),
    "paged keys and values": lambda: has_argument("page", "block_table"),
    "splits of the keys": lambda: has_argument("split"),
}


def test_the_support_table_is_what_the_code_says():
    rows = [re.match(r"\| (.+?) \| (yes|no) \|", line) for line in marked("support").splitlines()]
    table = {row[1]: row[2] for row in rows if row}
    assert set(table) == set(SUPPORT)
    for what, answer in table.items():
        assert ("yes" if SUPPORT[what]() else "no") == answer, what


def test_uc_133_the_newest_symbols_are_the_stated_ones():
    for name, version in (("GLIBC", NEWEST_GLIBC), ("GLIBCXX", NEWEST_GLIBCXX), ("libgcc", NEWEST_LIBGCC)):
        assert f"{name} {'.'.join(map(str, version))}" in README


def test_uc_137_the_commands_are_there():
    assert "python -m flash_attn4" in marked("command one")
    assert "pytest" in marked("command two")


@pytest.mark.parametrize(
    "subject",
    ["**Layout.**", "**Strides.**", "**Precision.**", "**Dropout**", "**Threads.**", "**DTensor.**", "`True` attends"],
)
def test_uc_069_uc_044_uc_095_uc_121_uc_110_uc_142_the_subjects_are_there(subject):
    assert subject in README
