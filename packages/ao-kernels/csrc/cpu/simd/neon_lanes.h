// Four columns of a row of activations as a part of the register that holds 16, for products that take such parts.
#pragma once
#include "neon_vectors.h"

namespace ao::AO_ISA {

// Columns 4i to 4i + 3 of 16 bytes.
template <int i>
struct Lane {
  int8x16_t row;
};
template <int i>
AO_INLINE Lane<i> quad_of(const uint8_t* x) {
  return {vreinterpretq_s8_u8(vld1q_u8(x))};
}

}  // namespace ao::AO_ISA
