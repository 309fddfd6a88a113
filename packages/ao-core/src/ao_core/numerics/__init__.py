"""Pure functions on tensors: packing, blocks, rounding, number formats, scales, error measures."""

from __future__ import annotations

from ao_core.numerics.affine import (
    choose_qparams,
    dequantize_affine,
    qparams_of_range,
    quant_max_of,
    quantize_affine,
    scale_to_float,
    store_qparams,
    store_zero,
    zero_to_float,
)
from ao_core.numerics.allowed import CODEBOOK_DTYPES, SCALE_RULES
from ao_core.numerics.bits import (
    digits_a_byte,
    pack_bits,
    pack_digits,
    pack_unit,
    packed_size,
    unpack_bits,
    unpack_digits,
)
from ao_core.numerics.blocks import (
    block_absmax,
    block_absmean,
    block_minmax,
    block_sum,
    expand,
    full_block,
    grid_shape,
    split_blocks,
)
from ao_core.numerics.codebooks import decode_codebooks, encode_codebooks, learn_codebooks
from ao_core.numerics.compiling import may_be_compiled
from ao_core.numerics.error import cosine, error_sums, relative_error, sqnr, sqnr_of_sums
from ao_core.numerics.floats import decode_float, encode_float
from ao_core.numerics.formats import (
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E5M2,
    FloatFormat,
    float_format,
)
from ao_core.numerics.hadamard import (
    hadamard_factors,
    hadamard_matrix,
    hadamard_scales,
    hadamard_transform,
    has_hadamard,
    inverse_hadamard_transform,
    largest_block,
)
from ao_core.numerics.hull import lower_hull
from ao_core.numerics.ints import decode_int, encode_int
from ao_core.numerics.lut import NF4_VALUES, decode_lut, encode_lut
from ao_core.numerics.mx import MX_MODES, choose_e8m0, decode_e8m0, encode_e8m0
from ao_core.numerics.rounding import (
    round_half_even,
    round_to_16_bits,
    stochastic_round,
    stochastic_round_to,
)
from ao_core.numerics.slabs import searched_at_once
from ao_core.numerics.state import (
    companded_values,
    dynamic_values,
    linear_values,
    unsigned_float_values,
)
from ao_core.numerics.trellis import (
    TRELLIS_BITS,
    TRELLIS_MULTIPLIERS,
    TRELLIS_STATE_BITS,
    TRELLIS_UNIT,
    decode_trellis,
    encode_trellis,
    trellis_values,
)

__all__ = [
    "CODEBOOK_DTYPES",
    "E2M1",
    "E2M3",
    "E3M2",
    "E4M3",
    "E5M2",
    "MX_MODES",
    "NF4_VALUES",
    "SCALE_RULES",
    "TRELLIS_BITS",
    "TRELLIS_MULTIPLIERS",
    "TRELLIS_STATE_BITS",
    "TRELLIS_UNIT",
    "FloatFormat",
    "block_absmax",
    "block_absmean",
    "block_minmax",
    "block_sum",
    "choose_e8m0",
    "choose_qparams",
    "companded_values",
    "cosine",
    "decode_codebooks",
    "decode_e8m0",
    "decode_float",
    "decode_int",
    "decode_lut",
    "decode_trellis",
    "dequantize_affine",
    "digits_a_byte",
    "dynamic_values",
    "encode_codebooks",
    "encode_e8m0",
    "encode_float",
    "encode_int",
    "encode_lut",
    "encode_trellis",
    "error_sums",
    "expand",
    "float_format",
    "full_block",
    "grid_shape",
    "hadamard_factors",
    "hadamard_matrix",
    "hadamard_scales",
    "hadamard_transform",
    "has_hadamard",
    "inverse_hadamard_transform",
    "largest_block",
    "learn_codebooks",
    "linear_values",
    "lower_hull",
    "may_be_compiled",
    "pack_bits",
    "pack_digits",
    "pack_unit",
    "packed_size",
    "qparams_of_range",
    "quant_max_of",
    "quantize_affine",
    "relative_error",
    "round_half_even",
    "round_to_16_bits",
    "scale_to_float",
    "searched_at_once",
    "split_blocks",
    "sqnr",
    "sqnr_of_sums",
    "stochastic_round",
    "stochastic_round_to",
    "store_qparams",
    "store_zero",
    "trellis_values",
    "unpack_bits",
    "unpack_digits",
    "unsigned_float_values",
    "zero_to_float",
]
