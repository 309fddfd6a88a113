// The search for scales of ao_core.scales.search, one row after the other: candidates stand in lanes.
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

// `value`, if it has the sign of `otherwise` and their ratio is finite, else `otherwise`.
static inline double alike(double value, double otherwise) {
  const double ratio = value / otherwise;
  return ratio > 0 && ratio < __builtin_inf() ? value : otherwise;
}

// A scale and a zero point, the sums of the errors that they make, and their measure.
struct Candidate {
  float scale, point, squares, along, plain, measure;
};

template <bool kZero, bool kWeighted, bool kPowers, class Values>
struct Search {
  const SearchScales& s;
  Summing<kZero, kWeighted, kPowers, Values> summing;
  const float least, greatest;  // of the format

  Search(const SearchScales& call, const Values& values)
      : s(call), summing(call.rows, values), least(call.rows.format.least), greatest(call.rows.format.greatest) {}

  // What a row is, besides its elements.
  struct Row {
    int64_t number;
    F unit;
    double count, lost, plain;  // sums of w, w x^2 and w x
    float share;                // the gain by `lost`
    float allowed;              // squares of the start
  };

  // Both as they are stored; without zero points scales keep their sign.
  AO_METHOD Tried stored(const Row& row, F scale, F point_of_one, F fixed_point) const {
    F whole = kZero ? scale : abs(scale);
    if (s.unit) whole = mul(whole, row.unit);
    whole = in_type(s.scale_type, min(max(whole, splat(s.least_scale)), splat(s.greatest_scale)));
    F by = whole;
    if (s.unit) by = div(whole, row.unit);
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

  AO_METHOD F measured(const Totals& t, const Row& row) const {
    const F amplified = fma(mul(splat(row.share), t.along), t.along, t.squares);
    if constexpr (!kPowers) return amplified;
    const F ratio = min(max(div(amplified, t.squares), zero()), splat(3e38f));
    return mul(t.powers, raised(ratio, splat(0.5f * s.rows.power)));
  }

  // The best of the first `count` lanes, to a few digits, or the one before, where no candidate without greater squares
  // than the start is better.
  void choose(const Row& row, const Tried& q, const Totals& t, int count, Candidate& best) const {
    alignas(64) static constexpr int32_t kLanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const I infinity = splat_int(0x7f800000), lanes = load_vector(kLanes);
    // infinite where there are too great squares, or no such lane, or a NaN
    const I no_lane = shift_right<31>(subtract(splat_int(count - 1), lanes));
    const I too_great = shift_right<31>(bits_of(max(sub(splat(row.allowed), t.squares), splat(-1.0f))));
    const F measure = min(measured(t, row), as_float(infinity));
    const I bits = bits_of(max(measure, as_float(and_(or_(no_lane, too_great), infinity))));
    // bits of numbers that are not negative are in their order
    const int32_t least_key = -largest(subtract(splat_int(0), or_(and_(bits, splat_int(~15)), lanes)));
    const float found = __builtin_bit_cast(float, least_key & ~15);
    if (found < best.measure) best = taken(q, t, least_key & 15, found);
  }
  static Candidate taken(const Tried& q, const Totals& t, int lane, float measure = 0) {
    alignas(64) float lanes[5][16];
    store(lanes[0], q.scale), store(lanes[1], q.point), store(lanes[2], t.squares);
    store(lanes[3], t.along), store(lanes[4], t.plain);  // of -e
    return {lanes[0][lane], lanes[1][lane], lanes[2][lane], -lanes[3][lane], -lanes[4][lane], measure};
  }

  // The range of `from`, which has one end without zero points, times factors.
  void try_stage(const Row& row, const Candidate& from, int begin, int count, Part& part, Candidate& best) const {
    const F base = splat(from.scale), high = load_as(Element::f32, s.high + begin, count);
    Tried q;
    if constexpr (kZero) {
      const float below = from.point - least, steps = greatest - least;
      const F low = mul(splat(below), load_as(Element::f32, s.low + begin, count));
      const F span = fma(splat(steps - below), high, low);
      q = stored(row, mul(span, splat(from.scale / steps)), mul(base, low), splat(least));
    } else {
      q = stored(row, mul(base, high), zero(), zero());
    }
    choose(row, q, summing.totals_of(row.number, q, part, false), count, best);
  }

  // Least squares for the codes of `from`, as `Rows.fitted` has them.
  Tried fitted(const Row& row, const Candidate& from) const {
    const double e2 = from.squares, ex = from.along, x2 = row.lost, share = row.share, scale = from.scale;
    double y2 = e2 + 2 * ex + x2, yx = ex + x2;
    const double square = y2 + share * yx * yx;
    if constexpr (!kZero) {
      const double by = alike(scale * (yx * (1 + share * x2) / square), scale);
      return stored(row, splat(static_cast<float>(by)), zero(), zero());
    }
    const double e1 = from.plain, x1 = row.plain, count = row.count;
    const double y1 = e1 + x1, mixed = y1 + share * yx * x1, level = count + share * x1 * x1;
    const double grown = -(e2 + ex + share * ex * yx), moved = -(e1 + share * ex * x1);
    const double determinant = square * level - mixed * mixed;
    double by = alike(scale * (1 + (grown * level - moved * mixed) / determinant), scale);
    const double shift = (moved * square - grown * mixed) / determinant / by;
    const double wanted = __builtin_isfinite(shift) ? from.point - shift : from.point;
    const float point =
        first_of(stored_point(splat(static_cast<float>(wanted)), mul(splat(static_cast<float>(by)), row.unit)));
    const double change = scale * (from.point - point);
    y2 += change * (2 * y1 + change * count), yx += change * x1;
    by = alike(scale * (yx * (1 + share * x2) / (y2 + share * yx * yx)), scale);
    return stored(row, splat(static_cast<float>(by)), zero(), splat(point));
  }

  void row(int64_t number, Part& part) const {
    const ScaleSums& rows = s.rows;
    if (summing.is_one_part()) read_part<kWeighted>(rows, number, 0, part);
    const float scale = rows.scale[number], point = kZero ? rows.zero[number] : 0.0f;
    const Tried start = Tried::of(&scale, &point, 1);
    const Totals at_first = summing.totals_of(number, start, part, true);
    Candidate best = taken(start, at_first, 0);
    const Row own = row_of(number, best.squares, part);
    best.measure = first_of(measured(at_first, own));
    const Candidate first = best;
    int begin = 0;
    for (int32_t i = 0; i < s.stage_count; begin += s.stages[i++]) {
      const Candidate from = best;
      for (int j = 0; j < s.stages[i]; j += 16) {
        try_stage(own, from, begin + j, s.stages[i] - j < 16 ? s.stages[i] - j : 16, part, best);
      }
    }
    Candidate current = best;
    for (int32_t i = 0; i < s.fits; ++i) {
      const Tried q = fitted(own, current);
      const Totals t = summing.totals_of(number, q, part, true);
      current = taken(q, t, 0);
      choose(own, q, t, 1, best);
    }
    s.scale[number] = best.scale;
    if constexpr (kZero) s.zero[number] = best.point;
    s.better[number] = is_better(own, first, best, part);
  }
  // Whether a candidate, whose errors are measured without doubt near ties, is better than the start by more than sums
  // in float32 are wrong.
  bool is_better(const Row& row, const Candidate& first, const Candidate& best, Part& part) const {
    if (best.measure == first.measure) return false;
    const Tried q = Tried::of(&best.scale, &best.point, 1);
    const Totals t = summing.totals_of(row.number, q, part, true);
    const float sure = 1 - kCertain;
    return first_of(t.squares) < sure * first.squares && first_of(measured(t, row)) < sure * first.measure &&
           first.squares > kLeastSquares;
  }
  static float first_of(F v) {
    alignas(64) float lanes[16];
    store(lanes, v);
    return lanes[0];
  }
  // Sums over a row that do not depend on a scale.
  Row row_of(int64_t number, float allowed, Part& part) const {
    Row row{number, splat(s.unit ? s.unit[number] : 1.0f), 0, 0, 0, 0, allowed};
    for (int64_t begin = 0; begin < s.rows.columns; begin += kPart) {
      if (!summing.is_one_part()) read_part<kWeighted>(s.rows, number, begin, part);
      F squares = zero(), plain = zero(), count = zero();
      for (int64_t i = 0; i < part.count; i += 16) {
        const F x = load(part.x + i), w = part.template weight_at<kWeighted>(i), counted = mul(w, x);
        squares = fma(counted, x, squares), plain = add(plain, counted), count = add(count, w);
      }
      row.lost += sum(squares), row.plain += sum(plain), row.count += sum(count);
    }
    if (s.gain != 0 && row.lost != 0) row.share = static_cast<float>(s.gain / row.lost);
    return row;
  }
};

static inline void search_rows(const SearchScales& s, int64_t begin, int64_t end) {
  with_kinds(s.rows, [&]<bool kZero, bool kWeighted, bool kPowers>() {
    with_values(s.rows.format, [&]<class Values>(const Values& values) {
      const Search<kZero, kWeighted, kPowers, Values> search(s, values);
      Part part;
      for (int64_t r = begin; r < end; ++r) search.row(r, part);
    });
  });
}

}  // namespace
}  // namespace ao::AO_ISA::sums
