// The search for scales of ao_core.scales.search, 16 rows at a time.
//
// Each row has a lane. The elements of a part are read once for all candidates of a stage, some of which are tried side
// by side. What depends on the kind of call and on the format is in `Trying`; all else is one function for all.
#pragma once
#include "lanes.h"

namespace ao::AO_ISA::sums {
namespace {  // members of templates are exported otherwise

// A number in the precision of a type.
static __attribute__((noinline)) F in_type(Element type, F v) {
  if (type == Element::f32) return v;
  alignas(64) uint8_t stored[64];
  store_as(type, stored, v, 16);
  return load_as(type, stored, 16);
}
// Sums in float32 are right to a much smaller part than this, and those of powers too, unless squares are so small that
// some lost digits.
constexpr float kCertain = 2e-4f, kCertainPowers = 3e-3f, kLeastSquares = 1e-28f;

// Candidates of a stage whose sums are kept at a time.
constexpr int kKept = 16;

// `value`, if it has the sign of `otherwise` and their ratio is finite, else `otherwise`.
AO_INLINE double alike(double value, double otherwise) {
  const double ratio = value / otherwise;
  return ((ratio > 0) & (ratio < __builtin_inf())) ? value : otherwise;
}

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

struct Search {
  const SearchScales& s;
  const Trying trying;
  const bool zeros, powers;     // whether there are zero points, and powers of errors
  const float least, greatest;  // of the format

  Search(const SearchScales& call, const Trying& of)
      : s(call), trying(of), zeros(call.rows.zero), powers(call.rows.power != 0), least(call.rows.format.least),
        greatest(call.rows.format.greatest) {}

  // Both as they are stored; without zero points scales keep their sign. Zero points are fixed, or follow from the
  // scale: `least` and `point_of_one` by it.
  __attribute__((noinline)) Tried stored(const Block& block, F scale, F point, bool fixed) const {
    F whole = mul(zeros ? scale : abs(scale), load(block.unit));
    whole = in_type(s.scale_type, min(max(whole, splat(s.least_scale)), splat(s.greatest_scale)));
    F by = mul(whole, load(block.by));
    if (!zeros) by = as_float(or_(bits_of(by), and_(bits_of(scale), splat_int(INT32_MIN))));
    const F inverse = div(splat(1.0f), by);
    if (!zeros) return {by, zero(), by, inverse, splat(kMagic), true};
    const F at = stored_point(fixed ? point : fma(point, inverse, splat(least)), whole);
    return {by, at, by, inverse, add(splat(kMagic), at), s.point == Point::whole};
  }
  __attribute__((noinline)) F stored_point(F point, F whole) const {
    const F inside = min(max(point, splat(least)), splat(greatest));
    if (s.point == Point::whole) return to_float(round_to_int(inside));
    if (s.point == Point::number) return in_type(s.point_type, inside);
    const F reach = splat(s.greatest_point);
    const F offset = min(max(mul(inside, whole), sub(zero(), reach)), reach);
    return div(in_type(s.point_type, offset), whole);
  }

  // No NaN: infinity in its place. Powers are exact, or by `halves`, as those of the sums are by `roots`.
  __attribute__((noinline)) F measured(const Totals& t, F share, bool exact) const {
    const F amplified = fma(mul(share, t.along), t.along, t.squares), infinity = splat(__builtin_inff());
    if (!powers) return min(amplified, infinity);
    const F ratio = min(max(div(amplified, t.squares), zero()), splat(3e38f));
    const F grown = exact ? raised(ratio, splat(0.5f * s.rows.power))
                          : trying.halves.template added<false>(zero(), ratio, zero());
    return min(mul(t.powers, grown), infinity);
  }
  // Bits of measures, which are in their order; of infinity where squares are too great.
  static I keys(F measure, F squares, F allowed) {
    const I too_great = shift_right<31>(bits_of(max(sub(allowed, squares), splat(-1.0f))));
    return bits_of(max(measure, as_float(and_(too_great, splat_int(0x7f800000)))));
  }

  // -- rows in lanes ---------------------------------------------------------------------------------------

