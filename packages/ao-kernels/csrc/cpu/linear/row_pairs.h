// Matmuls of two rows of activations at a time, for sets with products of matrices of two rows (see neon_i8mm.h).
#pragma once
#include "pack.h"

namespace ao::AO_ISA {

template <Mode kMode>
struct Arithmetic;

// Whether rows are multiplied two by two. Panels are made for it; elsewhere vectors of weights are zipped on the way, which
// as many rows make up for.
template <Mode kMode, class Source>
constexpr bool by_row_pairs([[maybe_unused]] int rows) {
  return AO_HAS_ROW_PAIRS && kMode != Mode::f32 && (Source::kStored || rows >= 4);
}

#if AO_HAS_ROW_PAIRS
template <class Sum, int kRows>
AO_INLINE void zip_sums(Sum (&sums)[kRows][1]) {
#pragma GCC unroll 3
  for (int r = 0; r < kRows; r += 2) zip_lanes(sums[r][0], sums[r + 1][0]);
}
template <class Sum, int kRows>
AO_INLINE void unzip_sums(Sum (&sums)[kRows][1]) {
#pragma GCC unroll 3
  for (int r = 0; r < kRows; r += 2) unzip_lanes(sums[r][0], sums[r + 1][0]);
}

// The vectors of a tile, each with the next one.
template <Mode kMode, class Weight, int kCount>
AO_INLINE void zip_weights(Weight (&w)[4][kCount]) {
  if constexpr (kMode == Mode::int8) zip_lanes(w[0][0], w[1][0]), zip_lanes(w[2][0], w[3][0]);
  if constexpr (kMode == Mode::pairs) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) zip_lanes(w[i][0], w[i][1]);
  }
}

// Vectors 2j and 2j + 1 of a tile, zipped, in all parts.
template <Mode kMode, class Source, int j, class Weight>
AO_INLINE void zipped_pair(const typename Source::Table& table, const uint8_t* tile, Weight (&w)[Source::kParts][2]) {
  if constexpr (kMode == Mode::int8) {
    Source::template get<2 * j>(table, tile, &w[0][0]), Source::template get<2 * j + 1>(table, tile, &w[0][1]);
  } else {
    Source::template get<j>(table, tile, w[0]);
  }
#pragma GCC unroll 2
  for (int part = 0; part < Source::kParts; ++part) zip_lanes(w[part][0], w[part][1]);
}

// The same, of four rows of the weight, times all rows of activations. A last row without another one is taken twice.
template <int kQuarter, class Weight, class Sum, int kSums>
AO_INLINE void add_quarter(Weight first, Weight second, const i4 (&x)[kSums / 2], Sum (&sums)[kSums][1]) {
#pragma GCC unroll 3
  for (int r = 0; r < kSums; r += 2) {
    auto &p = quarter<kQuarter>(sums[r][0]), &q = quarter<kQuarter>(sums[r + 1][0]);
    p = dot_rows(p, first, x[r / 2]), q = dot_rows(q, second, x[r / 2]);
  }
}

template <Mode kMode, class Source, int kRows, int j, class Sum, int kSums>
AO_INLINE void add_pair(const typename Source::Table& table, const uint8_t* tile, const uint8_t* x,
                        Sum (&sums)[kSums][1]) {
  constexpr int kRowBytes = 16 * Arithmetic<kMode>::kVectors;
  i4 rows[kSums / 2];
#pragma GCC unroll 3
  for (int r = 0; r < kSums; r += 2) {
    const uint8_t* const first = x + r * kRowBytes + 8 * j;
    rows[r / 2] = two_rows(first, r + 1 < kRows ? first + kRowBytes : first);
  }
  if constexpr (Source::kStored) {
    const uint8_t* const p = tile + 128 * j;
    add_quarter<0>(load_held(p), load_held(p + 64), rows, sums);
    add_quarter<1>(load_held(p + 16), load_held(p + 80), rows, sums);
    add_quarter<2>(load_held(p + 32), load_held(p + 96), rows, sums);
    add_quarter<3>(load_held(p + 48), load_held(p + 112), rows, sums);
  } else {
    typename Arithmetic<kMode>::Weight w[Source::kParts][2];
    zipped_pair<kMode, Source, j>(table, tile, w);
#pragma GCC unroll 2
    for (int part = 0; part < Source::kParts; ++part) {
      add_quarter<0>(w[part][0].a, w[part][1].a, rows, sums), add_quarter<1>(w[part][0].b, w[part][1].b, rows, sums);
      add_quarter<2>(w[part][0].c, w[part][1].c, rows, sums), add_quarter<3>(w[part][0].d, w[part][1].d, rows, sums);
    }
  }
}

template <Mode kMode, class Source, int kRows, class Sum, int kSums>
AO_INLINE void tile_of_row_pairs(const typename Source::Table& table, const uint8_t* tile, const uint8_t* x,
                                 Sum (&sums)[kSums][1]) {
  add_pair<kMode, Source, kRows, 0>(table, tile, x, sums);
  add_pair<kMode, Source, kRows, 1>(table, tile, x, sums);
  if constexpr (kMode == Mode::pairs) {
    add_pair<kMode, Source, kRows, 2>(table, tile, x, sums);
    add_pair<kMode, Source, kRows, 3>(table, tile, x, sums);
  }
}
#endif

}  // namespace ao::AO_ISA
