// Matmuls with dense weights; included by the unit of an instruction set.
#pragma once
#include "kernels.h"

namespace ao::AO_ISA::dense {

// Rows of w and of x that are multiplied together.
constexpr int kColumns = 4, kRows = kRegisters == 1 ? 4 : 1;

// 16 products of the next elements, added to a sum; so many elements are left.
struct Floats {
  static constexpr int kStep = 16;
  using Value = F;
  static AO_METHOD F read(Element type, const uint8_t* p, int64_t left) {
    return load_as(type, p, left < 16 ? static_cast<int>(left) : 16);
  }
  static AO_METHOD F dot(F sum, F w, F x) { return fma(w, x, sum); }
};

#if AO_HAS_PAIRS
struct Pairs {
  static constexpr int kStep = 32;
  using Value = P;
  static AO_METHOD P read(Element, const uint8_t* p, int64_t left) {
    if (left >= 32) return load_vector(p);
    alignas(64) uint8_t part[64] = {};
    __builtin_memcpy(part, p, static_cast<size_t>(2 * left));
    return load_vector(part);
  }
  static AO_METHOD F dot(F sum, P w, P x) { return dot_pairs(sum, w, x); }
};
#endif

template <class Arithmetic, int kCount, int kMore>
static inline void multiply(const Dense& t, int64_t column, int64_t row) {
  const int size = bytes_of(t.type);
  const auto* const w = static_cast<const uint8_t*>(t.w) + column * t.k * size;
  const auto* const x = static_cast<const uint8_t*>(t.x) + row * t.x_stride * size;
  F sums[kMore][kCount];
  for (auto& of_row : sums) {
    for (F& one : of_row) one = zero();
  }
  for (int64_t k = 0; k < t.k; k += Arithmetic::kStep) {
    typename Arithmetic::Value weights[kCount];
#pragma GCC unroll 4
    for (int c = 0; c < kCount; ++c) weights[c] = Arithmetic::read(t.type, w + (c * t.k + k) * size, t.k - k);
#pragma GCC unroll 4
    for (int r = 0; r < kMore; ++r) {
      const auto value = Arithmetic::read(t.type, x + (r * t.x_stride + k) * size, t.k - k);
#pragma GCC unroll 4
      for (int c = 0; c < kCount; ++c) sums[r][c] = Arithmetic::dot(sums[r][c], weights[c], value);
    }
  }
  for (int r = 0; r < kMore; ++r) {
    for (int c = 0; c < kCount; ++c) {
      F total = splat(sum(sums[r][c]));
      if (t.bias) {
        total = add(total, load_as(t.type, static_cast<const uint8_t*>(t.bias) + (column + c) * size, 1));
      }
      store_as(t.type, static_cast<uint8_t*>(t.y) + ((row + r) * t.n + column + c) * size, total, 1);
    }
  }
}

template <class Arithmetic>
static void columns_as(const Dense& t, int64_t begin, int64_t end) {
  for (int64_t c = begin; c < end;) {
    const bool whole = c + kColumns <= end;
    for (int64_t r = 0; r < t.m;) {
      const bool rows = r + kRows <= t.m;
      if (whole && rows) {
        multiply<Arithmetic, kColumns, kRows>(t, c, r);
      } else if (whole) {
        multiply<Arithmetic, kColumns, 1>(t, c, r);
      } else {
        multiply<Arithmetic, 1, 1>(t, c, r);
      }
      r += whole && rows ? kRows : 1;
    }
    c += whole ? kColumns : 1;
  }
}

static void columns(const Dense& t, int64_t begin, int64_t end) {
#if AO_HAS_PAIRS
  if (t.type == Element::bf16) return columns_as<Pairs>(t, begin, end);
#endif
  columns_as<Floats>(t, begin, end);
}

static const DenseKernels kDenseKernels = {.columns = columns};

}  // namespace ao::AO_ISA::dense