  bool is_one_part() const { return s.rows.columns <= kPart; }
  // Of whole rows; `block` has them if they are one part.
  Totals totals_of(const Tried& q, Block& block, bool exact) const {
    if (is_one_part()) return trying.one(trying, q, block, exact);
    Long sums;
    for (int64_t begin = 0; begin < s.rows.columns; begin += kPart) {
      block.part_of(s.rows, begin);
      sums.add_totals(trying.one(trying, q, block, exact));
    }
    return sums.rounded();
  }
  // Of up to `kKept` candidates of whole rows.
  void try_many(const Tried* q, int count, Block& block, Totals* totals) const {
    if (is_one_part()) return trying.many(trying, q, count, block, totals);
    Long sums[kKept];
    for (int64_t begin = 0; begin < s.rows.columns; begin += kPart) {
      block.part_of(s.rows, begin);
      trying.many(trying, q, count, block, totals);
      for (int k = 0; k < count; ++k) sums[k].add_totals(totals[k]);
    }
    for (int k = 0; k < count; ++k) totals[k] = sums[k].rounded();
  }

  void find_facts(Block& block, Facts& facts) const {
    for (int r = 0; r < kLanes; ++r) facts.count[r] = facts.lost[r] = facts.plain[r] = 0;
    for (int64_t begin = 0; begin < s.rows.columns; begin += kPart) {
      if (!is_one_part()) block.part_of(s.rows, begin);
      F squares = zero(), plain = zero(), count = zero();
      for (int64_t i = 0; i < block.count; ++i) {
        const F x = block.x_of(i), w = block.weight_of(i), counted = mul(w, x);
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

  // Least squares for the codes of `from`, as `Rows.fitted` has them. Loops over rows have no branches: they are
  // vectorized.
  __attribute__((noinline)) Tried fitted(const Block& block, const Facts& facts, const Candidates& from) const {
    return zeros ? fitted_both(block, facts, from) : fitted_scale(block, facts, from);
  }
  Tried fitted_scale(const Block& block, const Facts& facts, const Candidates& from) const {
    alignas(64) Lane scales;
    for (int r = 0; r < kLanes; ++r) {
      const double e2 = from.squares[r], ex = from.along[r], x2 = facts.lost[r], share = facts.share[r];
      const double scale = from.scale[r], y2 = e2 + 2 * ex + x2, yx = ex + x2, square = y2 + share * yx * yx;
      scales[r] = static_cast<float>(alike(scale * (yx * (1 + share * x2) / square), scale));
    }
    return stored(block, load(scales), zero(), true);
  }
  Tried fitted_both(const Block& block, const Facts& facts, const Candidates& from) const {
    alignas(64) Lane scales, points;
    double y2s[kLanes], yxs[kLanes], y1s[kLanes];
    for (int r = 0; r < kLanes; ++r) {
      const double e2 = from.squares[r], ex = from.along[r], x2 = facts.lost[r], share = facts.share[r];
      const double scale = from.scale[r], y2 = e2 + 2 * ex + x2, yx = ex + x2, square = y2 + share * yx * yx;
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
    store(points, stored_point(load(points), mul(load(scales), load(block.unit))));
    for (int r = 0; r < kLanes; ++r) {
      const double scale = from.scale[r], x1 = facts.plain[r], x2 = facts.lost[r], share = facts.share[r];
      const double change = scale * (static_cast<double>(from.point[r]) - points[r]);
      const double y2 = y2s[r] + change * (2 * y1s[r] + change * facts.count[r]), yx = yxs[r] + change * x1;
      scales[r] = static_cast<float>(alike(scale * (yx * (1 + share * x2) / (y2 + share * yx * yx)), scale));
    }
    return stored(block, load(scales), load(points), true);
  }

  // The range of `scale` and `point`, which has one end without zero points, times factors.
  Tried in_stage(const Block& block, F scale, F point, float by_low, float by_high) const {
    if (!zeros) return stored(block, mul(scale, splat(by_high)), zero(), false);
    const F below = sub(point, splat(least)), steps = splat(greatest - least);
    const F low = mul(below, splat(by_low)), span = fma(sub(steps, below), splat(by_high), low);
    return stored(block, mul(span, mul(scale, splat(1.0f / (greatest - least)))), mul(scale, low), false);
  }

  // What is better than the best so far, without greater squares than the start.
  void keep_better(const Tried& q, const Totals& t, const Facts& facts, F measure, Candidates& best) const {
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
        q[k] = in_stage(block, scale, point, zeros ? s.low[at] : 0.0f, s.high[at]);
      }
      try_many(q, some, block, t);
      for (int k = 0; k < some; ++k) keep_better(q[k], t[k], facts, measured(t[k], share, false), best);
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
      block.unit[r] = !powers ? 1.0f : power < 0x1p-126f ? 0x1p-126f : power > 0x1p126f ? 0x1p126f : power;
      block.by[r] = 1.0f / block.unit[r];
      scales[r] = scale * block.by[r], points[r] = zeros ? s.rows.zero[at] : 0.0f;
    }
    return Tried::of(scales, points, kLanes);
  }

  void rows(Block& block) const {
    const Tried start = start_of(block);
    block.start(s.rows);
    Facts facts;
    find_facts(block, facts);
    const F share = load(facts.share);
    const Totals at_first = totals_of(start, block, false);
    store(facts.allowed, at_first.squares);
    Candidates first;
    first.put(start, at_first, measured(at_first, share, false));
    Candidates best = first;
    for (int32_t i = 0, begin = 0; i < s.stage_count; begin += s.stages[i++]) {
      run_stage(block, facts, begin, s.stages[i], best);
    }
    Candidates current = best;
    for (int32_t i = 0; i < s.fits; ++i) {
      const Tried q = fitted(block, facts, current);
      Totals t;
      try_many(&q, 1, block, &t);
      const F measure = measured(t, share, false);
      current.put(q, t, measure);
      keep_better(q, t, facts, measure, best);
    }
    for (int64_t r = 0; r < block.rows; ++r) {
      const int64_t at = block.first + r;
      s.scale[at] = best.scale[r] * block.unit[r];
      if (zeros) s.zero[at] = best.point[r];
      s.better[at] = best.measure[r] != first.measure[r];
    }
    // candidates are measured again without doubt near ties
    const Tried last = Tried::of(best.scale, best.point, kLanes);
    if (judge(block, at_first, totals_of(last, block, false), share, powers ? kCertainPowers : kCertain)) return;
    if (powers) {
      for (int64_t r = 0; r < block.rows; ++r) s.better[block.first + r] = best.measure[r] != first.measure[r];
      const Totals was = totals_of(start, block, true);
      judge(block, was, totals_of(last, block, true), share, kCertain);
    }
  }

  // Of the rows that changed, which are better by more than that part, besides digits that squares have lost; and
  // whether all are.
  bool judge(const Block& block, const Totals& was, const Totals& now, F share, float certain) const {
    alignas(64) Lane squares[2], measures[2];
    store(squares[0], was.squares), store(measures[0], measured(was, share, true));
    store(squares[1], now.squares), store(measures[1], measured(now, share, true));
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

static inline void search_all(const SearchScales& s, const Trying& trying, int64_t begin, int64_t end) {
  const Search search(s, trying);
  Block block(s.rows.importance);
  for (int64_t r = begin; r < end; r += kLanes) {
    block.first = r, block.rows = end - r < kLanes ? end - r : kLanes;
    search.rows(block);
  }
}

static inline void search_rows(const SearchScales& s, int64_t begin, int64_t end) {
  with_kinds(s.rows, [&]<bool kZero, bool kWeighted, bool kPowers>() {
    with_values(s.rows.format, [&]<class Values>(const Values& values) {
      search_all(s, {&values, Roots(s.rows.power), Roots(0.5f * s.rows.power), Raise{splat(s.rows.power)},
                     Kind<kZero, kWeighted, kPowers, Values>::many, Once<kZero, kPowers, Values>::one},
                 begin, end);
    });
  });
}

}  // namespace
}  // namespace ao::AO_ISA::sums
