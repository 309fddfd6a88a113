"""ONNX files of quantized models, in which codes stay integers and every op is a standard one.

A quantized linear layer becomes `DequantizeLinear` and `MatMul`, which ONNX Runtime and others fuse.
Activations that are quantized at run time go through plain arithmetic: ONNX has no op for that.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ao_core.ext import MissingExtraError, checked
from ao_hf.export.spelled import SpelledLinear, spell_linears

__all__ = ["OPSET", "export_onnx"]

#: the first with 4-bit integers and with scales of groups
OPSET = 21


@checked
def export_onnx(
    model: nn.Module,
    inputs: tuple[Any, ...],
    path: str | os.PathLike[str],
    *,
    dynamic_shapes: dict[str, Any] | tuple[Any, ...] | None = None,
) -> None:
    """Write a quantized model as an ONNX file of opset 21.

    Codes of 8 bits are stored as INT8 or UINT8, those of 4 bits or fewer as INT4 or UINT4, two in a byte.
    Large models get a second file of weights next to the first, as `torch.onnx` makes it.

    Args:
        model: in eval mode, with quantized `nn.Linear` layers; a language model of transformers goes into a
            `LogitsModel` first.
        inputs: an example, as for `torch.export.export`.
        path: the file to write.
        dynamic_shapes: as for `torch.export.export`.

    Raises:
        MissingExtraError: onnxscript is not installed.
        UnsupportedOp: a weight is quantized in a way that ONNX does not express; see `spell_linears`.
    """
    try:
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("onnxscript", "ao-hf[onnx]", "export_onnx") from error
    from ao_hf.export.onnx_ops import narrowed, translations

    spelled = spell_linears(model)
    with torch.no_grad():
        program = torch.export.export(spelled, inputs, dynamic_shapes=dynamic_shapes)
        exported = torch.onnx.export(
            program,
            dynamo=True,
            opset_version=OPSET,
            custom_translation_table=translations(),
            verbose=False,
        )
    assert exported is not None  # with dynamo=True
    narrowed(exported.model, _bits(spelled))
    exported.save(str(Path(path)))


def _bits(model: nn.Module) -> dict[str, tuple[int, bool]]:
    """By the name of a tensor of codes: bits, and whether they have a sign."""
    return {
        f"{name}.codes" if name else "codes": (module.format.bits, module.format.low < 0)
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, SpelledLinear)
    }
