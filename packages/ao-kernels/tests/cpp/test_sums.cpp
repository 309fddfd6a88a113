// scale_sums and learned_gradients against their definitions in float64.
#include "sums/sums.h"

#include "quantize/quantize.h"
#include "support.h"

using namespace ao;
using namespace ao::test;

namespace {

// Integers in two's complement, or values that are no integers, in the order of their codes.
Format format(int bits, bool whole) {
  Format f{};
  f.bits = bits;
  f.rule = whole ? Rule::integer : Rule::search;
  const int codes = 1 << bits, half = codes / 2;
  std::vector<int32_t> steps;
  float before = 0;
  for (int u = 0; u < codes; ++u) {
    f.order[u] = static_cast<uint8_t>(u);
    const float value = static_cast<float>(u - half) / 8 + (u == codes - 1 ? 0.5f : 0.0f);
    f.table[u] = whole ? static_cast<float>((u ^ half) - half) : value;
    if (u > 0) {
      const float first = std::nextafter((before + value) / 2, INFINITY);
      int32_t key;
      std::memcpy(&key, &first, 4);
      steps.push_back(key < 0 ? key ^ 0x7fffffff : key);
    }
    before = value;
  }
  set_steps(f, steps.data());
  REQUIRE(complete(f) == nullptr);
  return f;
}

double nearest_value(const Format& f, double v) {
  double best = f.table[0];
  for (int u = 1; u < 1 << f.bits; ++u) {
    if (std::abs(f.table[u] - v) < std::abs(best - v)) best = f.table[u];
  }
  return best;
}

struct Case {
  int bits;
  bool whole;
  int64_t columns, candidates;
  bool zero, whole_zero, weighted;
  float power;
};

void compare(const Case& c) {
  const int64_t rows = 5;
  const std::vector<float> x = normal(static_cast<size_t>(rows * c.columns), 1);
  std::vector<float> weights = normal(x.size(), 2), scale = normal(static_cast<size_t>(rows * c.candidates), 3);
  std::vector<float> zero = normal(scale.size(), 4);
  for (float& w : weights) w = std::abs(w);
  for (float& v : scale) v = std::abs(v) / 4 + 0.05f;
  for (float& z : zero) z = c.whole_zero ? std::nearbyint(z) : z;
  scale.back() = 0;
  std::vector<float> sums(static_cast<size_t>((c.power == 0 ? 3 : 4) * rows * c.candidates));
  ScaleSums s{format(c.bits, c.whole), x.data(), Element::f32, c.weighted ? weights.data() : nullptr, scale.data(),
              c.zero ? zero.data() : nullptr, c.power, sums.data(), rows, c.columns, c.candidates};
  scale_sums(s);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t k = 0; k < c.candidates; ++k) {
      const size_t at = static_cast<size_t>(r * c.candidates + k), plane = scale.size();
      const double by = scale[at], point = c.zero ? zero[at] : 0;
      double expected[4] = {}, sizes[4] = {};
      for (int64_t i = 0; i < c.columns; ++i) {
        const size_t place = static_cast<size_t>(r * c.columns + i);
        const double w = c.weighted ? weights[place] : 1, v = x[place];
        const double e = by == 0 ? -v : (nearest_value(s.format, v / by + point) - point) * by - v;
        const double parts[4] = {w * e * e, w * e * v, w * e, c.power == 0 ? 0 : w * std::pow(std::abs(e), c.power)};
        for (int j = 0; j < 4; ++j) expected[j] += parts[j], sizes[j] += std::abs(parts[j]);
      }
      for (int j = 0; j < (c.power == 0 ? 3 : 4); ++j) {
        CAPTURE(c.bits);
        CAPTURE(c.columns);
        CAPTURE(c.candidates);
        CAPTURE(j);
        CHECK(std::abs(sums[j * plane + at] - expected[j]) <= 1e-4 * sizes[j] + (j == 3 ? 1e-4 : 1e-6));
      }
    }
  }
}

