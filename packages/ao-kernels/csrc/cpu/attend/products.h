// Products of rows with the panels of a tile.
#pragma once
#include "panels.h"

namespace ao::AO_ISA::attention {

// Vectors that rows are multiplied by together, and rows.
constexpr int kVectors = kRegisters == 1 ? 2 : 1;
constexpr int kMostRows = kRegisters == 1 ? 4 : 2;

// f.template operator()<count>(first row) for all rows, up to kMost together.
template <int kMost = kMostRows, class F>
AO_INLINE void by_rows(int64_t rows, const F& f) {
  int64_t r = 0;
  for (; r + kMost <= rows; r += kMost) f.template operator()<kMost>(r);
  const int64_t left = rows - r;
  if constexpr (kMost > 2) {
    if (left == 3) f.template operator()<3>(r);
    if (left == 2) f.template operator()<2>(r);
  }
  if (left == 1) f.template operator()<1>(r);
}

// Rows as limbs: those of row r, limb l begin at (r * kLimbs + l) * wide.
struct LimbRows {
  const int8_t* bytes;
  const Limbs* of_row;
  int64_t wide;
};

// q · (code + least) of `tokens`, a multiple of 16 * kVectors, to rows of kTokenTile.
template <int kRows, int kLimbs, bool kSmall>
AO_INLINE void multiply_keys(const uint8_t* panel, const LimbRows& q, int64_t row, int64_t tokens, int32_t least,
                             float* logits) {
  const int64_t quads = q.wide / 4;
  const int8_t* const limbs = q.bytes + row * kLimbs * q.wide;
  for (int64_t t = 0; t < tokens; t += 16 * kVectors) {
    I acc[kRows][kVectors][kLimbs];
    for (auto& r : acc) {
      for (auto& v : r) {
        for (I& l : v) l = splat_int(0);
      }
    }
    const uint8_t* p = panel + t / 16 * quads * 64;
#pragma GCC unroll 4
    for (int64_t j = 0; j < quads; ++j, p += 64) {
      Q w[kVectors];
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) w[v] = load_vector(p + v * quads * 64);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 3
        for (int l = 0; l < kLimbs; ++l) {
          const Q x = splat_dword(limbs + (r * kLimbs + l) * q.wide + 4 * j);
#pragma GCC unroll 2
          for (int v = 0; v < kVectors; ++v) acc[r][v][l] = dot_quads<kSmall>(acc[r][v][l], w[v], x);
        }
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        store(logits + (row + r) * kTokenTile + t + 16 * v, joined<kLimbs>(acc[r][v], q.of_row[row + r], least));
      }
    }
  }
}

// Sums over tokens of weight * (code + least), added to `out`, for 64 elements in the order of `interleave`.
template <int kRows, int kLimbs, bool kSmall>
AO_INLINE void multiply_values(const uint8_t* panel, const LimbRows& w, int64_t row, int64_t tokens, int32_t least,
                               float* out, int64_t stride) {
  const int8_t* const limbs = w.bytes + row * kLimbs * w.wide;
  for (int k = 0; k < 4; k += kVectors) {
    I acc[kRows][kVectors][kLimbs];
    for (auto& r : acc) {
      for (auto& v : r) {
        for (I& l : v) l = splat_int(0);
      }
    }
    const uint8_t* p = panel + k * 64;
#pragma GCC unroll 4
    for (int64_t t = 0; t < tokens; t += 4, p += 256) {
      Q codes[kVectors];
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) codes[v] = load_vector(p + v * 64);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 3
        for (int l = 0; l < kLimbs; ++l) {
          const Q x = splat_dword(limbs + (r * kLimbs + l) * w.wide + t);
#pragma GCC unroll 2
          for (int v = 0; v < kVectors; ++v) acc[r][v][l] = dot_quads<kSmall>(acc[r][v][l], codes[v], x);
        }
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        float* const to = out + (row + r) * stride + (k + v) * 16;
        store(to, add(load(to), joined<kLimbs>(acc[r][v], w.of_row[row + r], least)));
      }
    }
  }
}

// -- floats ------------------------------------------------------------------------------------------------

template <int kRows>
AO_INLINE void multiply_keys(const float* panel, const float* q, int64_t row, int64_t tokens, int64_t size,
                             int64_t wide, float* logits) {
  for (int64_t t = 0; t < tokens; t += 16 * kVectors) {
    F acc[kRows][kVectors];
    for (auto& r : acc) {
      for (F& v : r) v = zero();
    }
    const float* p = panel + t * wide;
    for (int64_t d = 0; d < size; ++d, p += 16) {
      F w[kVectors];
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) w[v] = load(p + v * 16 * wide);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const F x = splat(q[(row + r) * wide + d]);
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) acc[r][v] = fma(x, w[v], acc[r][v]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) store(logits + (row + r) * kTokenTile + t + 16 * v, acc[r][v]);
    }
  }
}

template <int kRows>
AO_INLINE void multiply_values(const float* panel, const float* weights, int64_t row, int64_t tokens, int64_t wide,
                               float* out) {
  for (int64_t c = 0; c < wide; c += 16 * kVectors) {
    F acc[kRows][kVectors];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) acc[r][v] = load(out + (row + r) * wide + c + 16 * v);
    }
    const float* p = panel + c;
    for (int64_t t = 0; t < tokens; ++t, p += wide) {
      F w[kVectors];
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) w[v] = load(p + 16 * v);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const F x = splat(weights[(row + r) * kTokenTile + t]);
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) acc[r][v] = fma(x, w[v], acc[r][v]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) store(out + (row + r) * wide + c + 16 * v, acc[r][v]);
    }
  }
}

}  // namespace ao::AO_ISA::attention
