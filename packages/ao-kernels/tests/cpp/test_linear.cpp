// run_linear against float64, for every format that a weight in tiles can have.
#include "linear_cases.h"

using namespace ao;
using namespace ao::test;

namespace {

std::vector<Kind> kinds_of(int bits, Act act) {
  const bool integers = act == Act::int8 || act == Act::uint8;
  if (integers) return bits <= 4 ? std::vector{Kind::table, Kind::exact, Kind::integer} : std::vector{Kind::integer};
  if (bits <= 6) return {Kind::table, Kind::exact, Kind::integer};
  if (bits == 7) return {Kind::table, Kind::integer};
  return {Kind::table, Kind::integer, Kind::symmetric};
}

constexpr Element kElements[] = {Element::f32, Element::bf16, Element::f16};
constexpr Act kActs[] = {Act::none, Act::int8, Act::uint8, Act::e4m3, Act::e5m2};
constexpr int64_t kRows[] = {1, 2, 3, 4, 5, 7, 8, 17};

}  // namespace

TEST_CASE("every format, with every number of rows") {
  for (int bits = 1; bits <= 8; ++bits) {
    for (Act act : kActs) {
      for (Kind kind : kinds_of(bits, act)) {
        for (int64_t m : kRows) check({.bits = bits, .kind = kind, .m = m, .act = act});
      }
    }
  }
}

TEST_CASE("every type of activations") {
  for (int bits = 1; bits <= 8; ++bits) {
    for (Act act : kActs) {
      for (Kind kind : kinds_of(bits, act)) {
        for (Element type : kElements) {
          for (int64_t m : {1, 6}) check({.bits = bits, .kind = kind, .m = m, .type = type, .act = act, .bias = true});
        }
      }
    }
  }
}

TEST_CASE("every scale and zero point") {
  for (int bits : {4, 7, 8}) {
    for (Kind kind : {Kind::integer, Kind::table}) {
      for (Scale scale : {Scale::f32, Scale::bf16, Scale::f16, Scale::e8m0, Scale::e4m3}) {
        for (Zero zero : {Zero::none, Zero::u8, Zero::f32, Zero::bf16, Zero::f16}) {
          for (int64_t m : {1, 5}) {
            for (Act act : {Act::none, Act::int8, Act::uint8}) {
              // zero points that are codes belong to integers
              if (kind != Kind::integer && (act != Act::none || zero == Zero::u8)) continue;
              check({.bits = bits, .kind = kind, .m = m, .k = 100, .act = act, .scale = scale, .zero = zero});
            }
          }
        }
      }
    }
  }
}

TEST_CASE("scales of scales, and zero points that are scaled") {
  for (Scale scale : {Scale::u8, Scale::i8, Scale::e4m3, Scale::f16, Scale::f32, Scale::bf16}) {
    for (int64_t span : {0, 1, 3, 4, 100}) {
      for (Zero zero : {Zero::none, Zero::f32, Zero::scaled}) {
        for (int64_t m : {1, 3, 6}) {
          for (int bits : {2, 4, 6}) {
            const Act act = bits == 4 && m == 3 ? Act::uint8 : bits == 2 && m != 3 ? Act::int8 : Act::none;
            const Element type = bits == 6 ? Element::bf16 : Element::f32;
            check({.bits = bits, .m = m, .n = 20, .type = type, .act = act, .scale = scale, .zero = zero,
                   .span = span, .offset = scale});
          }
          check({.kind = Kind::table, .m = m, .n = 20, .scale = scale, .zero = zero, .span = span});
        }
      }
    }
  }
}

TEST_CASE("ragged sizes and groups") {
  for (int bits : {3, 4, 8}) {
    for (int64_t group : {int64_t{16}, int64_t{24}, int64_t{32}, int64_t{128}, kAll}) {
      for (int64_t k : {1, 16, 23, 130, 700}) {
        for (int64_t n : {1, 15, 16, 33}) {
          for (int64_t m : {1, 6}) {
            for (Act act : {Act::none, Act::int8}) {
              check({.bits = bits, .m = m, .n = n, .k = k, .group = group, .act = act});
              check({.bits = bits, .m = m, .n = n, .k = k, .group = group, .act = act, .zero = Zero::u8});
            }
          }
        }
      }
    }
  }
}

