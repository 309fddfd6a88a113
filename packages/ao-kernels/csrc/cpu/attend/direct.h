// Products of up to four rows with tokens as they lie in memory: a few tokens at a time in registers, for few rows.
//
// Codes are bytes, and rows limbs; or both are bfloat16. What is done with a tile is in products.h.
#pragma once
#include "products.h"

namespace ao::AO_ISA::attention {

#if AO_HAS_QUARTERS

// Prefetches memory that is read next, a few lines of each half at a time.
//
// Both halves of a tile are read alternately. A core has few line buffers for its own requests. The hardware prefetcher
// has more, but works within a page, so two pages keep more lines in flight than one.
struct Ahead {
  const uint8_t* next;
  int64_t half, lines;  // bytes of a half; lines of each half in a step

  // All of `bytes` in so many steps; null: nothing.
  AO_METHOD Ahead(const uint8_t* from, int64_t bytes, int64_t steps)
      : next(from), half(bytes / 2), lines(from && steps > 0 ? (bytes / 128 + steps - 1) / steps : 0) {}
  AO_METHOD void step() {
    for (int64_t i = 0; i < 64 * lines; i += 64) {
      __builtin_prefetch(next + i, 0, 2), __builtin_prefetch(next + half + i, 0, 2);
    }
    skip(1);
  }
  AO_METHOD void skip(int64_t steps) { next += 64 * lines * steps; }
};

// Tokens in each half of a tile, a multiple of 4. Up to 7 tokens follow the second half.
AO_INLINE int64_t half_of(int64_t count) { return count / 8 * 4; }

// -- bytes -------------------------------------------------------------------------------------------------

// Limbs of kRows rows of queries as the products take them: for each 4 elements those of four quarters, each four
// times. Bytes: 4 * kLimbs for each element of a row.
template <int kRows, int kLimbs>
static inline void turn_limbs(const int8_t* limbs, int64_t wide, bool nibbles, uint8_t* out) {
  for (int64_t at = 0; at < wide; at += 64) {
    I v[kLimbs * kRows];
    for (int i = 0; i < kLimbs * kRows; ++i) v[i] = load_vector(limbs + i * wide + at);
    for (int i = 0; nibbles && i < kLimbs * kRows; ++i) v[i] = for_nibbles(v[i]);
    const auto lane = [&]<int k>() {
      for (int i = 0; i < kLimbs * kRows; ++i, out += 64) store_vector(out, splat_lane<k>(v[i]));
    };
    lane.template operator()<0>(), lane.template operator()<1>();
    lane.template operator()<2>(), lane.template operator()<3>();
  }
}

// q · (code + least) of tokens to rows of kTokenTile, up to 7 more than `count`. `turned`: by turn_limbs. kChunks: of 64
// elements in a token; 0: any number, which takes more moves between registers.
template <int kBits, int kRows, int kLimbs, int kChunks>
static inline void multiply_keys_chunks(const Stored& s, const uint8_t* row, int64_t count, const uint8_t* turned,
                                        const Limbs* limbs, Ahead ahead, float* logits) {
  const int64_t bytes = s.coded.row_bytes;
  const I flip = flip_of(s);
  alignas(16) float units[4] = {}, offsets[4] = {};
  for (int r = 0; r < kRows; ++r) {
    units[r] = limbs[r].unit;
    // one limb multiplies codes less kMiddle
    offsets[r] = static_cast<float>(kLimbs == 1 ? -limbs[r].sum[0] * kMiddle
                                                : (limbs[r].sum[1] * 256 + limbs[r].sum[0]) * static_cast<int32_t>(s.least));
  }
  const F unit = splat_quarters(units);
  const F offset = mul(splat_quarters(offsets), unit);
  const int64_t half = half_of(count);
  // tokens t to t + 3, and four tokens from t + apart on
  const auto multiply_eight = [&](const uint8_t* const (&p)[8], int64_t t, int64_t apart) __attribute__((always_inline)) {
    I acc[kRows][kLimbs][2];
    for (auto& r : acc) {
      for (auto& l : r) l[0] = l[1] = splat_int(0);
    }
    const uint8_t* x = turned;
#pragma GCC unroll 2
    for (int64_t at = 0; at < (kChunks ? kChunks * 8 * kBits : bytes); at += 8 * kBits) {
      ahead.step();
      I v[2][4];
      if constexpr (kBits == 4) {
        const uint8_t* const from[8] = {p[0] + at, p[1] + at, p[2] + at, p[3] + at,
                                        p[4] + at, p[5] + at, p[6] + at, p[7] + at};
        quarters_of_nibbles(from, v[0]), quarters_of_nibbles(from + 4, v[1]);
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) v[i / 4][i % 4] = xor_(v[i / 4][i % 4], flip);
      } else {
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) v[i / 4][i % 4] = load_codes<8, true>(p[i] + at, 0, flip);
        transpose_quarters(v[0]), transpose_quarters(v[1]);
      }
#pragma GCC unroll 4
      for (int k = 0; k < 4; ++k) {
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
          for (int l = 0; l < kLimbs; ++l, x += 64) {
            const Q w = in_register(load_vector(x));
            acc[r][l][0] = dot_quads<false>(acc[r][l][0], v[0][k], w);
            acc[r][l][1] = dot_quads<false>(acc[r][l][1], v[1][k], w);
          }
        }
      }
    }
