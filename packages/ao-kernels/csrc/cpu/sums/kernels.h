// Sums of the errors that blocks would have with each of several scales: what an instruction set provides, and what it
// is told.
#pragma once
#include <stdint.h>

#include "../quantize/kernels.h"

namespace ao {

// Candidates that are tried together, one in each lane.
constexpr int64_t kTried = 16;

// Of each row and candidate, with the error e = (v - zero) * scale - x and the importance w (1 where there is none):
// the sums of w e^2, w e x, w e and, with a power, w |e|^power. v is the value of the format that is nearest to
// x / scale + zero; of whole numbers with many candidates, near a tie, maybe the other one. A scale of 0 makes
// all numbers 0.
struct ScaleSums {
  Format format;
  const void* x;            // (rows, columns)
  Element type;
  const float* importance;  // (rows, columns), or null
  const float* scale;       // (rows, candidates)
  const float* zero;        // (rows, candidates), or null
  float power;              // 0: there is none
  float* sums;              // (3, or 4 with a power, rows, candidates)
  int64_t rows, columns, candidates;
};

struct SumsKernels {
  void (*rows)(const ScaleSums&, int64_t begin, int64_t end);
};

}  // namespace ao