TEST_CASE("float8 formats, and others with a sign bit") {
  const std::vector<float> noise = normal(128, 3);
  for (int format = 0; format < 5; ++format) {
    std::vector<float> table(256);
    for (int c = 0; c < 256; ++c) {
      double value = format == 0 ? e4m3(c) : format == 1 ? e5m2(c) : small_float(c, 3, 4, 3);
      if (format == 3) value = (c < 128 ? -1 : 1) * e4m3(c % 128);  // the top bit clear: negative
      if (format == 4) value = round_to_bf16(noise[static_cast<size_t>(c % 128)]) * (c < 128 ? 1.0f : -1.0f);
      table[static_cast<size_t>(c)] = static_cast<float>(value);
    }
    for (int64_t m : {1, 2, 6}) {
      const Case c{.bits = 8, .kind = Kind::symmetric, .m = m, .n = 20, .table = table};
      check(c);
      if (format > 1) continue;
      Call call = make_call(c);
      for (int code : {0x7f, 0xff}) {  // NaN in row 2, column 5 of the first tile
        call.weight.qdata[64 + 4 * 2 + 1] = static_cast<uint8_t>(code);
        run_linear(call.linear);
        const std::vector<float> y = results(c, call);
        for (int64_t i = 0; i < m * 20; ++i) CHECK(std::isnan(y[static_cast<size_t>(i)]) == (i % 20 == 2));
      }
    }
  }
}

TEST_CASE("tables of whole numbers, up to those that need all bits of a byte") {
  for (int bits : {4, 6}) {
    for (float greatest : {7.0f, 63.0f, 64.0f, 127.0f, 200.0f}) {
      std::vector<float> table(size_t{1} << bits, -greatest);  // mostly far from each other
      for (size_t c = 0; c < table.size(); c += 2) table[c] = greatest - static_cast<float>(c % 5);
      for (Element type : {Element::f32, Element::bf16}) {
        check({.bits = bits, .kind = Kind::exact, .m = 1, .k = 512, .group = 128, .type = type, .table = table});
      }
    }
  }
}

TEST_CASE("codes of value 0 make exactly 0, whatever their scale") {
  for (int bits = 2; bits <= 8; ++bits) {
    for (Kind kind : {Kind::table, Kind::exact}) {
      if (kind == Kind::exact && bits > 6) continue;
      for (float lift : {0.0f, 3.0f, -3.0f}) {  // values of both signs, or none below 0, or none above
        const int zero = bits == 2 ? 1 : 5 % (1 << bits);
        std::vector<float> table = table_of(bits, kind, false, 7);
        for (float& value : table) value = round_to_bf16(lift == 0 ? value : std::copysign(value, lift));
        if (kind == Kind::table) table[0] *= 1.0001f;  // no multiple of anything
        table[static_cast<size_t>(zero)] = 0;
        for (Element type : kElements) {
          for (int64_t m : {1, 2, 3, 4, 6, 40}) {
            const Case c{.bits = bits, .kind = kind, .m = m, .n = 21, .k = 300, .group = 48, .type = type,
                         .scale = Scale::f32, .table = table};
            Call call = make_call(c);
            Weight& w = call.weight;
            for (int64_t group = 0; group < w.groups; ++group) {  // all of row 7, and every second group of row 18
              for (int64_t row : {7, 18}) {
                if (row == 18 && group % 2) continue;
                set(w.scale, (row / 16 * w.groups + group) * 16 + row % 16, 1000.0f);
                for (int64_t column = group * 48; column < std::min<int64_t>(300, group * 48 + 48); ++column) {
                  const int64_t tile = row / 16 * w.tiles + group * 3 + column % 48 / 16;
                  put_code(w, bits, tile, static_cast<int>(row % 16), static_cast<int>(column % 48 % 16), zero);
                  w.values[static_cast<size_t>(row * c.k + column)] = w.sizes[static_cast<size_t>(row * c.k + column)] = 0;
                }
              }
            }
            run_linear(call.linear);
            const std::vector<float> y = results(c, call);
            const Exact exact = expected(c, call);
            const std::string label = text(c);
            CAPTURE(label);
            for (int64_t r = 0; r < m; ++r) {
              CHECK(y[static_cast<size_t>(r * c.n + 7)] == 0.0f);
              CHECK(y[static_cast<size_t>(r * c.n + 18)] ==
                    doctest::Approx(exact.y[static_cast<size_t>(r * c.n + 18)]).epsilon(0.05).scale(20.0));
            }
          }
        }
      }
    }
  }
}

