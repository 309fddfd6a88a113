// The search for scales of ao_core.scales.search, 16 rows at a time.
//
// Candidates of a stage stand in lanes, for one row after the other. Where each row has one candidate (where the search
// starts, a fit, what it ends with), the rows stand in lanes.
#pragma once

namespace ao::AO_ISA::sums {
namespace {  // members of templates are exported otherwise

// A number in the precision of a type.
AO_INLINE F in_type(Element type, F v) {
  if (type == Element::f32) return v;
  alignas(64) uint8_t stored[64];
  store_as(type, stored, v, 16);
  return load_as(type, stored, 16);
}
// Sums in float32 are right to a much smaller part than this, unless squares are so small that some lost digits.
constexpr float kCertain = 2e-4f, kLeastSquares = 1e-28f;

constexpr int kLanes = 16;
using Lane = float[kLanes];

// `value`, if it has the sign of `otherwise` and their ratio is finite, else `otherwise`.
AO_INLINE double alike(double value, double otherwise) {
  const double ratio = value / otherwise;
  return ratio > 0 && ratio < __builtin_inf() ? value : otherwise;
}

// A part of 16 rows, element by element; the last row again where there are fewer.
struct Block {
  alignas(64) Lane x[kPart], weights[kPart];
  int64_t first, rows, count;

  // Element i of each row and its importance, a row in each lane.
  AO_METHOD F x_of(int64_t i) const { return load(x[i]); }
  AO_METHOD F weight_of(int64_t i) const { return load(weights[i]); }

  template <bool kWeighted>
  void read(const ScaleSums& s, int64_t begin) {
    count = begin + kPart < s.columns ? kPart : s.columns - begin;
    turn(s, s.type, s.x, begin, x);
    if constexpr (kWeighted) turn(s, Element::f32, s.importance, begin, weights);
  }
  void turn(const ScaleSums& s, Element type, const void* from, int64_t begin, Lane* to) const {
    for (int64_t i = 0; i < count; i += 16) {
      const int width = count - i < 16 ? static_cast<int>(count - i) : 16;
      I v[16];
      for (int64_t r = 0; r < 16; ++r) {
        const int64_t at = (first + (r < rows ? r : rows - 1)) * s.columns + begin + i;
        v[r] = bits_of(load_as(type, static_cast<const uint8_t*>(from) + at * bytes_of(type), width));
      }
      transpose(v);
      for (int j = 0; j < 16; ++j) store(to[i + j], as_float(v[j]));
    }
  }
};

// What rows are, besides their elements.
struct Facts {
  alignas(64) Lane unit, share, allowed;        // the gain by `lost`; squares of the start
  double count[kLanes], lost[kLanes], plain[kLanes];  // sums of w, w x^2 and w x
};

// Of each row a scale and a zero point, the sums of the errors that they make, and their measure.
struct Candidates {
  alignas(64) Lane scale, point, squares, along, plain, measure;

  void put(const Tried& q, const Totals& t, F by) {
    store(scale, q.scale), store(point, q.point), store(squares, t.squares), store(measure, by);
    store(along, sub(zero(), t.along)), store(plain, sub(zero(), t.plain));  // totals are of -e
  }
  // Those of `other` in the lanes of a mask.
  void take(const Candidates& other, I mask) {
    const auto of = [&](Lane& mine, const Lane& others) {
      const I bits = bits_of(load(mine));
      store(mine, as_float(xor_(bits, and_(mask, xor_(bits, bits_of(load(others)))))));
    };
    of(scale, other.scale), of(point, other.point), of(squares, other.squares);
    of(along, other.along), of(plain, other.plain), of(measure, other.measure);
  }
};

template <bool kZero, bool kWeighted, bool kPowers, class Values>
struct Search {
  const SearchScales& s;
  Summing<kZero, kWeighted, kPowers, Values> summing;
  const float least, greatest;  // of the format

