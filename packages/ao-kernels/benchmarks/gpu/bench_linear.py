"""Linear layers on one GPU beside bf16 and torch's int4: see METHOD.md."""

from __future__ import annotations

import argparse
import json
import platform
import random
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ao_core import WHOLE, QTensor, Spec
from ao_core.dispatch import select
from ao_core.records import Call
from ao_core.tensor import native, quantize_tensor

SHAPES = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "head": (128256, 4096),
}
ROWS = (1, 8, 16, 32, 64, 128, 256, 1024, 4096)
TINY = ({"tiny": (256, 512)}, (1, 17), 1e6)
FORMATS = {
    "int4 g128": Spec("int4", (1, 128), "bfloat16", layout="packed"),
    "int4 g64 zero": Spec("uint4", (1, 64), "bfloat16", "float", layout="packed"),
    "nf4 g64": Spec("nf4", (1, 64), "bfloat16", layout="packed"),
    "int8": Spec("int8", (1, WHOLE), "float32"),
    "float8": Spec("f8e4m3", (1, WHOLE), "float32"),
}
ROUNDS, SECONDS = 20, 7 * 60


@dataclass
class Contender:
    """One way to multiply: what is called for each copy of its weight."""

    name: str
    #: bytes that a product reads of its weight
    size: int
    copies: list[Any]
    call: Callable[[Tensor, Any], Tensor]
    kernel: str = ""


