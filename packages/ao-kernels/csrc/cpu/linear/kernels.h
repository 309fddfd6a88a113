// Matmuls with weights of few bits: what an instruction set provides, and what it is told.
#pragma once
#include <stdint.h>

#include "../element.h"

namespace ao {

// The number in which products are accumulated.
// f32: float32; pairs: bfloat16 pairs (dpbf16); int8: int8 dot products (VNNI); words: activations as fixed-point
// numbers of 16 bits, for int16 dot products (see words.h); limbs2, limbs3: as fixed-point numbers of two or three bytes
// (limbs), or one more, for M = 1 (see digits.h).
enum class Mode : int32_t { f32, pairs, int8, words, limbs2, limbs3 };
// Bytes of an activation, at most.
static constexpr int bytes_of(Mode mode) {
  switch (mode) {
    case Mode::int8: return 1;
    case Mode::pairs: return 2;
    case Mode::words: return 2;
    case Mode::limbs2: return 3;
    default: return 4;
  }
}
// How activations are quantized before the matmul: per token, or by a scale that is given.
enum class Act : int32_t { none, int8, uint8, e4m3, e5m2 };

// How codes are stored: as tiles, or in less memory, see expand.h. digits: 5 codes of 3 values in a byte. two_four: two of
// every four codes along a row, of 4 or 8 bits.
enum class StoredAs : int32_t { tiles, digits, two_four };
constexpr int kDigits = 5, kDigitBytes = 256;  // of a byte; of five tiles

// Consecutive tiles of one group: what is summed up before a scale is applied.
struct Step {
  int32_t tiles, group;
  int32_t span = 0;  // of groups, which the group belongs to
  bool opens = false;  // words: from here on activations have another unit
};

// Prefetch distances, in bytes of weights. Prefetches go to L2 first, because L1 has too few requests in flight at a
// time for the rate of memory, and from there to L1.
constexpr int kPrefetchL2 = 16384, kPrefetchL1 = 512;

constexpr int kLimbTiles = 8;  // tiles whose activations share an exponent, in limbs or words

// What goes with a step of activations in limbs.
struct LimbStep {
  float unit;         // of the last sum
  float sum;          // of the activations, for zero points
  int32_t acc_init[4];  // least value * sum of the limbs
  bool more;          // one more limb than the mode says
};

// Matmuls in AMX tile registers (see amx.h). `depth` 0: there are none.
struct Tiling {
  int32_t depth;    // tiles of 16 columns that a register holds side by side
  int32_t x_parts;  // an activation is the sum of so many numbers in bfloat16, or a byte
  int32_t w_parts;  // and so is a weight with its scale; 0: codes are multiplied, and scales applied to sums
};

struct Linear : QuantParams {
  // weight: see the layout `cpu_tiles`
  const uint8_t* qdata;
  const float* rowsum;
  const float* table;
  Kind kind;
  float least;        // value of the table, in units of `table_unit`; limbs: of their first byte
  int32_t table_parts;  // limbs: bytes that a value of the table is made of
  float table_unit;   // limbs: of which all values are multiples, or nearly so (of several parts); else 1
  int32_t zero_flip;  // turns canonical codes of zero points into stored ones
  int32_t bits;
  int64_t n, k, group, tiles;
  StoredAs stored;
  int32_t fill;       // bytes of tiles are bitwise exclusive or with it, after they are expanded
  // activations, output
  const void* x;
  void* y;
  const void* bias;
  Element type;
  int64_t m, x_stride, y_stride;
  Act act;
  float given_scale, given_zero;  // of quantized activations; scale 0: they are chosen for each token
  // made by the driver
  Mode mode;
  Tiling tiling;
  const Step* steps;
  int64_t step_count;
  int64_t rows;            // of the whole call: how a part of it is computed must not depend on the part
  const int32_t* rests;    // words: rows whose rest, which 16 bits leave, are the last `rest_count` of the m rows
  int64_t rest_count;
  int64_t row_blocks;      // blocks of rows of activations; their sizes differ by at most one
  uint8_t* x_packed;       // (row block, tile, row, 16)
  void* x_sums;            // (row block, step, row): sums, or (int8 without zero points) least * sum as int32
  float* x_ratios;         // (row block, step, row): words: the unit of the activations before over that from here on
  float* x_scale;          // (row): what outputs are multiplied by
  float* x_zero;           // (row); words: the last unit of the activations
};

// Bytes of a block of N as it is stored.
static inline int64_t stored_bytes(const Linear& t) {
  switch (t.stored) {
    case StoredAs::digits: return (t.tiles + kDigits - 1) / kDigits * kDigitBytes;
    case StoredAs::two_four: return t.tiles * (t.bits == 8 ? 160 : 96);
    default: return t.tiles * 32 * t.bits;
  }
}

// Rows [begin, end) of block b of `count` rows in `blocks` blocks.
struct Rows {
  int64_t begin, end;
};
static inline Rows rows_of(int64_t count, int64_t blocks, int64_t b) {
  const int64_t size = count / blocks, more = count % blocks;
  const int64_t begin = b * size + (b < more ? b : more);
  return {begin, begin + size + (b < more ? 1 : 0)};
}

// Rows of the output.
static inline int64_t outputs_of(const Linear& t) { return t.m - t.rest_count; }

struct LinearKernels {
  bool pairs;            // Mode::pairs exists
  // Mode::words, where it exists: whether a row of activations needs more than 16 bits; null: there is none
  bool (*leaves_rest)(const Linear&, int64_t row);
  int32_t panel_rows;    // greatest row block
  int32_t panel_blocks;  // blocks of 16 of N that are computed together
  int32_t row_blocks;    // the same for a single row of activations
  int32_t stream_rows;   // up to so many rows, weights are decoded in registers
  int32_t chunk_rows;    // that are multiplied by a panel at a time
  int32_t float_step;    // Mode::f32: tiles of a step, at most
  // bytes of scratch that `run_blocks` needs
  int64_t (*scratch)(const Linear&);
  // packs the rows of blocks [begin, end)
  void (*pack)(const Linear&, int64_t begin, int64_t end);
  // limbs: tables of any values can be taken apart into bytes, too
  bool table_limbs;
  // Mode::limbs*, where they exist: packs the row while the weights of the first block arrive; false where its
  // numbers differ too much, or are infinite or NaN
  bool (*pack_limbs)(const Linear&, int64_t block);
  // computes blocks of 16 of N [begin, end) for all rows; those at `then`, if there are any, come next
  void (*run_blocks)(const Linear&, int64_t begin, int64_t end, int64_t then, uint8_t* scratch);
  // makes tiles of the codes of blocks of N [begin, end) that are stored otherwise
  void (*expand)(const Linear&, int64_t begin, int64_t end, uint8_t* out);
  // matmuls in AMX tile registers, or null
  const LinearKernels* tiles;
  // of these: false where other kernels are to serve; else `mode` and `tiling` are set
  bool (*plan)(Linear&);
};

// -- matmuls in AMX tile registers ---------------------------------------------------------------------------

constexpr int kTileRows = 16;  // of activations in a register
// Whether sums leave the registers after each group, to be scaled.
static inline bool is_grouped(const Linear& t) { return t.tiling.depth > 0 && t.tiling.w_parts == 0 && t.groups > 1; }
static inline int64_t tile_steps(const Linear& t) { return (t.tiles + t.tiling.depth - 1) / t.tiling.depth; }
// Bytes of a row of activations in a register, and of a row of them in all parts.
static inline int64_t tile_line(const Linear& t) { return t.tiling.depth * 16 * bytes_of(t.mode); }
static inline int64_t tile_row_bytes(const Linear& t) { return tile_steps(t) * tile_line(t) * t.tiling.x_parts; }

}  // namespace ao
