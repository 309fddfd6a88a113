"""ao-core: number formats, layouts, quantized tensors, kernel tables and `quantize_`.

Names are imported when first used, so `import ao_core` is fast.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ao_core.__about__ import __version__
from ao_core.lazy import lazy_names
from ao_core.safe_globals import mark

if TYPE_CHECKING:
    from ao_core.checkpoints import (
        plan_checkpoint,
        quantize_checkpoint,
        replay_checkpoint,
        verify_checkpoint,
    )
    from ao_core.compute import ComputeWeight
    from ao_core.config import (
        Config,
        FqnToConfig,
        config_from_dict,
        config_from_json,
        config_from_yaml,
        config_to_dict,
        config_to_json,
        config_to_yaml,
        resolve_config,
    )
    from ao_core.dequantize import dequantize_
    from ao_core.dispatch import kernels
    from ao_core.dtypes import float_dtype, int_dtype, lut_dtype
    from ao_core.explanation import explain
    from ao_core.folder_records import FolderKind, FolderModel, Tokenizer
    from ao_core.hookspecs import hookimpl
    from ao_core.invariant import batch_invariant, is_batch_invariant
    from ao_core.layouts import Layout
    from ao_core.model_records import ModelTransform, Prepared
    from ao_core.quantize import quantize_
    from ao_core.recipes import WeightOnlyConfig, weight_only
    from ao_core.records import (
        Algorithm,
        Call,
        DType,
        Kernel,
        Op,
        OpCall,
        Recipe,
        ScaleMethod,
        Skip,
        Solved,
        Target,
        Transform,
    )
    from ao_core.registry import register, reopen
    from ao_core.report import Report
    from ao_core.spec import WHOLE, Spec
    from ao_core.tensor import QTensor, quantize_tensor
    from ao_core.tensor.saving import load_model, open_checkpoint, save_model

#: public name -> module that defines it
_MODULES = {
    "batch_invariant": "ao_core.invariant",
    "is_batch_invariant": "ao_core.invariant",
    "Algorithm": "ao_core.records",
    "Call": "ao_core.records",
    "ComputeWeight": "ao_core.compute",
    "Config": "ao_core.config",
    "DType": "ao_core.records",
    "FqnToConfig": "ao_core.config",
    "Kernel": "ao_core.records",
    "ModelTransform": "ao_core.model_records",
    "Layout": "ao_core.layouts",
    "Op": "ao_core.records",
    "OpCall": "ao_core.records",
    "QTensor": "ao_core.tensor",
    "FolderKind": "ao_core.folder_records",
    "FolderModel": "ao_core.folder_records",
    "Prepared": "ao_core.model_records",
    "Recipe": "ao_core.records",
    "Report": "ao_core.report",
    "ScaleMethod": "ao_core.records",
    "Skip": "ao_core.records",
    "Solved": "ao_core.records",
    "Spec": "ao_core.spec",
    "Target": "ao_core.records",
    "Tokenizer": "ao_core.folder_records",
    "Transform": "ao_core.records",
    "WHOLE": "ao_core.spec",
    "WeightOnlyConfig": "ao_core.recipes",
    "lut_dtype": "ao_core.dtypes",
    "config_from_dict": "ao_core.config",
    "config_from_json": "ao_core.config",
    "config_from_yaml": "ao_core.config",
    "config_to_dict": "ao_core.config",
    "config_to_json": "ao_core.config",
    "config_to_yaml": "ao_core.config",
    "dequantize_": "ao_core.dequantize",
    "explain": "ao_core.explanation",
    "float_dtype": "ao_core.dtypes",
    "hookimpl": "ao_core.hookspecs",
    "int_dtype": "ao_core.dtypes",
    "kernels": "ao_core.dispatch",
    "load_model": "ao_core.tensor.saving",
    "open_checkpoint": "ao_core.tensor.saving",
    "plan_checkpoint": "ao_core.checkpoints",
    "quantize_": "ao_core.quantize",
    "quantize_checkpoint": "ao_core.checkpoints",
    "quantize_tensor": "ao_core.tensor",
    "register": "ao_core.registry",
    "reopen": "ao_core.registry",
    "replay_checkpoint": "ao_core.checkpoints",
    "resolve_config": "ao_core.config",
    "save_model": "ao_core.tensor.saving",
    "verify_checkpoint": "ao_core.checkpoints",
    "weight_only": "ao_core.recipes",
}

__all__ = [
    "WHOLE",
    "Algorithm",
    "Call",
    "ComputeWeight",
    "Config",
    "DType",
    "FolderKind",
    "FolderModel",
    "FqnToConfig",
    "Kernel",
    "Layout",
    "ModelTransform",
    "Op",
    "OpCall",
    "Prepared",
    "QTensor",
    "Recipe",
    "Report",
    "ScaleMethod",
    "Skip",
    "Solved",
    "Spec",
    "Target",
    "Tokenizer",
    "Transform",
    "WeightOnlyConfig",
    "__version__",
    "batch_invariant",
    "config_from_dict",
    "config_from_json",
    "config_from_yaml",
    "config_to_dict",
    "config_to_json",
    "config_to_yaml",
    "dequantize_",
    "explain",
    "float_dtype",
    "hookimpl",
    "int_dtype",
    "is_batch_invariant",
    "kernels",
    "load_model",
    "lut_dtype",
    "open_checkpoint",
    "plan_checkpoint",
    "quantize_",
    "quantize_checkpoint",
    "quantize_tensor",
    "register",
    "reopen",
    "replay_checkpoint",
    "resolve_config",
    "save_model",
    "verify_checkpoint",
    "weight_only",
]


mark()

__getattr__, __dir__ = lazy_names(__name__, _MODULES)

if os.environ.get("AO_BATCH_INVARIANT", "0") not in ("", "0"):
    from ao_core.invariant import enter_for_process

    enter_for_process()
