// The table of an instruction set's kernels; included by its unit.
#pragma once
#include "blocks.h"
#include "pack.h"
#include "tile_mask.h"
#include "two_four.h"

namespace ao::AO_ISA {

static const SparseKernels kSparseKernels = {
    .measure = measure_activations,
    .pack = pack_activations,
    .scratch = blocks_scratch,
    .blocks = blocks_of,
    .pack_two_four = pack_two_four,
    .two_four = two_four_rows,
    .expand = expand_rows,
    .tile_mask = mask_tiles,
};

}  // namespace ao::AO_ISA
