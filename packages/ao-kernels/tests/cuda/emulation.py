"""Runs the CUDA matmul on the CPU: weights go to the program `emulate`, which is compiled here."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ao_core import QTensor
from ao_core.ext.numerics import full_block
from ao_kernels.cuda.records import FORMATS

PACKAGE = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PACKAGE))

from build_library import build  # noqa: E402

#: `Number` in params.h
NUMBERS = {None: 0, torch.uint8: 1, torch.bfloat16: 2, torch.float16: 3, torch.float32: 4}
#: an H100: SMs, bytes of shared memory of a CTA
H100 = (132, 227 * 1024)


class Call(NamedTuple):
    """The arguments of the op `cuda_linear`; `shuffle`, in which order warps start."""

    x: Tensor
    qdata: Tensor
    scale: Tensor
    zero_point: Tensor | None
    bias: Tensor | None
    n: int
    k: int
    group: int
    format: int
    shuffle: int = 0


class Ran(NamedTuple):
    """The result of a matmul, and how it was launched."""

    out: Tensor
    block_m: int
    n_warps: int
    splits: int
    stages: int
    shared: int


def program(sanitize: str = "") -> Path:
    """The program, compiled unless that was done before; the sanitizers watch it."""
    name = "-".join(filter(None, ["emulate", sanitize.replace(",", "-")]))
    settings = {"AO_LIBRARY": "OFF", "AO_SANITIZE": sanitize}
    return build(name, "ao_emulate", settings, jobs=1) / "ao_emulate"


def run(
    exe: Path, calls: Sequence[Call], *, device: tuple[int, int] = H100, hopper: bool = True
) -> list[Ran]:
    """Matmuls in one process: on a device of so many SMs, and bytes of shared memory of a CTA."""
    sent = b"".join(_sent(call, device, hopper) for call in calls)
    done = subprocess.run([exe], input=sent, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    found, at = [], 0
    for call in calls:
        told = torch.frombuffer(bytearray(done.stdout[at : at + 40]), dtype=torch.int64).tolist()
        size, at = 2 * call.x.shape[0] * call.n, at + 40
        out = torch.frombuffer(bytearray(done.stdout[at : at + size]), dtype=call.x.dtype)
        found.append(Ran(out.view(-1, call.n), *told))
        at += size
    return found


def of_weight(x: Tensor, w: QTensor, bias: Tensor | None = None) -> Call:
    """The call for a weight in the layout `plane16`, as the kernel makes it."""
    (n, k), parts = w.stored_shape, w.parts
    group = full_block(w.spec.block, (n, k))[-1]
    return Call(
        x,
        parts["qdata"],
        parts["scale"],
        parts.get("zero_point"),
        bias,
        n,
        k,
        group,
        FORMATS[w.spec.dtype],
    )


def _sent(call: Call, device: tuple[int, int], hopper: bool) -> bytes:
    zero_point = call.zero_point
    blobs = (call.x, call.qdata, call.scale, zero_point, call.bias)
    data = [b"" if each is None else _bytes(each) for each in blobs]
    head = (
        call.x.shape[0], call.n, call.k, call.group, 8 if call.format else 4, call.format == 2,
        NUMBERS[call.x.dtype], NUMBERS[call.scale.dtype],
        NUMBERS[None if zero_point is None else zero_point.dtype], call.x.stride(0),
        *device, hopper, call.shuffle, *map(len, data),
    )  # fmt: skip
    return torch.tensor(list(map(int, head)), dtype=torch.int64).numpy().tobytes() + b"".join(data)


def _bytes(tensor: Tensor) -> bytes:
    """Its memory, from the first element to the last."""
    if tensor.numel() == 0:
        return b""
    count = 1 + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    flat = tensor.as_strided((count,), (1,), tensor.storage_offset())
    return bytes(flat.view(torch.uint8).numpy())
