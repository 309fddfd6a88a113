// Numbers to codes and back, in one loop: blocks of rows or of columns without zero points, whose formats round by
// arithmetic, in bfloat16 or float32. All others take the loops of round.h, with the same results.
#pragma once
#include "round.h"

namespace ao::AO_ISA::coding {

// -- division ----------------------------------------------------------------------------------------

// A division takes as long as all else together. The inverse, rounded, and two steps of Newton give the same quotient
// (Markstein's theorem), where nothing on the way is subnormal or infinite, and the divisor's mantissa is not all ones.
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
constexpr bool kInverts = true;
#else
constexpr bool kInverts = false;
#endif

static inline bool has_inverse(float scale) {
  const bool in_range = scale >= 0x1p-60f && scale <= 0x1p60f;
  return in_range && (bits_of(scale) & 0x7fffff) != 0x7fffff;
}

// kPower: the scale is a power of two, whose inverse is exact.
template <bool kPower>
static inline float quotient(float v, float scale, float inverse) {
  if constexpr (kPower) return v * inverse;
  if constexpr (!kInverts) return v / scale;
  float q = v * inverse;
  q = __builtin_fmaf(__builtin_fmaf(-q, scale, v), inverse, q);
  return __builtin_fmaf(__builtin_fmaf(-q, scale, v), inverse, q);
}

// -- rounding ----------------------------------------------------------------------------------------

// What rounds magnitudes below infinity, see round_floats and round_integers.
struct Rounder {
  float greatest, greatest_negative, to_quanta;
  uint32_t least;

  explicit Rounder(const Format& f)
      : greatest(f.greatest),
        greatest_negative(-f.least),
        to_quanta(as_float(static_cast<uint32_t>(127 + 23 - f.mantissa) << 23)),
        least(bits_of(f.smallest_normal)) {}

