// Sums of errors for candidates of scales; included by the unit of an instruction set.
//
// A part of a row stays in the cache while all candidates are tried. Many of them are tried side by side, one in each
// lane, for one element after the other; the few that are left one by one, for 16 elements at a time.
#pragma once
#include "learned.h"
#include "values.h"

namespace ao::AO_ISA::sums {
namespace {  // members of templates are exported otherwise

struct Yes {
  static constexpr bool value = true;
};
struct No {
  static constexpr bool value = false;
};

// From so many candidates on they fill lanes.
constexpr int64_t kFew = 5;

// A polynomial, the coefficient of the highest power first.
template <int kCount>
AO_INLINE F polynomial(const float (&coefficients)[kCount], F x) {
  F sum = splat(coefficients[0]);
#pragma GCC unroll 8
  for (int i = 1; i < kCount; ++i) sum = fma(sum, x, splat(coefficients[i]));
  return sum;
}

// magnitude^power, to 1 part in 2^17 where both are normal numbers; next to nothing for 0.
AO_INLINE F raised(F magnitude, F power) {
  // log2(1 + t) / t for t from 1 / sqrt(2) - 1 to sqrt(2) - 1, and 2^t from -1/2 to 1/2: interpolated
  constexpr float kLog[] = {0x1.608508p-3f, -0x1.13f974p-2f, 0x1.2eba94p-2f, -0x1.6ff99ep-2f,
                            0x1.ec2a0cp-2f, -0x1.7156ap-1f, 0x1.71548ep+0f};
  constexpr float kPower[] = {0x1.3d107cp-7f, 0x1.ca1d02p-5f, 0x1.ebf906p-3f, 0x1.62e0c2p-1f, 0x1p+0f};
  const I bits = bits_of(magnitude);
  // the exponent of the mantissa's nearest power of two
  const I exponent = shift_right<23>(subtract(bits, splat_int(0x3f3504f3)));
  const F t = sub(as_float(subtract(bits, shift_left<23>(exponent))), splat(1.0f));
  const F log = fma(polynomial(kLog, t), t, to_float(exponent));
  const F whole = min(max(mul(log, power), splat(-126.0f)), splat(127.0f));
  const I nearest = round_to_int(whole);
  return as_float(add(bits_of(polynomial(kPower, sub(whole, to_float(nearest)))), shift_left<23>(nearest)));
}

// One power of magnitudes, added up.
struct Raise {
  F power;

  template <bool kWeighted>
  AO_METHOD F added(F sum, F v, F weight) const {
    const F by = raised(abs(v), power);
    return kWeighted ? fma(weight, by, sum) : add(sum, by);
  }
};

// Scales and zero points of 16 lanes.
struct Tried {
  F scale, point;     // what codes are multiplied by, and what is taken off them before
  F divisor, inverse; // the scale, or 1 where it is 0, and 1 / that
  F shift;            // kMagic + point
  bool whole;         // points are whole numbers, with which `shift` is exact

  // The first `count` of some numbers; the last lanes, or all where there is one, are as the first one.
  static AO_METHOD Tried of(const float* scales, const float* points, int count) {
    alignas(64) float lanes[3][16];
    bool whole = true;
    for (int i = 0; i < 16; ++i) {
      const int from = i < count ? i : 0;
      lanes[0][i] = scales[from];
      lanes[1][i] = scales[from] == 0 ? 1.0f : scales[from];
      lanes[2][i] = points ? points[from] : 0.0f;
    }
    for (int i = 0; i < 16; ++i) whole = whole && (lanes[2][i] + kMagic) - kMagic == lanes[2][i];
    const F divisor = load(lanes[1]), point = load(lanes[2]);
    return {load(lanes[0]), point, divisor, div(splat(1.0f), divisor), add(splat(kMagic), point), whole};
  }
  // The same of numbers in lanes; scales are not 0.
  static AO_METHOD Tried of_lanes(F scale, F point, bool whole) {
    return {scale, point, scale, div(splat(1.0f), scale), add(splat(kMagic), point), whole};
  }
  // x / scale, rounded as a division rounds: where products and sums are fused, the remainder of a guess leads to it.
  AO_METHOD F divide(F x) const {
    if constexpr (kRegisters > 2) return div(x, divisor);
    const F guess = mul(x, inverse);
    return fma(sub(zero(), fma(guess, divisor, sub(zero(), x))), inverse, guess);
  }
};

// x less what dequantizing gives: -e.
template <bool kZero, class Values>
AO_INLINE F missing(const Values& values, const Tried& q, F x) {
  const F quotient = q.divide(x);
  const F value = values.values(kZero ? add(quotient, q.point) : quotient);
  // rounded once before the difference, as what is dequantized
  return sub(x, mul(kZero ? sub(value, q.point) : value, q.scale));
}

// The sums of 16 lanes, of -e in place of e.
struct Totals {
  F squares = zero(), along = zero(), plain = zero(), powers = zero();

