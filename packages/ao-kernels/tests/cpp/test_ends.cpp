// Activations at the ends of their type: zeros, subnormal and very large numbers, infinity, NaN.
#include "linear_cases.h"

using namespace ao;
using namespace ao::test;

namespace {

constexpr Element kElements[] = {Element::f32, Element::bf16, Element::f16};
constexpr Act kActs[] = {Act::none, Act::int8, Act::uint8, Act::e4m3, Act::e5m2};

}  // namespace

TEST_CASE("activations that are subnormal, or nearly, count") {
  for (int bits : {4, 6, 8}) {
    for (Kind kind : {Kind::table, Kind::integer}) {
      for (Element type : {Element::f32, Element::bf16}) {
        for (int64_t m : {1, 2, 6, 40}) {
          for (int exponent : {-128, -120, -90, -60}) {
            const Case c{.bits = bits, .kind = kind, .m = m, .n = 20, .k = 256, .group = 64, .type = type,
                         .zero = kind == Kind::integer ? Zero::f32 : Zero::none};
            Call call = make_call(c);
            for (int64_t i = 0; i < m * c.k; ++i) {
              put(type, call.x, i, static_cast<float>(std::ldexp(get(type, call.x, i), exponent)));
            }
            run_linear(call.linear);
            const Exact exact = expected(c, call);
            const std::vector<float> y = results(c, call);
            double noise = 0;
            for (size_t i = 0; i < y.size(); ++i) noise += std::pow(std::ldexp(y[i] - exact.y[i], 100), 2);
            const std::string label = text(c);
            CAPTURE(label);
            // outputs are rounded to multiples of the least subnormal number
            const double least = std::ldexp(type == Element::f32 ? 0x1p-149 : 0x1p-133, 100);
            CHECK(std::sqrt(noise) <= bound(c) * std::ldexp(exact.norm, 100) + least * std::sqrt(y.size() * c.k));
          }
        }
      }
    }
  }
}

TEST_CASE("sums do not leave float32 where scales bring them back") {
  struct Sizes {
    int x, weight;
  };
  for (const Sizes sizes : {Sizes{124, -30}, Sizes{-140, 60}}) {
    for (Kind kind : {Kind::table, Kind::integer}) {
      for (Element type : {Element::f32, Element::bf16}) {
        for (int64_t m : {1, 2, 6, 40}) {
          const Case c{.kind = kind, .m = m, .n = 20, .k = 256, .group = 64, .type = type, .scale = Scale::f32,
                       .zero = kind == Kind::integer ? Zero::f32 : Zero::none};
          Call call = make_call(c);
          Weight& w = call.weight;
          for (size_t i = 0; i < w.scale.size() / 4; ++i) {
            float scale;
            std::memcpy(&scale, w.scale.data() + 4 * i, 4);
            set(w.scale, static_cast<int64_t>(i), std::ldexp(scale, sizes.weight));
          }
          for (double& value : w.values) value = std::ldexp(value, sizes.weight);
          for (double& size : w.sizes) size = std::ldexp(size, sizes.weight);
          for (int64_t i = 0; i < m * c.k; ++i) {
            put(type, call.x, i, std::ldexp(static_cast<float>(get(type, call.x, i)), sizes.x));
          }
          run_linear(call.linear);
          const Exact exact = expected(c, call);
          const std::vector<float> y = results(c, call);
          double noise = 0;
          for (size_t i = 0; i < y.size(); ++i) noise += std::pow(y[i] - exact.y[i], 2);
          const std::string label = text(c);
          CAPTURE(label);
          CHECK(std::sqrt(noise) <= bound(c) * exact.norm);
        }
      }
    }
  }
}

TEST_CASE("a token of zeros makes exactly 0, with zero points too") {
  for (Act act : kActs) {
    for (int64_t group : {int64_t{64}, kAll}) {
      for (int64_t m : {1, 3, 40, 110}) {
        const Case c{.m = m, .n = 70, .k = 1100, .group = group, .act = act, .scale = Scale::f32};
        Call call = make_call(c);
        for (int64_t i = 0; i < c.k; ++i) put(c.type, call.x, m / 2 * c.k + i, 0.0f);
        run_linear(call.linear);
        const std::vector<float> y = results(c, call);
        const std::string label = text(c);
        CAPTURE(label);
        for (int64_t i = 0; i < c.n; ++i) CHECK(y[static_cast<size_t>(m / 2 * c.n + i)] == 0.0f);
      }
    }
  }
}

TEST_CASE("a token with an infinity has no finite output, and leaves the others alone") {
  for (Act act : {Act::int8, Act::uint8, Act::e4m3, Act::e5m2}) {
    for (Element type : kElements) {
      for (int64_t m : {1, 3, 40, 110}) {
        for (float odd : {INFINITY, -INFINITY}) {
          const Case c{.bits = 4, .m = m, .n = 20, .k = 256, .group = 64, .type = type, .act = act, .zero = Zero::none};
          Call call = make_call(c), same = make_call(c);
          put(type, call.x, 100, odd);
          run_linear(call.linear);
          run_linear(same.linear);
          const std::vector<float> y = results(c, call), before = results(c, same);
          const std::string label = text(c);
          CAPTURE(label);
          for (size_t i = 0; i < y.size(); ++i) {
            if (i < 20) CHECK(!std::isfinite(y[i]));
            if (i >= 20) CHECK(y[i] == before[i]);
          }
        }
      }
    }
  }
}

TEST_CASE("an infinity spreads as in the dense product, whatever zero points take off") {
  for (Zero zero : {Zero::none, Zero::u8, Zero::f32, Zero::scaled}) {
    for (Element type : kElements) {
      for (int64_t m : {1, 3, 40, 110}) {
        for (float odd : {INFINITY, -INFINITY}) {
          const Case c{.bits = 4, .m = m, .n = 20, .k = 256, .group = 64, .type = type, .zero = zero};
          Call call = make_call(c);
          put(type, call.x, 100, odd);
          run_linear(call.linear);
          const std::vector<float> y = results(c, call);
          const std::string label = text(c);
          CAPTURE(label);
          for (int64_t i = 0; i < c.n; ++i) {
            const double dense = call.weight.values[static_cast<size_t>(i * c.k + 100)] * odd;
            const float found = y[static_cast<size_t>(i)];
            CHECK((std::isnan(dense) ? std::isnan(found) : found == dense));
          }
        }
      }
    }
  }
}

TEST_CASE("NaN and infinity spoil their own row of the output only") {
  for (Act act : kActs) {
    for (int64_t m : {3, 9, 100}) {
      for (float spoilt : {NAN, INFINITY}) {
        const Case c{.m = m, .n = 20, .act = act};
        Call call = make_call(c);
        put(Element::f32, call.x, c.k + 7, spoilt);
        run_linear(call.linear);
        const std::vector<float> y = results(c, call);
        for (int64_t i = 0; i < m * 20; ++i) {
          // an infinity has codes like any other number, and an infinite scale is clamped
          if (i / 20 == 1 && !std::isnan(spoilt) && act != Act::none) continue;
          CHECK(std::isfinite(y[static_cast<size_t>(i)]) == (i / 20 != 1));
        }
      }
    }
  }
}