TEST_CASE("as many rows as tile registers are for") {
  size_t turn = 0;  // of the types, which meet each of the rest in some case
  for (int bits : {1, 4, 6, 7, 8}) {
    for (Act act : kActs) {
      const int64_t m = act == Act::int8 || act == Act::uint8 ? 97 : 13;
      for (Kind kind : kinds_of(bits, act)) {
        for (int64_t group : {int64_t{24}, int64_t{64}, kAll}) {
          const Element type = kElements[turn++ % std::size(kElements)];
          check({.bits = bits, .kind = kind, .m = m, .n = 18, .k = 120, .group = group, .type = type, .act = act});
        }
      }
    }
  }
  // panels of several steps, steps that end within them, half a register at the end, sums of several panels
  for (Act act : {Act::none, Act::int8, Act::uint8}) {
    for (Zero zero : {Zero::none, Zero::u8, Zero::f32}) {
      for (int64_t group : {int64_t{32}, int64_t{96}, int64_t{128}, int64_t{600}, kAll}) {
        const Element type = kElements[turn++ % std::size(kElements)];
        check({.m = 97, .n = 34, .k = 1100, .group = group, .type = type, .act = act, .zero = zero, .bias = true});
      }
    }
  }
  // rows of activations that fill no register, and more than fit the second cache
  for (int64_t m : {16, 32, 47}) check({.bits = 8, .m = m, .k = 90, .group = kAll, .type = Element::bf16, .x_gap = 3, .y_gap = 5});
  check({.bits = 8, .m = 260, .n = 70, .k = 1600, .group = kAll, .type = Element::bf16});
  check({.m = 260, .n = 70, .k = 3200, .group = 128, .act = Act::int8});
}

TEST_CASE("scales of groups, applied to sums of products of several bfloat16 numbers") {
  // an odd number of blocks of rows and of N, registers that are half full, steps of several panels, a last group that is
  // short; small groups take as many rows to pay
  for (int64_t group : {16, 32, 48, 80, 600}) {
    for (Zero zero : {Zero::none, Zero::u8, Zero::bf16, Zero::scaled}) {
      for (Element type : {Element::f32, Element::f16}) {
        const int64_t m = group == 16 && type == Element::f32 ? 201 : 40;
        check({.bits = 5, .m = m, .n = 40, .k = 1300, .group = group, .type = type, .zero = zero, .bias = true});
      }
    }
  }
  check({.bits = 3, .kind = Kind::exact, .m = 193, .n = 40, .k = 300, .group = 16, .zero = Zero::f32});
  for (Act act : {Act::none, Act::e4m3}) {
    for (Scale scale : {Scale::f16, Scale::e8m0}) {
      check({.bits = 6, .kind = Kind::exact, .m = 33, .n = 50, .k = 700, .act = act, .scale = scale});
      check({.bits = 8, .kind = Kind::symmetric, .m = 33, .n = 50, .k = 700, .group = 128, .act = act, .scale = scale});
    }
  }
}

TEST_CASE("six products of bfloat16 numbers, from as many rows on as they take less time than vectors") {
  for (int64_t m : {191, 193, 225}) {
    for (int64_t group : {int64_t{16}, int64_t{64}, kAll}) {
      check({.kind = Kind::table, .m = m, .n = 40, .k = 700, .group = group, .scale = Scale::f32, .bias = true});
    }
  }
}

TEST_CASE("more rows than are packed at a time") {
  for (Act act : {Act::none, Act::uint8}) check({.m = 500, .n = 20, .k = 40, .act = act});
}

TEST_CASE("rows of activations and outputs with gaps, which are neither read nor written") {
  for (Element type : kElements) {
    for (int64_t m : {1, 2, 9}) {
      Case c{.m = m, .n = 21, .k = 37, .type = type, .x_gap = 5, .y_gap = 3};
      check(c);
      Call call = make_call(c);
      run_linear(call.linear);
      const auto size = static_cast<int64_t>(size_of(type));
      for (int64_t r = 0; r + 1 < m; ++r) {
        for (int64_t i = (r * 24 + 21) * size; i < (r + 1) * 24 * size; ++i) {
          CHECK(call.y[static_cast<size_t>(i)] == 0xff);
        }
      }
    }
  }
}