  Search(const SearchScales& call, const Values& values)
      : s(call), summing(call.rows, values), least(call.rows.format.least), greatest(call.rows.format.greatest) {}

  // Both as they are stored; without zero points scales keep their sign.
  AO_METHOD Tried stored(F unit, F scale, F point_of_one, F fixed_point) const {
    F whole = kZero ? scale : abs(scale);
    if (s.unit) whole = mul(whole, unit);
    whole = in_type(s.scale_type, min(max(whole, splat(s.least_scale)), splat(s.greatest_scale)));
    F by = whole;
    if (s.unit) by = div(whole, unit);
    if constexpr (!kZero) {
      by = as_float(or_(bits_of(by), and_(bits_of(scale), splat_int(INT32_MIN))));
      return Tried::of_lanes(by, zero(), true);
    }
    const F point = add(fixed_point, div(point_of_one, by));
    return Tried::of_lanes(by, stored_point(point, whole), s.point == Point::whole);
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

  // Of whole rows; `block` has them if they are one part.
  Totals totals_of(const Tried& q, Block& block) const {
    return summing.over_parts([&](int64_t begin) { block.template read<kWeighted>(s.rows, begin); },
                              [&] { return summing.try_lanes(q, block); });
  }

  void find_facts(Block& block, Facts& facts) const {
    for (int r = 0; r < kLanes; ++r) {
      facts.count[r] = facts.lost[r] = facts.plain[r] = 0;
      facts.unit[r] = s.unit ? s.unit[block.first + (r < block.rows ? r : 0)] : 1.0f;
    }
    for (int64_t begin = 0; begin < s.rows.columns; begin += kPart) {
      if (!summing.is_one_part()) block.template read<kWeighted>(s.rows, begin);
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
  __attribute__((noinline)) Tried fitted(const Facts& facts, const Candidates& from) const {
    alignas(64) Lane scales, points;
    const F unit = load(facts.unit);
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
    if constexpr (!kZero) return stored(unit, load(scales), zero(), zero());
    store(points, stored_point(load(points), mul(load(scales), unit)));
    for (int r = 0; r < kLanes; ++r) {
      const double scale = from.scale[r], x1 = facts.plain[r], x2 = facts.lost[r], share = facts.share[r];
      const double change = scale * (static_cast<double>(from.point[r]) - points[r]);
      const double y2 = y2s[r] + change * (2 * y1s[r] + change * facts.count[r]), yx = yxs[r] + change * x1;
      scales[r] = static_cast<float>(alike(scale * (yx * (1 + share * x2) / (y2 + share * yx * yx)), scale));
    }
    return stored(unit, load(scales), zero(), load(points));
  }

  // -- candidates in lanes ---------------------------------------------------------------------------------

  // The best of the first `count` candidates of row r, to a few digits, or the one before, where no candidate without
  // greater squares than the start is better.
  static void choose(const Facts& facts, int64_t r, const Tried& q, const Totals& t, F measure, int count,
                     Candidates& best) {
    alignas(64) static constexpr int32_t kNumbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const I lanes = load_vector(kNumbers), no_lane = shift_right<31>(subtract(splat_int(count - 1), lanes));
    const I bits = or_(keys(measure, t.squares, splat(facts.allowed[r])), and_(no_lane, splat_int(0x7f800000)));
    const int32_t key = -largest(subtract(splat_int(0), or_(and_(bits, splat_int(~15)), lanes)));
    if (!(__builtin_bit_cast(float, key & ~15) < best.measure[r])) return;
    Candidates all;
    all.put(q, t, measure);
    const int lane = key & 15;
    best.scale[r] = all.scale[lane], best.point[r] = all.point[lane], best.squares[r] = all.squares[lane];
    best.along[r] = all.along[lane], best.plain[r] = all.plain[lane];
    best.measure[r] = __builtin_bit_cast(float, key & ~15);
  }

  // The range of `scale` and `point`, which has one end without zero points, times factors.
  Tried in_stage(F unit, float scale, float point, int begin, int count) const {
    const F base = splat(scale), high = load_as(Element::f32, s.high + begin, count);
    if constexpr (!kZero) return stored(unit, mul(base, high), zero(), zero());
    const float below = point - least, steps = greatest - least;
    const F low = mul(splat(below), load_as(Element::f32, s.low + begin, count));
    const F span = fma(splat(steps - below), high, low);
    return stored(unit, mul(span, splat(scale / steps)), mul(base, low), splat(least));
  }

  void run_stages(const Block& block, const Facts& facts, int64_t r, Part& part, Candidates& best) const {
    const int64_t number = block.first + r;
    const F unit = splat(facts.unit[r]), share = splat(facts.share[r]);
    if (summing.is_one_part()) read_part<kWeighted>(s.rows, number, 0, part);
    int begin = 0;
    for (int32_t i = 0; i < s.stage_count; begin += s.stages[i++]) {
      const float scale = best.scale[r], point = best.point[r];
      for (int j = 0; j < s.stages[i]; j += 16) {
        const int count = s.stages[i] - j < 16 ? s.stages[i] - j : 16;
        const Tried q = in_stage(unit, scale, point, begin + j, count);
        const Totals t = summing.totals_of(number, q, part, false);
        choose(facts, r, q, t, measured(t, share), count, best);
      }
    }
  }

  // --------------------------------------------------------------------------------------------------------

  void rows(Block& block, Part& part) const {
    const int64_t at = block.first, count = block.rows;
    if (summing.is_one_part()) block.template read<kWeighted>(s.rows, 0);
    Facts facts;
    find_facts(block, facts);
    const F share = load(facts.share);
    const Tried start = Tried::of(s.rows.scale + at, kZero ? s.rows.zero + at : nullptr, static_cast<int>(count));
    const Totals at_first = totals_of(start, block);
    store(facts.allowed, at_first.squares);
    Candidates first, current;
    first.put(start, at_first, measured(at_first, share));
    Candidates best = first;
    for (int64_t r = 0; r < count; ++r) run_stages(block, facts, r, part, best);
    current = best;
    for (int32_t i = 0; i < s.fits; ++i) {
      const Tried q = fitted(facts, current);
      const Totals t = totals_of(q, block);
      const F measure = measured(t, share);
      current.put(q, t, measure);
      const I key = keys(measure, t.squares, load(facts.allowed));
      best.take(current, shift_right<31>(subtract(key, bits_of(load(best.measure)))));
    }
    // candidates are measured again without doubt near ties
    const Totals t = totals_of(Tried::of(best.scale, best.point, kLanes), block);
    alignas(64) Lane squares, measure;
    store(squares, t.squares), store(measure, measured(t, share));
    const float sure = 1 - kCertain;  // more than sums in float32 are wrong
    for (int64_t r = 0; r < count; ++r) {
      s.scale[at + r] = best.scale[r];
      if constexpr (kZero) s.zero[at + r] = best.point[r];
      s.better[at + r] = best.measure[r] != first.measure[r] && squares[r] < sure * first.squares[r] &&
                         measure[r] < sure * first.measure[r] && first.squares[r] > kLeastSquares;
    }
  }
};

static inline void search_rows(const SearchScales& s, int64_t begin, int64_t end) {
  with_kinds(s.rows, [&]<bool kZero, bool kWeighted, bool kPowers>() {
    with_values(s.rows.format, [&]<class Values>(const Values& values) {
      const Search<kZero, kWeighted, kPowers, Values> search(s, values);
      Part part;
      Block block;
      for (int64_t r = begin; r < end; r += kLanes) {
        block.first = r, block.rows = end - r < kLanes ? end - r : kLanes;
        search.rows(block, part);
      }
    });
  });
}

}  // namespace
}  // namespace ao::AO_ISA::sums
