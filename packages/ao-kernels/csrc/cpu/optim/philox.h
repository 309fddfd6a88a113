// Random bits that depend on a seed and a place alone.
#pragma once
#include "numbers.h"

namespace ao::AO_ISA::optim {

// 16 random bits for each element of a block from `element` on, a multiple of 4, of tensor number `tensor`:
// the upper half of word i % 4 of Philox4x32-10 with the seed as key and (i / 4, tensor) as counter, both
// 64 bits and the low word first.
// Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011).
static inline void random_bits(uint64_t seed, uint64_t tensor, uint64_t element, uint32_t* out) {
  constexpr int kCount = kBlock / 4;
  uint32_t a[kCount], b[kCount], c[kCount], d[kCount];
  for (int i = 0; i < kCount; ++i) {
    const uint64_t place = element / 4 + static_cast<uint64_t>(i);
    a[i] = static_cast<uint32_t>(place), b[i] = static_cast<uint32_t>(place >> 32);
    c[i] = static_cast<uint32_t>(tensor), d[i] = static_cast<uint32_t>(tensor >> 32);
  }
  uint32_t key = static_cast<uint32_t>(seed), key2 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round, key += 0x9e3779b9, key2 += 0xbb67ae85) {
    for (int i = 0; i < kCount; ++i) {
      const uint64_t first = uint64_t{0xd2511f53} * a[i], second = uint64_t{0xcd9e8d57} * c[i];
      a[i] = static_cast<uint32_t>(second >> 32) ^ b[i] ^ key;
      b[i] = static_cast<uint32_t>(second);
      c[i] = static_cast<uint32_t>(first >> 32) ^ d[i] ^ key2;
      d[i] = static_cast<uint32_t>(first);
    }
  }
  for (int i = 0; i < kCount; ++i) {
    out[4 * i] = a[i] >> 16, out[4 * i + 1] = b[i] >> 16;
    out[4 * i + 2] = c[i] >> 16, out[4 * i + 3] = d[i] >> 16;
  }
}

}  // namespace ao::AO_ISA::optim
