"""The door for packages that build on ao: everything that a plugin may import, beside `ao_core` itself.

`ao_core` has what users of a model need, `ao_core.ext` what authors of formats, layouts, kernels, ops,
algorithms and commands need. Families of names are in modules of their own:

- `ao_core.ext.numerics`: pure functions on tensors
- `ao_core.ext.kernels`: selection, parts and activations
- `ao_core.ext.quantizing`: decisions, conversion, progress
- `ao_core.ext.compute`: weights that are multiplied in low precision
- `ao_core.ext.calibration`: data, statistics, visits
- `ao_core.ext.graph`: traced models
- `ao_core.ext.interchange`: checkpoints of other projects
- `ao_core.ext.schema`, `ao_core.ext.saving`, `ao_core.ext.reports`, `ao_core.ext.cli`

Any other module of ao_core may change without notice; the packages of this repository import no other one.
Names are imported when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ao_core.lazy import lazy_names

if TYPE_CHECKING:
    from ao_core.arguments import check_fields, checked, checked_but, shown
    from ao_core.caches import cache_folder
    from ao_core.config import ConfigLike, json_object
    from ao_core.dtypes import FLOATS, codebook_dtype, float_name
    from ao_core.errors import (
        AoError,
        CheckpointError,
        ConfigError,
        DequantizeWarning,
        FrozenError,
        GraphError,
        MissingExtraError,
        PluginError,
        QuantizationError,
        StorageError,
        UnknownNameError,
        UnsupportedOp,
    )
    from ao_core.layouts import (
        SHARED,
        Geometry,
        Packed,
        PartAxis,
        Parts,
        Quantizer,
        forms_of,
        grid_axes,
        too_wide,
        unlike,
    )
    from ao_core.layouts.base import make_parts
    from ao_core.mapped import give_back
    from ao_core.plugins import plugins, problems
    from ao_core.registry import registry
    from ao_core.spec import BLOCKSIZE, NO_SCALE, ROW, SCALE_DTYPES, TENSOR, blocksize_of
    from ao_core.steps import LOW_RANK, PERMUTE, SCALE, Step, hadamard_step, low_rank_step
    from ao_core.tensor import (
        STOCHASTIC,
        check_quantizable,
        fake_quantize,
        is_converted,
        quantize_values,
        repack,
        stochastic_rounding,
        to_layout,
    )
    from ao_core.tensor.attention import attend
    from ao_core.tensor.chosen_steps import ChosenSteps
    from ao_core.tensor.rotation import hadamard
    from ao_core.weights import (
        GroupSize,
        WeightConfig,
        WeightFormat,
        apply_weight_config,
        bias_name,
        is_conv,
        is_transposed,
        matmul_unsupported_reason,
        matrix_spec,
        own_scale_dtype,
        quantize_weight,
    )

#: name -> module that defines it
_MODULES = {
    "AoError": "ao_core.errors",
    "BLOCKSIZE": "ao_core.spec",
    "CheckpointError": "ao_core.errors",
    "ChosenSteps": "ao_core.tensor.chosen_steps",
    "ConfigError": "ao_core.errors",
    "ConfigLike": "ao_core.config",
    "DequantizeWarning": "ao_core.errors",
    "FLOATS": "ao_core.dtypes",
    "FrozenError": "ao_core.errors",
    "Geometry": "ao_core.layouts",
    "GraphError": "ao_core.errors",
    "GroupSize": "ao_core.weights",
    "MissingExtraError": "ao_core.errors",
    "LOW_RANK": "ao_core.steps",
    "NO_SCALE": "ao_core.spec",
    "PERMUTE": "ao_core.steps",
    "Packed": "ao_core.layouts",
    "PartAxis": "ao_core.layouts",
    "Parts": "ao_core.layouts",
    "PluginError": "ao_core.errors",
    "QuantizationError": "ao_core.errors",
    "Quantizer": "ao_core.layouts",
    "ROW": "ao_core.spec",
    "SCALE": "ao_core.steps",
    "SCALE_DTYPES": "ao_core.spec",
    "SHARED": "ao_core.layouts",
    "STOCHASTIC": "ao_core.tensor",
    "Step": "ao_core.steps",
    "StorageError": "ao_core.errors",
    "TENSOR": "ao_core.spec",
    "UnknownNameError": "ao_core.errors",
    "UnsupportedOp": "ao_core.errors",
    "WeightConfig": "ao_core.weights",
    "WeightFormat": "ao_core.weights",
    "apply_weight_config": "ao_core.weights",
    "bias_name": "ao_core.weights",
    "attend": "ao_core.tensor.attention",
    "blocksize_of": "ao_core.spec",
    "cache_folder": "ao_core.caches",
    "check_fields": "ao_core.arguments",
    "check_quantizable": "ao_core.tensor",
    "checked": "ao_core.arguments",
    "checked_but": "ao_core.arguments",
    "codebook_dtype": "ao_core.dtypes",
    "fake_quantize": "ao_core.tensor",
    "float_name": "ao_core.dtypes",
    "forms_of": "ao_core.layouts",
    "grid_axes": "ao_core.layouts",
    "hadamard": "ao_core.tensor.rotation",
    "give_back": "ao_core.mapped",
    "hadamard_step": "ao_core.steps",
    "low_rank_step": "ao_core.steps",
    "is_conv": "ao_core.weights",
    "is_converted": "ao_core.tensor",
    "is_transposed": "ao_core.weights",
    "json_object": "ao_core.config",
    "make_parts": "ao_core.layouts.base",
    "matmul_unsupported_reason": "ao_core.weights",
    "matrix_spec": "ao_core.weights",
    "own_scale_dtype": "ao_core.weights",
    "plugins": "ao_core.plugins",
    "problems": "ao_core.plugins",
    "quantize_values": "ao_core.tensor",
    "quantize_weight": "ao_core.weights",
    "registry": "ao_core.registry",
    "repack": "ao_core.tensor",
    "shown": "ao_core.arguments",
    "stochastic_rounding": "ao_core.tensor",
    "to_layout": "ao_core.tensor",
    "too_wide": "ao_core.layouts",
    "unlike": "ao_core.layouts",
}

__all__ = [
    "BLOCKSIZE",
    "FLOATS",
    "LOW_RANK",
    "NO_SCALE",
    "PERMUTE",
    "ROW",
    "SCALE",
    "SCALE_DTYPES",
    "SHARED",
    "STOCHASTIC",
    "TENSOR",
    "AoError",
    "CheckpointError",
    "ChosenSteps",
    "ConfigError",
    "ConfigLike",
    "DequantizeWarning",
    "FrozenError",
    "Geometry",
    "GraphError",
    "GroupSize",
    "MissingExtraError",
    "Packed",
    "PartAxis",
    "Parts",
    "PluginError",
    "QuantizationError",
    "Quantizer",
    "Step",
    "StorageError",
    "UnknownNameError",
    "UnsupportedOp",
    "WeightConfig",
    "WeightFormat",
    "apply_weight_config",
    "attend",
    "bias_name",
    "blocksize_of",
    "cache_folder",
    "check_fields",
    "check_quantizable",
    "checked",
    "checked_but",
    "codebook_dtype",
    "fake_quantize",
    "float_name",
    "forms_of",
    "give_back",
    "grid_axes",
    "hadamard",
    "hadamard_step",
    "is_conv",
    "is_converted",
    "is_transposed",
    "json_object",
    "lazy_names",
    "low_rank_step",
    "make_parts",
    "matmul_unsupported_reason",
    "matrix_spec",
    "own_scale_dtype",
    "plugins",
    "problems",
    "quantize_values",
    "quantize_weight",
    "registry",
    "repack",
    "shown",
    "stochastic_rounding",
    "to_layout",
    "too_wide",
    "unlike",
]

__getattr__, __dir__ = lazy_names(__name__, _MODULES)