TEST_CASE("several threads compute the same bits as one") {
  for (int bits : {4, 8}) {
    for (Act act : {Act::none, Act::int8, Act::e4m3}) {
      for (auto [m, n] : {std::pair{1, 16}, std::pair{1, 330}, std::pair{4, 330}, std::pair{19, 16}, std::pair{130, 330}}) {
        const Element type = act == Act::none ? Element::bf16 : Element::f32;
        const Case c{.bits = bits, .m = m, .n = n, .k = 300, .type = type, .act = act};
        Call one = make_call(c);
        run_linear(one.linear);
        for (int count : {2, 3, 8}) {
          Threads threads(count);
          Call many = make_call(c);
          run_linear(many.linear);
          CHECK(many.y == one.y);
        }
      }
    }
  }
}

TEST_CASE("nothing is written where there are no rows or columns") {
  Call call = make_call({.m = 1, .n = 5});
  for (auto [m, n] : {std::pair{0, 5}, std::pair{1, 0}}) {
    call.linear.m = m, call.linear.n = n;
    run_linear(call.linear);
    CHECK(std::all_of(call.y.begin(), call.y.end(), [](uint8_t byte) { return byte == 0xff; }));
  }
}

TEST_CASE("without columns of activations the output is the bias") {
  for (int64_t m : {1, 6}) {
    Call call = make_call({.m = m, .n = 20, .k = 16, .group = 16, .bias = true});
    call.linear.k = call.linear.groups = call.linear.spans = call.linear.tiles = 0;
    run_linear(call.linear);
    for (int64_t i = 0; i < m * 20; ++i) {
      CHECK(get(Element::f32, call.y, i) == get(Element::f32, call.bias, i % 20));
    }
  }
}

TEST_CASE("scales of 8 bits: every code") {
  for (Scale type : {Scale::e8m0, Scale::e4m3, Scale::u8, Scale::i8}) {
    const auto value = [type](int code) -> double {
      if (type == Scale::e8m0) return code == 255 ? NAN : std::ldexp(1.0, code - 127);
      if (type == Scale::e4m3) return e4m3(code);
      return type == Scale::i8 ? static_cast<int8_t>(code) : code;
    };
    const int one = type == Scale::e8m0 ? 127 : type == Scale::e4m3 ? 0x38 : 1;
    for (int64_t m : {1, 6}) {
      Call call = make_call({.m = m, .n = 256, .k = 32, .group = 32, .scale = type});
      std::vector<uint8_t>& scale = call.weight.scale;
      std::fill(scale.begin(), scale.end(), static_cast<uint8_t>(one));
      run_linear(call.linear);
      const std::vector<uint8_t> plain = call.y;
      for (size_t row = 0; row < 256; ++row) scale[row] = static_cast<uint8_t>(row);
      run_linear(call.linear);
      for (int64_t i = 0; i < m * 256; ++i) {
        const double exact = get(Element::f32, plain, i) * value(static_cast<int>(i % 256));
        const double now = get(Element::f32, call.y, i);
        CHECK(std::isnan(now) == std::isnan(exact));
        if (!std::isnan(exact)) CHECK(now == static_cast<float>(exact));
      }
    }
  }
}

TEST_CASE("scales of 8 bits: NaN and the least ones") {
  struct Codes {
    Scale type;
    uint8_t one, nan, least;
    double least_value;
  };
  for (const Codes& codes : {Codes{Scale::e8m0, 127, 255, 0, 0x1p-127}, Codes{Scale::e4m3, 0x38, 0x7f, 1, 0x1p-9}}) {
    for (int64_t m : {1, 6}) {
      Call call = make_call({.m = m, .n = 16, .k = 32, .group = 32, .scale = codes.type});
      std::vector<uint8_t>& scale = call.weight.scale;
      std::fill(scale.begin(), scale.end(), codes.one);
      const std::vector<float> outer(16, 0x1p20f);
      call.linear.scale.outer = outer.data(), call.linear.scale.outer_type = Scale::f32;
      run_linear(call.linear);
      const std::vector<uint8_t> plain = call.y;
      scale[3] = codes.nan, scale[4] = codes.least;
      run_linear(call.linear);
      for (int64_t i = 0; i < m * 16; ++i) {
        const double before = get(Element::f32, plain, i), now = get(Element::f32, call.y, i);
        CHECK(std::isnan(now) == (i % 16 == 3));
        if (i % 16 != 3) CHECK(now == before * (i % 16 == 4 ? codes.least_value : 1));
      }
    }
  }
}
