// From the range of a block to its scale and zero point, as ao_core.numerics.choose_qparams.
#pragma once
#include "encode.h"

namespace ao::AO_ISA::coding {

// Of elements as they lie in memory: the order of integers is that of the numbers, NaN outside.
// With `signs` both ends, else the greatest magnitude.
template <class Bits, class Key>
static inline KeyRange range_of_bits(const Bits* x, int64_t count, bool signs) {
  constexpr int kSign = 8 * sizeof(Bits) - 1;
  constexpr Bits kMagnitude = static_cast<Bits>(~(Bits{1} << kSign));
  if (!signs) {
    Bits high = 0;
    for (int64_t i = 0; i < count; ++i) {
      const Bits magnitude = static_cast<Bits>(x[i] & kMagnitude);
      high = magnitude > high ? magnitude : high;
    }
    return {0, static_cast<int32_t>(high)};
  }
  Key low = static_cast<Key>(kMagnitude), high = static_cast<Key>(~kMagnitude);
  for (int64_t i = 0; i < count; ++i) {
    const Key bits = static_cast<Key>(x[i]);
    const Key key = static_cast<Key>(bits ^ ((bits >> kSign) & static_cast<Key>(kMagnitude)));
    low = key < low ? key : low;
    high = key > high ? key : high;
  }
  return {low, high};
}

static inline KeyRange range_of(Element type, const void* x, int64_t count, bool signs) {
  if (type == Element::f32) {
    return range_of_bits<uint32_t, int32_t>(static_cast<const uint32_t*>(x), count, signs);
  }
  return range_of_bits<uint16_t, int16_t>(static_cast<const uint16_t*>(x), count, signs);
}

// Of no elements.
static inline KeyRange empty_range(bool signs) {
  return signs ? KeyRange{INT32_MAX, INT32_MIN} : KeyRange{0, 0};
}

static inline KeyRange join(KeyRange a, KeyRange b) {
  return {a.low < b.low ? a.low : b.low, a.high > b.high ? a.high : b.high};
}

// The number that a key of an element type stands for.
static inline float number_of(Element type, int32_t key) {
  if (type == Element::f32) return of_key(key);
  const uint16_t bits = static_cast<uint16_t>(key ^ ((key >> 31) & 0x7fff));
  return type == Element::bf16 ? from_bf16(bits) : from_f16(bits);
}

// -- storage -----------------------------------------------------------------------------------------

struct Storage {
  float least, greatest;  // that a scale may be
};
static inline Storage storage_of(Scale type) {
  switch (type) {
    case Scale::bf16: return {0x1p-126f, 0x1.fep127f};
    case Scale::f16: return {0x1p-24f, 65504.0f};
    case Scale::e4m3: return {0x1p-9f, 448.0f};
    default: return {0x1p-126f, 0x1.fffffep127f};
  }
}

// As round_to_16_bits, so without infinities.
static inline float round_to_f16(float v) {
  const uint32_t bits = bits_of(v);
  const float half = v < 0 ? -0.5f : 0.5f;
  const float small = (v + half) - half;
  const float normal = as_float((bits + 0xfff + ((bits >> 13) & 1)) & ~0x1fffu);
  const float signed_small = as_float((bits_of(small) & 0x7fffffff) | (bits & 0x80000000));
  return (bits & 0x7fffffff) < 0x38800000 ? signed_small : normal;
}

// To the nearest float8_e4m3fn, ties to even; at most 448.
static inline uint8_t to_e4m3(float v) {
  Format f;
  f.bits = 8, f.mantissa = 3, f.smallest_normal = 0x1p-6f, f.greatest = 448.0f, f.nan_code = 0x7f;
  uint8_t code = 0;
  encode_floats(f, &v, 1, &code);
  return code;
}

// Stores a number of its range as a scale; what was stored.
static inline float store_scale(void* scales, Scale type, int64_t i, float v) {
  switch (type) {
    case Scale::f32:
      return static_cast<float*>(scales)[i] = v;
    case Scale::bf16:
      return from_bf16(static_cast<uint16_t*>(scales)[i] = to_bf16(v));
    case Scale::f16:
      v = round_to_f16(v);
      static_cast<uint16_t*>(scales)[i] = to_f16(v);
      return v;
    case Scale::e8m0:  // a power of two
      static_cast<uint8_t*>(scales)[i] =
          static_cast<uint8_t>(v != v ? 255 : v == 0x1p-127f ? 0 : bits_of(v) >> 23);
      return v;
    case Scale::e4m3:
      return from_e4m3(static_cast<uint8_t*>(scales)[i] = to_e4m3(v));
    default:  // whole numbers are no scales of dense tensors
      return v;
  }
}

static inline float store_zero(void* zeros, Zero type, int64_t i, float v) {
  switch (type) {
    case Zero::f32:
      return static_cast<float*>(zeros)[i] = v;
    case Zero::bf16:
      return from_bf16(static_cast<uint16_t*>(zeros)[i] = to_bf16(v));
    case Zero::f16:
      v = round_to_f16(v);
      static_cast<uint16_t*>(zeros)[i] = to_f16(v);
      return v;
    default:
      return v;
  }
}

// -- powers of two -----------------------------------------------------------------------------------

struct Fraction {
  float mantissa;  // in [0.5, 1)
  int exponent;
};
// v = mantissa * 2^exponent, for finite positive numbers.
static inline Fraction fraction_of(float v) {
  int exponent = -126;
  if (v < 0x1p-126f) v *= 0x1p64f, exponent -= 64;
  const uint32_t bits = bits_of(v);
  exponent += static_cast<int>(bits >> 23);
  return {as_float((bits & 0x7fffff) | 0x3f000000), exponent};
}

// Whether zeros are exact at any scale: by a zero point, which is a value of the format, or by its own 0.
static inline bool holds_zero(const Quantize& q) {
  return q.zero_kind != ZeroKind::none || !q.format.lacks_zero;
}

// As choose_e8m0: the power of two that brings `magnitude` to q.reach.
static inline float power_of_two(const Quantize& q, float magnitude) {
  if (magnitude == 0) return holds_zero(q) ? 1.0f : 0x1p-127f;
  if (!(magnitude < as_float(kInfinity))) return kNaN;
  const Fraction m = fraction_of(magnitude);
  int exponent = m.exponent - q.reach_exponent;
  switch (q.mx_mode) {
    case MxMode::floor: break;
    case MxMode::ceil: exponent += m.mantissa > 0.5f; break;
    case MxMode::even: exponent += m.mantissa >= q.even_from; break;
    case MxMode::rceil: exponent += m.mantissa > q.reach_mantissa; break;
  }
  exponent = exponent < -127 ? -127 : exponent > 127 ? 127 : exponent;
  return exponent == -127 ? 0x1p-127f : as_float(static_cast<uint32_t>(exponent + 127) << 23);
}

// -- blocks ------------------------------------------------------------------------------------------

// The quantization parameters of one block: what numbers are divided by, and what is added then.
struct BlockQParams {
  float scale, zero;
};

static inline float scale_of(const Quantize& q, float magnitude) {
  if (q.scale_type == Scale::e8m0) return power_of_two(q, magnitude);
  if (magnitude == 0 && holds_zero(q)) return 1.0f;
  const Storage storage = storage_of(q.scale_type);
  const float scale = magnitude / q.reach;  // a NaN stays
  return scale < storage.least ? storage.least : scale > storage.greatest ? storage.greatest : scale;
}

// Chooses and stores scale and zero point i for a block.
static inline BlockQParams choose(const Quantize& q, KeyRange range, int64_t i) {
  if (q.zero_kind == ZeroKind::none) {
    const float magnitude = number_of(q.type, range.high);
    return {store_scale(q.scale, q.scale_type, i, scale_of(q, magnitude)), 0};
  }
  float low = number_of(q.type, range.low), high = number_of(q.type, range.high);
  if (low != low || high != high) low = high = kNaN;
  low = low > 0 ? 0 : low;
  high = high < 0 ? 0 : high;
  // half of the range, because all of it may exceed float32
  const float half = high * 0.5f - low * 0.5f;
  const float scale = store_scale(q.scale, q.scale_type, i, scale_of(q, half));
  const Format& f = q.format;
  float point = q.zero_kind == ZeroKind::center ? (0.0f - (high * 0.5f + low * 0.5f)) / scale
                                                : f.least - low / scale;
  point = point < f.least ? f.least : point > f.greatest ? f.greatest : point;
  if (q.zero_kind != ZeroKind::code) return {scale, store_zero(q.zero, q.zero_type, i, point)};
  uint8_t code = 0;
  encode_values(f, &point, 1, &code);
  static_cast<uint8_t*>(q.zero)[i] = code;
  return {scale, f.table[code]};
}

}  // namespace ao::AO_ISA::coding
