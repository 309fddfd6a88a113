// The matmuls: blocks of 16 of N (rows of the weight) times packed activations.
#pragma once
#include "pack.h"
#include "row_pairs.h"

namespace ao::AO_ISA {

template <int kNumber>
struct Constant {
  static constexpr int value = kNumber;
};

// -- arithmetic of each mode: what one row of activations and 64 codes make -----------------------------

// kVectors: of weights, that 64 codes make; kBytes: of activations, that meet one of them.
template <Mode kMode>
struct Arithmetic;

template <>
struct Arithmetic<Mode::f32> {
  using Sum = F;
  using Weight = F;
  static constexpr int kVectors = 4, kBytes = 4;
  AO_INLINE F zero_sum() { return zero(); }
  AO_INLINE F finish(F sum) { return sum; }
  AO_INLINE F spread(const uint8_t* x) { return splat_float(x); }
  template <bool>
  AO_INLINE F dot(F sum, F w, F x) {
    return fma(w, x, sum);
  }
};

template <>
struct Arithmetic<Mode::int8> {
  using Sum = I;
  using Weight = Q;
  static constexpr int kVectors = 1, kBytes = 4;
  AO_INLINE I zero_sum() { return splat_int(0); }
  AO_INLINE F finish(I sum) { return to_float(sum); }
  AO_INLINE Q spread(const uint8_t* x) { return splat_dword(x); }
  template <bool kSmall, class X>
  AO_INLINE I dot(I sum, Q w, X x) {
    return dot_quads<kSmall>(sum, w, x);
  }
};

#if AO_HAS_WORDS
template <>
struct Arithmetic<Mode::words> {
  using Sum = I;
  using Weight = I;
  static constexpr int kVectors = 2, kBytes = 4;
  AO_INLINE I zero_sum() { return splat_int(0); }
  AO_INLINE F finish(I sum) { return to_float(sum); }
  AO_INLINE I spread(const uint8_t* x) { return splat_dword(x); }
  template <bool>
  AO_INLINE I dot(I sum, I w, I x) {
    return dot_words(sum, w, x);
  }
};
#endif

#if AO_HAS_PAIRS
template <>
struct Arithmetic<Mode::pairs> {
  using Sum = F;
  using Weight = P;
  static constexpr int kVectors = 2, kBytes = 4;
  AO_INLINE F zero_sum() { return zero(); }
  AO_INLINE F finish(F sum) { return sum; }
  AO_INLINE P spread(const uint8_t* x) { return splat_dword(x); }
  template <bool>
  AO_INLINE F dot(F sum, P w, P x) {
    return dot_pairs(sum, w, x);
  }
};
#endif

// -- where weights come from ----------------------------------------------------------------------------

// `kStored`: vectors as they are in memory, so that each is read where it is multiplied; where rows are multiplied two by
// two they are zipped (row_pairs.h). `kFew`: bytes whose products, eight of them added up, fit 16 bits with a sign.

template <Mode kMode, int kBits, Kind kKind>
struct DecoderOf {
  using Type = FloatDecoder<kBits, kKind>;
};
#if AO_HAS_PAIRS
template <int kBits, Kind kKind>
struct DecoderOf<Mode::pairs, kBits, kKind> {
  using Type = PairDecoder<kBits, kKind>;
};
#endif

// Codes, decoded on the way.
template <Mode kMode, int kBits, Kind kKind>
struct Coded {
  static constexpr bool kStored = false, kFew = false;
  static constexpr int kCodeBits = kBits;
  static constexpr Kind kCodes = kKind;
  static constexpr int kTileBytes = 32 * kBits;
  static constexpr bool kSmall = true;
  // a table that bfloat16 does not hold exactly comes in two parts: its rounding errors, the same wherever a
  // code occurs, would add up
  static constexpr int kParts = kMode == Mode::pairs && kKind == Kind::table ? 2 : 1;
  using Table = typename DecoderOf<kMode, kBits, kKind>::Type;
  template <int i>
  AO_INLINE void get(const Table& table, const uint8_t* tile, typename Arithmetic<kMode>::Weight* out) {
    if constexpr (kMode == Mode::f32) table.template floats<i>(tile, out);
#if AO_HAS_PAIRS
    if constexpr (kMode == Mode::pairs) table.template pairs<i>(tile, out);
    if constexpr (kParts == 2) table.template low_pairs<i>(tile, out + 2);
#endif
  }
};
template <int kBits, Kind kKind>
struct Coded<Mode::int8, kBits, kKind> {
  static constexpr bool kStored = false, kFew = kKind == Kind::integer && kBits <= 5;
  static constexpr int kCodeBits = kBits;
  static constexpr Kind kCodes = kKind;
  static constexpr int kTileBytes = 32 * kBits;
  static constexpr bool kSmall = kBits < 8;
  static constexpr int kParts = 1;
  using Table = ByteDecoder<kBits, kKind>;
  template <int i>
  AO_INLINE void get(const Table& table, const uint8_t* tile, Q* out) {
    out[0] = table.template quads<i>(tile);
  }
};

#if AO_HAS_WORDS
// Values in units of `unit` as words: columns (4i, 4i + 2) and (4i + 1, 4i + 3) of a tile.
template <int kBits, Kind kKind>
struct WordDecoder {
  ByteDecoder<kBits, kKind> bytes;
  I least;
  inline __attribute__((always_inline)) explicit WordDecoder(const float* values, float least_value, float unit)
      : bytes(values, least_value, unit) {
    const uint32_t word = static_cast<uint32_t>(static_cast<int>(least_value)) & 0xffff;
    least = splat_int(static_cast<int32_t>(word * 0x10001));  // twice; a product of signed numbers would overflow
  }
  template <int i>
  inline __attribute__((always_inline)) void words(const uint8_t* tile, I out[2]) const {
    const Q quads = bytes.template quads<i>(tile);
    const I low = splat_int(0x00ff00ff);
    out[0] = add_words(and_(quads, low), least), out[1] = add_words(and_(shift_words<8>(quads), low), least);
  }
};
template <int kBits, Kind kKind>
struct Coded<Mode::words, kBits, kKind> {
  static constexpr bool kStored = false, kFew = false;
  static constexpr int kCodeBits = kBits;
  static constexpr Kind kCodes = kKind;
  static constexpr int kTileBytes = 32 * kBits;
  static constexpr bool kSmall = true;
  static constexpr int kParts = 1;
  using Table = WordDecoder<kBits, kKind>;
  template <int i>
  AO_INLINE void get(const Table& table, const uint8_t* tile, I* out) {
    table.template words<i>(tile, out);
  }
};
#endif

// A panel of vectors that were decoded before. `kSmall`: bytes are below 128.
template <Mode kMode, bool kSmallBytes = true, bool kFewBits = false>
struct Panel {
  static constexpr bool kStored = true, kFew = kFewBits;
  struct Table {};
  static constexpr int kTileBytes = 4 * Arithmetic<kMode>::kVectors * 64;
  static constexpr bool kSmall = kSmallBytes;
  static constexpr int kParts = 1;
};

// -- the loop ---------------------------------------------------------------------------------------------

// Some rows times some blocks of N, over consecutive steps.
struct Part {
  const uint8_t* weights;  // the first tile
  int64_t stride;          // bytes from one block of N to the next
  const uint8_t* x;        // the first tile of the row block
  const int32_t* acc_init;   // (step, row): initial values of the accumulators; null: 0
  const float* x_sums;     // (step, row): of the activations, for zero points, or null
  const float* x_ratios;   // (step, row): words: what totals are multiplied by before some steps
  const Step* steps;
  int64_t step_count;
  const uint8_t* prefetch;    // weights of the next part, to prefetch meanwhile; null: none
  int64_t prefetch_stride;    // bytes from one block of N to the next there
  int64_t prefetch_lines;     // cache lines of each block to ask for with every tile
  const float* scales;     // (N block, group, 16)
  const float* zero_terms;     // the same, for zero points
  int64_t scale_stride;    // floats from one block of N to the next
  float* totals;           // (row, N block, 16)
};

// Sums that grow independently of each other, so that additions need not wait for the one before, where so
// many registers hold sums already.
constexpr int chains_of(int sums) { return sums >= 4 ? 1 : sums >= 2 ? 2 : 4; }

// What vector v of quad i is multiplied by, of a row of activations.
template <Mode kMode, int i>
AO_INLINE auto factor(const uint8_t* row, [[maybe_unused]] int v) {
  using A = Arithmetic<kMode>;
  if constexpr (kMode == Mode::int8) return quad_of<i>(row);
  if constexpr (kMode != Mode::int8) return A::spread(row + (i * A::kVectors + v) * A::kBytes);
}

template <Mode kMode, class Source, int kRows, int kNBlocks, int kChains, int i>
AO_INLINE void quad(const Part& p, const typename Source::Table& table, const uint8_t* tile, const uint8_t* x,
                    typename Arithmetic<kMode>::Sum (&sums)[kChains][kRows][kNBlocks]) {
  using A = Arithmetic<kMode>;
  constexpr int kVectors = Source::kParts * A::kVectors;
  typename A::Weight w[kNBlocks][kVectors];
  if constexpr (!Source::kStored) {
#pragma GCC unroll 4
    for (int c = 0; c < kNBlocks; ++c) Source::template get<i>(table, tile + c * p.stride, w[c]);
  }
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    if constexpr (Source::kStored) {
#pragma GCC unroll 4
      for (int c = 0; c < kNBlocks; ++c) load_weight(w[c][v], tile + c * p.stride + (i * kVectors + v) * 64);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const auto all = factor<kMode, i>(x + r * 4 * A::kVectors * A::kBytes, v % A::kVectors);
#pragma GCC unroll 4
      for (int c = 0; c < kNBlocks; ++c) {
        auto& sum = sums[(i * kVectors + v) % kChains][r][c];
        sum = A::template dot<Source::kSmall>(sum, w[c][v], all);
      }
    }
  }
}

