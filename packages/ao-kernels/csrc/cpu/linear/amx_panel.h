// Weights as tile registers take them, and what is multiplied with them.
#pragma once
#include "panel.h"
#include "sources.h"

namespace ao::AO_ISA {

// -- decoding ---------------------------------------------------------------------------------------------

// Weights with scales and zero points applied, in parts. `out`: the first part of the first tile, `part_bytes`
// before the next one.
using FoldParts = void (*)(const uint8_t* tile, int64_t count, uint8_t* out, int64_t part_bytes, const void* table,
                           F scale, F zero_term);

template <class Source>
AO_INLINE void all_floats(const typename Source::Table& table, const uint8_t* tile, F (&w)[4][4], F scale,
                          F zero_term) {
  for (int line = 0; line < Source::kTileBytes; line += 64) __builtin_prefetch(tile + line + 2048);
  table.template floats<0>(tile, w[0]);
  table.template floats<1>(tile, w[1]);
  table.template floats<2>(tile, w[2]);
  table.template floats<3>(tile, w[3]);
#pragma GCC unroll 4
  for (auto& quad : w) {
#pragma GCC unroll 4
    for (F& v : quad) v = fma(v, scale, zero_term);
  }
}

// As sums of kParts numbers in bfloat16: the upper 8 bits of what is left, and at last all of it, rounded.
template <class Source, int kParts>
static void fold_parts(const uint8_t* tile, int64_t count, uint8_t* out, int64_t part_bytes, const void* table_,
                       F scale, F zero_term) {
  const auto& table = *static_cast<const typename Source::Table*>(table_);
  for (int64_t t = 0; t < count; ++t, tile += Source::kTileBytes, out += 512) {
    F w[4][4];
    all_floats<Source>(table, tile, w, scale, zero_term);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
#pragma GCC unroll 2
      for (int v = 0; v < 4; v += 2) {
        F &low = w[i][v], &high = w[i][v + 1];
        uint8_t* to = out + i * 128 + v * 32;
#pragma GCC unroll 2
        for (int part = 0; part + 1 < kParts; ++part, to += part_bytes) {
          const P pair = pair_exact(low, high);
          store_weight(to, pair);
          low = sub(low, low_halves(pair)), high = sub(high, high_halves(pair));
        }
        store_weight(to, pair_rounded(low, high));
      }
    }
  }
}

struct Decoder {
  Unpack unpack;   // codes, as they are multiplied
  FoldParts fold;  // or weights in parts; null: there are none
  int tile_bytes;
  void (*make_table)(const Linear&, void* table);
};

template <Mode kMode>
static Decoder decoder_of(const Linear& t) {
  return for_source<kMode>(t, [&](auto source) {
    using Source = decltype(source);
    Decoder d{unpack<kMode, Source>, nullptr, Source::kTileBytes, make_table<kMode, Source>};
    if constexpr (kMode == Mode::pairs) {
      constexpr FoldParts kFolds[] = {nullptr, fold_parts<Source, 1>, fold_parts<Source, 2>, fold_parts<Source, 3>};
      d.fold = kFolds[t.tiling.w_parts];
    }
    return d;
  });
}

// -- products ---------------------------------------------------------------------------------------------

// Blocks of rows times two blocks of N, over consecutive registers of columns.
struct TilePart {
  const uint8_t* x;  // (row block, part, register)
  int64_t x_block, x_part, x_step;
  const uint8_t* w;  // (N block, part, register)
  int64_t w_block, w_part, w_step;
  int64_t line;      // bytes of a row of activations in a register
  int64_t steps;
  int x_parts, w_parts;
  bool starts;           // sums begin here
  const uint8_t* prefetch;  // codes that the next product needs, to prefetch meanwhile
  int64_t prefetch_stride;  // bytes from one block of N to the next there
  int64_t prefetch_lines;   // cache lines of each block to ask for with every register of columns
};

// 32 rows by 32 columns, or 16 rows, over some registers of columns.
template <bool kBytes, int kRowBlocks>
AO_INLINE void add_products(const TilePart& p, const uint8_t* x, const uint8_t* w, const uint8_t*& prefetch) {
  for (int64_t s = p.steps; s > 0; --s, x += p.x_step, w += p.w_step) {
    for (int64_t line = 0; line < p.prefetch_lines; ++line, prefetch += 64) {
      __builtin_prefetch(prefetch, 0, 2);
      __builtin_prefetch(prefetch + p.prefetch_stride, 0, 2);
    }
    tile_load<4>(x, p.line);
    tile_load<6>(w, 64);
    tile_dot<kBytes, 0, 4, 6>();
    tile_load<7>(w + p.w_block, 64);
    tile_dot<kBytes, 1, 4, 7>();
    if constexpr (kRowBlocks == 2) {
      tile_load<5>(x + p.x_block, p.line);
      tile_dot<kBytes, 2, 5, 6>();
      tile_dot<kBytes, 3, 5, 7>();
    }
  }
}

// Adds to `sums`, (row, N block, 16).
template <bool kBytes, int kRowBlocks>
static void multiply_tiles(const TilePart& p, void* sums) {
  constexpr int64_t kStride = kPanelBlocks * 64;
  auto* out = static_cast<uint8_t*>(sums);
  uint8_t* next = out + kTileRows * kStride;
  if (p.starts) {
    tile_zero<0>(), tile_zero<1>();
    if constexpr (kRowBlocks == 2) tile_zero<2>(), tile_zero<3>();
  } else {
    tile_load<0>(out, kStride), tile_load<1>(out + 64, kStride);
    if constexpr (kRowBlocks == 2) tile_load<2>(next, kStride), tile_load<3>(next + 64, kStride);
  }
  const uint8_t* prefetch = p.prefetch;
  const int most = p.x_parts > p.w_parts ? p.x_parts : p.w_parts;
  for (int w_part = 0; w_part < p.w_parts; ++w_part) {
    // products of parts that are below the last ones are left out
    for (int x_part = 0; x_part < p.x_parts && x_part + w_part < most; ++x_part) {
      add_products<kBytes, kRowBlocks>(p, p.x + x_part * p.x_part, p.w + w_part * p.w_part, prefetch);
    }
  }
  tile_store<0>(out, kStride), tile_store<1>(out + 64, kStride);
  if constexpr (kRowBlocks == 2) tile_store<2>(next, kStride), tile_store<3>(next + 64, kStride);
}

}  // namespace ao::AO_ISA
