// A few rows on AVX2: codes of tokens become words as they are loaded, and meet rows whose two limbs are joined to words.
#pragma once
#include "worker.h"

#if AO_HAS_CODE_WORDS
namespace ao::AO_ISA::attention {

// Rows that share a code in a register.
constexpr int kWordRows = 4;

// Codes as signed words, less what is lacking to their values.
struct CodeWords {
  I flip;         // what bytes or words are turned over by
  int32_t least;  // value of the word 0

  AO_METHOD explicit CodeWords(const Stored& s) {
    const bool bytes = s.coded.code_bits == 8;
    flip = bytes ? splat_byte(s.flip ^ 0x80) : splat_int(s.flip * 0x10001);
    least = static_cast<int32_t>(s.least) + (bytes ? 128 : 0);
  }
  // What that makes of a sum of products with a row of limbs: 32 bits hold it, and the sum.
  AO_METHOD int32_t offset(const Limbs& row) const { return (row.sum[0] + 256 * row.sum[1]) * least; }
};

// q · (what is stored) of the tokens of a tile. `q`: kRows rows of `wide` words, by `turn_queries`.
template <int kBits, int kRows>
static inline void multiply_keys_words(const Stored& s, const Stored& next, int64_t matrix, int64_t token, int64_t count,
                                       const int16_t* q, int64_t wide, const Limbs* limbs, float* logits) {
  const uint8_t* const rows = row_of(s, matrix, token);
  const CodeWords codes(s);
  int32_t offset[kRows];
  float unit[kRows];
  for (int r = 0; r < kRows; ++r) offset[r] = codes.offset(limbs[r]), unit[r] = limbs[r].unit;
  for (int64_t t = 0; t < count; t += 4) {
    if (t % 16 == 0) prefetch(next, matrix, token + t, 16);
    __m128i sums[4];
#pragma GCC unroll 4
    for (int64_t i = 0; i < 4; ++i) {
      const uint8_t* const p = rows + (t + i < count ? t + i : count - 1) * s.coded.row_bytes;
      I acc[kRows];
      for (I& x : acc) x = splat_int(0);
      for (int64_t at = 0; at < s.size; at += 32) {
        I w;
        if constexpr (kBits == 8) w = widen_bytes(p + at, codes.flip);
        if constexpr (kBits == 4) w = widen_nibbles(p + at / 2, codes.flip);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) acc[r] = dot_words(acc[r], w, load_vector(q + r * wide + at));
      }
      sums[i] = sums_of(acc);
    }
    store_turned<kRows>(sums, offset, unit, logits + t, kTokenTile);
  }
}

// Sums over tokens of weight * value, added to `out`, for 64 elements. `weights`: kRows rows of kTokenTile words; those
// of tokens from `count` on are 0. `p`: of the first token.
template <int kBits, int kRows>
static inline void add_values_words(const Stored& s, const uint8_t* p, int64_t count, const int16_t* weights,
                                    const Limbs* limbs, float* out, int64_t stride) {
  const int64_t bytes = s.coded.row_bytes;
  const CodeWords codes(s);
  for (int64_t at = 0; at < 64; at += 16, p += 2 * kBits) {
    I acc[kRows];
    for (I& x : acc) x = splat_int(0);
    const uint8_t* row = p;
    for (int64_t t = 0; t < count; t += 2, row += 2 * bytes) {
      const uint8_t* const other = row + (t + 1 < count ? bytes : 0);
      I w;
      if constexpr (kBits == 8) w = pair_bytes(row, other, codes.flip);
      if constexpr (kBits == 4) w = pair_nibbles(row, other, codes.flip);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) acc[r] = dot_words(acc[r], w, splat_dword(weights + r * kTokenTile + t));
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      F sums = to_float(add(acc[r], splat_int(codes.offset(limbs[r]))));
      if constexpr (kBits == 4) sums = in_turns(sums);
      float* const to = out + r * stride + at;
      store(to, fma(sums, splat(limbs[r].unit), load(to)));
    }
  }
}

namespace {

template <int kLimbs>
void Worker<kLimbs>::turn_queries() {
  const bool nibbles = a.key.coded.code_bits == 4;
  auto* const words = reinterpret_cast<int16_t*>(turned);
  for (int64_t r = 0; r < item.rows; ++r) {
    const int8_t* const limbs = q_bytes + r * 2 * wide;
    for (int64_t at = 0; at < wide; at += 32) {
      const I x = join_limbs(limbs + at, limbs + wide + at);
      store_vector(words + r * wide + at, nibbles ? even_then_odd(x) : x);
    }
  }
}

template <int kLimbs>
void Worker<kLimbs>::meet_keys(int64_t t, int64_t count) {
  const auto* const words = reinterpret_cast<const int16_t*>(turned);
  const Stored &key = a.key, &next = a.value;
  by_rows<kWordRows>(item.rows, [&]<int kRows>(int64_t r) {
    const int16_t* const x = words + r * wide;
    float* const to = logits + r * kTokenTile;
    if (key.coded.code_bits == 8) {
      return multiply_keys_words<8, kRows>(key, next, item.matrix, t, count, x, wide, q_limbs + r, to);
    }
    multiply_keys_words<4, kRows>(key, next, item.matrix, t, count, x, wide, q_limbs + r, to);
  });
}

template <int kLimbs>
void Worker<kLimbs>::add_direct(int64_t t, int64_t count, int64_t at) {
  const Stored& value = a.value;
  const int64_t bits = value.coded.code_bits;
  auto* const words = reinterpret_cast<int16_t*>(values);  // no panel of values is there
  for (int64_t i = 0; i < item.rows * kTokenTile; i += 32) {
    const int8_t* const limbs = w_bytes + i / kTokenTile * 2 * kTokenTile + i % kTokenTile;
    store_vector(words + i, join_limbs(limbs, limbs + kTokenTile));
  }
  if (at == 0) prefetch(a.key, item.matrix, t + kTokenTile, kTokenTile);
  const uint8_t* const codes = row_of(value, item.matrix, t) + at * bits / 8;
  by_rows<kWordRows>(item.rows, [&]<int kRows>(int64_t r) {
    const int16_t* const w = words + r * kTokenTile;
    float* const to = part.values + r * a.value_size + at;
    if (bits == 8) return add_values_words<8, kRows>(value, codes, count, w, w_limbs + r, to, a.value_size);
    add_values_words<4, kRows>(value, codes, count, w, w_limbs + r, to, a.value_size);
  });
}

}  // namespace

}  // namespace ao::AO_ISA::attention
#endif  // AO_HAS_CODE_WORDS
