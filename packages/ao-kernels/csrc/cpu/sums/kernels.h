// Sums over blocks: of the errors that they would have with each of several scales, and of the gradients of scales that
// are learned. What an instruction set provides, and what it is told.
#pragma once
#include <stdint.h>

#include "../quantize/kernels.h"

namespace ao {

// Elements whose sums are in float32, before they are added to those in float64.
constexpr int64_t kPart = 256;

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

// The gradients of rounding each row x by its scale, with the gradient g of what dequantizing gives. With
// place = x / scale + zero and v the value of the format that is nearest to it, an element is outside where place is
// below `low` or above `high`. Its gradient is g, and 0 outside; the sums of a row are those of g (v - place), of g v
// outside, and of g outside alone.
struct LearnedGradients {
  Format format;
  const void* x;      // (rows, columns)
  const void* grad;   // the same
  Element type, grad_type;
  const float* scale;  // (rows,), not 0
  const float* zero;   // (rows,), or null
  float low, high;
  void* out;    // (rows, columns), of grad_type
  float* sums;  // (2, rows)
  int64_t rows, columns;
};

// How zero points are stored: as whole numbers, as numbers in the domain of codes, or times their scale.
enum class Point : int32_t { none, whole, number, offset };

// Scales and zero points of each row of least measure among those that are tried: first, in each stage, with the ends
// of the best range so far times factors, then, some times, fits to the codes. The measure is that of
// ao_core.scales.rows.measured.
struct SearchScales {
  ScaleSums rows;       // candidates: 1, where the search starts; sums: not used
  float gain;
  Point point;
  Element scale_type, point_type;  // in which they are stored
  float least_scale, greatest_scale, greatest_point;
  const float *low, *high;    // factors of all stages; low: with zero points
  const int32_t* stages;      // factors of each stage
  int32_t stage_count, fits;
  float *scale, *zero;  // (rows,): what is found; zero: null without zero points
  bool* better;         // (rows,): whether it is better than the start without doubt
};

struct SumsKernels {
  void (*rows)(const ScaleSums&, int64_t begin, int64_t end);
  void (*learned)(const LearnedGradients&, int64_t begin, int64_t end);
  void (*search)(const SearchScales&, int64_t begin, int64_t end);
};

}  // namespace ao
