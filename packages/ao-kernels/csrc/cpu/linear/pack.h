// Activations, arranged as the matmuls read them: (row block, tile, row, 16), each four columns in the
// order 0, 2, 1, 3 for floats and pairs, with the sum of every step beside.
#pragma once
#include "kernels.h"

namespace ao::AO_ISA {

// Least and greatest number of a row, 0 among them; both NaN where the row has one.
struct Range {
  float least, greatest;
};
static Range range_of(Element type, const uint8_t* row, int64_t k) {
  F least = zero(), greatest = zero();
  I magnitude = splat_int(0);  // as integers, magnitudes keep their order and NaN is above infinity
  for (int64_t i = 0; i < k; i += 16) {
    const F v = load_as(type, row + i * bytes_of(type), k - i < 16 ? static_cast<int>(k - i) : 16);
    least = min(v, least), greatest = max(v, greatest);
    magnitude = max_int(magnitude, bits_of(abs(v)));
  }
  float low[16], high[16], top[16];
  store(low, least), store(high, greatest), store(top, as_float(magnitude));
  Range range{0, 0};
  for (int i = 0; i < 16; ++i) {
    if (top[i] != top[i]) return {top[i], top[i]};
    if (low[i] < range.least) range.least = low[i];
    if (high[i] > range.greatest) range.greatest = high[i];
  }
  return range;
}

AO_INLINE float power_of_two(int exponent) {  // from -126 to 127
  const int32_t bits = (exponent + 127) << 23;
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

// Bits of the largest magnitude of a row: as integers, infinity is above all numbers and NaN above infinity.
static int32_t greatest_bits(Element type, const uint8_t* row, int64_t k) {
  I magnitude = splat_int(0);
  for (int64_t i = 0; i < k; i += 16) {
    const int count = k - i < 16 ? static_cast<int>(k - i) : 16;
    magnitude = max_int(magnitude, bits_of(abs(load_as(type, row + i * bytes_of(type), count))));
  }
  return largest(magnitude);
}

// Scale and zero point that are given. What outputs are multiplied by: the scale, or NaN where the token has an infinity
// or a NaN, which codes would hide. A token of zeros has the zero point 128, as in `choose`.
static float take_given(const Linear& t, const uint8_t* row, float& scale, float& zero_point) {
  const int32_t greatest = greatest_bits(t.type, row, t.k);
  scale = t.given_scale, zero_point = t.act == Act::uint8 && greatest == 0 ? 128.0f : t.given_zero;
  return greatest < 0x7f800000 ? scale : __builtin_nanf("");
}

constexpr float kLeastScale = 0x1p-126f, kGreatestScale = 3.40282347e38f;
static float clamp_scale(float v) {  // keeps a NaN
  return v < kLeastScale ? kLeastScale : v > kGreatestScale ? kGreatestScale : v;
}

// Scale and zero point of a token, as ao_core.numerics.choose_qparams has them; but 128 for one of zeros, whose codes
// are 0 then as matmuls take them, so that the output is exactly 0. What outputs are multiplied by: the scale, or
// infinity where the token has one, which the greatest code stands for.
static float choose(const Linear& t, const uint8_t* row, float& scale, float& zero_point) {
  const Range range = range_of(t.type, row, t.k);
  bool infinite;
  zero_point = 0;
  if (t.act == Act::uint8) {
    const float half = range.greatest * 0.5f - range.least * 0.5f;
    infinite = __builtin_isinf(half);
    scale = half == 0 ? 1.0f : clamp_scale(half / 127.5f);
    const float point = 0.0f - range.least / scale;
    zero_point = half == 0 ? 128.0f : __builtin_rintf(point < 0 ? 0 : point > 255 ? 255 : point);
  } else {
    const float reach = t.act == Act::int8 ? 127.5f : t.act == Act::e4m3 ? 448.0f : 57344.0f;
    const float absmax = range.greatest < -range.least ? -range.least : range.greatest;
    infinite = __builtin_isinf(absmax);
    scale = absmax == 0 ? 1.0f : clamp_scale(absmax / reach);
  }
  return infinite ? __builtin_inff() : scale;
}

// What numbers of a row, whose greatest has these bits, are multiplied by before they are added up, infinity where
// one of them is. Products of bfloat16 take subnormal numbers, of which a row of very small ones may consist, for 0,
// and others round what large scales bring back; beside numbers above the bound, these are less than what sums are
// rounded to. Sums of very large numbers times codes may exceed a float though small scales bring them back.
constexpr int kTinyExponent = -100, kHugeExponent = 60;
static float lift_of(int32_t bits) {
  const auto is_below = [bits](int exponent) { return bits < (exponent + 127) << 23; };
  if (is_below(kTinyExponent)) return bits > 0 ? power_of_two(-kTinyExponent) : 1.0f;
  if (is_below(kHugeExponent)) return 1.0f;
  return bits == 0x7f800000 ? __builtin_inff() : power_of_two(-kHugeExponent);  // and so for NaN, which stays one
}

// The nearest float8 values, ties to even, in float.
AO_INLINE F round_to_float8(F v, float reach, float smallest_normal, float to_quanta) {
  const F magnitude = min(abs(v), splat(reach));
  const F power = as_float(and_(bits_of(magnitude), splat_int(0x7f800000)));
  const F quanta = mul(max(power, splat(smallest_normal)), splat(to_quanta));
  const F rounded = sub(add(magnitude, quanta), quanta);
  return as_float(or_(bits_of(rounded), and_(bits_of(v), splat_int(static_cast<int>(0x80000000)))));
}

// What float8 numbers are packed as multiples of, so that they are below 2: sums times scales of very large weights
// stay in a float.
constexpr float kUnitE4m3 = 0x1p-8f, kUnitE5m2 = 0x1p-15f;
AO_INLINE float unit_of(Act act) { return act == Act::e4m3 ? kUnitE4m3 : act == Act::e5m2 ? kUnitE5m2 : 1.0f; }

// What bytes of weights count from, in units of the table: its least value, or, where bytes are signed, 128 more.
AO_INLINE float base_of(const Linear& t) {
  return t.least + static_cast<float>(t.bits == 8 || t.table_parts > 1 ? kByteBase : 0);
}

struct RowPacker {
  const Linear& t;
  const uint8_t* row;
  F scale;
  float zero_point;
  bool infinite;
  float base = 128;  // what is subtracted from codes of uint8

  // 16 columns from k on, quantized; int8 codes as whole floats. Without quantization a row with infinities has
  // the signs of these, and 0 elsewhere: its sums, times infinity, are those of the row without a difference of
  // infinities where there is none.
  inline __attribute__((always_inline)) F values(int64_t k, int count) const {
    const F v = load_as(t.type, row + k * bytes_of(t.type), count);
    switch (t.act) {
      case Act::none: {
        constexpr float kSmall = 0x1p-100f;
        return infinite ? clamped(mul(mul(v, splat(kSmall)), splat(kSmall)), -1.0f, 1.0f) : mul(v, scale);
      }
      case Act::int8: return clamped(div(v, scale), -128.0f, 127.0f);
      case Act::uint8:
        return sub(clamped(add(div(v, scale), splat(zero_point)), 0.0f, 255.0f), splat(base));
      case Act::e4m3: return mul(round_to_float8(div(v, scale), 448.0f, 0x1p-6f, 0x1p20f), splat(kUnitE4m3));
      case Act::e5m2: return mul(round_to_float8(div(v, scale), 57344.0f, 0x1p-14f, 0x1p21f), splat(kUnitE5m2));
    }
    return v;
  }
  AO_INLINE F clamped(F v, float least, float greatest) {
    return to_float(round_to_int(min(max(v, splat(least)), splat(greatest))));
  }
};

// For row r of the activations; its scale, and where they are quantized its zero point, are chosen, and noted.
static RowPacker packer_of(const Linear& t, int64_t r) {
  RowPacker packer{t, static_cast<const uint8_t*>(t.x) + r * t.x_stride * bytes_of(t.type), splat(1.0f), 0.0f, false};
  if (t.act == Act::none) {
    const float lift = lift_of(greatest_bits(t.type, packer.row, t.k));
    packer.infinite = __builtin_isinf(lift);
    packer.scale = splat(lift);
    t.x_scale[r] = packer.infinite ? lift : 1.0f / lift;
  } else {
    float scale;
    const auto find = t.given_scale > 0 ? take_given : choose;
    t.x_scale[r] = find(t, packer.row, scale, packer.zero_point) / unit_of(t.act);
    packer.scale = splat(scale);
    // Bytes are signed, and what they count from is multiplied by sums of the weights at the end. Floats hold a code
    // less its zero point, which needs no sums: these would not be of the weights as they are rounded here.
    packer.base = t.mode == Mode::int8 ? 128.0f : packer.zero_point;
    t.x_zero[r] = packer.zero_point - packer.base;
  }
  return packer;
}

// The columns of a group, from k on.
struct KRange {
  int64_t group, k, end;
  // of the next tile
  AO_METHOD int count() const { return end - k < 16 ? static_cast<int>(end - k) : 16; }
};
AO_INLINE KRange k_range_of(const Linear& t, int64_t group) {
  const int64_t k = group * t.group;
  return {group, k, k + t.group < t.k ? k + t.group : t.k};
}

template <Mode kMode>
static void pack_row(const Linear& t, int64_t r, uint8_t* out, int64_t rows, void* sums) {
  const RowPacker packer = packer_of(t, r);
  KRange at = k_range_of(t, 0);
  for (int64_t s = 0; s < t.step_count; ++s) {
    if (t.steps[s].group != at.group) at = k_range_of(t, t.steps[s].group);
    F total = zero();
    for (int tile = 0; tile < t.steps[s].tiles; ++tile, at.k += 16, out += rows * 16 * bytes_of(kMode)) {
      const int count = at.count();
      F v = packer.values(at.k, count);
      if (t.act == Act::uint8 && count < 16) {  // padding is 0, not code 0 less 128
        float lanes[16];
        store(lanes, v);
        for (int i = count; i < 16; ++i) lanes[i] = 0;
        v = load(lanes);
      }
      total = add(total, v);
      if constexpr (kMode == Mode::int8) store_bytes(out, round_to_int(v));
#if AO_HAS_PAIRS
      if constexpr (kMode == Mode::pairs) store_exact_bf16(out, swap_middle(v));
#endif
      if constexpr (kMode == Mode::f32) store(reinterpret_cast<float*>(out), swap_middle(v));
    }
    const float value = sum(total);
    if (kMode == Mode::int8 && t.zero_type == Zero::none) {
      static_cast<int32_t*>(sums)[s * rows] = static_cast<int32_t>(value * base_of(t));
    } else {
      static_cast<float*>(sums)[s * rows] = value;
    }
  }
}

}  // namespace ao::AO_ISA
