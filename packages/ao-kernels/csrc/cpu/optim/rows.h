// Parameters and gradients of a block, for the compiler to vectorize.
#pragma once
#include "numbers.h"

namespace ao::AO_ISA::optim {

template <Element kType>
static inline const float* load_block(const void* from, float* buffer) {
  if constexpr (kType == Element::f32) return static_cast<const float*>(from);
  const uint16_t* words = static_cast<const uint16_t*>(from);
  for (int i = 0; i < kBlock; ++i) buffer[i] = as_float(static_cast<uint32_t>(words[i]) << 16);
  return buffer;
}

template <Element kType>
static inline void store_block(void* to, const float* from, const uint32_t* noise) {
  if constexpr (kType == Element::f32) {
    __builtin_memcpy(to, from, sizeof(float) * kBlock);
  } else {
    uint16_t* words = static_cast<uint16_t*>(to);
    for (int i = 0; i < kBlock; ++i) {
      const uint32_t bits = bits_of(from[i]), magnitude = bits & 0x7fffffff;
      const uint32_t nearest = 0x7fff + (bits >> 16 & 1);
      const uint32_t carry = noise == nullptr ? nearest : magnitude < 0x7f800000 ? noise[i] : 0;
      words[i] = static_cast<uint16_t>((magnitude > 0x7f800000 ? bits | 0x400000 : bits + carry) >> 16);
    }
  }
}

}  // namespace ao::AO_ISA::optim
