"""Tokens per second of transformers' own `generate`: dense, quantized, and with fused blocks."""

from __future__ import annotations

import copy
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers

import ao_hf
from ao_core import quantize_
from ao_quant import Int4WeightOnlyConfig

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))
from benchmarking import Row, Samples, arguments, paired, record, rounds_of

SHAPES = {
    "SmolLM2-135M": {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
                     "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
                     "tie_word_embeddings": True},
    "Llama 1.1B": {"vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632,
                   "num_hidden_layers": 22, "num_attention_heads": 32, "num_key_value_heads": 4},
}  # fmt: skip
INT4, FUSED, DENSE = "int4", "int4, fused", "dense"

TEXT = """\
Llama models of these shapes with random weights in {dtype}, on {threads} thread(s): greedy
`model.generate` of transformers in eager mode, batch 1, {tokens} tokens after a prompt of {prompt}. Seconds
per token are the difference between generating many tokens and one, over their number. *int4* is
`Int4WeightOnlyConfig(32, symmetric=True)`, the head in 8 bits; *fused* is the same after `ao_hf.fuse`. In
alternate rounds of one process; *× int4* is the median over rounds of how many times as fast as int4."""


def build(shape: dict[str, Any], dtype: torch.dtype) -> Any:
    """A model with random weights."""
    torch.set_default_dtype(dtype)
    try:
        model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))
    finally:
        torch.set_default_dtype(torch.float32)
    return model.eval().requires_grad_(False)


def seconds_per_token(model: Any, prompt: int, tokens: int) -> float:
    """Of decoding alone."""
    ids = torch.arange(1, prompt + 1)[None]

    def generate(count: int) -> float:
        start = time.perf_counter()
        options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
        model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options)
        return time.perf_counter() - start

    return (generate(tokens + 1) - generate(1)) / tokens


def rows(shape: str, samples: Samples) -> list[Row]:
    """A row for each contender."""
    return [
        {
            "shape": shape,
            "weights": name,
            "tokens/s": 1 / median(seconds),
            "ms per token": 1e3 * median(seconds),
            "× int4": (ratio := paired(samples, name, INT4)).median,
            "× int4, 95 %": ratio.interval(),
        }
        for name, seconds in samples.items()
    ]


def main() -> None:
    args = arguments(
        __doc__, shapes="SmolLM2-135M", dtype="bfloat16", threads=2, rounds=10, prompt=16, tokens=32
    )
    torch.set_num_threads(args.threads)
    found: list[Row] = []
    for shape in args.shapes.split(","):
        models = {DENSE: build(SHAPES[shape], getattr(torch, args.dtype))}
        models[INT4] = copy.deepcopy(models[DENSE])
        quantize_(models[INT4], Int4WeightOnlyConfig(32, symmetric=True))
        models[FUSED] = copy.deepcopy(models[INT4])
        ao_hf.fuse(models[FUSED])
        time_of = {
            name: partial(seconds_per_token, model, args.prompt, args.tokens)
            for name, model in models.items()
        }
        found += rows(shape, rounds_of(time_of, args.rounds))
    named = ("dtype", "threads", "tokens", "prompt")
    text = TEXT.format(**{name: getattr(args, name) for name in named})
    record(args.json, "Fused blocks in `generate`", text, found)


if __name__ == "__main__":
    main()
