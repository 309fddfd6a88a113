// Matmuls with weights of which blocks, or two of every four values, are stored: what an instruction set
// provides, and what it is told.
#pragma once
#include <stdint.h>

#include "../element.h"
#include "../linear/kernels.h"

namespace ao {

// Stored values: numbers, or signed integers of 8 bits that have a scale.
enum class ValueType : int32_t { f32, bf16, f16, i8 };
static constexpr int bytes_of(ValueType type) { return type == ValueType::f32 ? 4 : type == ValueType::i8 ? 1 : 2; }
// Columns whose values a lane of a block holds together: what one instruction multiplies.
static constexpr int together_of(ValueType type) { return type == ValueType::bf16 ? 2 : type == ValueType::i8 ? 4 : 1; }

// A weight (n, k) in blocks of side x side of which only some are stored, and its activations.
struct BlockSparse {
  // (stored, side / together, side, together): columns together, then rows; i8 with the top bit flipped
  const uint8_t* blocks;
  const int32_t* columns;  // (stored): which column of blocks, increasing within a row of blocks
  const int32_t* starts;   // (row_blocks + 1): the first stored block of every row of blocks
  ValueType value;
  const void* scale;       // of i8: one for each row, or one for all; else null
  Element scale_type;
  bool scale_of_rows;
  int64_t n, k, side, row_blocks, column_blocks;
  // activations, output
  const void* x;
  void* y;
  const void* bias;
  Element type;
  int64_t m, x_stride;
  Act act;  // none or int8
  // made by the driver
  Mode mode;          // f32, pairs or int8
  int64_t x_direct;   // columns of blocks whose activations are read from `x`, being of `mode` already
  uint8_t* x_packed;  // (row, the rest of the columns of blocks, side), as `mode` has them, padded with 0
  float* x_scale;     // (row): what outputs are multiplied by; null: nothing
  int32_t* x_sums;    // int8: (row, column block)
};

// A weight (n, k) of which two of every four columns are stored, and its activations. See the layout `two_four`.
struct TwoFour {
  const uint8_t* codes;   // (n, row_bytes): floats, bytes, or half bytes with the even ones low
  const uint8_t* places;  // (n, place_bytes): four bits for every four columns
  int32_t bits;           // of a code; 4: signed integers, else as `value` says
  ValueType value;
  const float* table;     // the value of each code, where codes are no numbers; for `expand`
  const void* scale;      // (n or 1, scale_groups), or null
  Element scale_type;
  bool scale_of_rows;
  int64_t n, k, row_bytes, place_bytes;
  int64_t group, scale_groups;  // columns that share a scale: a multiple of 32, or all
  // activations, output; `expand` writes the dense weight to y
  const void* x;
  void* y;
  const void* bias;
  Element type;
  int64_t m, x_stride;
  // made by the driver
  Mode mode;          // f32 or pairs
  int64_t width;      // k up to the next multiple of kWindow
  uint8_t* x_packed;  // (m, width), as `mode` has them, padded with 0
  float* x_scale;     // (m): what outputs are multiplied by
  uint8_t* x_odd;     // (m): 1 where the row has infinities or NaN
};
// Columns whose activations are looked at together.
constexpr int64_t kWindow = 64;

// A matrix, and what stays of it: two of four along rows and along columns, whose magnitudes have the greatest sum in
// each tile of 4 x 4.
struct TileMask {
  const void* x;  // (n, k)
  Element type;
  uint8_t* mask;  // (n, k)
  int64_t n, k;
};

struct SparseKernels {
  // x_scale of rows [begin, end) of activations that are not quantized: 1, or what brings sums back into a float
  void (*measure)(const BlockSparse&, int64_t begin, int64_t end);
  // packs the activations of rows [begin, end)
  void (*pack)(const BlockSparse&, int64_t begin, int64_t end);
  // bytes of scratch that `blocks` needs for so many rows of activations
  int64_t (*scratch)(const BlockSparse&, int64_t rows);
  // computes a row of blocks for rows [begin, end)
  void (*blocks)(const BlockSparse&, int64_t row_block, Rows rows, uint8_t* scratch);
  // the same of two of four: rows [begin, end) of the activations, of the weight
  void (*pack_two_four)(const TwoFour&, int64_t begin, int64_t end);
  void (*two_four)(const TwoFour&, int64_t begin, int64_t end);
  // the dense weight, rows [begin, end)
  void (*expand)(const TwoFour&, int64_t begin, int64_t end);
  // rows [begin, end) of tiles
  void (*tile_mask)(const TileMask&, int64_t begin, int64_t end);
};

}  // namespace ao
