"""A package of AOTInductor gives what the quantized model gives, also where ao is not imported."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ao_core import kernels
from ao_hf.export.logits import LogitsModel

SHAPES = {"input_ids": {1: torch.export.Dim("sequence", min=2, max=64)}}
TOKENS = (torch.arange(12).reshape(2, 6), torch.arange(18).reshape(2, 9))
#: a program that loads a package and keeps what it gives
ELSEWHERE = """
import sys, torch
for library in sys.argv[4:]:
    torch.ops.load_library(library)
model = torch._inductor.aoti_load_package(sys.argv[1])
torch.save([model(tokens) for tokens in torch.load(sys.argv[2])], sys.argv[3])
assert not [name for name in sys.modules if name.startswith("ao_")]
"""


def package(model: torch.nn.Module, folder: Path) -> str:
    with torch.no_grad():
        program = torch.export.export(model, TOKENS[:1], dynamic_shapes=SHAPES)
        path = str(folder / "model.pt2")
        return torch._inductor.aoti_compile_and_package(program, package_path=path)


def run_elsewhere(path: str, folder: Path, *libraries: str) -> Any:
    torch.save(TOKENS, folder / "tokens.pt")
    files = [path, folder / "tokens.pt", folder / "logits.pt", *libraries]
    env = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    return subprocess.run(
        [sys.executable, "-c", ELSEWHERE, *map(str, files)],
        env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip


def check(found: list[torch.Tensor], model: torch.nn.Module) -> None:
    with torch.no_grad():
        for logits, tokens in zip(found, TOKENS, strict=True):
            torch.testing.assert_close(logits, model(tokens), rtol=1e-4, atol=1e-5)


def test_with_the_kernels_of_ao(make_llama: Callable[..., LogitsModel], tmp_path: Path) -> None:
    """The package calls ops of ao-kernels: its library is all that another process needs of ao."""
    model = make_llama("int4_weight_only/g32-asymmetric")
    path = package(model, tmp_path)
    packaged = torch._inductor.aoti_load_package(path)
    check([packaged(tokens) for tokens in TOKENS], model)

    assert run_elsewhere(path, tmp_path).returncode != 0
    (library,) = (name for name in torch.ops.loaded_libraries if "libao_cpu" in name)
    done = run_elsewhere(path, tmp_path, library)
    assert done.returncode == 0, done.stderr
    check(torch.load(tmp_path / "logits.pt"), model)


def test_without_kernels_of_ao_it_needs_torch_alone(
    make_llama: Callable[..., LogitsModel], tmp_path: Path
) -> None:
    with kernels("reference"):  # also the layout of weights: that of a kernel is for its ops
        model = make_llama("int4_weight_only/g32-asymmetric")
        path = package(model, tmp_path)
    done = run_elsewhere(path, tmp_path)
    assert done.returncode == 0, done.stderr
    check(torch.load(tmp_path / "logits.pt"), model)
