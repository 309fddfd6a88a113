"""Products of two operands in 8 bits, and what quantizes activations, on one GPU: see METHOD.md."""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from bench_linear import ROUNDS, SECONDS, SHAPES, Contender, copy_bandwidth, environment, recorded
from torch import Tensor

from ao_core import WHOLE, QTensor, Spec
from ao_core.records import Call
from ao_core.registry import registry
from ao_core.tensor import quantize_tensor
from ao_core.tensor.create import encode_parts, encode_reference
from ao_core.tensor.relayout import to_layout
from ao_kernels.triton.dynamic import grouped_mm, mm
from ao_kernels.triton.dynamic4 import linear
from ao_kernels.triton.producers import quantize, rms_norm_quantize, silu_mul_quantize

ROW, TENSOR, GROUP, SQUARE = (1, WHOLE), (WHOLE, WHOLE), (1, 128), (128, 128)
ROWS = (16, 128, 1024, 4096, 16384)


def cast_weight(b: Tensor, spec: Spec) -> Any:
    """The weight in codes, as a layer has it."""
    plain = Spec(spec.dtype, spec.block, spec.scale_dtype)
    return QTensor(encode_parts(b, plain), plain, tuple(b.shape), b.dtype)


#: weights in 4 bits, and activations in 8
FOUR = {
    "uint8 × int4 32": Spec("int4", (1, 32), "bfloat16", act=Spec("uint8", ROW, zero="int")),
    "int8 × int4 128": Spec("int4", (1, 128), "bfloat16", act=Spec("int8", ROW)),
    "float8 × int4 128": Spec("int4", (1, 128), "bfloat16", act=Spec("f8e4m3", ROW)),
}


def in_4_bits(
    a: Tensor, b: Tensor, count: int, expected: Tensor, name: str, spec: Spec
) -> Contender:
    """The product with a weight that is loaded in 4 bits."""
    packed = quantize_tensor(b, replace(spec, layout="packed"))
    weights = [to_layout(packed, "plane32") for _ in range(count)]
    check(linear(a, weights[0], None)[:64], expected, name, 0.2)
    return Contender(f"ao {name}", 0, weights, lambda x, w: linear(x, w, None))