  // `raise` adds powers of magnitudes.
  template <bool kWeighted, bool kPowers, class Raise>
  AO_METHOD void count(F missed, F x, F weight, const Raise& raise) {
    const F counted = kWeighted ? mul(weight, missed) : missed;
    squares = fma(counted, missed, squares);
    along = fma(counted, x, along);
    plain = add(plain, counted);
    if constexpr (kPowers) powers = raise.template added<kWeighted>(powers, missed, weight);
  }
  // All lanes added up, in the first one.
  template <bool kPowers>
  AO_METHOD Totals together() const {
    return {splat(sum(squares)), splat(sum(along)), splat(sum(plain)), kPowers ? splat(sum(powers)) : zero()};
  }
};

// A part of a row as floats, with zeros behind it, where the importance is 0, too.
struct Part {
  alignas(64) float x[kPart], weights[kPart];
  int64_t count;

  // Element i and its importance, in all lanes.
  AO_METHOD F x_of(int64_t i) const { return splat(x[i]); }
  AO_METHOD F weight_of(int64_t i) const { return splat(weights[i]); }
  // Of the 16 elements from i on: the importance, or 1 for those that there are.
  template <bool kWeighted>
  AO_METHOD F weight_at(int64_t i) const {
    if constexpr (kWeighted) return load(weights + i);
    alignas(64) static constexpr float kOnes[16] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
    return load_as(Element::f32, kOnes, count - i < 16 ? static_cast<int>(count - i) : 16);
  }
};

template <bool kWeighted>
static inline void read_part(const ScaleSums& s, int64_t row, int64_t begin, Part& part) {
  part.count = begin + kPart < s.columns ? kPart : s.columns - begin;
  const int64_t at = row * s.columns + begin;
  const auto* x = static_cast<const uint8_t*>(s.x) + at * bytes_of(s.type);
  for (int64_t i = 0; i < part.count; i += 16) {
    const int count = part.count - i < 16 ? static_cast<int>(part.count - i) : 16;
    store(part.x + i, load_as(s.type, x + i * bytes_of(s.type), count));
    if constexpr (kWeighted) store(part.weights + i, load_as(Element::f32, s.importance + at + i, count));
  }
}

// Where the sums of candidates of a row go: of squares, along, plain and powers, a plane each.
struct Place {
  float* first;
  int64_t plane;  // distance to the next sum

  AO_METHOD void write(const Totals& t, bool powers, int count) const {
    store_as(Element::f32, first, t.squares, count);
    store_as(Element::f32, first + plane, sub(zero(), t.along), count);
    store_as(Element::f32, first + 2 * plane, sub(zero(), t.plain), count);
    if (powers) store_as(Element::f32, first + 3 * plane, t.powers, count);
  }
};

// Sums of several parts in float64.
struct Long {
  double of[4][16] = {};

  void add_totals(const Totals& t) {
    alignas(64) float part[4][16];
    store(part[0], t.squares), store(part[1], t.along), store(part[2], t.plain), store(part[3], t.powers);
    for (int k = 0; k < 4; ++k) {
      for (int i = 0; i < 16; ++i) of[k][i] += part[k][i];
    }
  }
  Totals rounded() const {
    alignas(64) float part[4][16];
    for (int k = 0; k < 4; ++k) {
      for (int i = 0; i < 16; ++i) part[k][i] = static_cast<float>(of[k][i]);
    }
    return {load(part[0]), load(part[1]), load(part[2]), load(part[3])};
  }
};

// One kind of call: with zero points, importance and powers or without.
template <bool kZero, bool kWeighted, bool kPowers, class Values>
struct Summing {
  const ScaleSums& s;
  const Values values;
  const Raise power;

  Summing(const ScaleSums& call, const Values& of) : s(call), values(of), power{splat(call.power)} {}

  // Up to 16 candidates, one in each lane.
  __attribute__((noinline)) Totals try_lanes(const Tried& q, const Part& part) const {
    Totals totals;
    for (int64_t i = 0; i < part.count; ++i) {
      const F x = part.x_of(i), weight = kWeighted ? part.weight_of(i) : zero();
      totals.template count<kWeighted, kPowers>(missing<kZero>(values, q, x), x, weight, power);
    }
    return totals;
  }

