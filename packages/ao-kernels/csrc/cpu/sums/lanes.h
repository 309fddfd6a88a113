// Rows side by side, 16 of them: one in each lane.
#pragma once
#include "roots.h"

namespace ao::AO_ISA::sums {
namespace {  // members of templates are exported otherwise

constexpr int kLanes = 16;
using Lane = float[kLanes];

// Elements of a row, whole parts, up to which all of them are held.
constexpr int64_t kHeld = 4 * kPart;

// A part of 16 rows, element by element; the last row again where there are fewer.
struct Block {
  alignas(64) Lane x[kHeld], weights[kHeld];
  alignas(64) Lane unit, by;  // of each row what x is divided by, a power of two, and 1 / that
  int64_t first, rows;
  int64_t begin, count;  // of the part, which starts at x[begin]

  explicit Block(bool weighted) {
    if (weighted) return;
    for (int64_t i = 0; i < kHeld; ++i) store(weights[i], splat(1.0f));
  }

  // Element i of each row and its importance, a row in each lane.
  AO_METHOD F x_of(int64_t i) const { return load(x[begin + i]); }
  AO_METHOD F weight_of(int64_t i) const { return load(weights[begin + i]); }

  // Other rows, of which all elements are read if they are held.
  void start(const ScaleSums& s) {
    if (s.columns <= kHeld) turn_all(s, 0, s.columns);
    if (s.columns <= kPart) part_of(s, 0);
  }
  // The part from an element on.
  void part_of(const ScaleSums& s, int64_t from) {
    count = from + kPart < s.columns ? kPart : s.columns - from;
    begin = s.columns <= kHeld ? from : 0;
    if (s.columns > kHeld) turn_all(s, from, count);
  }

 private:
  void turn_all(const ScaleSums& s, int64_t from, int64_t size) {
    turn(s, s.type, s.x, by, from, size, x);
    alignas(64) static constexpr Lane kOnes = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
    if (s.importance) turn(s, Element::f32, s.importance, kOnes, from, size, weights);
  }
  // Columns of rows, each times a factor, into lanes.
  __attribute__((noinline)) void turn(const ScaleSums& s, Element type, const void* values, const Lane& times,
                                      int64_t from, int64_t size, Lane* to) const {
    for (int64_t i = 0; i < size; i += 16) {
      const int width = size - i < 16 ? static_cast<int>(size - i) : 16;
      I v[16];
      for (int64_t r = 0; r < 16; ++r) {
        const int64_t at = (first + (r < rows ? r : rows - 1)) * s.columns + from + i;
        const F row = load_as(type, static_cast<const uint8_t*>(values) + at * bytes_of(type), width);
        v[r] = bits_of(mul(row, splat(times[r])));
      }
      transpose(v);
      for (int j = 0; j < 16; ++j) store(to[i + j], as_float(v[j]));
    }
  }
};

// Sums of errors of a part, of one kind of call and of the values of its format.
struct Trying {
  const void* values;
  Roots roots, halves;  // of the power, and of half of it
  Raise power;
  // Some candidates, each for all rows, by products with 1 / scale where the kind has them, and by `roots`.
  void (*many)(const Trying&, const Tried* q, int count, const Block&, Totals* totals);
  // One, by quotients; `exact` powers, or `roots`.
  Totals (*one)(const Trying&, const Tried& q, const Block&, bool exact);
};

template <bool kZero, bool kWeighted, bool kPowers, class Values>
struct Kind {
  // Candidates that are tried side by side: as many as leave their sums in registers.
  static constexpr int kSide = kRegisters == 1 && Values::kIsShort ? 2 : 1;

  // Products with 1 / scale stand for quotients of whole numbers, as in `try_whole`.
  template <int kCount, bool kShifted>
  static __attribute__((noinline)) void side(const Trying& t, const Tried* q, const Block& block, Totals* totals) {
    const Values& values = *static_cast<const Values*>(t.values);
    Totals sums[kCount];
    F inverse[kCount], shift[kCount], negative[kCount], low = zero(), high = zero();
    if constexpr (kShifted) low = add(values.least, splat(kMagic)), high = add(values.greatest, splat(kMagic));
#pragma GCC unroll 4
    for (int k = 0; k < kCount; ++k) {
      inverse[k] = q[k].inverse, shift[k] = q[k].shift, negative[k] = sub(zero(), q[k].scale);
    }
    for (int64_t i = 0; i < block.count; ++i) {
      const F x = block.x_of(i), weight = kWeighted ? block.weight_of(i) : zero();
#pragma GCC unroll 4
      for (int k = 0; k < kCount; ++k) {
        F missed;
        if constexpr (kShifted) {
          missed = fma(sub(min(max(fma(x, inverse[k], shift[k]), low), high), shift[k]), negative[k], x);
        } else {
          missed = missing<kZero>(values, q[k], x);
        }
        sums[k].template count<kWeighted, kPowers>(missed, x, weight, t.roots);
      }
    }
#pragma GCC unroll 4
    for (int k = 0; k < kCount; ++k) {
      totals[k] = {sums[k].squares, sums[k].along, kZero ? sums[k].plain : zero(), sums[k].powers};
    }
  }
  template <bool kShifted>
  static void all(const Trying& t, const Tried* q, int count, const Block& block, Totals* totals) {
    int k = 0;
    for (; k + kSide <= count; k += kSide) side<kSide, kShifted>(t, q + k, block, totals + k);
    if constexpr (kSide > 1) {
      for (; k < count; ++k) side<1, kShifted>(t, q + k, block, totals + k);
    }
  }
  static void many(const Trying& t, const Tried* q, int count, const Block& block, Totals* totals) {
    if constexpr (Values::kShifts) {
      if (q->whole) return all<true>(t, q, count, block, totals);
    }
    all<false>(t, q, count, block, totals);
  }
};

// Importance is 1 in each lane where there is none.
template <bool kZero, bool kPowers, class Values>
struct Once {
  template <class By>
  static __attribute__((noinline)) Totals sums(const Values& values, const Tried& q, const Block& block,
                                               const By& raise) {
    Totals totals;
    for (int64_t i = 0; i < block.count; ++i) {
      const F x = block.x_of(i);
      totals.template count<true, kPowers>(missing<kZero>(values, q, x), x, block.weight_of(i), raise);
    }
    return totals;
  }
  static Totals one(const Trying& t, const Tried& q, const Block& block, bool exact) {
    const Values& values = *static_cast<const Values*>(t.values);
    if constexpr (kPowers) {
      if (exact) return sums(values, q, block, t.power);
    }
    return sums(values, q, block, t.roots);
  }
};

}  // namespace
}  // namespace ao::AO_ISA::sums
