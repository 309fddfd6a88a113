"""Error and time of encoding weights in the block formats of GGUF: ao, llama.cpp and the `gguf` package."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import gguf
import torch
from torch import Tensor

from ao_core.ext.numerics import sqnr
from ao_quant import GGUFWeightOnlyConfig
from ao_quant.configs import GGUF_TYPES
from ao_quant.gguf.blocks import block_size, from_blocks, to_blocks
from ao_quant.gguf.encode import encode

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))
from benchmarking import Row, arguments, interleaved, record

COLUMNS = 1024

TEXT = f"""\
Gaussian float32 weights, rows of {COLUMNS}, encoded on one thread, in alternate rounds. *dB* is the SQNR
after decoding. llama.cpp encodes without an importance matrix (`ggml_quantize_chunk`); the `gguf` package
encodes some types only."""

#: (weights, type) -> bytes of the blocks
Encoder = Callable[[Tensor, str], Tensor]


def ours(x: Tensor, kind: str) -> Tensor:
    """The bytes that `write_gguf` writes."""
    spec = GGUFWeightOnlyConfig(kind).spec(tuple(x.shape), x.dtype)
    return to_blocks(encode(kind, x, spec), kind)


def package(x: Tensor, kind: str) -> Tensor:
    """The `gguf` package in numpy."""
    return torch.from_numpy(gguf.quantize(x.numpy(), gguf.GGMLQuantizationType[kind.upper()]))


def llama(folder: str) -> Encoder:
    """llama.cpp, from its library in a folder."""
    library = ctypes.CDLL(str(Path(folder) / "libggml-base.so"))
    quantize = library.ggml_quantize_chunk
    quantize.restype = ctypes.c_size_t
    sizes = [ctypes.c_int64] * 3
    quantize.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *sizes, ctypes.c_void_p]

    def run(x: Tensor, kind: str) -> Tensor:
        elements, size = block_size(kind)
        rows, k = x.shape
        out = torch.empty(rows, k // elements * size, dtype=torch.uint8)
        number = gguf.GGMLQuantizationType[kind.upper()]
        quantize(number, x.data_ptr(), out.data_ptr(), 0, rows, k, None)
        return out

    return run


def measure(rounds: int, rows: int, folder: str) -> list[Row]:
    """One row for each type and encoder."""
    torch.set_num_threads(1)
    x = torch.randn(rows, COLUMNS, generator=torch.Generator().manual_seed(0))
    found: list[Row] = []
    for kind in GGUF_TYPES:
        encoders: dict[str, Encoder] = {"ao": ours}
        if folder:
            encoders["llama.cpp"] = llama(folder)
        if kind in ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0"):
            encoders["gguf"] = package
        calls = {name: partial(encoder, x, kind) for name, encoder in encoders.items()}
        samples = interleaved(calls, rounds=rounds)
        expected = calls["ao"]()
        for name, call in calls.items():
            encoded = call()
            found.append(
                {
                    "type": kind,
                    "encoder": name,
                    "dB": float(sqnr(x, from_blocks(encoded, kind).dequantize())),
                    "bytes of ao": "yes" if torch.equal(encoded, expected) else "no",
                    "ns a weight": median(samples[name]) / x.numel() * 1e9,
                }
            )
    return found


if __name__ == "__main__":
    args = arguments(__doc__, rounds=5, rows=256, llama="")
    record(args.json, "Encoding in GGUF", TEXT, measure(args.rounds, args.rows, args.llama))