  // The same for whole numbers, whose rounding is part of the product with 1 / scale: what is near a tie may become
  // the other one of two values that are as near.
  __attribute__((noinline)) Totals try_whole(const Tried& tried, const Part& part) const {
    Totals totals;
    const F least = add(values.least, splat(kMagic)), greatest = add(values.greatest, splat(kMagic));
    const F inverse = tried.inverse, shift = tried.shift, negative = sub(zero(), tried.scale);
    for (int64_t i = 0; i < part.count; ++i) {
      const F x = part.x_of(i), weight = kWeighted ? part.weight_of(i) : zero();
      const F shifted = min(max(fma(x, inverse, shift), least), greatest);
      totals.template count<kWeighted, kPowers>(fma(sub(shifted, shift), negative, x), x, weight, power);
    }
    return totals;
  }

  // One candidate, for 16 elements at a time; what is behind the part does not count.
  __attribute__((noinline)) Totals try_one(const Tried& q, const Part& part) const {
    Totals totals;
    int64_t i = 0;
    for (; i + 16 <= part.count; i += 16) {
      const F x = load(part.x + i);
      totals.template count<kWeighted, kPowers>(missing<kZero>(values, q, x), x, part.template weight_at<kWeighted>(i),
                                                power);
    }
    if (i < part.count) {
      const F x = load(part.x + i);
      totals.template count<true, kPowers>(missing<kZero>(values, q, x), x, part.template weight_at<kWeighted>(i),
                                           power);
    }
    return totals.template together<kPowers>();
  }

  Totals attempt(const Tried& q, const Part& part, bool few) const {
    if (few) return try_one(q, part);
    if constexpr (Values::kShifts) {
      if (q.whole) return try_whole(q, part);
    }
    return try_lanes(q, part);
  }

  AO_METHOD bool is_one_part() const { return s.columns <= kPart; }

  // The sum of take() over all parts. read(begin) gets each of them; where there is one part only, it has been read.
  template <class Read, class Take>
  Totals over_parts(const Read& read, const Take& take) const {
    if (is_one_part()) return take();
    Long sums;
    for (int64_t begin = 0; begin < s.columns; begin += kPart) read(begin), sums.add_totals(take());
    return sums.rounded();
  }
  // Of a row, which `part` has if it is one.
  Totals totals_of(int64_t row, const Tried& q, Part& part, bool few) const {
    return over_parts([&](int64_t begin) { read_part<kWeighted>(s, row, begin, part); },
                      [&] { return attempt(q, part, few); });
  }

  void row(int64_t row, Part& part) const {
    if (is_one_part()) read_part<kWeighted>(s, row, 0, part);
    for (int64_t first = 0; first < s.candidates;) {
      const int64_t at = row * s.candidates + first, left = s.candidates - first;
      const bool few = left < kFew;
      const int count = few ? 1 : left < kTried ? static_cast<int>(left) : static_cast<int>(kTried);
      const Tried q = Tried::of(s.scale + at, kZero ? s.zero + at : nullptr, count);
      const Place place{s.sums + at, s.rows * s.candidates};
      first += count;
      place.write(totals_of(row, q, part, few), kPowers, count);
    }
  }

  void rows(int64_t begin, int64_t end) const {
    Part part;
    for (int64_t r = begin; r < end; ++r) row(r, part);
  }
};

// f.template operator()<kZero, kWeighted, kPowers>() of a call.
template <class Function>
AO_INLINE void with_kinds(const ScaleSums& s, const Function& f) {
  const auto with_zero = [&](auto... kinds) {
    if (s.zero) return f.template operator()<true, kinds.value...>();
    return f.template operator()<false, kinds.value...>();
  };
  if (s.power != 0) return s.importance ? with_zero(Yes{}, Yes{}) : with_zero(No{}, Yes{});
  return s.importance ? with_zero(Yes{}, No{}) : with_zero(No{}, No{});
}

static inline void sum_rows(const ScaleSums& s, int64_t begin, int64_t end) {
  with_kinds(s, [&]<bool kZero, bool kWeighted, bool kPowers>() {
    with_values(s.format, [&]<class Values>(const Values& values) {
      Summing<kZero, kWeighted, kPowers, Values>(s, values).rows(begin, end);
    });
  });
}

}  // namespace
}  // namespace ao::AO_ISA::sums

#include "search.h"

namespace ao::AO_ISA::sums {
namespace {

static const SumsKernels kSumsKernels = {.rows = sum_rows, .learned = learned_rows, .search = search_rows};

}  // namespace
}  // namespace ao::AO_ISA::sums
