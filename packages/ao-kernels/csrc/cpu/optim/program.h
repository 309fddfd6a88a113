// Steps of rules that are told as programs: what an instruction set provides, and what it is told.
//
// A program updates each element separately. Norms are the exception: they are of whole tensors. A register holds a
// block of 256 elements. At the start, register 0 is the parameter, 1 the gradient, and those from 2 on the moments.
#pragma once
#include "kernels.h"

namespace ao {

// What the result is, of operands a, b, c and the number s.
enum class Operation : uint8_t {
  scale,        // s a
  shift,        // a + s
  add,          // a + s b, rounded once where the processor can
  multiply,     // a b
  divide,       // a / b
  over,         // s / a
  add_product,  // a + s b c
  add_ratio,    // a + s b / c
  root,
  sign,
  magnitude,
  at_least,  // the greater one of a and s; NaN stays
  at_most,
  constant,  // s
  above,     // 1 where a > s, else 0
  choose,    // b where a is not 0, else c
  norm,      // the root of the sum of the squares of all a; no a depends on another norm
};
constexpr int kOperands[] = {1, 1, 2, 2, 2, 1, 3, 3, 1, 1, 1, 1, 1, 0, 1, 3, 1};  // of each operation
constexpr int kOperations = sizeof kOperands / sizeof *kOperands;

// As many as fit a level 1 cache, and more than any rule of ao-optim takes.
constexpr int kProgramMoments = 4, kProgramRegisters = 16, kProgramSteps = 96, kProgramNorms = 4;

struct Instruction {
  Operation operation;
  uint8_t result, operands[3];
  float number;
  uint8_t norm;  // which norm it is
};

struct Program {
  Instruction code[kProgramSteps];
  int size;
  uint32_t inputs;  // a bit for each register that is read before it is written
};

// A number format of 4 bits; as StateFormat, but steps are keys: integers in the order of the numbers.
struct NibbleFormat {
  float values[32];  // of each code; the upper half is not looked up
  int32_t steps[15];
  uint8_t order[16];
  bool in_order;
  uint8_t nan_code;
  float reach, of_zeros;
};

// How a moment is kept: as numbers of a type; in codes of 8 bits with a scale per block of 256; in codes of 4 bits
// with a scale per block of 128, or with one per row and column, of which the smaller one counts.
enum class Keep : uint8_t { dense, bytes, nibbles, rank1 };
constexpr int64_t kNibbleBlock = 128;

struct MomentKind {
  Keep keep;
  Element type;
  StateFormat bytes;
  NibbleFormat nibbles;
};

struct ProgramMoment {
  void* codes;  // or numbers
  float *scales, *columns;  // rank1: of rows, and of columns
  const float *new_rows, *new_columns;
};

struct ProgramTensor {
  void* p;
  const void* g;
  void* lost;  // what rounding took from each parameter; null: nothing is kept
  ProgramMoment moments[kProgramMoments];
  int64_t count;
  int64_t columns;  // of the matrix that rank1 sees, each row of which begins with a new byte
  int64_t first;    // blocks of all tensors before it
  float norms[kProgramNorms];
};

struct ProgramStep {
  const ProgramTensor* tensors;
  int64_t size;
  Element p_type, g_type;
  int moments;
  MomentKind kinds[kProgramMoments];
  int norms;       // how many there are
  Program update;  // all of it, where norms are known
  Program survey;  // what new moments with the scales of rows and columns depend on
  Program measure; // what norms depend on, and the norms
  uint8_t outputs[1 + kProgramMoments];  // registers that hold the parameter and the moments when it has ended
  bool stochastic;  // bfloat16 is rounded so
  uint64_t seed;
};

struct ProgramKernels {
  // items: blocks of all tensors
  void (*step)(const ProgramStep&, int64_t begin, int64_t end);
  // Sums of squares (block, norm).
  void (*measure)(const ProgramStep&, int64_t begin, int64_t end, float* sums);
  // Blocks of one tensor: raises `rows`, from that of the first element on, and `columns` to the greatest magnitudes
  // of a new moment, as bits.
  void (*survey)(const ProgramStep&, int64_t tensor, int moment, int64_t begin, int64_t end, uint32_t* rows,
                 uint32_t* columns);
};

}  // namespace ao
