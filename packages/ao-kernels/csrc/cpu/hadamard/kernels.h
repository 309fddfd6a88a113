// Hadamard transforms of blocks: what an instruction set provides, and what it is told.
#pragma once
#include <stdint.h>

#include "../element.h"

namespace ao {

// A factor of the matrix that is no power of two: element (i, j) is signs[i * row + j * column], ±1.
struct Factor {
  const float* signs;
  int64_t order, row, column;
};

// Factors of a block that are no powers of two: each is 12 at least.
constexpr int kMostFactors = 12;
// Blocks that are worked on together, one in a lane, where neighbours within a block fill no vector.
constexpr int64_t kLanes = 16;

// The matrix of a block is the Kronecker product of `factor`, the last one first, and of Sylvester's of order
// `power`.
struct Hadamard {
  const void* x;
  void* y;
  Element type;
  int64_t count;         // elements, a multiple of `block`
  int64_t block, power;  // of elements; the power of two in it
  int factors;
  Factor factor[kMostFactors];
  float before, after;   // what elements are multiplied by before and after all sums
  // made by the driver
  int64_t unit;          // elements that are worked on at a time; the last unit may be shorter
  int64_t scratch;       // floats that a thread needs
};

struct HadamardKernels {
  void (*transform)(const Hadamard&, int64_t begin, int64_t end, float* scratch);  // units
};

}  // namespace ao
