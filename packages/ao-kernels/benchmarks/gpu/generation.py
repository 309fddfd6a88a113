"""Tokens per second of a model of Llama-3-8B's shape with random weights: decoding, and a text."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from statistics import median

import torch
from decoder import Decoder, Shape, after, anywhere, empty_cache, random_model, rope_table
from measuring import Case, Line, Setup, told
from torch import Tensor, nn

import ao_core
from ao_core import Config, QTensor
from ao_quant import Int4WeightOnlyConfig, Int8WeightOnlyConfig

#: tokens of a text; entries of the cache that decoding attends to, where it begins, tokens at a time
TEXT, LENGTH, START, TOKENS = 2048, 256, 64, 64
LLAMA = Shape(layers=32, dim=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256, context=TEXT)
TINY = Shape(layers=2, dim=512, heads=4, kv_heads=2, ffn=1024, vocab=1024, context=16)
_INT8, _G64 = Int8WeightOnlyConfig(), Int4WeightOnlyConfig(group_size=64)
_G128 = Int4WeightOnlyConfig(group_size=128, symmetric=True)
#: name -> what becomes of the blocks, and of the head
MODELS: dict[str, tuple[Config | None, Config | None]] = {
    "bf16": (None, None),
    "int4 g64": (_G64, _G64),
    "int8": (_INT8, _INT8),
    "int4 g128, int8 head": (_G128, _INT8),
}
#: blocks stay compiled once they are
MODES = ("eager, captured", "eager", "compiled, captured", "compiled")
ROUNDS = 5
Run = Callable[[], None]


def cases(setup: Setup) -> list[Case]:
    """One for each model, which is made once."""
    shape = TINY if setup.tiny else LLAMA
    return [Case(name, partial(of_model, setup, shape, name)) for name in MODELS]


def model_of(shape: Shape, name: str, device: str, dtype: torch.dtype) -> Decoder:
    """Weights from N(0, 0.02), quantized block by block on the device where they are made."""
    blocks, head = MODELS[name]

    def epilogue(part: nn.Module) -> None:
        if isinstance(part, nn.Embedding):
            return
        config = head if isinstance(part, nn.Linear) else blocks
        if config is not None:
            ao_core.quantize_(part, config, strict=True)

    return random_model(shape, dtype, device=device, std=0.02, epilogue=epilogue)


class Generator:
    """A model with its cache, and what is run of it: one more token, and a whole text."""

    def __init__(self, model: Decoder, length: int) -> None:
        shape, table = model.shape, model.embedding.weight
        self.model, self.length = model, length
        self.cache = empty_cache(replace(shape, context=length), table.dtype, table.device)
        self.texts = empty_cache(shape, table.dtype, table.device)
        self.rope = rope_table(shape, table.dtype).to(table.device)
        self.token = torch.zeros(1, dtype=torch.int64, device=table.device)
        self.position = torch.zeros_like(self.token)
        self.text_tokens = torch.randint(shape.vocab, (shape.context,), device=table.device)
        self.logits = torch.empty(shape.vocab, dtype=table.dtype, device=table.device)

    def restart(self, position: int) -> None:
        """The next token stands there."""
        self.position.fill_(position)

    def step(self) -> None:
        """Decode a token; the likeliest is the next one."""
        place = anywhere(self.position, self.length)
        self.logits.copy_(self.model(self.token, self.cache, self.rope, place))
        self.token.copy_(self.logits.argmax(-1, keepdim=True))
        self.position.add_(1)

    def text(self) -> None:
        """The logits after a text as long as the context."""
        place = after(0, len(self.text_tokens), self.token.device)
        self.logits.copy_(self.model(self.text_tokens, self.texts, self.rope, place))


def of_model(setup: Setup, shape: Shape, name: str) -> Iterator[Line]:
    """A line for each way to run it; a way that fails leaves the others."""
    on_gpu = setup.device == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    error = disagreement(name, setup.device, dtype)
    if not error < (5e-2 if on_gpu else 1e-4):
        raise AssertionError(f"a small model's logits differ by {error:.1e} from its dense twin's")
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    model = model_of(shape, name, setup.device, dtype)
    about = {"model": name, **sizes(model), "seconds_to_make": time.perf_counter() - began}
    about["peak_bytes_making"] = torch.cuda.max_memory_allocated() if on_gpu else 0
    run = Generator(model, min(LENGTH, shape.context))
    for mode in MODES if on_gpu else ("eager",):
        try:
            if mode == "compiled, captured":
                compile_blocks(model)
            yield {**about, "mode": mode, **timed(run, setup, captured="captured" in mode)}
        except Exception as caught:  # of the compiler, or in a capture
            yield {**about, "mode": mode, "failed": told(caught)}


def compile_blocks(model: Decoder) -> None:
    """They are alike: the first one compiles for all."""
    torch.compiler.reset()
    for block in model.blocks:
        block.compile(fullgraph=True, dynamic=False)


def timed(run: Generator, setup: Setup, *, captured: bool) -> Line:
    """Tokens per second of decoding and of texts."""
    count = 1 if setup.tiny else TOKENS
    start = 0 if setup.tiny else START
    run.restart(start)
    if setup.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    step, text = (capture(each) if captured else warm(each) for each in (run.step, run.text))

    def steps() -> None:
        run.restart(start)
        for _ in range(count):
            step()

    rounds = 1 if setup.tiny else ROUNDS
    decode, prefill = ([seconds(call) for _ in range(rounds)] for call in (steps, text))
    peak = torch.cuda.max_memory_allocated() if setup.device == "cuda" else 0
    return {
        "tokens_per_second": count / median(decode),
        "slowest": count / max(decode),
        "fastest": count / min(decode),
        "text_tokens_per_second": len(run.text_tokens) / median(prefill),
        "text_tokens": len(run.text_tokens),
        "peak_bytes": peak,
    }


def warm(run: Run) -> Run:
    """After two calls, which compile."""
    run()
    run()
    return run


def capture(run: Run) -> Run:
    """The call as a CUDA graph."""
    warm(run)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    return graph.replay  # type: ignore[no-any-return]


def seconds(call: Run) -> float:
    """Until the device is done."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else (lambda: None)
    wait()
    start = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - start


def sizes(model: Decoder) -> Line:
    """Bytes of all parameters, and of those that a token is multiplied by."""

    def stored(weight: Tensor) -> int:
        if isinstance(weight, QTensor):
            return weight.stored_bytes
        return weight.numel() * weight.element_size()

    everything = sum(stored(parameter) for parameter in model.parameters())
    return {
        "model_bytes": everything,
        "bytes_a_token": everything - stored(model.embedding.weight),
    }


def disagreement(name: str, device: str, dtype: torch.dtype, shape: Shape = TINY) -> float:
    """Relative error of a small model's logits beside those of the same with dense weights."""
    model = model_of(shape, name, device, dtype)
    twin = copy.deepcopy(model)
    ao_core.dequantize_(twin)
    runs = [Generator(each, shape.context) for each in (model, twin)]
    worst = 0.0
    for token in range(3, 3 + 5 * 7, 7):
        for run in runs:
            run.token.fill_(token)
            run.step()
        found, expected = (run.logits.float() for run in runs)
        worst = max(worst, float((found - expected).norm() / expected.norm()))
    return worst
