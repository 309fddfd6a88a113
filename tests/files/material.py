"""What hostile files are made from: checkpoints, unfinished work and GGUF, of every kind of tensor."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ao_core import (
    WHOLE,
    Spec,
    WeightOnlyConfig,
    quantize_checkpoint,
    quantize_tensor,
    save_model,
)

CONFIG = WeightOnlyConfig("int4", 32, "bfloat16")
#: a layer (96, 64) for each way to store a tensor
SPECS = {
    "int8": Spec("int8", (1, WHOLE), "bfloat16"),
    "uint4": Spec("uint4", (1, 32), "bfloat16", zero_point="int", layout="packed"),
    "centered": Spec("uint4", (1, 32), "float16", zero_point="float", layout="packed"),
    "scaled": Spec("uint4", (1, 32), "float16", zero_point="offset", layout="packed"),
    "nested": Spec("nf4", (1, 32), Spec("uint8", (1, WHOLE), zero_point="int"), layout="packed"),
    "mx": Spec("f4e2m1", (1, 32), "e8m0", layout="packed"),
    "float8": Spec("f8e4m3", (1, WHOLE)),
    "ternary": Spec("ternary", (1, WHOLE), layout="digits"),
    "flat": Spec("int8", (256,), layout="flat"),
    "static": Spec("int8", (1, WHOLE), act=Spec("int8", (WHOLE, WHOLE), static=True)),
    "dynamic": Spec("int8", (1, WHOLE), act=Spec("int8", (1, WHOLE))),
    "bsr": Spec("bf16", (1, WHOLE), "none", layout="bsr", options=(("blocksize", 16),)),
    "two_four": Spec("int8", (1, WHOLE), layout="two_four"),
}


def model(seed: int = 0, *, dense: bool = False) -> nn.ModuleDict:
    """A layer of each kind, a transposed one, a dense one, a tie and a buffer."""
    torch.manual_seed(seed)
    layers = nn.ModuleDict()
    for name, spec in SPECS.items():
        layers[name] = layer = nn.Linear(64, 96)
        if name == "bsr":
            layer.weight.data[:48] = 0
        if not dense:
            act = {"act_scale": 0.1} if name == "static" else {}
            weight = quantize_tensor(layer.weight.detach(), spec, **act)
            layer.weight = nn.Parameter(weight, requires_grad=False)
    layers["turned"] = turned = nn.Linear(96, 64)
    if not dense:
        weight = quantize_tensor(turned.weight.detach().t().contiguous(), SPECS["int8"])
        turned.weight = nn.Parameter(weight.t(), requires_grad=False)
    layers["plain"], layers["tied"] = nn.Linear(64, 96), nn.Linear(64, 96)
    layers["tied"].weight = layers["plain"].weight
    layers.register_buffer("wide", torch.ones(2, dtype=torch.complex128))
    return layers


def make(root: Path) -> None:
    """The folders that cases begin with."""
    save_model(model(), root / "one")
    save_model(model(), root / "many", max_shard_size=20_000)
    for folder in ("one", "many"):
        (root / folder / "config.json").write_text('{"model": "small"}')
    save_model(model(dense=True), root / "dense", max_shard_size=60_000)
    quantize_checkpoint(root / "dense", root / "done", CONFIG, max_shard_size=30_000)
    for folder, part in (("half", 0.5), ("late", 2.0)):
        unfinished(root / "dense", root / folder, part)
    write_gguf_file(root)
    (root / "sentinel").mkdir()
    (root / "sentinel" / "secret").write_bytes(b"secret" * 100)


def unfinished(source: Path, target: Path, part: float) -> None:
    """What a run leaves that is interrupted when that part is quantized, or when files are published."""

    def stop(done: int, total: int, name: str) -> None:
        if done > part * total:
            raise KeyboardInterrupt

    real = os.replace
    if part > 1:

        def halt(old: Any, new: Any) -> None:
            real(old, new)
            if Path(new).parent == target and Path(new).suffix == ".safetensors":
                raise KeyboardInterrupt

        os.replace = halt  # type: ignore[assignment]
    with contextlib.suppress(KeyboardInterrupt):
        quantize_checkpoint(source, target, CONFIG, max_shard_size=30_000, progress=stop)
    os.replace = real
    assert (target / ".quantizing" / "state.json").exists()


def write_gguf_file(root: Path) -> None:
    """A file of some tensors and keys of every kind."""
    import numpy

    from ao_quant import GGUFWeightOnlyConfig
    from ao_quant.gguf import write_gguf

    (root / "gguf").mkdir()
    tensors: dict[str, Tensor] = {"dense": torch.randn(3, 5), "half": torch.randn(7).bfloat16()}
    for kind in ("q4_0", "q4_k", "q8_0"):
        spec = GGUFWeightOnlyConfig(kind).spec((4, 256), torch.float32)
        tensors[kind] = quantize_tensor(torch.randn(4, 256), spec)
    metadata = {
        "general.architecture": "llama",
        "a.list": ["x", "y"],
        "a.numbers": numpy.arange(4, dtype=numpy.int32),
        "a.true": True,
        "a.float": 0.5,
    }
    write_gguf(root / "gguf" / "model.gguf", tensors, metadata)
