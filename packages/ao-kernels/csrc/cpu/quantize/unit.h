// The table of an instruction set's kernels; included by its unit.
#pragma once
#include "fused.h"
#include "tiles.h"

namespace ao::AO_ISA::coding {

constexpr QuantizeKernels kQuantizeKernels = {
    .fused = quantize_fused,
    .ranges = quantize_ranges,
    .scales = quantize_scales,
    .absmax = quantize_absmax,
    .encode = quantize_encode,
    .fused_round = round_fused,
    .round = round_blocks,
    .round_columns = round_columns,
    .decode = decode_blocks,
    .errors = sum_errors,
    .pack_tiles = pack_tiles,
    .unpack_tiles = unpack_tiles,
    .decode_tiles = decode_tiles,
    .gather = gather_rows,
};

}  // namespace ao::AO_ISA::coding
