"""The model by llama.cpp's own programs: importance matrix and K-quants, read back for the same measure."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from smollm2 import model
from torch import Tensor, nn

from ao_core import Config, FqnToConfig, QTensor
from ao_quant import GGUFWeightOnlyConfig
from ao_quant.gguf import read_gguf, read_gguf_header, write_gguf

#: of the method
NAME = "llama.cpp with its imatrix"
#: the embedding, which is the head too, keeps 8 bits, as in ao
_KEEP = ("--pure", "--token-embedding-type", "q8_0")


def quantized(
    original: nn.Module, kind: str, programs: Path, windows: Tensor
) -> tuple[nn.Module, float]:
    """The model with the values of a file of llama.cpp, and the seconds that its programs took."""
    with tempfile.TemporaryDirectory() as place:
        dense, text, matrix, file = (
            Path(place) / name for name in ("dense.gguf", "text.txt", "imatrix.gguf", "made.gguf")
        )
        write_gguf(dense, _tensors(original), _metadata(), names="transformers")
        text.write_text("\n".join(_texts(windows)), encoding="utf-8")
        start = time.perf_counter()
        _run(
            programs / "llama-imatrix",
            "-m",
            dense,
            "-f",
            text,
            "-o",
            matrix,
            "-c",
            windows.shape[1],
        )
        _run(programs / "llama-quantize", "--imatrix", matrix, *_KEEP, dense, file, kind)
        seconds = time.perf_counter() - start
        tensors, _ = read_gguf(file, names="transformers")
    values = {n: t.dequantize() if isinstance(t, QTensor) else t for n, t in tensors.items()}
    values["lm_head.weight"] = values["model.embed_tokens.weight"]
    original.load_state_dict(values, assign=True)
    return original.eval().requires_grad_(False), seconds


def base(kind: str, method: Callable[[Config], list[Config]], programs: Path) -> FqnToConfig:
    """The types that llama.cpp gives the weights of a file of this kind, for a method of ao."""
    entries: dict[str, Config | None] = {}
    for name, found in _types(kind, programs).items():
        config: Config = GGUFWeightOnlyConfig(found)
        # the embedding is the head too, in 8 bits
        entries[name] = config if "embed_tokens" in name else method(config)[0]
    return FqnToConfig(entries)


@cache
def _types(kind: str, programs: Path) -> dict[str, str]:
    """By the name in transformers; K-quants need rows of whole super-blocks, and others get other types."""
    with tempfile.TemporaryDirectory() as place:
        dense, file = Path(place) / "dense.gguf", Path(place) / "made.gguf"
        write_gguf(dense, _tensors(model.load()), _metadata(), names="transformers")
        _run(programs / "llama-quantize", *_KEEP, dense, file, kind)
        header = read_gguf_header(file)
        names = read_gguf(file, names="transformers").tensors
    infos = zip(names, header.tensors.values(), strict=True)
    return {name: info.type for name, info in infos if len(info.shape) == 2}


def _tensors(original: nn.Module) -> dict[str, Tensor]:
    values = original.state_dict()
    return {name: value for name, value in values.items() if name != "lm_head.weight"}


def _metadata() -> dict[str, Any]:
    return read_gguf(model.path()).metadata | {"general.file_type": 0}


def _texts(windows: Tensor) -> list[str]:
    return [model.tokenizer().decode(window.tolist()) for window in windows]


def _run(program: Path, *arguments: object) -> None:
    command = [str(program), *map(str, arguments)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
