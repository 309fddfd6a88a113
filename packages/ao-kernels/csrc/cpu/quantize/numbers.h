// Numbers as bits, and arrays of them in the types of dense tensors and scales.
//
// Loops over arrays are written for the compiler to vectorize, with the instructions of the unit.
#pragma once
#include <stddef.h>

#include "kernels.h"

namespace ao::AO_ISA::coding {

static inline uint32_t bits_of(float v) { return __builtin_bit_cast(uint32_t, v); }
static inline float as_float(uint32_t bits) { return __builtin_bit_cast(float, bits); }

constexpr uint32_t kInfinity = 0x7f800000;
constexpr float kNaN = __builtin_nanf("");

// An integer that orders floats as their values do, -0 below 0 and NaN outside of the infinities.
static inline int32_t key_of(float v) {
  const int32_t bits = static_cast<int32_t>(bits_of(v));
  return bits ^ ((bits >> 31) & 0x7fffffff);
}
static inline float of_key(int32_t key) {
  return as_float(static_cast<uint32_t>(key ^ ((key >> 31) & 0x7fffffff)));
}

static inline float from_bf16(uint16_t v) { return as_float(static_cast<uint32_t>(v) << 16); }

static inline float from_f16(uint16_t v) {
  const uint32_t magnitude = static_cast<uint32_t>(v & 0x7fff) << 13;
  // the exponent's bias is corrected by a product, which is exact for subnormal numbers too
  uint32_t bits = bits_of(as_float(magnitude) * 0x1p112f);
  bits |= magnitude >= 0x0f800000 ? kInfinity : 0;
  return as_float(bits | static_cast<uint32_t>(v & 0x8000) << 16);
}

// To the nearest, ties to even.
static inline uint16_t to_bf16(float v) {
  const uint32_t bits = bits_of(v);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return static_cast<uint16_t>((bits & 0x7fffffff) > kInfinity ? 0x7fc0 : rounded);
}

static inline uint16_t to_f16(float v) {
  const uint32_t bits = bits_of(v), magnitude = bits & 0x7fffffff;
  // below 2^-14 float16 has a step of 2^-24, which is float32's at 0.5
  const uint32_t small = bits_of(as_float(magnitude) + 0.5f) - bits_of(0.5f);
  const uint32_t normal = ((magnitude + 0xfff + ((magnitude >> 13) & 1)) >> 13) - (112 << 10);
  uint32_t code = magnitude < 0x38800000 ? small : normal;
  code = magnitude >= 0x477ff000 ? 0x7c00 : code;
  code = magnitude > kInfinity ? 0x7e00 : code;
  return static_cast<uint16_t>(code | (bits >> 16 & 0x8000));
}

static inline float from_e8m0(uint8_t code) {
  const uint32_t bits = code == 0 ? 1u << 22 : static_cast<uint32_t>(code) << 23;
  return code == 255 ? kNaN : as_float(bits);
}

static inline float from_e4m3(uint8_t code) {
  const uint32_t magnitude = static_cast<uint32_t>(code & 0x7f) << 20;
  uint32_t bits = bits_of(as_float(magnitude) * 0x1p120f);
  bits = (code & 0x7f) == 0x7f ? bits_of(kNaN) : bits;
  return as_float(bits | static_cast<uint32_t>(code & 0x80) << 24);
}

// -- arrays ------------------------------------------------------------------------------------------


static inline const void* at(const void* array, Element type, int64_t i) {
  return static_cast<const uint8_t*>(array) + i * bytes_of(type);
}
static inline void* at(void* array, Element type, int64_t i) {
  return static_cast<uint8_t*>(array) + i * bytes_of(type);
}

// `count` numbers as floats: in `buffer`, or where they are already.
static inline const float* read(Element type, const void* from, int64_t count, float* buffer) {
  const uint16_t* words = static_cast<const uint16_t*>(from);
  switch (type) {
    case Element::f32:
      return static_cast<const float*>(from);
    case Element::bf16:
      for (int64_t i = 0; i < count; ++i) buffer[i] = from_bf16(words[i]);
      break;
    case Element::f16:
      for (int64_t i = 0; i < count; ++i) buffer[i] = from_f16(words[i]);
  }
  return buffer;
}

static inline void write(Element type, const float* from, int64_t count, void* to) {
  uint16_t* words = static_cast<uint16_t*>(to);
  switch (type) {
    case Element::f32:
      __builtin_memcpy(to, from, static_cast<size_t>(count) * 4);
      break;
    case Element::bf16:
      for (int64_t i = 0; i < count; ++i) words[i] = to_bf16(from[i]);
      break;
    case Element::f16:
      for (int64_t i = 0; i < count; ++i) words[i] = to_f16(from[i]);
  }
}

// -- scales and zero points --------------------------------------------------------------------------

static inline float load_scale(const void* scales, Scale type, int64_t i) {
  switch (type) {
    case Scale::f32: return static_cast<const float*>(scales)[i];
    case Scale::bf16: return from_bf16(static_cast<const uint16_t*>(scales)[i]);
    case Scale::f16: return from_f16(static_cast<const uint16_t*>(scales)[i]);
    case Scale::e8m0: return from_e8m0(static_cast<const uint8_t*>(scales)[i]);
    case Scale::e4m3: return from_e4m3(static_cast<const uint8_t*>(scales)[i]);
    case Scale::u8: return static_cast<const uint8_t*>(scales)[i];
    case Scale::i8: return static_cast<const int8_t*>(scales)[i];
  }
  return 0;
}

// Of row r of a row block.
static inline float load_scale(const QuantParams& t, const ScaleView& scales, int64_t block, int64_t group, int r) {
  const float scale = load_scale(scales.values, scales.type, (block * t.groups + group) * 16 + r);
  if (scales.outer == nullptr) return scale;
  return scale * load_scale(scales.outer, scales.outer_type, (block * t.spans + group / t.span) * 16 + r);
}

// A zero point that is not scaled; `table` has the values of 256 codes after an exclusive or with `flip`.
static inline float load_zero(const void* zeros, Zero type, int64_t i, const float* table,
                              uint8_t flip) {
  switch (type) {
    case Zero::u8: return table[static_cast<const uint8_t*>(zeros)[i] ^ flip];
    case Zero::f32: return static_cast<const float*>(zeros)[i];
    case Zero::bf16: return from_bf16(static_cast<const uint16_t*>(zeros)[i]);
    case Zero::f16: return from_f16(static_cast<const uint16_t*>(zeros)[i]);
    default: return 0;
  }
}

}  // namespace ao::AO_ISA::coding
