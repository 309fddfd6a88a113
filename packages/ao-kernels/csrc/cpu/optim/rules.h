// Formats whose codes are computed rather than looked up. Each loop over them can be vectorized.
//
// Numbers are of a block, divided by its scale. Square roots turn the nearest value into the nearest
// integer: halfway between i^2 and (i + 1)^2 lies (i + 1/2)^2 + 1/4, and halfway between i^4 and
// (i + 1)^4 lies ((i + 1/2)^2 + 3/4)^2 - 1/2.
#pragma once
#include <stdint.h>

namespace ao::optim {

constexpr float kSquares = 127.0f * 127.0f, kFourths = 65025.0f * 65025.0f;

static inline uint32_t bits_of(float v) { return __builtin_bit_cast(uint32_t, v); }
static inline float as_float(uint32_t bits) { return __builtin_bit_cast(float, bits); }

// The nearest integer, of two the even one; v from 0 to 2^22.
static inline uint32_t nearest(float v) { return bits_of(v + 0x1p23f) & 0x3fffff; }
// The greater one of v and 0, without a comparison, which the compiler would not vectorize.
static inline float positive(float v) { return as_float(bits_of(v) & ((bits_of(v) >> 31) - 1)); }

// Code i + 127 is i |i| / 127^2.
static inline uint8_t square_code(float x) {
  const float size = as_float(bits_of(x) & 0x7fffffff);
  const uint32_t i = nearest(__builtin_sqrtf(positive(size * kSquares - 0.25f)));
  const uint32_t sign = 0 - (bits_of(x) >> 31);
  return static_cast<uint8_t>(127 + ((i ^ sign) - sign));
}

// Code i is (i / 255)^4.
static inline uint8_t fourth_code(float x) {
  const float root = __builtin_sqrtf(positive(x) * kFourths + 0.5f);
  return static_cast<uint8_t>(nearest(__builtin_sqrtf(positive(root - 0.75f))));
}

// Sign, 4 bits of exponent, 3 of mantissa. 2^20 times the lowest power of 2 of x's size, but of 2^-6 at
// least, makes an addition round to 3 bits behind it.
static inline uint8_t e4m3_code(float x) {
  const uint32_t exponent = bits_of(x) & 0x7f800000, least = 121u << 23;
  const uint32_t power = exponent > least ? exponent : least, unit = power + (20u << 23);
  const uint32_t steps = bits_of(as_float(bits_of(x) & 0x7fffffff) + as_float(unit)) - unit;
  return static_cast<uint8_t>(((power - least) >> 20) + steps + (bits_of(x) >> 31 << 7));
}

// 5 bits of exponent, from 2^-31 on, and 3 of mantissa.
constexpr int32_t kLeastE5m3 = 96 << 3;
static inline uint8_t e5m3_code(float x) {
  const int32_t code = ((static_cast<int32_t>(bits_of(x)) + 0x7ffff) >> 20) - kLeastE5m3;
  return static_cast<uint8_t>(code < 0 ? 0 : code > 255 ? 255 : code);
}

}  // namespace ao::optim
