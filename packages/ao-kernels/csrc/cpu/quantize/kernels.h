// From numbers to codes and back: what an instruction set provides, and what it is told.
//
// A dense side is `matrices` matrices of n rows and k columns, one after the other. Blocks of
// block_n x block_k elements share a scale (and a zero point); the last ones of a matrix may be
// smaller. Rows of codes are bit streams as ao_core.numerics.pack_bits makes them, or one byte a code.
#pragma once
#include <stdint.h>

#include "../element.h"

namespace ao {

// How a number becomes a code: by a search in `tree`, or, where that gives the same and is faster,
// as the nearest integer (two's complement or unsigned) or by rounding a float's mantissa.
enum class Rule : int32_t { search, integer, floating };

// A number format of at most 8 bits.
struct Format {
  float table[256];      // value of each code, whatever its bits beyond `bits`
  int32_t tree[256];     // search: first number of every interval but the lowest, as keys (key_of);
                         // a balanced tree, its levels one after the other
  uint8_t order[256];    // search: the code of every interval, lowest first
  bool in_order;         // search: which is the number of the interval
  bool lacks_zero;       // then a block of zeros gets the least scale there is
  int32_t bits;
  Rule rule;
  uint8_t nan_code;
  bool is_integer;         // value = code, or code as two's complement
  bool is_float;           // floating: all values but NaN are sign, exponent and mantissa of their codes
  float least, greatest;   // finite values
  int32_t mantissa;        // floating: its bits
  float smallest_normal;   // floating
};

// How the scale of an MX block follows from its greatest magnitude (ao_core.numerics.choose_e8m0).
enum class MxMode : int32_t { floor, ceil, even, rceil };

// What zero points are: none, codes of whole numbers, or numbers; `center` puts the middle of the
// range at 0, where a float format is finest, and not the least value at the range's low end.
enum class ZeroKind : int32_t { none, code, number, center };

struct Blocks {
  int64_t matrices, n, k;
  int64_t block_n, block_k;
  int64_t bands, groups;  // of a matrix: ceil(n / block_n), ceil(k / block_k)
};

// Place of the first scale of a row.
static inline int64_t scale_row(const Blocks& b, int64_t row) {
  return (row / b.n * b.bands + row % b.n / b.block_n) * b.groups;
}

// Least and greatest element of a block as keys, or the greatest magnitude as `high` alone.
struct KeyRange {
  int32_t low, high;
};

// Elements of a row that are handled at a time: whole bytes of codes, whatever the width.
constexpr int64_t kPiece = 1024;
// Greatest block that is read by one thread; more of it is shared out.
constexpr int64_t kShare = 1 << 16;
// Elements, and greatest number of groups, that a thread takes at a time.
constexpr int64_t kChunk = 8 * kPiece;
constexpr int64_t kChunkGroups = 256;

// Columns that a thread takes at a time, of blocks of one column.
constexpr int64_t kColumns = 256;

struct Quantize {
  Blocks blocks;
  Format format;
  const void* x;
  Element type;
  Scale scale_type;
  ZeroKind zero_kind;
  Zero zero_type;
  MxMode mx_mode;
  float reach;        // what the greatest magnitude of a block is divided by, and for e8m0
  float reach_mantissa, even_from;  // = reach_mantissa * 2^reach_exponent, and the mantissa from which
  int32_t reach_exponent;           // MxMode::even takes the next power
  void* scale;
  void* zero;
  uint8_t* codes;
  int64_t row_bytes;  // of codes
  int32_t code_bits;  // 8, or format.bits where codes are packed
  void* y;            // what the codes stand for, in the type of x, in place of codes
  // items of `fused`: (row, chunk of groups); of `encode`: (row, chunk of kChunk elements)
  int64_t chunk_groups, chunks;
  // items of `ranges`: (row, group, share of the group)
  KeyRange* ranges;
  int64_t shares;
};

struct Dequantize {
  Blocks blocks;
  Format format;
  const uint8_t* codes;
  int64_t row_bytes;
  int32_t code_bits;
  const void* scale;  // or, of codebooks, the values of the codes of every block, one after the other
  const void* zero;
  Scale scale_type;
  Zero zero_type;
  bool codebooks;
  void* y;
  Element type;
  // items of `decode`: (row, chunk of kChunk elements)
  int64_t chunks;
  // errors: against x, after rounding to `type`. Counted are runs of `run` elements of the whole, one
  // in every `step`; items are shares of kShare of these, with two sums each
  const void* x;
  Element x_type;
  int64_t run, step, counted;
  double* sums;
};

// A tensor in the layout cpu_tiles: see its Python class.
struct Tiles : QuantParams {
  int64_t matrices, n, k, group;
  int64_t row_blocks, group_tiles, tiles;  // of a matrix; of all groups but the last; of a row
  int32_t bits;
  const uint8_t* qdata;
  float table[256];  // value of each stored code, whatever its bits beyond `bits`
  Element type;
  void* y;
  const int64_t* ids;  // gather
  uint8_t flip;        // stored code = code ^ flip
  // pack and unpack: rows of codes
  const uint8_t* packed;
  int64_t row_bytes;
  uint8_t* out;
};

struct QuantizeKernels {
  void (*fused)(const Quantize&, int64_t begin, int64_t end);   // ranges, scales and codes
  void (*ranges)(const Quantize&, int64_t begin, int64_t end);
  void (*scales)(const Quantize&, int64_t begin, int64_t end);  // items: (matrix, band)
  void (*absmax)(const Quantize&, int64_t begin, int64_t end);  // the same, to float32 scales
  void (*encode)(const Quantize&, int64_t begin, int64_t end);  // codes, with these scales
  void (*fused_round)(const Quantize&, int64_t begin, int64_t end);  // as fused and encode, to y
  void (*round)(const Quantize&, int64_t begin, int64_t end);
  // ranges, scales and y of blocks of one column; items: (matrix, band, share of kColumns columns)
  void (*round_columns)(const Quantize&, int64_t begin, int64_t end);
  void (*decode)(const Dequantize&, int64_t begin, int64_t end);
  void (*errors)(const Dequantize&, int64_t begin, int64_t end);
  // items of these: blocks of 16 rows, of `gather`: ids
  void (*pack_tiles)(const Tiles&, int64_t begin, int64_t end);
  void (*unpack_tiles)(const Tiles&, int64_t begin, int64_t end);
  void (*decode_tiles)(const Tiles&, int64_t begin, int64_t end);
  void (*gather)(const Tiles&, int64_t begin, int64_t end);
};

}  // namespace ao
