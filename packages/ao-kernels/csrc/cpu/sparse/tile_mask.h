// Which weights of a matrix stay, 2:4 along rows and columns at once; included by the unit of an instruction set.
//
// Two of the four columns of a row are a pair, one of 6, and a tile has a pair for each of its rows. The sums of two
// rows are shared by the patterns of all four, and 16 tiles are looked at together, one in each lane.
#pragma once
#include "kernels.h"

namespace ao::AO_ISA {
namespace {  // members of templates are exported otherwise

constexpr int kPairs = 6, kPatterns = 90, kTilesAtOnce = 16;
// The columns of each pair, as bits.
constexpr uint8_t kPairColumns[kPairs] = {0b0011, 0b0101, 0b1001, 0b0110, 0b1010, 0b1100};

// Patterns with two of four in every column: the pairs of rows 0 and 1, as one number, and those of rows 2 and 3.
struct Patterns {
  uint8_t upper[kPatterns] = {}, lower[kPatterns] = {};

  constexpr Patterns() {
    int count = 0;
    for (int i = 0; i < kPairs * kPairs; ++i) {
      for (int j = 0; j < kPairs * kPairs; ++j) {
        const uint8_t a = kPairColumns[i / kPairs], b = kPairColumns[i % kPairs];
        const uint8_t c = kPairColumns[j / kPairs], d = kPairColumns[j % kPairs];
        // columns of both upper rows are in no lower one, and the other way round
        if ((a & b) == (~(c | d) & 15) && (c & d) == (~(a | b) & 15)) {
          upper[count] = static_cast<uint8_t>(i), lower[count++] = static_cast<uint8_t>(j);
        }
      }
    }
  }
};
constexpr Patterns kAllPatterns;

// Magnitudes as numbers whose sums are finite; NaN and infinity are above all others.
AO_INLINE uint32_t score_bits(float v) {
  constexpr uint32_t kLargest = 0x7d7fffff;  // the greatest float / 16
  const uint32_t bits = __builtin_bit_cast(uint32_t, v) & 0x7fffffff;
  return bits < kLargest ? bits : kLargest;
}

// For each of 16 tiles, the number of the best pattern, as the bits of a float; the first one of several.
static inline void best_patterns(const float (&scores)[4][4][kTilesAtOnce], float* best) {
  F sums[2][kPairs * kPairs];
  for (int half = 0; half < 2; ++half) {
    F pairs[2][kPairs];
    for (int r = 0; r < 2; ++r) {
      const auto& row = scores[2 * half + r];
      for (int first = 0, pair = 0; first < 4; ++first) {
        for (int second = first + 1; second < 4; ++second) pairs[r][pair++] = add(load(row[first]), load(row[second]));
      }
    }
    for (int i = 0; i < kPairs * kPairs; ++i) sums[half][i] = add(pairs[0][i / kPairs], pairs[1][i % kPairs]);
  }
  F greatest = splat(-1.0f);
  I found = splat_int(0);
  for (int i = 0; i < kPatterns; ++i) {
    const F sum = add(sums[0][kAllPatterns.upper[i]], sums[1][kAllPatterns.lower[i]]);
    const I better = shift_right<31>(bits_of(sub(greatest, sum)));
    found = xor_(found, and_(xor_(found, splat_int(i)), better));
    greatest = max(sum, greatest);
  }
  store(best, as_float(found));
}

// Items: rows of tiles.
static inline void mask_tiles(const TileMask& t, int64_t begin, int64_t end) {
  constexpr int64_t kColumns = 4 * kTilesAtOnce;
  alignas(64) float scores[4][4][kTilesAtOnce], values[kColumns], best[kTilesAtOnce];
  for (int64_t band = begin; band < end; ++band) {
    const int64_t rows = t.n - 4 * band < 4 ? t.n - 4 * band : 4;
    for (int64_t k = 0; k < t.k; k += kColumns) {
      const int64_t columns = t.k - k < kColumns ? t.k - k : kColumns;
      for (int64_t r = 0; r < 4; ++r) {
        const int64_t at = (4 * band + r) * t.k + k;
        for (int64_t i = 0; i < kColumns; i += 16) {
          const int64_t left = r < rows ? columns - i : 0;
          const auto* from = static_cast<const uint8_t*>(t.x) + (at + i) * bytes_of(t.type);
          store(values + i, left > 0 ? load_as(t.type, from, left < 16 ? static_cast<int>(left) : 16) : zero());
        }
        for (int64_t i = 0; i < kColumns; ++i) {
          scores[r][i % 4][i / 4] = __builtin_bit_cast(float, score_bits(values[i]));
        }
      }
      best_patterns(scores, best);
      for (int64_t r = 0; r < rows; ++r) {
        uint8_t stays[kColumns];
        for (int64_t tile = 0; tile < kTilesAtOnce; ++tile) {
          const int32_t pattern = __builtin_bit_cast(int32_t, best[tile]);
          const uint8_t two = r < 2 ? kAllPatterns.upper[pattern] : kAllPatterns.lower[pattern];
          const uint8_t pair = kPairColumns[r % 2 == 0 ? two / kPairs : two % kPairs];
          for (int c = 0; c < 4; ++c) stays[4 * tile + c] = pair >> c & 1;
        }
        __builtin_memcpy(t.mask + (4 * band + r) * t.k + k, stays, static_cast<size_t>(columns));
      }
    }
  }
}

}  // namespace
}  // namespace ao::AO_ISA
