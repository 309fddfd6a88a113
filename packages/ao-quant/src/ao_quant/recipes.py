"""Named, ready configurations: each transform's default under its own name, and variants of it."""

from __future__ import annotations

from ao_core import Recipe
from ao_quant import configs as c

__all__ = ["RECIPES"]

#: bits per weight of the block formats of GGUF, the default first
_GGUF_BITS = {
    "q4_k": 4.5,
    "q2_k": 2.625,
    "q3_k": 3.4375,
    "q5_k": 5.5,
    "q6_k": 6.5625,
    "q8_0": 8.5,
    "q4_0": 4.5,
    "q4_1": 5,
    "q5_0": 5.5,
    "q5_1": 6,
    "iq4_nl": 4.5,
}

RECIPES: tuple[Recipe, ...] = (
    Recipe(
        "int8_weight_only",
        c.Int8WeightOnlyConfig(),
        "int8 weights, one scale per row",
        short="int8",
    ),
    Recipe(
        "int4_weight_only",
        c.Int4WeightOnlyConfig(),
        "uint4 weights in groups of 128 with zero points, 0.523 bytes per weight",
        short="int4-g128",
    ),
    Recipe(
        "int4_weight_only/g32-asymmetric",
        c.Int4WeightOnlyConfig(group_size=32),
        "the most accurate of the 4-bit integers, 0.594 bytes per weight",
        short="int4-g32",
    ),
    Recipe(
        "int4_weight_only/g128-symmetric",
        c.Int4WeightOnlyConfig(symmetric=True),
        "int4 weights in groups of 128, 0.516 bytes per weight",
    ),
    Recipe(
        "intx_weight_only",
        c.IntxWeightOnlyConfig(),
        "6-bit weights in groups of 128 with zero points",
    ),
    Recipe(
        "intx_weight_only/2bit",
        c.IntxWeightOnlyConfig(bits=2, group_size=32),
        "2-bit weights in groups of 32 with zero points",
        short="int2-g32",
    ),
    Recipe(
        "intx_weight_only/3bit",
        c.IntxWeightOnlyConfig(bits=3, group_size=32),
        "3-bit weights in groups of 32 with zero points",
        short="int3-g32",
    ),
    Recipe(
        "intx_weight_only/2bit-g64",
        c.IntxWeightOnlyConfig(bits=2, group_size=64),
        "2-bit weights in groups of 64 with zero points",
        short="int2-g64",
    ),
    Recipe(
        "intx_weight_only/3bit-g64",
        c.IntxWeightOnlyConfig(bits=3, group_size=64),
        "3-bit weights in groups of 64 with zero points",
        short="int3-g64",
    ),
    Recipe(
        "uintx_weight_only",
        c.UIntxWeightOnlyConfig(),
        "uint4 weights in groups of 64 with zero points",
    ),
    Recipe(
        "bitnet_weight_only",
        c.BitNetWeightOnlyConfig(),
        "weights -1, 0 and 1 in 2 bits, one scale: BitNet b1.58",
    ),
    Recipe(
        "bitnet_weight_only/1.6bit",
        c.BitNetWeightOnlyConfig(trits_per_byte=5),
        "the same, five weights per byte",
    ),
    Recipe(
        "nf4_weight_only",
        c.NF4WeightOnlyConfig(),
        "NF4 weights in groups of 64, scales quantized too: 4.125 bits per weight",
        short="nf4",
    ),
    Recipe(
        "codebook_weight_only",
        c.CodebookWeightOnlyConfig(),
        "16 values learned for each row by k-means",
    ),
    Recipe(
        "fp4_weight_only",
        c.FP4WeightOnlyConfig(),
        "4-bit floats e2m1 in groups of 64: 4.25 bits per weight",
    ),
    Recipe(
        "fp6_llm_weight_only",
        c.FP6LLMWeightOnlyConfig(),
        "6-bit floats e3m2, one scale per row",
    ),
    Recipe(
        "fpx_weight_only",
        c.FPXWeightOnlyConfig(),
        "5-bit floats e2m2, one scale per row",
    ),
    Recipe(
        "float8_weight_only",
        c.Float8WeightOnlyConfig(),
        "float8 e4m3 weights, one scale per row",
        short="float8",
    ),
    Recipe(
        "float8_weight_only/tensor",
        c.Float8WeightOnlyConfig(granularity="tensor"),
        "float8 e4m3 weights, one scale",
    ),
    Recipe(
        "float8_weight_only/e5m2",
        c.Float8WeightOnlyConfig(dtype="e5m2"),
        "float8 e5m2 weights, one scale per row",
    ),
    Recipe(
        "float8_weight_only/block",
        c.Float8WeightOnlyConfig(granularity="block"),
        "float8 e4m3 weights, a scale for 128 x 128",
    ),
    Recipe(
        "mx_weight_only",
        c.MXWeightOnlyConfig(),
        "MXFP4: 4-bit floats e2m1 in blocks of 32, scales are powers of two",
        short="mxfp4",
    ),
    Recipe("mx_weight_only/mxfp6", c.MXWeightOnlyConfig("e2m3"), "MXFP6: 6-bit floats e2m3"),
    Recipe(
        "mx_weight_only/mxfp8",
        c.MXWeightOnlyConfig("e4m3", "rceil"),
        "MXFP8: float8 e4m3, scales by which none saturates",
    ),
    Recipe("mx_weight_only/mxint8", c.MXWeightOnlyConfig("int8"), "MXINT8: int8"),
    Recipe(
        "nvfp4_weight_only",
        c.NVFP4WeightOnlyConfig(),
        "NVFP4: 4-bit floats e2m1 in blocks of 16 with float8 scales and one float32 scale",
        short="nvfp4",
    ),
    *(
        Recipe(
            "gguf_weight_only" if kind == "q4_k" else f"gguf_weight_only/{kind}",
            c.GGUFWeightOnlyConfig(kind),
            f"{kind.upper()} of llama.cpp, {bits:g} bits per weight",
            short=kind,
        )
        for kind, bits in _GGUF_BITS.items()
    ),
    Recipe(
        "int8_dynamic_activation_int8_weight",
        c.Int8DynamicActivationInt8WeightConfig(),
        "int8 weights per row and int8 activations per token",
        short="w8a8",
    ),
    Recipe(
        "int8_dynamic_activation_int8_weight/asymmetric",
        c.Int8DynamicActivationInt8WeightConfig(symmetric_activations=False),
        "the same with one zero point per token",
    ),
    Recipe(
        "float8_dynamic_activation_float8_weight",
        c.Float8DynamicActivationFloat8WeightConfig(),
        "float8 e4m3 weights per row and activations per token",
    ),
    Recipe(
        "float8_dynamic_activation_float8_weight/tensor",
        c.Float8DynamicActivationFloat8WeightConfig(granularity="tensor"),
        "float8 e4m3 weights and activations, one scale for each",
    ),
    Recipe(
        "int8_dynamic_activation_int4_weight",
        c.Int8DynamicActivationInt4WeightConfig(),
        "int4 weights in groups of 32 and int8 activations per token",
        short="w4a8",
    ),
    Recipe(
        "int8_dynamic_activation_intx_weight",
        c.Int8DynamicActivationIntxWeightConfig(),
        "6-bit weights in groups of 32 and int8 activations per token",
    ),
    Recipe(
        "int8_dynamic_activation_ternary_weight",
        c.Int8DynamicActivationTernaryWeightConfig(),
        "weights -1, 0 and 1 and int8 activations per token: BitNet b1.58",
        short="bitnet",
    ),
    Recipe(
        "float8_dynamic_activation_int4_weight",
        c.Float8DynamicActivationInt4WeightConfig(),
        "int4 weights in groups of 128 and float8 activations per token",
    ),
    Recipe(
        "int4_dynamic_activation_int4_weight",
        c.Int4DynamicActivationInt4WeightConfig(),
        "int4 weights in groups of 128 and int4 activations per token; rotate the model first",
        short="w4a4",
    ),
    Recipe(
        "float8_dynamic_activation_float8_weight/block",
        c.Float8DynamicActivationFloat8WeightConfig(granularity="block"),
        "float8 e4m3, a scale for 128 x 128 weights and for 128 elements of a token",
    ),
    Recipe(
        "mx_dynamic_activation_mx_weight",
        c.MXDynamicActivationMXWeightConfig(),
        "MXFP8 weights and activations: float8 e4m3 in blocks of 32",
    ),
    Recipe(
        "mx_dynamic_activation_mx_weight/mxfp4",
        c.MXDynamicActivationMXWeightConfig("e2m1", "e2m1", "even"),
        "MXFP4 weights and activations",
        short="w4a4-mxfp4",
    ),
    Recipe(
        "nvfp4_dynamic_activation_nvfp4_weight",
        c.NVFP4DynamicActivationNVFP4WeightConfig(),
        "NVFP4 weights and activations",
        short="w4a4-nvfp4",
    ),
)