void compare_learned(int bits, bool whole, int64_t columns, bool zero, float reach) {
  const int64_t rows = 5;
  const std::vector<float> x = normal(static_cast<size_t>(rows * columns), 1), grad = normal(x.size(), 2);
  std::vector<float> scale = normal(rows, 3), point = normal(rows, 4), out(x.size()), sums(2 * rows);
  for (float& v : scale) v = std::copysign(std::abs(v) / (whole ? 4.0f : 1.0f) + 0.1f, v);
  LearnedGradients call{format(bits, whole), x.data(), grad.data(), Element::f32, Element::f32, scale.data(),
                        zero ? point.data() : nullptr, 0, 0, out.data(), sums.data(), rows, columns};
  call.low = call.format.least - reach, call.high = call.format.greatest + reach;
  learned_gradients(call);
  for (int64_t r = 0; r < rows; ++r) {
    const size_t row = static_cast<size_t>(r);
    double expected[2] = {}, size = 0;
    for (int64_t i = 0; i < columns; ++i) {
      const size_t at = static_cast<size_t>(r * columns + i);
      const float ratio = x[at] / scale[row], place = zero ? ratio + point[row] : ratio;
      const bool outside = place < call.low || place > call.high;
      const double value = nearest_value(call.format, place), g = grad[at];
      CHECK(out[at] == (outside ? 0 : grad[at]));
      expected[0] += g * (outside ? value : value - place);
      expected[1] += outside ? g : 0;
      size += std::abs(g) * (std::abs(value) + std::abs(place));
    }
    CAPTURE(bits);
    CAPTURE(columns);
    CHECK(std::abs(sums[row] - expected[0]) <= 1e-5 * size);
    CHECK(std::abs(sums[rows + row] - expected[1]) <= 1e-5 * size);
  }
}

// Squared errors of a row with one scale and zero point, in float64, and how far they shorten it.
struct Error {
  double square = 0, along = 0, lost = 0;
  double measure(double gain) const { return square + (lost == 0 ? 0 : gain / lost * along * along); }
};
Error error_of(const SearchScales& s, int64_t row, double scale, double point) {
  Error found;
  const auto* x = static_cast<const float*>(s.rows.x) + row * s.rows.columns;
  for (int64_t i = 0; i < s.rows.columns; ++i) {
    const double w = s.rows.importance ? s.rows.importance[row * s.rows.columns + i] : 1;
    const double e = (nearest_value(s.rows.format, x[i] / scale + point) - point) * scale - x[i];
    found.square += w * e * e, found.along += w * e * x[i], found.lost += w * x[i] * x[i];
  }
  return found;
}

