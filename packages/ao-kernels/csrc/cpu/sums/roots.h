// Powers of errors, for searches; included by the unit of an instruction set.
#pragma once

namespace ao::AO_ISA::sums {
namespace {  // members of templates are exported otherwise

#ifdef AO_HAS_FLOAT_TABLES
// magnitude^power, to 1 part in 1000: of the power of two by a table, of the mantissa by a polynomial. Magnitudes are
// those of errors in units of a scale: below 2^-15 they count as that, and from 2^17 on as if they were smaller.
struct Roots {
  static constexpr int kLeast = -15, kTerms = 3;
  F low, high, terms[kTerms];  // powers of 2^k for the lowest bits of exponents; the coefficient of m^2 first

  explicit Roots(float power) {
    alignas(64) float tables[2][16];
    for (int k = kLeast; k < kLeast + 32; ++k) {
      const int place = (k + 127) & 31;
      tables[place / 16][place % 16] = power_of(__builtin_bit_cast(float, (k + 127) << 23), power);
    }
    low = load(tables[0]), high = load(tables[1]);
    // Newton's divided differences at the nodes of Chebyshev's polynomial from 1 to 2
    constexpr double kNodes[kTerms] = {1.06698730, 1.5, 1.93301270};
    double by[kTerms], sums[kTerms] = {};
    for (int i = 0; i < kTerms; ++i) by[i] = power_of(static_cast<float>(kNodes[i]), power);
    for (int order = 1; order < kTerms; ++order) {
      for (int i = kTerms - 1; i >= order; --i) by[i] = (by[i] - by[i - 1]) / (kNodes[i] - kNodes[i - order]);
    }
    for (int i = kTerms - 1; i >= 0; --i) {  // times (m - node), and the next difference
      for (int k = kTerms - 1; k > 0; --k) sums[k] = sums[k - 1] - kNodes[i] * sums[k];
      sums[0] = by[i] - kNodes[i] * sums[0];
    }
    for (int k = 0; k < kTerms; ++k) terms[k] = splat(static_cast<float>(sums[kTerms - 1 - k]));
  }
  static float power_of(float v, float power) {
    alignas(64) float lanes[16];
    store(lanes, raised(splat(v), splat(power)));
    return lanes[0];
  }
  template <bool kWeighted>
  AO_METHOD F added(F sum, F v, F weight) const {
    const F magnitude = greater_magnitude(v, splat(__builtin_bit_cast(float, (kLeast + 127) << 23)));
    const F m = mantissa_of(magnitude);
    F root = terms[0];
#pragma GCC unroll 4
    for (int k = 1; k < kTerms; ++k) root = fma(root, m, terms[k]);
    return fma(kWeighted ? mul(weight, root) : root, of_exponent(low, high, magnitude), sum);
  }
};
#else
struct Roots : Raise {
  explicit Roots(float of) : Raise{splat(of)} {}
};
#endif

}  // namespace
}  // namespace ao::AO_ISA::sums