#pragma GCC unroll 2
    for (int g = 0; g < 2; ++g) {
      I all[4];
      for (int r = 0; r < 4; ++r) {
        const auto& of = acc[r < kRows ? r : 0];
        all[r] = r >= kRows ? splat_int(0) : kLimbs == 1 ? of[0][g] : add(shift_left<8>(of[kLimbs - 1][g]), of[0][g]);
      }
      store_quarters<kRows>(logits + t + apart * g, kTokenTile, fma(to_float(sum_quarters(all)), unit, offset));
    }
  };
  const uint8_t* other = row + half * bytes;
  for (int64_t t = 0; t < half; t += 4, row += 4 * bytes, other += 4 * bytes) {
    multiply_eight({row, row + bytes, row + 2 * bytes, row + 3 * bytes, other, other + bytes, other + 2 * bytes,
                    other + 3 * bytes}, t, half);
  }
  const int64_t left = count - 2 * half;
  if (left == 0) return;
  const uint8_t* p[8];
  for (int i = 0; i < 8; ++i) p[i] = other + (i < left ? i : left - 1) * bytes;
  multiply_eight(p, 2 * half, 4);
}

template <int kBits, int kRows, int kLimbs>
AO_INLINE void multiply_keys_direct(const Stored& s, const uint8_t* row, int64_t count, const uint8_t* turned,
                                    const Limbs* limbs, Ahead ahead, float* logits) {
  if (s.size == 64) return multiply_keys_chunks<kBits, kRows, kLimbs, 1>(s, row, count, turned, limbs, ahead, logits);
  if (s.size == 128) return multiply_keys_chunks<kBits, kRows, kLimbs, 2>(s, row, count, turned, limbs, ahead, logits);
  multiply_keys_chunks<kBits, kRows, kLimbs, 0>(s, row, count, turned, limbs, ahead, logits);
}

// Calls f(pointers to four tokens, index of the first one) for all tokens; a last group of fewer repeats the last one.
template <class F>
AO_INLINE void by_fours(const uint8_t* rows, int64_t bytes, int64_t count, Ahead& ahead, const F& f) {
  const int64_t half = half_of(count);
  const uint8_t* other = rows + half * bytes;
  for (int64_t t = 0; t < half; t += 4, rows += 4 * bytes, other += 4 * bytes) {
    ahead.step();
    f({rows, rows + bytes, rows + 2 * bytes, rows + 3 * bytes}, t);
    f({other, other + bytes, other + 2 * bytes, other + 3 * bytes}, half + t);
  }
  for (int64_t t = 2 * half; t < count; t += 4, other += 4 * bytes) {
    const int64_t last = count - 1 - t;
    f({other, other + (last < 1 ? last : 1) * bytes, other + (last < 2 ? last : 2) * bytes,
       other + (last < 3 ? last : 3) * bytes}, t);
  }
}

