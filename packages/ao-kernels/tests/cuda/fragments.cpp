// Compiled, and so proven: the fragments of the PTX ISA, beside CuTe's description of the same instruction,
// SM80_16x8x16 (cute/atom/mma_traits_sm80.hpp): strides of (thread % 4, thread / 4) and of the values, over matrices
// whose rows are next to each other.
#include "fragments.h"

namespace {

using namespace ao::gpu;

constexpr bool agree() {
  for (int lane = 0; lane < 32; ++lane) {
    const int t = lane % 4, g = lane / 4;
    for (int i = 0; i < 8; ++i) {  // A: ((4, 8), (2, 2, 2)) : ((32, 1), (16, 8, 128))
      const int place = t * 32 + g + i % 2 * 16 + i / 2 % 2 * 8 + i / 4 * 128;
      if (place != row_of_a(lane, i) + 16 * column_of_a(lane, i)) return false;
    }
    for (int i = 0; i < 4; ++i) {
      const int b = t * 16 + g + i % 2 * 8 + i / 2 * 64;  // B: ((4, 8), (2, 2)) : ((16, 1), (8, 64))
      if (b != column_of_b(lane, i) + 8 * row_of_b(lane, i)) return false;
      const int c = t * 32 + g + i % 2 * 16 + i / 2 * 8;  // C: ((4, 8), (2, 2)) : ((32, 1), (16, 8))
      if (c != row_of_c(lane, i) + 16 * column_of_c(lane, i)) return false;
    }
  }
  return true;
}

// Every element of a matrix is in one place.
template <int ROWS, int COLUMNS, int COUNT>
constexpr bool covers(int (*row)(int, int), int (*column)(int, int)) {
  bool seen[ROWS][COLUMNS] = {};
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < COUNT; ++i) {
      bool& here = seen[row(lane, i)][column(lane, i)];
      if (here) return false;
      here = true;
    }
  }
  return 32 * COUNT == ROWS * COLUMNS;
}

static_assert(agree());
static_assert(covers<16, 16, 8>(row_of_a, column_of_a));
static_assert(covers<16, 8, 4>(row_of_b, column_of_b));
static_assert(covers<16, 8, 4>(row_of_c, column_of_c));

}  // namespace