  template <bool kIntegers>
  inline float operator()(float v, uint32_t sign) const {
    if constexpr (kIntegers) {
      const float most = sign ? greatest_negative : greatest;
      return ((v < most ? v : most) + 0x1p23f) - 0x1p23f;
    }
    v = v < greatest ? v : greatest;
    const uint32_t exponent = bits_of(v) & kInfinity;
    const float quanta = as_float(exponent < least ? least : exponent) * to_quanta;
    return (quanta + v) - quanta;
  }
};

static inline uint32_t load_bits(const uint16_t* x) { return static_cast<uint32_t>(*x) << 16; }
static inline uint32_t load_bits(const float* x) { return bits_of(*x); }
static inline void store_number(uint16_t* y, float v) {
  const uint32_t bits = bits_of(v);
  *y = static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
static inline void store_number(float* y, float v) { *y = v; }

// Of element i: the same for all, or one for each.
struct Same {
  float value;
  inline float operator()(int64_t) const { return value; }
};
struct Each {
  const float* values;
  inline float operator()(int64_t i) const { return values[i]; }
};

// Elements with scale(i) and inverse(i). One copy of each loop, whoever calls it.
template <bool kIntegers, bool kPower, class Number, class Factor>
__attribute__((noinline)) static void round_elements(const Rounder& rounder, const Number* x, int64_t count,
                                                     Factor scale, Factor inverse, Number* y) {
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = load_bits(x + i), sign = bits & 0x80000000;
    const float magnitude = quotient<kPower>(as_float(bits ^ sign), scale(i), inverse(i));
    const float rounded = rounder.template operator()<kIntegers>(magnitude, sign) * scale(i);
    // an integer 0 has no sign
    const uint32_t signs = kIntegers && bits_of(rounded) == 0 ? 0 : sign;
    store_number(y + i, as_float(bits_of(rounded) | signs));
  }
}

// Whether scales are taken for powers of two: those of floats, which MX formats are.
static inline bool takes_powers(const Quantize& q) {
  return q.scale_type == Scale::e8m0 && q.format.rule == Rule::floating;
}

// f(integers, powers), constants, of a format and its scales.
template <class F>
static inline void for_rule(const Quantize& q, const F& f) {
  if (q.format.rule == Rule::integer) return f.template operator()<true, false>();
  takes_powers(q) ? f.template operator()<false, true>() : f.template operator()<false, false>();
}

static inline bool rounds_in_one_loop(const Quantize& q) {
  const Format& f = q.format;
  const bool rule = f.rule == Rule::integer ? f.is_integer : f.rule == Rule::floating && f.is_float;
  return rule && q.zero_kind == ZeroKind::none && q.zero_type == Zero::none && q.type != Element::f16;
}

static inline bool is_finite(float scale) { return scale < as_float(kInfinity); }

// -- blocks of rows ----------------------------------------------------------------------------------

template <bool kIntegers, bool kPower, class Number, class Affine>
static inline void round_groups_as(const Quantize& q, int64_t row, int64_t begin, int64_t end, const Affine& affine) {
  const Blocks& b = q.blocks;
  const Rounder rounder(q.format);
  const auto* x = static_cast<const Number*>(q.x) + row * b.k;
  auto* y = static_cast<Number*>(q.y) + row * b.k;
  for (int64_t i = begin, group = begin / b.block_k; i < end; ++group) {
    const int64_t last = (group + 1) * b.block_k, stop = last < end ? last : end;
    const float scale = affine(group).scale;
    if (kPower ? is_finite(scale) : has_inverse(scale)) {
      const float inverse = 1.0f / scale;
      round_elements<kIntegers, kPower>(rounder, x + i, stop - i, Same{scale}, Same{inverse}, y + i);
    } else {
      round_run(q, row, i, stop, affine);
    }
    i = stop;
  }
}

// Elements [begin, end) of a row; affine(group) is of its block.
template <class Affine>
static inline void round_groups(const Quantize& q, int64_t row, int64_t begin, int64_t end, const Affine& affine) {
  if (!rounds_in_one_loop(q)) return round_run(q, row, begin, end, affine);
  for_rule(q, [&]<bool kIntegers, bool kPower>() {
    if (q.type == Element::f32) {
      round_groups_as<kIntegers, kPower, float>(q, row, begin, end, affine);
    } else {
      round_groups_as<kIntegers, kPower, uint16_t>(q, row, begin, end, affine);
    }
  });
}

static inline void round_fused(const Quantize& q, int64_t begin, int64_t end) {
  for_chosen(q, begin, end, [&](int64_t row, int64_t from, int64_t to, const auto& affine) {
    round_groups(q, row, from, to, affine);
  });
}

static inline void round_blocks(const Quantize& q, int64_t begin, int64_t end) {
  for_given(q, begin, end, [&](int64_t row, int64_t from, int64_t to, const auto& affine) {
    // scales that are given do not tell of elements that are not finite
    const KeyRange range = range_of(q.type, at(q.x, q.type, row * q.blocks.k + from), to - from, false);
    if (is_finite(number_of(q.type, range.high))) return round_groups(q, row, from, to, affine);
    round_run(q, row, from, to, affine);
  });
}

// -- blocks of columns -------------------------------------------------------------------------------

template <class Number>
struct BitsOf {
  using Type = uint32_t;
};
template <>
struct BitsOf<uint16_t> {
  using Type = uint16_t;
};

// Columns [begin, begin + count) of a band, in blocks of one column each.
template <class Number>
static inline void round_band(const Quantize& q, int64_t band, int64_t begin, int64_t count) {
  using Bits = typename BitsOf<Number>::Type;
  constexpr Bits kMagnitude = static_cast<Bits>(~(Bits{1} << (8 * sizeof(Bits) - 1)));
  const Blocks& b = q.blocks;
  const int64_t top = band % b.bands * b.block_n, first = band / b.bands * b.n + top;
  const int64_t rows = top + b.block_n < b.n ? b.block_n : b.n - top;
  alignas(64) Bits greatest[kColumns] = {};
  alignas(64) float scale[kColumns], inverse[kColumns];
  for (int64_t row = first; row < first + rows; ++row) {
    const auto* x = static_cast<const Bits*>(q.x) + row * b.k + begin;
    for (int64_t i = 0; i < count; ++i) {
      const Bits magnitude = static_cast<Bits>(x[i] & kMagnitude);
      greatest[i] = magnitude > greatest[i] ? magnitude : greatest[i];
    }
  }
  bool usual = rounds_in_one_loop(q);
  for (int64_t i = 0; i < count; ++i) {
    scale[i] = choose(q, {0, static_cast<int32_t>(greatest[i])}, band * b.groups + begin + i).scale;
    usual = usual && (takes_powers(q) ? is_finite(scale[i]) : has_inverse(scale[i]));
    inverse[i] = 1.0f / scale[i];
  }
  const Rounder rounder(q.format);
  for (int64_t row = first; row < first + rows; ++row) {
    if (!usual) {
      round_run(q, row, begin, begin + count, [&](int64_t group) { return BlockQParams{scale[group - begin], 0}; });
      continue;
    }
    const auto* x = static_cast<const Number*>(q.x) + row * b.k + begin;
    auto* y = static_cast<Number*>(q.y) + row * b.k + begin;
    for_rule(q, [&]<bool kIntegers, bool kPower>() {
      round_elements<kIntegers, kPower>(rounder, x, count, Each{scale}, Each{inverse}, y);
    });
  }
}

// Items: (matrix, band, share of kColumns columns).
static inline void round_columns(const Quantize& q, int64_t begin, int64_t end) {
  const Blocks& b = q.blocks;
  const int64_t shares = (b.k + kColumns - 1) / kColumns;
  for (int64_t item = begin; item < end; ++item) {
    const int64_t from = item % shares * kColumns, count = from + kColumns < b.k ? kColumns : b.k - from;
    if (q.type == Element::f32) {
      round_band<float>(q, item / shares, from, count);
    } else {
      round_band<uint16_t>(q, item / shares, from, count);
    }
  }
}

}  // namespace ao::AO_ISA::coding