// Sums over tokens of weight * (code + least), added to `out`, for 64 elements in the order of `interleave`, or with
// codes of 4 bits in that of `interleave_nibbles`. Weights of tokens from `count` on are 0. `codes` is of the first token.
template <int kBits, int kRows, int kHalf>
static inline void add_values_half(const Stored& s, const uint8_t* codes, int64_t count, const int8_t* limbs,
                                   const Limbs* of_row, Ahead& ahead, float* out, int64_t stride) {
  const int64_t bytes = s.coded.row_bytes;
  const I flip = flip_of(s);
  I acc[kRows][2][2];
  for (auto& r : acc) {
    for (auto& v : r) v[0] = v[1] = splat_int(0);
  }
  const auto add_four = [&](const uint8_t* const (&p)[4], int64_t t) __attribute__((always_inline)) {
    I v[4], w[2];
    if constexpr (kBits == 4) {
      interleave_nibbles<kHalf>(p, w[0], w[1]);
      w[0] = xor_(w[0], flip), w[1] = xor_(w[1], flip);
    } else {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) v[i] = load_codes<kBits, true>(p[i], 0, flip);
      interleave_half<kHalf>(v, w);
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int l = 0; l < 2; ++l) {
        const Q x = in_register(splat_dword(limbs + (r * 2 + l) * kTokenTile + t));
        acc[r][0][l] = dot_quads<false>(acc[r][0][l], w[0], x);
        acc[r][1][l] = dot_quads<false>(acc[r][1][l], w[1], x);
      }
    }
  };
  by_fours(codes, bytes, count, ahead, add_four);
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
      float* const to = out + r * stride + (2 * kHalf + v) * 16;
      store(to, add(load(to), joined<2>(acc[r][v], of_row[r], static_cast<int32_t>(s.least))));
    }
  }
}

// The same with weights as one unsigned byte each, kRows rows of kTokenTile, and codes of 4 bits; all 64 elements.
template <int kRows>
static inline void add_values_bytes(const Stored& s, const uint8_t* codes, int64_t count, const uint8_t* weights,
                                    const Limbs* of_row, Ahead& ahead, float* out, int64_t stride) {
  const int64_t bytes = s.coded.row_bytes;
  const I flip = flip_of(s);
  I acc[kRows][4];
  for (auto& r : acc) {
    for (I& v : r) v = splat_int(0);
  }
  const auto add_four = [&](const uint8_t* const (&p)[4], int64_t t) __attribute__((always_inline)) {
    I v[4];
    interleave_nibbles<0>(p, v[0], v[1]), interleave_nibbles<1>(p, v[2], v[3]);
#pragma GCC unroll 4
    for (I& x : v) x = xor_(x, flip);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const Q x = in_register(splat_dword(weights + r * kTokenTile + t));
#pragma GCC unroll 4
      for (int k = 0; k < 4; ++k) acc[r][k] = dot_quads<false>(acc[r][k], x, v[k]);
    }
  };
  by_fours(codes, bytes, count, ahead, add_four);
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
    const I offset = splat_int(-of_row[r].sum[0] * kMiddle);
    const F unit = splat(of_row[r].unit);
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) {
      float* const to = out + r * stride + 16 * v;
      store(to, fma(to_float(add(acc[r][v], offset)), unit, load(to)));
    }
  }
}

// -- pairs of bfloat16 -------------------------------------------------------------------------------------

// Tokens in bfloat16.
struct HalfTokens {
  static constexpr int kBytes = 2;      // of an element
  static constexpr bool kSplit = false;  // words are in order

  // 64 elements of a token, as two vectors of words.
  AO_METHOD void words(const uint8_t* p, I& a, I& b) const { a = load_vector(p), b = load_vector(p + 64); }
  // Those of two tokens in pairs, 16 elements in each vector.
  AO_METHOD void pairs(const uint8_t* p, const uint8_t* q, I (&out)[4]) const {
    I first[2], second[2];
    pair_words(load_vector(p), load_vector(q), first), pair_words(load_vector(p + 64), load_vector(q + 64), second);
    out[0] = first[0], out[1] = first[1], out[2] = second[0], out[3] = second[1];
  }
};

// Codes of 8 bits that are looked up.
struct TableTokens {
  static constexpr int kBytes = 1;
  static constexpr bool kSplit = true;  // quarters of the first vector are elements 0 to 7, 16 to 23, ...
  SignedTable table;

