"""Runs the CUDA matmul on the CPU: weights in the layout go to the program `emulate`, which is compiled here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ao_core import QTensor
from ao_core.ext.numerics import full_block

PACKAGE = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PACKAGE))

from hatch_build import alone_in, compile_objects, find_compiler, sanitizing  # noqa: E402

#: `Number` in params.h
NUMBERS = {None: 0, torch.uint8: 1, torch.bfloat16: 2, torch.float16: 3, torch.float32: 4}
#: an H100: SMs, bytes of shared memory of a CTA
H100 = (132, 227 * 1024)
_NONE = torch.empty(0, dtype=torch.uint8)


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
    out = PACKAGE / "build" / "-".join(filter(None, ["emulate", sanitize.replace(",", "-")]))
    compiler = find_compiler()
    # out of line: what stands for an instruction of the GPU is a loop over lanes
    own = ("-std=c++20", "-O1", "-fno-inline", "-ffp-contract=off", "-Wall", "-Wextra", "-Wno-unknown-pragmas")
    flags = [*own, *sanitizing(sanitize, compiler), "-fno-inline"]
    flags += [f"-I{PACKAGE / 'csrc' / 'cuda'}", f"-I{PACKAGE / 'tests' / 'cuda'}"]
    with alone_in(out):
        sources = {PACKAGE / "tests" / "cuda" / "emulate.cpp": ()}
        objects = compile_objects(compiler, sources, flags, out, 1)
        link = [*compiler, *flags, *map(str, objects), "-pthread", "-o", str(out / "emulate")]
        subprocess.run(link, check=True)
    return out / "emulate"


def run(
    exe: Path,
    x: Tensor,
    w: QTensor,
    bias: Tensor | None = None,
    *,
    device: tuple[int, int] = H100,
    hopper: bool = True,
    shuffle: int = 0,
) -> Ran:
    """The matmul of activations (M, K) with a weight in the layout `plane16`."""
    (n, k), m, parts = w.stored_shape, x.shape[0], w.parts
    zero_point = parts.get("zero_point")
    group = full_block(w.spec.block, (n, k))[-1]
    blobs = [each if each is not None else _NONE for each in (x, parts["qdata"], parts["scale"], zero_point, bias)]
    data = [_bytes(each) for each in blobs]
    head = [
        m, n, k, group, w.format.bits, w.spec.dtype == "f8e4m3", NUMBERS[x.dtype],
        NUMBERS[parts["scale"].dtype], NUMBERS[None if zero_point is None else zero_point.dtype],
        x.stride(0), *device, hopper, shuffle, *map(len, data),
    ]  # fmt: skip
    sent = torch.tensor(list(map(int, head)), dtype=torch.int64).numpy().tobytes() + b"".join(data)
    done = subprocess.run([exe], input=sent, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    told = torch.frombuffer(bytearray(done.stdout[:40]), dtype=torch.int64).tolist()
    out = torch.frombuffer(bytearray(done.stdout[40:]), dtype=x.dtype).view(m, n)
    return Ran(out, *told)


def _bytes(tensor: Tensor) -> bytes:
    """Its memory, from the first element to the last."""
    if tensor.numel() == 0:
        return b""
    count = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    flat = tensor.as_strided((count,), (1,), tensor.storage_offset())
    return bytes(flat.view(torch.uint8).numpy())
