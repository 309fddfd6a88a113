"""What the compiled kernels compute, as digests: `python digests.py FILE` writes JSON.

`nox -s abi` runs this under several versions of torch and Python, with one file of the library,
and compares.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

from ao_core import Spec, kernels, quantize_tensor
from ao_core.ext import repack
from ao_kernels.cpu import library

INT8_PER_TOKEN = Spec("int8", (1, -1))
SPECS = {
    "int8 row": Spec("int8", (1, -1)),
    "int4 g32": Spec("int4", (1, 32), layout="packed"),
    "uint4 g64, zero points": Spec("uint4", (1, 64), zero_point="int", layout="packed"),
    "int3 row": Spec("int3", (1, -1), layout="packed"),
    "q4_k": Spec(
        "uint4", (1, 32), Spec("uint6", (1, 8), "float16", layout="packed"), "offset", "packed"
    ),
    "nf4 g64": Spec("nf4", (1, 64), layout="packed"),
    "mxfp4": Spec("f4e2m1", (1, 32), scale_dtype="e8m0", layout="packed"),
    "f8e4m3 row": Spec("f8e4m3", (1, -1)),
    "int4 g32, int8 activations": Spec("int4", (1, 32), layout="packed", act=INT8_PER_TOKEN),
}
N, K = 80, 192


def digest(tensor: torch.Tensor) -> str:
    """Of the bytes."""
    data = bytes(tensor.contiguous().view(torch.uint8).reshape(-1).tolist())
    return hashlib.sha256(data).hexdigest()[:16]


def numbers() -> dict[str, str]:
    """Matmuls of each format at several batch sizes, rows of it, and the dequantized weight."""
    library.load()
    found = {}
    random = torch.Generator().manual_seed(0)
    dense = torch.randn(N, K, generator=random)
    rows = torch.randn(33, K, generator=random)
    ids = torch.tensor([3, 0, N - 1])
    for name, spec in SPECS.items():
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            weight = repack(quantize_tensor(dense.to(dtype), spec), dtype)
            case = f"{name}, {dtype}".replace("torch.", "")
            found[f"{case}: weight"] = digest(weight.dequantize())
            found[f"{case}: embedding"] = digest(F.embedding(ids, weight))
            for m in (1, 5, 33):
                with kernels("compiled"):
                    y = F.linear(rows[:m].to(dtype), weight)
                found[f"{case}: M={m}"] = digest(y)
    return found


if __name__ == "__main__":
    record = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "isa": library.isa(),
        "library": hashlib.sha256(library.library_path().read_bytes()).hexdigest(),
        "numbers": numbers(),
    }
    Path(sys.argv[1]).write_text(json.dumps(record, indent=1), encoding="utf-8")