// What is found is no worse than the start, and as good as the best of the first stage.
void compare_search(int bits, bool whole, int64_t columns, Point point, bool weighted) {
  const int64_t rows = 7;
  const std::vector<float> x = normal(static_cast<size_t>(rows * columns), 1);
  std::vector<float> weights = normal(x.size(), 2), scale(rows), zero(rows, 0), found(rows), found_zero(rows);
  bool better[rows];
  for (float& w : weights) w = std::abs(w);
  std::vector<float> factors;
  for (int i = 0; i < 19; ++i) factors.push_back(1.1f - 0.04f * static_cast<float>(i));
  for (const float f : {0.97f, 0.99f, 1.01f, 1.03f}) factors.push_back(f);
  const std::vector<float> low = factors;
  factors.insert(factors.end(), low.begin(), low.end());
  const int32_t stages[] = {19, 4};
  SearchScales s{};
  s.rows = {format(bits, whole), x.data(), Element::f32, weighted ? weights.data() : nullptr, scale.data(),
            point == Point::none ? nullptr : zero.data(), 0, nullptr, rows, columns, 1};
  for (int64_t r = 0; r < rows; ++r) {
    float greatest = 0;
    for (int64_t i = r * columns; i < (r + 1) * columns; ++i) {
      greatest = std::max(greatest, std::abs(x[static_cast<size_t>(i)]));
    }
    scale[static_cast<size_t>(r)] = static_cast<float>(2 * greatest / (s.rows.format.greatest - s.rows.format.least));
  }
  s.gain = 10, s.point = point, s.scale_type = s.point_type = Element::bf16;
  s.least_scale = 0x1p-126f, s.greatest_scale = s.greatest_point = 3e38f;
  s.low = factors.data(), s.high = factors.data() + 23, s.stages = stages, s.stage_count = 2, s.fits = 2;
  s.scale = found.data(), s.zero = point == Point::none ? nullptr : found_zero.data();
  s.better = better;
  search_scales(s);
  for (size_t r = 0; r < rows; ++r) {
    CAPTURE(bits);
    CAPTURE(columns);
    CAPTURE(static_cast<int>(point));
    const bool kept = found[r] == scale[r] && found_zero[r] == zero[r];
    CHECK((kept || round_to_bf16(found[r]) == found[r]));
    const double by_zero = point == Point::none ? 0 : found_zero[r];
    if (point == Point::whole) CHECK(std::nearbyint(by_zero) == by_zero);
    const Error start = error_of(s, static_cast<int64_t>(r), scale[r], 0);
    const Error now = error_of(s, static_cast<int64_t>(r), found[r], by_zero);
    CHECK(now.square <= start.square * 1.0001 + 1e-9);
    if (better[r]) CHECK(now.square < start.square);
    if (now.measure(10) < 0.99 * start.measure(10) && now.square < 0.99 * start.square) CHECK(better[r]);
    double best = start.measure(10);
    if (point == Point::none) {
      for (int i = 0; i < 19; ++i) {
        const float by = round_to_bf16(scale[r] * low[static_cast<size_t>(i)]);
        const Error tried = error_of(s, static_cast<int64_t>(r), by, 0);
        if (tried.square <= start.square) best = std::min(best, tried.measure(10));
      }
    }
    CHECK(now.measure(10) <= best * 1.001 + 1e-9);
  }
}

}  // namespace

TEST_CASE("searched scales are no worse than those that are tried") {
  const Threads threads(2);
  for (const bool whole : {true, false}) {
    for (const int64_t columns : {1, 7, 32, 256, 600}) {
      for (const Point point : {Point::none, Point::number, Point::offset}) {
        compare_search(4, whole, columns, point, false);
        compare_search(2, whole, columns, point, true);
      }
      if (whole) compare_search(8, whole, columns, Point::whole, false);
    }
  }
}

TEST_CASE("gradients of scales are those of rounding") {
  const Threads threads(2);
  for (const bool whole : {true, false}) {
    for (const int64_t columns : {1, 7, 16, 33, 256, 600}) {
      compare_learned(4, whole, columns, false, 0);
      compare_learned(whole ? 8 : 5, whole, columns, true, 0.5f);
      compare_learned(2, whole, columns, columns % 2 == 0, 0);
    }
  }
}

TEST_CASE("sums of errors are those of what dequantizing gives") {
  const Threads threads(2);
  for (const bool whole : {true, false}) {
    for (const int64_t columns : {1, 7, 16, 33, 256, 600}) {
      for (const int64_t candidates : {1, 4, 5, 16, 37}) {
        for (const float power : {0.0f, 0.7f}) {
          compare({4, whole, columns, candidates, false, false, false, power});
          compare({whole ? 8 : 5, whole, columns, candidates, true, false, true, power});
          compare({2, whole, columns, candidates, true, true, columns % 2 == 0, power});
        }
      }
    }
  }
}

TEST_CASE("sums of nothing") {
  ScaleSums s{};
  s.format = format(4, true);
  scale_sums(s);
  LearnedGradients call{};
  call.format = format(4, true);
  learned_gradients(call);
}
