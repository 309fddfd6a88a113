// The search for scales of ao_core.scales.search, 16 rows at a time.
//
// Each row has a lane. The elements of a part are read once for all candidates of a stage, some of which are tried side
// by side.
#pragma once
#include "roots.h"

namespace ao::AO_ISA::sums {
namespace {  // members of templates are exported otherwise

// A number in the precision of a type.
AO_INLINE F in_type(Element type, F v) {
  if (type == Element::f32) return v;
  alignas(64) uint8_t stored[64];
  store_as(type, stored, v, 16);
  return load_as(type, stored, 16);
}
// Sums in float32 are right to a much smaller part than this, and those of powers too, unless squares are so small that
// some lost digits.
constexpr float kCertain = 2e-4f, kCertainPowers = 3e-3f, kLeastSquares = 1e-28f;

constexpr int kLanes = 16;
using Lane = float[kLanes];

// Candidates of a stage whose sums are kept at a time, and those that are tried side by side: as many as leave their
// sums in registers.
constexpr int kKept = 16, kSide = kRegisters == 1 ? 2 : 1;

// `value`, if it has the sign of `otherwise` and their ratio is finite, else `otherwise`.
AO_INLINE double alike(double value, double otherwise) {
  const double ratio = value / otherwise;
  return ratio > 0 && ratio < __builtin_inf() ? value : otherwise;
}

// Elements of a row, whole parts, up to which all of them are held.
constexpr int64_t kHeld = 8 * kPart;

// A part of 16 rows, element by element; the last row again where there are fewer.
struct Block {
  alignas(64) Lane x[kHeld], weights[kHeld];
  alignas(64) Lane unit, by;  // of each row what x is divided by, a power of two, and 1 / that
  int64_t first, rows;
  int64_t begin, count;  // of the part, which starts at x[begin]

  // Element i of each row and its importance, a row in each lane.
  AO_METHOD F x_of(int64_t i) const { return load(x[begin + i]); }
  AO_METHOD F weight_of(int64_t i) const { return load(weights[begin + i]); }

  // Other rows, of which all elements are read if they are held.
  template <bool kWeighted>
  void start(const ScaleSums& s) {
    if (s.columns <= kHeld) turn_all<kWeighted>(s, 0, s.columns);
    if (s.columns <= kPart) part_of<kWeighted>(s, 0);
  }
  // The part from an element on.
  template <bool kWeighted>
  void part_of(const ScaleSums& s, int64_t from) {
    count = from + kPart < s.columns ? kPart : s.columns - from;
    begin = s.columns <= kHeld ? from : 0;
    if (s.columns > kHeld) turn_all<kWeighted>(s, from, count);
  }

