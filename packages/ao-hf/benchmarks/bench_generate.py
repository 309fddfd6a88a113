"""Tokens per second of transformers' own `generate` on the CPU, compared with llama.cpp."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers

import ao_hf
from ao_core import Config, FqnToConfig, quantize_
from ao_hf.generation import weights_read
from ao_hf.generation.caches import cache_reads, decoding, fixed_cache, make_cache
from ao_hf.generation.clock import Clock, Timing
from ao_quant import (
    Int4WeightOnlyConfig,
    Int8DynamicActivationInt4WeightConfig,
    Int8WeightOnlyConfig,
)

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))
sys.path.insert(0, str(Path(__file__).parents[2] / "ao-kernels/benchmarks/cpu"))
sys.path.append(str(Path(__file__).parents[2] / "ao-kernels/benchmarks/gpu"))  # decoder
from decoder import Shape
from llama import LlamaBench, version
from reader import READER, SIZE, reader
from rotation import Timed

from benchmarking import Row, Samples, arguments, paired, record, rounds_of

SHAPES = {
    "SmolLM2-135M": Shape(30, 576, 9, 3, 1536, 49152, context=16384),
    "Llama 1.1B": Shape(context=16384),
}
EAGER, COMPILED = "ao, eager", "ao, compiled"
#: a token that no text has, so that none ends early, and that is looked for as others are
NEVER = 1 << 20

ABOUT = """\
Llama models with random weights in {threads} threads: greedy `model.generate` of transformers, batch 1,
after `ao_hf.fuse`, bfloat16 with all matrices in {weights}, and keys and values in
`AoCache(model.config, {kv!r})`. Activations are as they are, or where it is said in int8. llama.cpp's
`llama-bench` runs in a process of its own, and takes its turn in each round, on a file of the same shape with
all matrices in {kind}, keys and values in {llama_kv}, and decodes with `-fa {flash}`. *tokens/s*: of some
tokens that follow a context, the first one not counted; or of a text of {text} ("prefill"). *× llama.cpp*:
the median over the rounds of how many times as fast, with its interval. *share of read*: the bytes of
weights, keys and values that a token needs, over what is read in that time by a plain loop in C."""


@dataclass(frozen=True)
class Recipe:
    """How a model is quantized, and the type of llama.cpp that it is compared with."""

    config: Config
    #: type of llama.cpp
    kind: str
    #: how the weights are stored, and what is said of activations that are quantized, in words
    weights: str
    acts: str = ""

    @property
    def peer(self) -> str:
        """The name of llama.cpp's rows."""
        return f"llama.cpp {self.kind}"


_INT4 = "4 bits and one scale for 32 weights"
RECIPES = {
    "weights": Recipe(Int4WeightOnlyConfig(32, symmetric=True), "Q4_0", _INT4),
    "dynamic": Recipe(
        Int8DynamicActivationInt4WeightConfig(32), "Q4_0", _INT4, ", int8 activations"
    ),
    "int8": Recipe(Int8WeightOnlyConfig(), "Q8_0", "8 bits and one scale per row"),
}


def build(shape: Shape, recipe: str = "weights") -> Any:
    """A fused model of a shape with random weights, quantized by one of `RECIPES`."""
    config = transformers.LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.dim,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.context,
    )
    torch.set_default_dtype(torch.bfloat16)
    try:
        model: Any = transformers.LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(torch.float32)
    model.eval().requires_grad_(False)
    # a head that is not named would keep 8 bits, and that of llama.cpp is as all its matrices
    chosen = RECIPES[recipe].config
    quantize_(model, FqnToConfig({"lm_head": chosen, "*": chosen}))
    ao_hf.fuse(model)
    return model


@dataclass
class Generating:
    """A model, and a context of random keys and values that it goes on from."""

    model: Any
    kv: str
    context: int
    compiled: bool = False

    def __post_init__(self) -> None:
        self.cache = make_cache(self.model, self.kv)
        if self.compiled:  # with room for the tokens of a round
            self.cache, self.steps = fixed_cache(self.model, self.kv, self.context + 256)
            self.steps.__enter__()  # and kept: once it is collected, the model runs as ever
        generator, config = torch.Generator().manual_seed(0), self.model.config
        heads, dim = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
        for layer in range(config.num_hidden_layers):
            both = torch.randn(2, 1, heads, self.context, dim, generator=generator).bfloat16()
            self.cache.update(*both, layer)
        self.decode(2)  # what has to be compiled is compiled

    def decode(self, tokens: int) -> float:
        """Seconds a token."""
        timing = generate(self.model, self.kv, self.cache, self.context + 1, tokens + 1)
        self.nbytes = weights_read(self.model) + cache_reads(self.cache, 1)
        self.cache.crop(-(tokens + 1))
        return timing.seconds_after / tokens