#if AO_HAS_WORD_SUMS
// A tile of bytes of few bits, whose products are added up as words: half as many operations.
template <class Source, int kRows, int kNBlocks>
AO_INLINE void tile_of_words(const Part& p, const typename Source::Table& table, const uint8_t* tile, const uint8_t* x,
                             I (&sums)[kRows][kNBlocks]) {
  I words[kRows][kNBlocks];
  const auto add_quad = [&]<int i>(Constant<i>) __attribute__((always_inline)) {
    Q w[kNBlocks];
#pragma GCC unroll 4
    for (int c = 0; c < kNBlocks; ++c) {
      if constexpr (Source::kStored) load_weight(w[c], tile + c * p.stride + i * 64);
      if constexpr (!Source::kStored) Source::template get<i>(table, tile + c * p.stride, &w[c]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Q all = splat_dword(x + (r * 4 + i) * 4);
#pragma GCC unroll 4
      for (int c = 0; c < kNBlocks; ++c) {
        const I products = multiply_bytes(w[c], all);
        words[r][c] = i == 0 ? products : add_words(words[r][c], products);
        hold(words[r][c]);  // gcc would add in another order, with more sums than registers
      }
    }
  };
  add_quad(Constant<0>{}), add_quad(Constant<1>{}), add_quad(Constant<2>{}), add_quad(Constant<3>{});
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < kNBlocks; ++c) sums[r][c] = add_pairs(sums[r][c], words[r][c]);
  }
}
#endif

