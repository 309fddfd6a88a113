"""A step of AdamW with 8-bit moments over many tensors, beside torch's own with moments in float32."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[4] / "scripts"))
from ao_core import Spec, quantize_tensor
from ao_core.ext.kernels import select
from ao_optim import StepCall
from benchmarking import Row, Samples, arguments, interleaved, paired, percentile, record

TEXT = """\
{size:,} parameters in {tensors} tensors, {threads} threads, one step of AdamW in alternate rounds; *GB/s*:
what has to be read and written, by the median; *x fused*: the median over rounds of how many times as fast
as `torch.optim.AdamW(fused=True)`, with its interval; *copy*: `Tensor.copy_` of as many float32, read and
written."""

#: formats of the first and the second moment
STATES = {
    "dynamic8": ("dynamic8", "dynamic8u"),
    "companded8": ("companded8", "companded8u"),
    "float8": ("f8e4m3", "f8e5m3u"),
}


def quantized(params: list[Tensor], states: tuple[str, str]) -> Callable[[], object]:
    """Steps of the kernel; tensors of their own."""
    params = [p.clone() for p in params]
    grads = [torch.randn_like(p) for p in params]
    specs = tuple(Spec(name, (256,), layout="flat") for name in states)
    moments = [[quantize_tensor(torch.zeros(p.shape), spec) for p in params] for spec in specs]
    size = sum(p.numel() for p in params)
    call = StepCall("adam_step", specs, size, params[0].dtype, grads[0].dtype, "cpu")
    kernel, steps = select(call), count(1)
    assert kernel.name == "cpu_adam_step"

    def step() -> None:
        kernel.fn(
            params, grads, *moments, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01,
            step=next(steps), decoupled=True, maximize=False, seed=None,
        )  # fmt: skip

    return step


def dense(params: list[Tensor], **options: bool) -> Callable[[], object]:
    params = [p.clone().requires_grad_() for p in params]
    for p in params:
        p.grad = torch.randn_like(p)
    return torch.optim.AdamW(params, lr=1e-3, weight_decay=0.01, **options).step


def measure(
    dtype: torch.dtype, size: int, tensors: int, rounds: int, with_foreach: bool
) -> list[Row]:
    """A row for each contender, with parameters of one dtype."""
    params = [torch.randn(size // tensors).to(dtype) for _ in range(tensors)]
    contenders = {"fused": dense(params, fused=True)}
    if with_foreach:
        contenders["foreach"] = dense(params, foreach=True)
    contenders |= {name: quantized(params, states) for name, states in STATES.items()}
    source, target = torch.randn(size), torch.empty(size)
    contenders["copy"] = lambda: target.copy_(source)
    samples: Samples = interleaved(contenders, rounds=rounds)
    rows = []
    for name, seconds in samples.items():
        # parameters are read and written, gradients read, two moments read and written
        moments = 4 + 4 * 4 / 256 if name in STATES else 4 * dtype.itemsize
        moved = 8 if name == "copy" else 3 * dtype.itemsize + moments
        ratio = paired(samples, name, "fused")
        rows.append(
            {
                "parameters": str(dtype).removeprefix("torch."),
                "contender": name,
                "p10 ms": 1e3 * percentile(seconds, 10),
                "median ms": 1e3 * percentile(seconds, 50),
                "GB/s": moved * size / percentile(seconds, 50) / 1e9,
                "x fused": ratio.median,
                "95 %": ratio.interval(),
            }
        )
    return rows


def main() -> None:
    args = arguments(__doc__, size=100_000_000, tensors=300, threads=2, rounds=15, foreach=1)
    torch.set_num_threads(args.threads)
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        rows += measure(dtype, args.size, args.tensors, args.rounds, bool(args.foreach))
    text = TEXT.format(size=args.size, tensors=args.tensors, threads=args.threads)
    record(args.json, "A step of AdamW with 8-bit moments", text, rows)


if __name__ == "__main__":
    main()