  AO_METHOD void words(const uint8_t* p, I& a, I& b) const {
    I low, high;
    table.look_up(load_vector(p), low, high);
    a = join_bytes_low(low, high), b = join_bytes_high(low, high);
  }
  // In the order of `interleave`.
  AO_METHOD void pairs(const uint8_t* p, const uint8_t* q, I (&out)[4]) const {
    table.look_up(load_vector(p), out[0], out[1]);
    table.look_up(load_vector(q), out[2], out[3]);
    interleave(out);
  }
};

// kRows rows of floats as the products of pairs take them. Bytes: 8 for each element of a row.
template <bool kSplit, int kRows>
static inline void turn_pairs(const float* q, int64_t wide, uint8_t* out) {
  for (int64_t at = 0; at < wide; at += 64) {
    I v[2][kRows];
    for (int r = 0; r < kRows; ++r) {
      const float* const x = q + r * wide + at;
      const I a = join_bf16(load(x), load(x + 16)), b = join_bf16(load(x + 32), load(x + 48));
      v[0][r] = kSplit ? every_second_quarter<0>(a, b) : a, v[1][r] = kSplit ? every_second_quarter<1>(a, b) : b;
    }
    for (int h = 0; h < 2; ++h) {
      const auto lane = [&]<int k>() {
        for (int r = 0; r < kRows; ++r, out += 64) store_vector(out, splat_lane<k>(v[h][r]));
      };
      lane.template operator()<0>(), lane.template operator()<1>();
      lane.template operator()<2>(), lane.template operator()<3>();
    }
  }
}

// q · key of tokens to rows of kTokenTile, up to 7 more than `count`. row(t): where a token begins.
template <int kRows, class Tokens, class Row>
static inline void multiply_keys_pairs(const Tokens& tokens, const Row& row, int64_t count, int64_t size,
                                       const uint8_t* turned, Ahead ahead, float* logits) {
  for (int64_t t = 0; t < count; t += 8) {
    const uint8_t* p[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) p[i] = row(t + i < count ? t + i : count - 1);
    F acc[kRows][2];
    for (auto& r : acc) r[0] = r[1] = zero();
    const uint8_t* x = turned;
    for (int64_t at = 0; at < size; at += 64) {
      ahead.step();
      I v[2][2][4];  // first or second words, four tokens
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) tokens.words(p[i] + at * Tokens::kBytes, v[0][i / 4][i % 4], v[1][i / 4][i % 4]);
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        transpose_quarters(v[h][0]), transpose_quarters(v[h][1]);
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) {
#pragma GCC unroll 4
          for (int r = 0; r < kRows; ++r, x += 64) {
            const P w = in_register(load_vector(x));
            acc[r][0] = dot_pairs(acc[r][0], v[h][0][k], w);
            acc[r][1] = dot_pairs(acc[r][1], v[h][1][k], w);
          }
        }
      }
    }
#pragma GCC unroll 2
    for (int g = 0; g < 2; ++g) {
      F all[4];
      for (int r = 0; r < 4; ++r) all[r] = r < kRows ? acc[r < kRows ? r : 0][g] : zero();
      store_quarters<kRows>(logits + t + 4 * g, kTokenTile, sum_quarters(all));
    }
  }
}

// Sums over tokens of weight * value, added to `out`, for 64 elements from `at` on. `weights`: kRows rows of kTokenTile
// bfloat16; those of tokens from `count` on are 0.
template <int kRows, class Tokens, class Row>
static inline void add_values_pairs(const Tokens& tokens, const Row& row, int64_t count, int64_t at,
                                    const uint8_t* weights, Ahead& ahead, float* out, int64_t stride) {
  F acc[kRows][4];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < 4; ++v) acc[r][v] = load(out + r * stride + 16 * v);
  }
  for (int64_t t = 0; t < count; t += 2) {
    if (t % 8 == 0) ahead.step();
    I v[4];
    tokens.pairs(row(t) + at * Tokens::kBytes, row(t + 1 < count ? t + 1 : t) + at * Tokens::kBytes, v);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const P x = in_register(splat_dword(weights + 2 * (r * kTokenTile + t)));
#pragma GCC unroll 4
      for (int k = 0; k < 4; ++k) acc[r][k] = dot_pairs(acc[r][k], v[k], x);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < 4; ++v) store(out + r * stride + 16 * v, acc[r][v]);
  }
}

#endif  // AO_HAS_QUARTERS

}  // namespace ao::AO_ISA::attention