template <Mode kMode, class Source, int kRows, int kNBlocks>
static void multiply(const Part& p, const typename Source::Table& table) {
  using A = Arithmetic<kMode>;
  constexpr int kChains = chains_of(kRows * kNBlocks * kRegisters);
  constexpr bool kByPairs = by_row_pairs<kMode, Source>(kRows);
  constexpr int kSums = kByPairs ? (kRows + 1) / 2 * 2 : kRows;  // a last row without another one is taken twice
  const uint8_t* x = p.x;
  const uint8_t* tile = p.weights;
  const uint8_t* prefetch = p.prefetch;
  F totals[kRows][kNBlocks];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < kNBlocks; ++c) totals[r][c] = load(p.totals + (r * kPanelBlocks + c) * 16);
  }
  for (int64_t s = 0; s < p.step_count; ++s) {
    typename A::Sum sums[kChains][kSums][kNBlocks];
#pragma GCC unroll 8
    for (int r = 0; r < kSums; ++r) {
#pragma GCC unroll 4
      for (int c = 0; c < kNBlocks; ++c) {
#pragma GCC unroll 4
        for (int chain = 0; chain < kChains; ++chain) sums[chain][r][c] = A::zero_sum();
        if constexpr (kMode == Mode::int8) {
          if (p.acc_init && r < kRows) sums[0][r][c] = splat_int(p.acc_init[s * kRows + r]);
        }
      }
    }
#if AO_HAS_ROW_PAIRS
    if constexpr (kByPairs) zip_sums(sums[0]);
#endif
    for (int t = p.steps[s].tiles; t > 0; --t) {
      if constexpr (kNBlocks == 1) {  // weights come from memory
#pragma GCC unroll 8
        for (int line = 0; line < Source::kTileBytes; line += 64) {
          __builtin_prefetch(tile + line + kPrefetchL2, 0, 2);
          __builtin_prefetch(tile + line + kPrefetchL1);
        }
      } else if (prefetch) {
        for (int64_t line = 0; line < p.prefetch_lines; ++line, prefetch += 64) {
          __builtin_prefetch(prefetch, 0, 2);
          __builtin_prefetch(prefetch + p.prefetch_stride, 0, 2);
        }
      }
#if AO_HAS_WORD_SUMS
      if constexpr (Source::kFew) tile_of_words<Source, kRows, kNBlocks>(p, table, tile, x, sums[0]);
#endif
#if AO_HAS_ROW_PAIRS
      if constexpr (kByPairs) tile_of_row_pairs<kMode, Source, kRows>(table, tile, x, sums[0]);
#endif
      if constexpr (!kByPairs && !(AO_HAS_WORD_SUMS && Source::kFew)) {
        quad<kMode, Source, kRows, kNBlocks, kChains, 0>(p, table, tile, x, sums);
        quad<kMode, Source, kRows, kNBlocks, kChains, 1>(p, table, tile, x, sums);
        quad<kMode, Source, kRows, kNBlocks, kChains, 2>(p, table, tile, x, sums);
        quad<kMode, Source, kRows, kNBlocks, kChains, 3>(p, table, tile, x, sums);
      }
      tile += Source::kTileBytes;
      x += kRows * 4 * A::kVectors * A::kBytes;
    }
#if AO_HAS_ROW_PAIRS
    if constexpr (kByPairs) unzip_sums(sums[0]);
#endif
    if constexpr (kMode == Mode::words) {
      if (p.steps[s].opens) {
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          const F ratio = splat(p.x_ratios[s * kRows + r]);
#pragma GCC unroll 4
          for (int c = 0; c < kNBlocks; ++c) totals[r][c] = mul(totals[r][c], ratio);
        }
      }
    }
    const int64_t group = p.steps[s].group;
#pragma GCC unroll 4
    for (int c = 0; c < kNBlocks; ++c) {
      const F scale = load(p.scales + c * p.scale_stride + group * 16);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        auto sum = sums[0][r][c];
        if constexpr (kChains == 2) sum = add(sum, sums[1][r][c]);
        if constexpr (kChains == 4) sum = add(add(sum, sums[1][r][c]), add(sums[2][r][c], sums[3][r][c]));
        totals[r][c] = fma(scale, A::finish(sum), totals[r][c]);
      }
      if (p.x_sums) {
        const F zero_term = load(p.zero_terms + c * p.scale_stride + group * 16);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) totals[r][c] = fma(zero_term, splat(p.x_sums[s * kRows + r]), totals[r][c]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < kNBlocks; ++c) store(p.totals + (r * kPanelBlocks + c) * 16, totals[r][c]);
  }
}

using Multiply = void (*)(const Part&, const void* table);

template <Mode kMode, class Source, int kRows, int kNBlocks>
static void multiply_any(const Part& p, const void* table) {
  multiply<kMode, Source, kRows, kNBlocks>(p, *static_cast<const typename Source::Table*>(table));
}

}  // namespace ao::AO_ISA