 private:
  template <bool kWeighted>
  void turn_all(const ScaleSums& s, int64_t from, int64_t size) {
    turn(s, s.type, s.x, by, from, size, x);
    alignas(64) static constexpr Lane kOnes = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
    if constexpr (kWeighted) turn(s, Element::f32, s.importance, kOnes, from, size, weights);
  }
  // Columns of rows, each times a factor, into lanes.
  void turn(const ScaleSums& s, Element type, const void* values, const Lane& times, int64_t from, int64_t size,
            Lane* to) const {
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

// What rows are, besides their elements.
struct Facts {
  alignas(64) Lane share, allowed;                    // the gain by `lost`; squares of the start
  double count[kLanes], lost[kLanes], plain[kLanes];  // sums of w, w x^2 and w x
};

// Of each row a scale and a zero point, the sums of the errors that they make, and their measure.
struct Candidates {
  alignas(64) Lane scale, point, squares, along, plain, measure;

  void put(const Tried& q, const Totals& t, F by) {
    store(scale, q.scale), store(point, q.point), store(squares, t.squares), store(measure, by);
    store(along, sub(zero(), t.along)), store(plain, sub(zero(), t.plain));  // totals are of -e
  }
  // These in the lanes of a mask.
  AO_METHOD void take(const Tried& q, const Totals& t, F by, I mask) {
    const auto of = [&](Lane& mine, F other) {
      const I bits = bits_of(load(mine));
      store(mine, as_float(xor_(bits, and_(mask, xor_(bits, bits_of(other))))));
    };
    of(scale, q.scale), of(point, q.point), of(squares, t.squares), of(measure, by);
    of(along, sub(zero(), t.along)), of(plain, sub(zero(), t.plain));
  }
};

template <bool kZero, bool kWeighted, bool kPowers, class Values>
struct Search {
  const SearchScales& s;
  Summing<kZero, kWeighted, kPowers, Values> summing;
  const Roots roots;
  const float least, greatest;  // of the format

  Search(const SearchScales& call, const Values& values)
      : s(call), summing(call.rows, values), roots(call.rows.power), least(call.rows.format.least),
        greatest(call.rows.format.greatest) {}

  // Both as they are stored; without zero points scales keep their sign. Zero points are fixed, or follow from the
  // scale: `least` and `point_of_one` by it.
  template <bool kFixed>
  AO_METHOD Tried stored(const Block& block, F scale, F point) const {
    F whole = kZero ? scale : abs(scale);
    if constexpr (kPowers) whole = mul(whole, load(block.unit));
    whole = in_type(s.scale_type, min(max(whole, splat(s.least_scale)), splat(s.greatest_scale)));
    F by = whole;
    if constexpr (kPowers) by = mul(whole, load(block.by));
    if constexpr (!kZero) by = as_float(or_(bits_of(by), and_(bits_of(scale), splat_int(INT32_MIN))));
    const F inverse = div(splat(1.0f), by);
    if constexpr (!kZero) return {by, zero(), by, inverse, splat(kMagic), true};
    const F at = stored_point(kFixed ? point : fma(point, inverse, splat(least)), whole);
    return {by, at, by, inverse, add(splat(kMagic), at), s.point == Point::whole};
  }
  AO_METHOD F stored_point(F point, F whole) const {
    const F inside = min(max(point, splat(least)), splat(greatest));
    if (s.point == Point::whole) return to_float(round_to_int(inside));
    if (s.point == Point::number) return in_type(s.point_type, inside);
    const F reach = splat(s.greatest_point);
    const F offset = min(max(mul(inside, whole), sub(zero(), reach)), reach);
    return div(in_type(s.point_type, offset), whole);
  }

  // No NaN: infinity in its place.
  AO_METHOD F measured(const Totals& t, F share) const {
    const F amplified = fma(mul(share, t.along), t.along, t.squares), infinity = splat(__builtin_inff());
    if constexpr (!kPowers) return min(amplified, infinity);
    const F ratio = min(max(div(amplified, t.squares), zero()), splat(3e38f));
    return min(mul(t.powers, raised(ratio, splat(0.5f * s.rows.power))), infinity);
  }
  // Bits of measures, which are in their order; of infinity where squares are too great.
  static I keys(F measure, F squares, F allowed) {
    const I too_great = shift_right<31>(bits_of(max(sub(allowed, squares), splat(-1.0f))));
    return bits_of(max(measure, as_float(and_(too_great, splat_int(0x7f800000)))));
  }

  // -- rows in lanes ---------------------------------------------------------------------------------------

  AO_METHOD void read(Block& block, int64_t begin) const { block.template part_of<kWeighted>(s.rows, begin); }
  // Of whole rows; `block` has them if they are one part.
  template <class By>
  Totals totals_of(const Tried& q, Block& block, const By& raise) const {
    return summing.over_parts([&](int64_t begin) { read(block, begin); },
                              [&] { return summing.try_lanes(q, block, raise); });
  }

  // Some candidates side by side. Products with 1 / scale stand for quotients of whole numbers, as in `try_whole`,
  // and powers are those of `roots`.
  template <int kCount, bool kShifted>
  __attribute__((noinline)) void try_side(const Tried* q, const Block& block, Totals* totals) const {
    Totals t[kCount];
    F inverse[kCount], shift[kCount], negative[kCount];
#pragma GCC unroll 4
    for (int k = 0; k < kCount; ++k) {
      inverse[k] = q[k].inverse, shift[k] = q[k].shift, negative[k] = sub(zero(), q[k].scale);
    }
    const F low = splat(least + kMagic), high = splat(greatest + kMagic);
    for (int64_t i = 0; i < block.count; ++i) {
      const F x = block.x_of(i), weight = kWeighted ? block.weight_of(i) : zero();
#pragma GCC unroll 4
      for (int k = 0; k < kCount; ++k) {
        F missed;
        if constexpr (kShifted) {
          missed = fma(sub(min(max(fma(x, inverse[k], shift[k]), low), high), shift[k]), negative[k], x);
        } else {
          missed = missing<kZero>(summing.values, q[k], x);
        }
        t[k].template count<kWeighted, kPowers>(missed, x, weight, roots);
      }
    }
#pragma GCC unroll 4
    for (int k = 0; k < kCount; ++k) {
      totals[k] = {t[k].squares, t[k].along, kZero ? t[k].plain : zero(), t[k].powers};
    }
  }
  template <bool kShifted>
  void try_all(const Tried* q, int count, const Block& block, Totals* totals) const {
    int k = 0;
    for (; k + kSide <= count; k += kSide) try_side<kSide, kShifted>(q + k, block, totals + k);
    if constexpr (kSide > 1) {
      for (; k < count; ++k) try_side<1, kShifted>(q + k, block, totals + k);
    }
  }
  void try_part(const Tried* q, int count, const Block& block, Totals* totals) const {
    if constexpr (Values::kShifts) {
      if (q->whole) return try_all<true>(q, count, block, totals);
    }
    try_all<false>(q, count, block, totals);
  }
  // Of up to `kKept` candidates of whole rows.
  void try_many(const Tried* q, int count, Block& block, Totals* totals) const {
    if (summing.is_one_part()) return try_part(q, count, block, totals);
    Long sums[kKept];
    for (int64_t begin = 0; begin < s.rows.columns; begin += kPart) {
      read(block, begin);
      try_part(q, count, block, totals);
      for (int k = 0; k < count; ++k) sums[k].add_totals(totals[k]);
    }
    for (int k = 0; k < count; ++k) totals[k] = sums[k].rounded();
  }

  void find_facts(Block& block, Facts& facts) const {
    for (int r = 0; r < kLanes; ++r) facts.count[r] = facts.lost[r] = facts.plain[r] = 0;
    for (int64_t begin = 0; begin < s.rows.columns; begin += kPart) {
      if (!summing.is_one_part()) read(block, begin);
      F squares = zero(), plain = zero(), count = zero();
      for (int64_t i = 0; i < block.count; ++i) {
        const F x = block.x_of(i), w = kWeighted ? block.weight_of(i) : splat(1.0f), counted = mul(w, x);
        squares = fma(counted, x, squares), plain = add(plain, counted), count = add(count, w);
      }
      alignas(64) Lane sums[3];
      store(sums[0], squares), store(sums[1], plain), store(sums[2], count);
      for (int r = 0; r < kLanes; ++r) {
        facts.lost[r] += sums[0][r], facts.plain[r] += sums[1][r], facts.count[r] += sums[2][r];
      }
    }
    for (int r = 0; r < kLanes; ++r) {
      facts.share[r] = s.gain != 0 && facts.lost[r] != 0 ? static_cast<float>(s.gain / facts.lost[r]) : 0.0f;
    }
  }

  // Least squares for the codes of `from`, as `Rows.fitted` has them.
  __attribute__((noinline)) Tried fitted(const Block& block, const Facts& facts, const Candidates& from) const {
    alignas(64) Lane scales, points;
    double y2s[kLanes], yxs[kLanes], y1s[kLanes];
    for (int r = 0; r < kLanes; ++r) {
      const double e2 = from.squares[r], ex = from.along[r], x2 = facts.lost[r], share = facts.share[r];
      const double scale = from.scale[r], y2 = e2 + 2 * ex + x2, yx = ex + x2, square = y2 + share * yx * yx;
      if constexpr (!kZero) {
        scales[r] = static_cast<float>(alike(scale * (yx * (1 + share * x2) / square), scale));
        continue;
      }
      const double e1 = from.plain[r], x1 = facts.plain[r], y1 = e1 + x1;
      const double mixed = y1 + share * yx * x1, level = facts.count[r] + share * x1 * x1;
      const double grown = -(e2 + ex + share * ex * yx), moved = -(e1 + share * ex * x1);
      const double determinant = square * level - mixed * mixed;
      const double by = alike(scale * (1 + (grown * level - moved * mixed) / determinant), scale);
      const double wanted = from.point[r] - (moved * square - grown * mixed) / determinant / by;
      // not where it is infinite or NaN
      points[r] = static_cast<float>(wanted - wanted == 0 ? wanted : static_cast<double>(from.point[r]));
      scales[r] = static_cast<float>(by), y2s[r] = y2, yxs[r] = yx, y1s[r] = y1;
    }
    if constexpr (!kZero) return stored<true>(block, load(scales), zero());
    F size = load(scales);
    if constexpr (kPowers) size = mul(size, load(block.unit));
    store(points, stored_point(load(points), size));
    for (int r = 0; r < kLanes; ++r) {
      const double scale = from.scale[r], x1 = facts.plain[r], x2 = facts.lost[r], share = facts.share[r];
      const double change = scale * (static_cast<double>(from.point[r]) - points[r]);
      const double y2 = y2s[r] + change * (2 * y1s[r] + change * facts.count[r]), yx = yxs[r] + change * x1;
      scales[r] = static_cast<float>(alike(scale * (yx * (1 + share * x2) / (y2 + share * yx * yx)), scale));
    }
    return stored<true>(block, load(scales), load(points));
  }

  // The range of `scale` and `point`, which has one end without zero points, times factors.
  AO_METHOD Tried in_stage(const Block& block, F scale, F point, float by_low, float by_high) const {
    if constexpr (!kZero) return stored<false>(block, mul(scale, splat(by_high)), zero());
    const F below = sub(point, splat(least)), steps = splat(greatest - least);
    const F low = mul(below, splat(by_low)), span = fma(sub(steps, below), splat(by_high), low);
    return stored<false>(block, mul(span, mul(scale, splat(1.0f / (greatest - least)))), mul(scale, low));
  }

  // What is better than the best so far, without greater squares than the start.
  AO_METHOD void keep_better(const Tried& q, const Totals& t, const Facts& facts, F measure, Candidates& best) const {
    const I key = keys(measure, t.squares, load(facts.allowed));
    best.take(q, t, measure, shift_right<31>(subtract(key, bits_of(load(best.measure)))));
  }

  // Candidates from `begin` on.
  void run_stage(Block& block, const Facts& facts, int begin, int count, Candidates& best) const {
    const F scale = load(best.scale), point = load(best.point), share = load(facts.share);
    Tried q[kKept];
    Totals t[kKept];
    for (int j = 0; j < count; j += kKept) {
      const int some = count - j < kKept ? count - j : kKept;
      for (int k = 0; k < some; ++k) {
        const int at = begin + j + k;
        q[k] = in_stage(block, scale, point, kZero ? s.low[at] : 0.0f, s.high[at]);
      }
      try_many(q, some, block, t);
      for (int k = 0; k < some; ++k) keep_better(q[k], t[k], facts, measured(t[k], share), best);
    }
  }

  // --------------------------------------------------------------------------------------------------------

  // Where the search starts: in units of the scale with powers, which keeps them far from where floats end.
  Tried start_of(Block& block) const {
    alignas(64) Lane scales, points;
    for (int r = 0; r < kLanes; ++r) {
      const int64_t at = block.first + (r < block.rows ? r : 0);
      const float scale = s.rows.scale[at];
      const float power = __builtin_bit_cast(float, __builtin_bit_cast(int32_t, scale) & 0x7f800000);
      block.unit[r] = !kPowers ? 1.0f : power < 0x1p-126f ? 0x1p-126f : power > 0x1p126f ? 0x1p126f : power;
      block.by[r] = 1.0f / block.unit[r];
      scales[r] = scale * block.by[r], points[r] = kZero ? s.rows.zero[at] : 0.0f;
    }
    return Tried::of(scales, points, kLanes);
  }

  void rows(Block& block) const {
    const Tried start = start_of(block);
    block.template start<kWeighted>(s.rows);
    Facts facts;
    find_facts(block, facts);
    const F share = load(facts.share);
    const Totals at_first = totals_of(start, block, roots);
    store(facts.allowed, at_first.squares);
    Candidates first;
    first.put(start, at_first, measured(at_first, share));
    Candidates best = first;
    for (int32_t i = 0, begin = 0; i < s.stage_count; begin += s.stages[i++]) {
      run_stage(block, facts, begin, s.stages[i], best);
    }
    Candidates current = best;
    for (int32_t i = 0; i < s.fits; ++i) {
      const Tried q = fitted(block, facts, current);
      const Totals t = totals_of(q, block, roots);  // a fit follows from them: with quotients, which keep ties
      const F measure = measured(t, share);
      current.put(q, t, measure);
      keep_better(q, t, facts, measure, best);
    }
    for (int64_t r = 0; r < block.rows; ++r) {
      const int64_t at = block.first + r;
      s.scale[at] = best.scale[r] * block.unit[r];
      if constexpr (kZero) s.zero[at] = best.point[r];
      s.better[at] = best.measure[r] != first.measure[r];
    }
    // candidates are measured again without doubt near ties
    const Tried last = Tried::of(best.scale, best.point, kLanes);
    if (judge(block, at_first, totals_of(last, block, roots), share, kPowers ? kCertainPowers : kCertain)) return;
    if constexpr (kPowers) {
      for (int64_t r = 0; r < block.rows; ++r) s.better[block.first + r] = best.measure[r] != first.measure[r];
      const Totals was = totals_of(start, block, summing.power);
      judge(block, was, totals_of(last, block, summing.power), share, kCertain);
    }
  }

  // Of the rows that changed, which are better by more than that part, besides digits that squares have lost; and
  // whether all are.
  bool judge(const Block& block, const Totals& was, const Totals& now, F share, float certain) const {
    alignas(64) Lane squares[2], measures[2];
    store(squares[0], was.squares), store(measures[0], measured(was, share));
    store(squares[1], now.squares), store(measures[1], measured(now, share));
    bool all = true;
    for (int64_t r = 0; r < block.rows; ++r) {
      bool& better = s.better[block.first + r];
      const bool less = squares[1][r] < (1 - kCertain) * squares[0][r] && squares[0][r] > kLeastSquares;
      const bool sure = less && measures[1][r] < (1 - certain) * measures[0][r];
      all = all && (sure || !better), better = better && sure;
    }
    return all;
  }
};

static inline void search_rows(const SearchScales& s, int64_t begin, int64_t end) {
  with_kinds(s.rows, [&]<bool kZero, bool kWeighted, bool kPowers>() {
    with_values(s.rows.format, [&]<class Values>(const Values& values) {
      const Search<kZero, kWeighted, kPowers, Values> search(s, values);
      Block block;
      for (int64_t r = begin; r < end; r += kLanes) {
        block.first = r, block.rows = end - r < kLanes ? end - r : kLanes;
        search.rows(block);
      }
    });
  });
}

}  // namespace
}  // namespace ao::AO_ISA::sums
