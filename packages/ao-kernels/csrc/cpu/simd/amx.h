// The tile registers of AMX beside the vectors of AVX-512: eight, of 16 rows of up to 64 bytes each.
//
// In assembly, because the intrinsics of compilers do not say that a register is read from memory.
#pragma once
#include "avx512.h"

namespace ao::AO_ISA {

// Registers 0 to 3 hold sums, 4 and 5 activations, 6 and 7 weights. `line`: bytes of a row of activations in one.
// To be released by the thread that is done with them: the system saves them until then.
AO_INLINE void configure_tiles(int line) {
  struct alignas(64) {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
  } config;
  for (int i = 0; i < 8; ++i) {
    config.bytes[i] = static_cast<uint16_t>(i / 2 == 2 ? line : 64);
    config.rows[i] = static_cast<uint8_t>(i / 2 == 3 ? line / 4 : 16);
  }
  asm volatile("ldtilecfg %0" : : "m"(config));
}
AO_INLINE void release_tiles() { asm volatile("tilerelease" : : : "memory"); }

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
