// Numbers of the types of weights, scales and activations, by their definitions.
#pragma once
#include "element.h"
#include "support.h"

namespace ao::test {

// -- small floats, by their definition ---------------------------------------------------------------------

inline double small_float(int code, int exponent_bits, int mantissa_bits, int bias) {
  const int sign = code >> (exponent_bits + mantissa_bits) & 1;
  const int exponent = code >> mantissa_bits & ((1 << exponent_bits) - 1);
  const double mantissa = std::ldexp(code & ((1 << mantissa_bits) - 1), -mantissa_bits);
  const double value = exponent ? std::ldexp(1 + mantissa, exponent - bias) : std::ldexp(mantissa, 1 - bias);
  return sign ? -value : value;
}
inline double e4m3(int code) { return (code & 0x7f) == 0x7f ? NAN : small_float(code, 4, 3, 7); }
inline double e5m2(int code) {
  if ((code & 0x7f) > 0x7c) return NAN;
  return (code & 0x7f) == 0x7c ? (code & 0x80 ? -INFINITY : INFINITY) : small_float(code, 5, 2, 15);
}
inline double half(uint16_t code) {
  if ((code & 0x7c00) == 0x7c00) return code & 0x3ff ? NAN : code & 0x8000 ? -INFINITY : INFINITY;
  return small_float(code, 5, 10, 15);
}
inline double brain(uint16_t code) {
  const uint32_t bits = static_cast<uint32_t>(code) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// The nearest finite value among those of all codes, the even code of two.
template <class Decode>
inline double nearest(double v, int codes, Decode decode) {
  double best = NAN;
  for (int c = 0; c < codes; ++c) {
    const double value = decode(c);
    if (!std::isfinite(value)) continue;
    const double distance = std::abs(value - v), least = std::abs(best - v);
    if (std::isnan(best) || distance < least || (distance == least && c % 2 == 0)) best = value;
  }
  return best;
}

// -- elements of activations and outputs -------------------------------------------------------------------

inline size_t size_of(Element type) { return type == Element::f32 ? 4 : 2; }

inline double get(Element type, const std::vector<uint8_t>& data, int64_t i) {
  if (type == Element::f32) {
    float value;
    std::memcpy(&value, data.data() + i * 4, 4);
    return value;
  }
  uint16_t word;
  std::memcpy(&word, data.data() + i * 2, 2);
  return type == Element::bf16 ? brain(word) : half(word);
}

// Exact only for values that the type has, so that no rounding of the test's own is involved.
inline void put(Element type, std::vector<uint8_t>& data, int64_t i, float value) {
  if (type == Element::f32) {
    std::memcpy(data.data() + i * 4, &value, 4);
    return;
  }
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  uint16_t word = static_cast<uint16_t>(bits >> 16);
  if (type == Element::f16) {
    int exponent;
    const double mantissa = std::frexp(std::abs(static_cast<double>(value)), &exponent);  // 0.5 <= mantissa < 1
    const int field = value == 0 ? 0 : std::clamp(exponent + 14, 0, 30);
    const double unit = std::ldexp(1, std::max(exponent, -13) - 11);
    const int digits = static_cast<int>(std::nearbyint(std::ldexp(mantissa, exponent) / unit));
    word = static_cast<uint16_t>((value < 0) << 15);
    if (std::isnan(value)) word = 0x7e00;
    if (std::isinf(value)) word = static_cast<uint16_t>(word | 0x7c00);
    if (std::isfinite(value)) word = static_cast<uint16_t>(word | ((field ? (field - 1) << 10 : 0) + digits));
  }
  std::memcpy(data.data() + i * 2, &word, 2);
}

}  // namespace ao::test
