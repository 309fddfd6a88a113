// The packed B panel: weights unpacked once, kept in a cache while many rows are multiplied with it.
#pragma once
#include "product.h"

namespace ao::AO_ISA {

using Unpack = void (*)(const uint8_t* tile, int64_t count, uint8_t* panel, const void* table);

template <Mode kMode, class Source>
static void unpack(const uint8_t* tile, int64_t count, uint8_t* panel, const void* table_) {
  const auto& table = *static_cast<const typename Source::Table*>(table_);
  constexpr int kVectors = Arithmetic<kMode>::kVectors;
  for (int64_t t = 0; t < count; ++t, tile += Source::kTileBytes, panel += 4 * kVectors * 64) {
    typename Arithmetic<kMode>::Weight w[4][Source::kParts * kVectors];
    for (int line = 0; line < Source::kTileBytes; line += 64) __builtin_prefetch(tile + line + 2048);
    Source::template get<0>(table, tile, w[0]);
    Source::template get<1>(table, tile, w[1]);
    Source::template get<2>(table, tile, w[2]);
    Source::template get<3>(table, tile, w[3]);
#if AO_HAS_ROW_PAIRS
    zip_weights<kMode>(w);
#endif
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) store_weight(panel + (i * kVectors + v) * 64, w[i][v]);
    }
  }
}

// The same with scales and zero points fused into the weights, in bfloat16 rounded: the panel is what `dequantize`
// gives, and the matmul applies no scales.
using Fold = void (*)(const uint8_t* tile, int64_t count, uint8_t* panel, const void* table, F scale, F zero_term);

template <Mode kMode, class Source>
static void fold(const uint8_t* tile, int64_t count, uint8_t* panel, const void* table_, F scale, F zero_term) {
  const auto& table = *static_cast<const typename Source::Table*>(table_);
  for (int64_t t = 0; t < count; ++t, tile += Source::kTileBytes) {
    F w[4][4];
    table.template floats<0>(tile, w[0]);
    table.template floats<1>(tile, w[1]);
    table.template floats<2>(tile, w[2]);
    table.template floats<3>(tile, w[3]);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) w[i][v] = fma(w[i][v], scale, zero_term);
      if constexpr (kMode == Mode::f32) {
#pragma GCC unroll 4
        for (int v = 0; v < 4; ++v, panel += 64) store_weight(panel, w[i][v]);
      }
#if AO_HAS_PAIRS
      if constexpr (kMode == Mode::pairs) {
        P first = pair_rounded(w[i][0], w[i][1]), second = pair_rounded(w[i][2], w[i][3]);
#if AO_HAS_ROW_PAIRS
        zip_lanes(first, second);
#endif
        store_weight(panel, first);
        store_weight(panel + 64, second);
        panel += 128;
      }
#endif
    }
  }
}

}  // namespace ao::AO_ISA
