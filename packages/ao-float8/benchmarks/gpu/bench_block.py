"""A block of Llama-3-8B's shape, forward and backward, in each recipe, beside bfloat16 and torchao."""

from __future__ import annotations

import copy
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[4] / "scripts"))
from block import Block

from ao_float8 import EmulationWarning, Float8LinearConfig, convert_to_float8_training
from benchmarking import Row, Samples, arguments, paired, percentile, record, rounds_of

BASELINE = "bfloat16"

TEXT = """\
A decoder block of Llama-3-8B's shape (width {width}), {tokens} tokens in sequences of {sequence},
random-normal data in bfloat16: one forward and backward pass on {device}, {how}. Contenders take turns in
shuffled rounds of one process after {warm_up} s of warming up each; ratios are medians over the rounds, with
intervals."""


#: what torchao has for a recipe: the stable ones by the same name, and a prototype for GPUs only
_STABLE, _PROTOTYPE = ("tensorwise", "rowwise", "rowwise_with_gw_hp"), "blockwise"


def contenders(recipes: list[str], device: str) -> dict[str, Callable[[nn.Module], None]]:
    """What is done to the block, in place, by name; torchao's where it is installed."""
    on_gpu = device.startswith("cuda")
    found: dict[str, Callable[[nn.Module], None]] = {BASELINE: lambda model: None}
    for recipe in recipes:
        found[f"ao {recipe}"] = lambda model, name=recipe: _ours(model, name)  # type: ignore[misc]
        has_peer = recipe in _STABLE or (recipe == _PROTOTYPE and on_gpu)
        if has_peer and find_spec("torchao"):
            found[f"torchao {recipe}"] = lambda model, name=recipe: _torchao(model, name)  # type: ignore[misc]
    return found


def _ours(model: nn.Module, name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EmulationWarning)
        convert_to_float8_training(
            model, config=Float8LinearConfig.from_recipe_name(name), strict=True
        )


def _torchao(model: nn.Module, name: str) -> None:
    if name == _PROTOTYPE:
        from torchao import quantize_
        from torchao.prototype.blockwise_fp8_training.linear import Float8BlockwiseLinearConfig

        quantize_(model, Float8BlockwiseLinearConfig())
        return
    from torchao.float8 import Float8LinearConfig as Config
    from torchao.float8 import convert_to_float8_training as convert

    convert(model, config=Config.from_recipe_name(name))


def seconds_of(model: nn.Module, x: Tensor, grad: Tensor) -> Callable[[], float]:
    """A measurement of one forward and backward pass, until the device is done."""
    synchronize = torch.cuda.synchronize if x.is_cuda else (lambda: None)

    def measure() -> float:
        model.zero_grad(set_to_none=True)
        x.grad = None
        synchronize()
        start = time.perf_counter()
        model(x).backward(grad)
        synchronize()
        return time.perf_counter() - start

    return measure


def warm(measures: Mapping[str, Callable[[], float]], seconds: float) -> None:
    """Compile everything, and bring the device to the clocks that it keeps."""
    for measure in measures.values():
        measure()
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            measure()


def rows_of(samples: Samples, tokens: int) -> list[Row]:
    """A line for each contender."""
    rows = []
    for name, seconds in samples.items():
        peer = name.replace("ao ", "torchao ", 1) if name.startswith("ao ") else ""
        times = paired(samples, name, BASELINE)
        beside = paired(samples, name, peer) if peer in samples else None
        rows.append(
            {
                "contender": name,
                "ms": percentile(seconds, 50) * 1e3,
                "tokens/s": tokens / percentile(seconds, 50),
                f"× {BASELINE}": times.median,
                "95 %": times.interval(),
                "× torchao": beside.median if beside else "",
                "of it 95 %": beside.interval() if beside else "",
            }
        )
    return rows


def main() -> None:
    args = arguments(
        __doc__,
        width=4096,
        tokens=16384,
        sequence=8192,
        rounds=50,
        warm_up=1.0,
        recipes="tensorwise,rowwise,blockwise",
        device="cuda",
        compiled=1,
    )
    generator = torch.Generator(args.device).manual_seed(0)
    shape = (args.tokens // args.sequence, args.sequence, args.width)
    options = {"generator": generator, "device": args.device, "dtype": torch.bfloat16}
    x, grad = torch.randn(shape, **options).requires_grad_(), torch.randn(shape, **options)
    block = Block(args.width, args.sequence).to(args.device, torch.bfloat16)
    measures = {}
    for name, convert in contenders(args.recipes.split(","), args.device).items():
        model = copy.deepcopy(block)
        convert(model)
        run = torch.compile(model, fullgraph=True) if args.compiled else model
        measures[name] = seconds_of(run, x, grad)
    warm(measures, args.warm_up)
    samples = rounds_of(measures, args.rounds)
    on_gpu = args.device.startswith("cuda")
    text = TEXT.format(
        width=args.width,
        tokens=args.tokens,
        sequence=args.sequence,
        device=torch.cuda.get_device_name() if on_gpu else "the CPU",
        how="compiled" if args.compiled else "not compiled",
        warm_up=args.warm_up,
    )
    rows = rows_of(samples, args.tokens)
    record(args.json, "Training a block in float8", text, rows)


if __name__ == "__main__":
    main()
