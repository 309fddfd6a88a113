// The tile registers of AMX beside the vectors of AVX-512: eight, of 16 rows of up to 64 bytes each.
//
// In assembly, because the intrinsics of compilers do not say that a register is read from memory.
#pragma once
#include "avx512.h"

namespace ao::AO_ISA {

// Registers of sums, of 16 rows of activations each, and of weights.
constexpr int kFirstActivations = 4, kFirstWeights = 6;

// Which rows and bytes of them the registers have, while it lives; they are given back at its end, so that the
// system need not save them any more.
class TileRegisters {
 public:
  // `line`: bytes of a row of activations in a register.
  AO_METHOD explicit TileRegisters(int line) {
    struct alignas(64) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    for (int i = 0; i < 8; ++i) {
      const bool activations = i / 2 == kFirstActivations / 2, weights = i / 2 == kFirstWeights / 2;
      config.bytes[i] = static_cast<uint16_t>(activations ? line : 64);
      config.rows[i] = static_cast<uint8_t>(weights ? line / 4 : 16);
    }
    asm volatile("ldtilecfg %0" : : "m"(config));
  }
  AO_METHOD ~TileRegisters() { asm volatile("tilerelease" : : : "memory"); }
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;
};

// `stride`: bytes from one row to the next.
template <int kTile>
AO_INLINE void tile_load(const void* p, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(stride), "n"(kTile) : "memory");
}
template <int kTile>
AO_INLINE void tile_store(void* p, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(p), "r"(stride), "n"(kTile) : "memory");
}
template <int kTile>
AO_INLINE void tile_zero() {
  asm volatile("tilezero %%tmm%c0" : : "n"(kTile));
}
// Adds products to sums: of signed bytes of activations with unsigned ones of weights, or of bfloat16.
template <bool kBytes, int kSums, int kX, int kW>
AO_INLINE void tile_dot() {
  if constexpr (kBytes) {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "n"(kSums), "n"(kX), "n"(kW));
  } else {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "n"(kSums), "n"(kX), "n"(kW));
  }
}

// v less `part` of it, 0 where v is NaN or infinite.
AO_INLINE F rest_of(F v, F part) {
  return _mm512_maskz_sub_ps(_knot_mask16(_mm512_fpclass_ps_mask(v, 0x99)), v, part);
}

}  // namespace ao::AO_ISA