def products(a: Tensor, b: Tensor, rotation: float) -> list[Contender]:
    """Everyone, each with the cast of the activations; weights are cast before."""
    kinds = {
        "float8 rows": Spec("f8e4m3", ROW, act=Spec("f8e4m3", ROW)),
        "float8 blocks": Spec("f8e4m3", SQUARE, act=Spec("f8e4m3", GROUP)),
        "float8 gradients": Spec("f8e4m3", GROUP, act=Spec("f8e4m3", GROUP)),
        "int8 rows": Spec("int8", ROW, act=Spec("int8", ROW)),
        "int8 zero points": Spec("int8", ROW, act=Spec("uint8", ROW, zero="int")),
    }
    count = 1 + int(rotation // (2 * b.numel()))
    found = [Contender("bf16", 0, [b.clone() for _ in range(count)], F.linear)]
    expected = (a[:64].double() @ b.double().t()).float()
    for name, spec in kinds.items():
        weights = [cast_weight(b, spec) for _ in range(count)]
        check(mm(a, weights[0], spec)[:64], expected, name)
        found.append(Contender(f"ao {name}", 0, weights, lambda x, w, spec=spec: mm(x, w, spec)))
    found += [in_4_bits(a, b, count, expected, *kind) for kind in FOUR.items()]
    kinds["float8 tensors"] = Spec("f8e4m3", TENSOR, act=Spec("f8e4m3", TENSOR))
    for name, kernel in (
        ("float8 tensors", "scaled_product"),
        ("float8 rows", "scaled_product"),
        ("int8 rows", "int_product"),
    ):
        spec, of_torch = kinds[name], registry.kernels.get(kernel)
        call = Call("mm", spec, tuple(b.shape), tuple(a.shape), a.dtype, "cuda")
        if a.is_cuda and of_torch.accepts(call) is None:
            weights = [cast_weight(b, spec) for _ in range(count)]
            compiled = torch.compile(lambda x, w, spec=spec, fn=of_torch.fn: fn(x, w, spec))
            found.append(Contender(f"torch {name}", 0, weights, compiled))
    return found + (torchao(b, count) if b.is_cuda else [])


def torchao(b: Tensor, count: int) -> list[Contender]:
    """The same by torchao, where it is installed."""
    try:
        from torchao.quantization import (
            Float8DynamicActivationFloat8WeightConfig,
            Int8DynamicActivationInt8WeightConfig,
            PerRow,
            quantize_,
        )
    except ImportError:
        return []
    found = []
    for name, config in (
        ("float8 rows", Float8DynamicActivationFloat8WeightConfig(granularity=PerRow())),
        ("int8 rows", Int8DynamicActivationInt8WeightConfig()),
    ):
        layers = []
        for _ in range(count):
            layer = torch.nn.Linear(b.shape[1], b.shape[0], bias=False, device="meta")
            layer.weight = torch.nn.Parameter(b.clone(), requires_grad=False)
            quantize_(layer, config)
            layers.append(layer)
        call = torch.compile(lambda x, layer: layer(x))
        found.append(Contender(f"torchao {name}", 0, layers, call))
    return found


def experts(a: Tensor, b: Tensor) -> list[Contender]:
    """Experts with rows that differ by some: 16 bits of torch, and float8."""
    share = torch.rand(len(b), device=b.device) + 0.5
    offs = (share.cumsum(0) / share.sum() * len(a)).to(torch.int32)
    offs[-1] = len(a)
    spec = Spec("f8e4m3", ROW, act=Spec("f8e4m3", ROW))
    w = cast_weight(b, spec)
    return [
        Contender("bf16", 0, [b], lambda _, w: torch._grouped_mm(a, w.transpose(-2, -1), offs=offs)),
        Contender("ao float8 rows", 0, [w], lambda _, w: grouped_mm(a, w, offs, spec)),
    ]  # fmt: skip


def producers(x: Tensor, up: Tensor, rotation: float) -> list[Contender]:
    """What quantizes activations, beside the same in torch, compiled; sizes are bytes that must move."""
    spec, k, size = Spec("f8e4m3", ROW), x.shape[1], x.numel()
    copies = [(x.clone(), up.clone()) for _ in range(1 + int(rotation // (4 * size)))]
    weight = torch.randn_like(x[0])
    pairs: dict[str, tuple[int, Callable[..., Any], Callable[..., Any]]] = {
        "rows": (3, lambda x, up: quantize(x, spec), lambda x, up: encode_reference(x, spec)),
        "RMSNorm": (
            3,
            lambda x, up: rms_norm_quantize(x, weight, 1e-6, spec),
            lambda x, up: encode_reference(F.rms_norm(x, (k,), weight, 1e-6), spec),
        ),
        "SiLU": (
            5,
            lambda x, up: silu_mul_quantize(x, up, spec),
            lambda x, up: encode_reference(F.silu(x) * up, spec),
        ),
    }
    found = []
    for name, (width, ours, of_torch) in pairs.items():
        compiled = torch.compile(of_torch) if x.is_cuda else of_torch
        parts = [call(x, up)["qdata"].float() for call in (ours, compiled)]
        check(parts[0], parts[1], name, 1e-2)
        for who, call in ((f"ao {name}", ours), (f"torch {name}", compiled)):
            found.append(
                Contender(who, width * size, copies, lambda _, pair, call=call: call(*pair))
            )
    return found


def check(out: Tensor, expected: Tensor, name: str, bound: float = 6e-2) -> None:
    error = float((out.float() - expected).norm() / expected.norm())
    if not error < bound:
        raise AssertionError(f"{name}: relative error {error:.1e}")


def timed(
    everyone: list[Contender], x: Tensor, bandwidth: float, rounds: int
) -> list[dict[str, Any]]:
    """Interleaved: each once in every round."""
    replays = {each.name: recorded(each, x) for each in everyone}
    times: dict[str, list[float]] = {name: [] for name in replays}
    for _ in range(rounds):
        for name in random.sample(list(replays), len(replays)):
            times[name].append(replays[name]())
    first = times[everyone[0].name]
    return [
        {
            "contender": each.name, "microseconds": median(times[each.name]) * 1e6,
            "times_first": median(a / b for a, b in zip(first, times[each.name], strict=True)),
            "share_of_copy": each.size / median(times[each.name]) / bandwidth,
        }
        for each in everyone
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="one small product of each kind")
    options = parser.parse_args()
    torch.manual_seed(0)
    device, dtype = options.device, torch.bfloat16 if options.device == "cuda" else torch.float16
    rotation, widths, tokens = (0, (300,), 8) if options.tiny else (400e6, (4096, 14336), 16384)
    rounds = 1 if options.tiny else ROUNDS
    shapes, rows = ({"tiny": (130, 300)}, (17,)) if options.tiny else (SHAPES, ROWS)
    mixtures = ((3, 128, 304),) if options.tiny else ((8, 4096, 2048), (64, 4096, 2048))
    began, bandwidth, lines = time.monotonic(), copy_bandwidth(device), []

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=device)

    def add(about: dict[str, Any], everyone: Callable[[], list[Contender]], x: Tensor) -> None:
        if time.monotonic() - began < SECONDS:
            lines.extend({**about, **line} for line in timed(everyone(), x, bandwidth, rounds))

    with torch.inference_mode():
        for k in widths:
            x, up = draw(tokens, k), draw(tokens, k)
            add({"k": k}, partial(producers, x, up, rotation), x)
        for shape in mixtures:
            x = draw(2 * tokens, shape[-1])
            add({"experts": shape}, partial(experts, x, draw(*shape) * 0.02), x)
        for m in rows:
            for name, (n, k) in shapes.items():
                x, about = draw(m, k), {"name": name, "rows": m, "shape": [n, k]}
                add(about, partial(products, x, draw(n, k) * 0.02, rotation), x)
    result = {"environment": environment(device, bandwidth), "lines": lines}
    print(json.dumps(result, indent=1))
    if device == "cuda":
        options.out.mkdir(parents=True, exist_ok=True)
        stem = f"dynamic-{result['environment']['date'].replace(':', '')}.json"
        (options.out / stem).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
