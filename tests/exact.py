"""Calls whose results are exact, so that a chip and the simulator must give the same bits whatever the order of their
sums: scores are whole numbers from -14 to 0, the scale makes weights of 2 to their power, v is small whole numbers, and
the weights of a row sum to a power of two. python tests/exact.py OUT.json stores what the GPU here answers, as hashes.
"""

import datetime
import hashlib
import json
import math
import sys

import numpy as np
import torch

SCALE = math.log(2)
LOWEST = -14
TOTAL = 4  # the weights of the row that sees most sum to 2 to this
DIMS = {"d64": (64, 64), "d96": (96, 96), "d128": (128, 128), "d192_v128": (192, 128), "d256": (256, 256)}
# name: dims, len_q, len_kv, heads, heads_kv, hi
CASES = {f"{name}_full": (dims, 140, 300, 2, 1, None) for name, dims in DIMS.items()}
CASES |= {f"{name}_causal": (dims, 200, 250, 2, 2, 50) for name, dims in DIMS.items()}
CASES |= {"d128_long_full": ((128, 128), 70, 4200, 1, 1, None), "d128_long_causal": ((128, 128), 140, 8300, 1, 1, 8160)}
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}


def exponents(random, count, total):
    """So many whole numbers from LOWEST to 0, the powers of two of which sum to 2 ** total."""
    parts = [min(total, 0)] * 2 ** max(total, 0)
    at = 0
    while len(parts) < count:  # halve one
        at = int(random.integers(len(parts)))
        if parts[at] > LOWEST:
            parts[at] -= 1
            parts.append(parts[at])
    random.shuffle(parts)
    return parts


def scores(random, lengths, len_kv):
    """Scores of one query's direction with every key: its weights over each of these lengths sum to a power of two."""
    found, total = [], TOTAL - (len(lengths) - 1)
    for i, (begin, end) in enumerate(zip([0, *lengths[:-1]], lengths, strict=True)):
        found += exponents(random, end - begin, total + max(0, i - 1))
    return found + list(random.integers(LOWEST, 1, len_kv - len(found)))


def inputs(name, dtype):
    """q, k, v and hi of a case.

    A query has its direction in two dimensions of its own, 2 and 1 long, which queries a whole number of directions
    apart share; a key has two numbers there that make the score."""
    (dim, dim_v), len_q, len_kv, heads, heads_kv, hi = CASES[name]
    random = np.random.default_rng(sum(map(ord, name)))
    directions = dim // 2 // (heads // heads_kv)
    q = np.zeros((1, heads, len_q, dim))
    k = np.zeros((1, heads_kv, len_kv, dim))
    for head in range(heads):
        group, head_kv = head % (heads // heads_kv), head // (heads // heads_kv)
        for i in range(len_q):
            at = 2 * (group * directions + i % directions)
            q[0, head, i, at : at + 2] = 2, 1
        for direction in range(directions):
            rows = range(direction, len_q, directions)
            lengths = [len_kv] if hi is None else [min(i + hi + 1, len_kv) for i in rows]
            if not lengths:
                continue
            at = 2 * (group * directions + direction)
            first = random.integers(-3, 4, len_kv)
            k[0, head_kv, :, at] = first
            k[0, head_kv, :, at + 1] = scores(random, lengths, len_kv) - 2 * first
    v = random.integers(-4, 5, (1, heads_kv, len_kv, dim_v))
    return *(torch.from_numpy(x).to(DTYPES[dtype]) for x in (q, k, v)), hi


def digest(tensor):
    return hashlib.sha256(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def main(path):
    answers = {}
    for name in CASES:
        for dtype in DTYPES:
            q, k, v, hi = inputs(name, dtype)
            out, lse = torch.ops.fa4.fwd(q.cuda(), k.cuda(), v.cuda(), hi=hi, scale=SCALE)
            answers[f"{dtype}_{name}"] = [digest(out), digest(lse)]
    about = {
        "chip": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
    }
    with open(path, "w") as file:
        json.dump({"about": about, "answers": answers}, file, indent=1)
        file.write("\n")


if __name__ == "__main__":
    import flash_attn4  # noqa: F401

    main(sys.argv[1])
