// Matmuls with dense weights whose rows do not depend on each other: what an instruction set provides.
#pragma once
#include <stdint.h>

#include "../element.h"

namespace ao {

// y = x @ w.T + bias. Every element of y is one sum over k, in the same order whatever m and n are.
struct Dense {
  const void* x;     // (m, k), rows x_stride elements apart
  const void* w;     // (n, k), contiguous
  const void* bias;  // (n), or null
  void* y;           // (m, n), contiguous
  Element type;      // of all of them
  int64_t m, n, k, x_stride;
};

struct DenseKernels {
  // columns [begin, end) of y
  void (*columns)(const Dense&, int64_t begin, int64_t end);
};

}  // namespace ao