def generate(model: Any, kv: str, cache: Any, prompt: int, new: int) -> Timing:
    """When tokens after a prompt came."""
    ids, clock = torch.arange(prompt)[None] % 1000, Clock()
    options = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0, "eos_token_id": NEVER}
    with decoding(model, kv), torch.inference_mode():
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            streamer=clock,
            **options,
        )
    return clock.timing()


def prefill(model: Any, kv: str, text: int) -> float:
    """Seconds to the first token after a text."""
    return generate(model, kv, make_cache(model, kv), text, 1).seconds_to_first


#: type of llama.cpp -> bytes of a number with its share of a scale
KV_BYTES = {"": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32}


def row(
    shape: str, work: str, samples: Samples, name: str, peer: str, tokens: int, nbytes: int
) -> Row:
    """One contender; `tokens` are made in a sample, and `nbytes` read."""
    ratio = paired(samples, name, peer) if peer in samples else None
    share = paired(samples, name, READER).scaled(nbytes / SIZE) if nbytes else None
    return {
        "shape": shape,
        "work": work,
        "contender": name,
        "tokens/s": tokens / median(samples[name]),
        "× llama.cpp": ratio.median if ratio else "",
        "× llama.cpp, 95 %": ratio.interval() if ratio else "",
        "share of read": share.median if share else "",
        "share of read, 95 %": share.interval() if share else "",
    }


def measured(name: str, model: Any, args: Any) -> list[Row]:
    """Rows of one shape: for each context, then prefill."""
    peer, texts, recipe = None, None, RECIPES[args.recipe]
    if args.llama:
        folder, how = Path(args.llama), (SHAPES[name], recipe.kind, args.threads, args.llama_kv)
        peer, texts = LlamaBench(folder, *how, flash=args.flash), LlamaBench(folder, *how)
    shape, found, reading = SHAPES[name], [], Timed(reader().calls(1))
    keys = int(2 * shape.layers * shape.kv_heads * shape.head_dim * KV_BYTES[args.llama_kv])
    for context in (int(text) for text in args.contexts.split(",") if text):
        ours = {EAGER: Generating(model, args.kv, context)}
        if args.compiled:
            ours[COMPILED] = Generating(model, args.kv, context, compiled=True)
        times: Any = {n: partial(one.decode, args.tokens) for n, one in ours.items()}
        with ExitStack() as stack:
            if peer is not None:
                # one call to warm up
                other = peer.decoding(args.tokens, context, args.rounds + 1)
                times[recipe.peer] = stack.enter_context(other)
            samples = rounds_of({**times, READER: reading}, args.rounds)
        sizes = {n: one.nbytes for n, one in ours.items()}
        if peer is not None:
            sizes[recipe.peer] = peer.nbytes + keys * context
        work = f"after {context}{recipe.acts}"
        found += [row(name, work, samples, n, recipe.peer, 1, sizes[n]) for n in sizes]
    if args.texts:
        times = {EAGER: partial(prefill, model, args.kv, args.text)}
        if texts is not None:
            times[recipe.peer] = partial(texts.prefill, args.text)
        samples = rounds_of(times, args.texts)
        work = f"prefill of {args.text}{recipe.acts}"
        found += [row(name, work, samples, n, recipe.peer, args.text, 0) for n in times]
    return found


def main() -> None:
    args = arguments(
        __doc__,
        shapes=",".join(SHAPES),
        contexts="64,1024,8192",
        kv="kv8",
        recipe="weights",
        threads=2,
        rounds=8,
        texts=5,  # rounds of prefill
        text=512,  # tokens of it
        llama_kv="",  # type of keys and values of llama.cpp; float16
        compiled=1,  # or 0: eager alone
        tokens=48,
        llama="",
        flash="auto",  # of llama.cpp: which is faster depends on the machine
        note="",  # a sentence on how llama.cpp was built
    )
    torch.set_num_threads(args.threads)
    found: list[Row] = []
    for name in args.shapes.split(","):
        found += measured(name, build(SHAPES[name], args.recipe), args)
    recipe = RECIPES[args.recipe]
    options = {"kv": args.kv, "llama_kv": args.llama_kv or "float16", "flash": args.flash}
    options |= {"weights": recipe.weights, "kind": recipe.kind}
    about = f"{ABOUT.format(threads=args.threads, **options, text=args.text)} {args.note}".strip()
    title, peers = "`generate` on the CPU", version(args.llama)
    record(args.json, title, about, found, versions=peers, keys=("shape", "work", "contender"))


if __name__ == "__main__":
    main()
