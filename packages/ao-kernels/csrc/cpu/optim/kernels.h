// Steps of optimizers with quantized moments: what an instruction set provides, and what it is told.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "../element.h"

namespace ao {

// Elements that share the scales of all moments.
constexpr int64_t kStateBlock = 256;

// How numbers become codes: by the tables of a StateFormat, or as rules.h has it.
enum class Coding : uint8_t { table, square, fourth, e4m3, e5m3 };

// How the codes of both moments become numbers: as the values of `square` and `fourth` are computed,
// from the upper halves of the values where the lower ones are 0, or from all of them.
enum class MomentFormat : uint8_t { companded, halves, any };

// A number format of 8 bits in the form that whole blocks of codes take least time with.
//
// A number's first bits, cut off where the format is coarser, are the place of a cell, in which at most
// one step lies; one comparison with that step decides. See make_state.
struct StateFormat {
  float values[256];             // of each code
  float steps[256];              // of each interval the first number beyond; NaN where there is none
  uint8_t value_bytes[4][256];   // byte b of each value in [b]
  uint8_t step_bytes[4][256];
  uint8_t cells[512];            // the lowest interval in every cell
  uint8_t order[256];            // the code of every interval, lowest first
  // By the last 5 bits of the exponent, a = the upper 16 bits of |x| within [least, greatest]:
  // the cell is (a >> shift) - offset, of a negative number `negative` more.
  uint16_t shift[32], offset[32];
  uint16_t least, greatest, negative;
  bool in_order;  // code = interval
  bool is_short;  // the lower 16 bits of all values are 0
  Coding coding;
  uint8_t nan_code;
  float reach;    // what the greatest magnitude of a block is divided by
  float of_zeros; // the scale of a block of zeros: the least one where no code is 0
};

struct StepTensor {
  void* p;
  const void* g;
  uint8_t *m, *v;  // v: null where there is one moment alone
  float *m_scale, *v_scale;
  int64_t count;
  int64_t first;  // blocks of all tensors before it
};

// What the step of any rule is told.
struct OptimStep {
  const StepTensor* tensors;
  int64_t size;
  Element type;  // of parameters and gradients
  StateFormat m;
  float beta1, rest1, beta2, rest2;  // rest: 1 - beta; those that gradients meet alone are negative to maximize
  float decay;                       // what parameters are multiplied by
  float rate;
  bool stochastic;
  uint64_t seed;
};

struct Adam : OptimStep {
  static constexpr bool kHasSecond = true;
  StateFormat v;
  MomentFormat values;
  float l2;      // what parameters are multiplied by before they are added to gradients; as rest1
  float unbias;  // what the root of the second moment is multiplied by
  float eps;
};

// The sign of beta1 m + rest1 g is what a parameter moves by; m becomes beta2 m + rest2 g.
struct Lion : OptimStep {
  static constexpr bool kHasSecond = false;
};

struct OptimKernels {
  // items: blocks
  void (*adam)(const Adam&, int64_t begin, int64_t end);
  void (*lion)(const Lion&, int64_t begin, int64_t end);
};

}  // namespace ao
