// Weights on a trellis: what an instruction set provides, and what it is told.
//
// `ao_core.numerics.trellis` has the format. 128 rows of a column are a ring of codes of `bits` bits each, a
// little-endian bit stream. The state of a row is the 12 bits of the ring that end with its code, and its value is
// table[(state * multiplier mod 4096) >> 4], an integer, times the scale of its row over kUnit.
#pragma once
#include <stdint.h>

#include "../element.h"

namespace ao {

constexpr int kStateBits = 12, kStates = 1 << kStateBits;
constexpr int64_t kRing = 128;  // rows
constexpr int64_t kHalf = 64;   // rows that are decoded at a time
constexpr float kUnit = 32.0f;

struct TrellisFormat {
  const int8_t* table;  // 256
  int32_t multiplier, bits;
};

// The nearest codes of rings: x (rings, places) to codes (rings, places).
struct TrellisSearch {
  const float* values;  // of states whose newest code is at the bottom, for a scale of 1
  const float* x;
  uint8_t* codes;
  int64_t rings, places, count;  // places from `count` on have any value
  int32_t bits;
};

// y (m, n) = x (m, k) @ w.T + bias; or, where x is null, w itself to y (n, k).
struct Trellis : TrellisFormat {
  const float* values;   // of states as they are in a ring, as integers
  const uint8_t* qdata;  // (rings along rows, k, 16 * bits)
  const void* scale;     // n
  Element scale_type;
  const void* bias;  // n, or null
  const void* x;
  Element type;  // of x, bias and y
  int64_t x_stride, m, n, k;
  void* y;
  const float* rows;  // x in float32, (m, k); made by the driver
};

struct TrellisKernels {
  int64_t (*search_scratch)(const TrellisSearch&);  // bytes that a thread needs
  void (*search)(const TrellisSearch&, int64_t begin, int64_t end, uint8_t* scratch);  // rings
  void (*widen)(const Trellis&, int64_t begin, int64_t end, float* rows);  // rows of x
  int64_t (*scratch)(const Trellis&);
  void (*multiply)(const Trellis&, int64_t begin, int64_t end, uint8_t* scratch);  // halves of rings
  void (*decode)(const Trellis&, int64_t begin, int64_t end, uint8_t* scratch);    // halves of rings
};

}  // namespace ao