def contenders(shape: tuple[int, int], rows: int, device: str, rotation: float) -> list[Contender]:
    """All of them, with weights of `rotation` bytes; the numbers of ao's are checked."""

    def copies_of(weight: Any, size: int, copy: Callable[[Any], Any]) -> list[Any]:
        return [weight, *(copy(weight) for _ in range(int(rotation // size)))]

    dense = torch.randn(shape, dtype=torch.bfloat16, device=device) * 0.02
    x = torch.randn(rows, shape[1], dtype=torch.bfloat16, device=device)
    size = 2 * dense.numel()
    found = [Contender("bf16", size, copies_of(dense, size, Tensor.clone), F.linear, "F.linear")]
    for name, spec in FORMATS.items():
        weight = native(quantize_tensor(dense, spec))
        call = Call("linear", weight.spec, shape, tuple(x.shape), x.dtype, device)
        size = sum(leaf.numel() * leaf.element_size() for _, leaf in weight.leaves())
        copies = copies_of(weight, size, QTensor.clone)
        found.append(Contender(f"ao {name}", size, copies, F.linear, select(call).name))
        check(F.linear(x, weight), x, weight.dequantize(torch.float32))
    if device == "cuda":
        weight, size = tinygemm(shape)
        copies = copies_of(weight, size, lambda pair: tuple(part.clone() for part in pair))
        found.append(Contender("torch int4 g128", size, copies, tinygemm_linear, "int4pack_mm"))
    return found


def tinygemm(shape: tuple[int, int]) -> tuple[tuple[Tensor, Tensor], int]:
    """Random weights of torch's int4 with scales and zero points, and their bytes."""
    n, k = shape
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
    packed = torch.ops.aten._convert_weight_to_int4pack(codes, 8)
    qparams = torch.rand(k // 128, n, 2, dtype=torch.bfloat16, device="cuda")
    return (packed, qparams), n * k // 2 + 2 * qparams.numel()


def tinygemm_linear(x: Tensor, weight: tuple[Tensor, Tensor]) -> Tensor:
    return torch.ops.aten._weight_int4pack_mm(x, weight[0], 128, weight[1])


def check(out: Tensor, x: Tensor, weight: Tensor) -> None:
    expected = x[:64].double() @ weight.double().t()
    error = float((out[:64].double() - expected).norm() / expected.norm())
    if not error < 1e-2:
        raise AssertionError(f"relative error {error:.1e}")


def recorded(contender: Contender, x: Tensor) -> Callable[[], float]:
    """Run every copy once; seconds for each."""

    def everything() -> None:
        for weight in contender.copies:
            contender.call(x, weight)

    if not x.is_cuda:

        def plain() -> float:
            start = time.perf_counter()
            everything()
            return (time.perf_counter() - start) / len(contender.copies)

        return plain
    everything()  # compiles, and allocates what captured launches share
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        everything()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def replay() -> float:
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / len(contender.copies)

    replay()
    return replay


def interleaved(everyone: list[Contender], x: Tensor) -> dict[str, list[float]]:
    """Seconds of every contender in each round; the order changes from round to round."""
    replays = {each.name: recorded(each, x) for each in everyone}
    times: dict[str, list[float]] = {name: [] for name in replays}
    for _ in range(ROUNDS):
        for name in random.sample(list(replays), len(replays)):
            times[name].append(replays[name]())
    return times


def measured(
    shape: tuple[int, int], rows: int, device: str, rotation: float, bandwidth: float
) -> list[dict[str, Any]]:
    everyone = contenders(shape, rows, device, rotation)
    x = torch.randn(rows, shape[1], dtype=torch.bfloat16, device=device)
    times = interleaved(everyone, x)
    lines = []
    for each in everyone:
        taken = sorted(times[each.name])
        ratios = [a / b for a, b in zip(times["bf16"], times[each.name], strict=True)]
        lines.append(
            {
                "shape": list(shape), "rows": rows, "contender": each.name, "kernel": each.kernel,
                "microseconds": median(taken) * 1e6, "p10": taken[len(taken) // 10] * 1e6,
                "p90": taken[-1 - len(taken) // 10] * 1e6, "times_bf16": median(ratios),
                "share_of_copy": each.size / median(taken) / bandwidth,
            }
        )  # fmt: skip
    return lines


def copy_bandwidth(device: str) -> float:
    """Bytes read and written per second by `copy_`."""
    source = torch.empty(
        int(1e9) if device == "cuda" else int(1e7), dtype=torch.uint8, device=device
    )
    copy = Contender("copy", 0, [torch.empty_like(source)], lambda x, to: to.copy_(x))
    run = recorded(copy, source)
    return 2 * source.numel() / median(run() for _ in range(ROUNDS))


def environment(device: str, bandwidth: float) -> dict[str, Any]:
    packages = ("torch", "triton", "ao-core", "ao-kernels") if device == "cuda" else ("torch",)
    query = [
        "nvidia-smi",
        "--query-gpu=driver_version,clocks.sm,power.limit",
        "--format=csv,noheader",
    ]
    gpu = None
    if device == "cuda" and shutil.which(query[0]):
        gpu = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor(),
        "driver, clock, power limit": gpu,
        "versions": {name: version(name) for name in packages},
        "copy_bytes_per_second": bandwidth,
    }


def markdown(result: dict[str, Any]) -> str:
    head = "| weight | rows | contender | kernel | µs | p10 | p90 | × bf16 | of copy |"
    rows = [
        f"| {line['name']} | {line['rows']} | {line['contender']} | `{line['kernel']}` | "
        f"{line['microseconds']:.1f} | {line['p10']:.1f} | {line['p90']:.1f} | "
        f"{line['times_bf16']:.2f} | {line['share_of_copy']:.0%} |"
        for line in result["lines"]
    ]
    about = "\n".join(f"- {key}: {value}" for key, value in result["environment"].items())
    return "\n".join(["# Linear layers", "", about, "", head, "|" + " --- |" * 9, *rows, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="one small weight")
    options = parser.parse_args()
    torch.manual_seed(0)
    shapes, rows, rotation = TINY if options.tiny else (SHAPES, ROWS, 400e6)
    began, bandwidth = time.monotonic(), copy_bandwidth(options.device)
    lines = []
    with torch.inference_mode():
        for m in rows:
            for name, shape in shapes.items():
                if time.monotonic() - began < SECONDS:
                    found = measured(shape, m, options.device, rotation, bandwidth)
                    lines += [{"name": name, **line} for line in found]
    result = {"environment": environment(options.device, bandwidth), "lines": lines}
    print(markdown(result))
    if options.device == "cuda":
        options.out.mkdir(parents=True, exist_ok=True)
        stem = options.out / f"linear-{result['environment']['date'].replace(':', '')}"
        stem.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
        stem.with_suffix(".md").write_text(markdown(result))


if __name__ == "__main__":
    main()
