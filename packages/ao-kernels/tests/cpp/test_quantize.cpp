#include "quantize/quantize.h"

#include <limits>

#include "numbers.h"
#include "support.h"

using ao::test::Threads;

namespace {

using Bytes = std::vector<uint8_t>;

struct Size {
  int64_t n, k, group;
};

// Two's complement integers, or a float without infinities and NaN.
std::vector<float> integers(int bits) {
  std::vector<float> table(1u << bits);
  const int half = 1 << (bits - 1);
  for (int u = 0; u < 2 * half; ++u) table[u] = static_cast<float>((u ^ half) - half);
  return table;
}

std::vector<float> floats(int bits, int mantissa, int bias) {
  std::vector<float> table(1u << bits);
  const int half = 1 << (bits - 1);
  for (int u = 0; u < half; ++u) {
    const int exponent = u >> mantissa, fraction = u & ((1 << mantissa) - 1);
    const int significand = exponent ? fraction + (1 << mantissa) : fraction;
    table[u] = std::ldexp(static_cast<float>(significand), std::max(exponent, 1) - bias - mantissa);
    table[u + half] = -table[u];
  }
  return table;
}

// Steps in the middle between values that follow one another, ties to the lower one.
ao::Format format(const std::vector<float>& table, ao::Rule rule) {
  ao::Format f{};
  f.bits = static_cast<int32_t>(std::lround(std::log2(table.size())));
  f.rule = rule;
  std::copy(table.begin(), table.end(), f.table);
  std::vector<int> order(table.size());
  for (size_t u = 0; u < table.size(); ++u) order[u] = static_cast<int>(u);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return table[a] < table[b]; });
  std::vector<int32_t> steps;
  for (size_t i = 0; i < order.size(); ++i) {
    f.order[i] = static_cast<uint8_t>(order[i]);
    if (i == 0) continue;
    const float middle = (table[order[i - 1]] + table[order[i]]) / 2;
    const float first = std::nextafter(middle, std::numeric_limits<float>::infinity());
    int32_t bits;
    std::memcpy(&bits, &first, 4);
    steps.push_back(bits < 0 ? bits ^ 0x7fffffff : bits);
  }
  ao::set_steps(f, steps.data());
  REQUIRE(ao::complete(f) == nullptr);
  return f;
}

// The code whose value is nearest in float64; of two, the even one, or for a search the lower one.
uint8_t nearest(const ao::Format& f, float v) {
  int best = 0;
  for (int u = 1; u < 1 << f.bits; ++u) {
    const double here = std::abs(double(v) - f.table[u]), there = std::abs(double(v) - f.table[best]);
    const bool preferred = f.rule == ao::Rule::search ? f.table[u] < f.table[best] : u % 2 == 0;
    if (here < there || (here == there && f.table[u] != f.table[best] && preferred)) best = u;
  }
  return static_cast<uint8_t>(best);
}

struct Parts {
  Bytes codes;
  std::vector<float> scales;
};

Parts quantize(const ao::Format& f, const std::vector<float>& x, const ao::Blocks& blocks, float reach,
               int code_bits) {
  ao::Quantize q{};
  q.blocks = blocks, q.format = f, q.x = x.data(), q.code_bits = code_bits;
  q.row_bytes = ao::packed_size(blocks.k, code_bits);
  ao::set_reach(q, reach);
  Parts parts{Bytes(static_cast<size_t>(blocks.matrices * blocks.n * q.row_bytes)),
              std::vector<float>(static_cast<size_t>(blocks.matrices * blocks.bands * blocks.groups))};
  q.codes = parts.codes.data(), q.scale = parts.scales.data();
  ao::quantize(q);
  return parts;
}

// The code of an element in a bit stream.
uint8_t code_at(const Bytes& rows, int64_t row_bytes, int64_t row, int64_t i, int bits) {
  unsigned code = 0;
  for (int b = 0; b < bits; ++b) {
    const int64_t place = i * bits + b;
    code |= (rows[row * row_bytes + place / 8] >> place % 8 & 1u) << b;
  }
  return static_cast<uint8_t>(code);
}

void check(const ao::Format& f, int64_t rows, int64_t k, int64_t block_n, int64_t block_k, float reach) {
  const ao::Blocks b = ao::blocks_of(1, rows, k, std::min(block_n, rows), std::min(block_k, k));
  std::vector<float> x = ao::test::normal(static_cast<size_t>(rows * k), 7);
  for (size_t i = 0; i < x.size(); i += 5) x[i] = std::round(x[i] * 4) / 4;
  const Parts parts = quantize(f, x, b, reach, f.bits);
  const int64_t row_bytes = ao::packed_size(k, f.bits);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t i = 0; i < k; ++i) {
      const int64_t band = row / b.block_n, group = i / b.block_k;
      float greatest = 0;
      for (int64_t r = band * b.block_n; r < std::min(rows, (band + 1) * b.block_n); ++r) {
        for (int64_t j = group * b.block_k; j < std::min(k, (group + 1) * b.block_k); ++j) {
          greatest = std::max(greatest, std::abs(x[r * k + j]));
        }
      }
      const float scale = greatest == 0 ? 1.0f : greatest / reach;
      REQUIRE(parts.scales[band * b.groups + group] == scale);
      const float v = x[row * k + i] / scale;
      const uint8_t code = code_at(parts.codes, row_bytes, row, i, f.bits);
      REQUIRE(f.table[code] == f.table[nearest(f, v)]);
    }
  }
  ao::Dequantize d{};
  std::vector<float> y(x.size());
  d.blocks = b, d.format = f, d.codes = parts.codes.data(), d.row_bytes = row_bytes;
  d.code_bits = f.bits, d.scale = parts.scales.data(), d.y = y.data();
  ao::dequantize(d);
  double signal = 0, noise = 0;
  for (int64_t i = 0; i < rows * k; ++i) {
    const int64_t row = i / k, place = row / b.block_n * b.groups + i % k / b.block_k;
    const uint8_t code = code_at(parts.codes, row_bytes, row, i % k, f.bits);
    REQUIRE(y[i] == f.table[code] * parts.scales[place]);
    signal += double(x[i]) * x[i];
    noise += (double(x[i]) - y[i]) * (double(x[i]) - y[i]);
  }
  ao::Quantize q{};
  std::vector<float> rounded(x.size()), scales(parts.scales.size());
  q.blocks = b, q.format = f, q.x = x.data(), q.y = rounded.data(), q.scale = scales.data();
  ao::set_reach(q, reach);
  ao::fake_quantize(q);
  for (size_t i = 0; i < y.size(); ++i) REQUIRE(std::memcmp(&rounded[i], &y[i], 4) == 0);
  CHECK(scales == parts.scales);

  d.x = x.data(), d.step = 1, d.run = d.counted = rows * k;
  double sums[2];
  ao::error_sums(d, sums);
  CHECK(sums[0] == doctest::Approx(signal).epsilon(1e-12));
  CHECK(sums[1] == doctest::Approx(noise).epsilon(1e-12));
}

}  // namespace

TEST_CASE("codes are the nearest ones, packed, and stand for their values") {
  Threads pool(3);
  for (int bits = 2; bits <= 8; ++bits) {
    const float reach = static_cast<float>((1 << bits) - 1) / 2;
    for (const ao::Rule rule : {ao::Rule::integer, ao::Rule::search}) {
      check(format(integers(bits), rule), 3, 70, 1, 32, reach);
      check(format(integers(bits), rule), 5, 37, 1, 7, reach);
    }
    check(format(integers(bits), ao::Rule::integer), 20, 1100, 16, 512, reach);
  }
  check(format(floats(4, 1, 1), ao::Rule::floating), 3, 70, 1, 32, 6);
  check(format(floats(6, 3, 1), ao::Rule::floating), 3, 70, 1, 33, 7.5);
  check(format(floats(6, 2, 3), ao::Rule::floating), 3, 70, 1, 70, 28);
  check(format(floats(8, 3, 7), ao::Rule::floating), 3, 70, 2, 35, 480);
  check(format(floats(8, 2, 15), ao::Rule::floating), 1, 20000, 1, 20000, 114688);
  // blocks of one column, in several shares of columns
  check(format(floats(8, 3, 7), ao::Rule::floating), 70, 300, 32, 1, 480);
  check(format(integers(8), ao::Rule::integer), 33, 20, 33, 1, 127.5);
  check(format(integers(4), ao::Rule::search), 33, 20, 16, 1, 7.5);
}

TEST_CASE("numbers are rounded as by a division, whatever their sizes") {
  Threads pool(2);
  constexpr int64_t kRows = 300, kColumns = 48;
  const ao::Format formats[] = {format(floats(8, 3, 7), ao::Rule::floating), format(integers(8), ao::Rule::integer)};
  for (const ao::Element type : {ao::Element::f32, ao::Element::bf16}) {
    std::vector<float> x = ao::test::normal(kRows * kColumns, 11);
    Bytes raw(x.size() * ao::test::size_of(type));
    for (size_t i = 0; i < x.size(); ++i) {
      const auto row = static_cast<int>(i / kColumns);
      x[i] = std::ldexp(x[i], row - 160) * (row % 7 ? 1.0f : std::ldexp(1.0f, static_cast<int>(i % 37) - 30));
      if (row % 5 == 0) x[i] = std::copysign(std::ldexp(0x1.fffffep0f, row - 160), x[i]);
      if (i % 41 == 0) x[i] = -0.0f;
      ao::test::put(type, raw, static_cast<int64_t>(i), x[i]);
    }
    for (const ao::Format& f : formats) {
      for (const auto& [block_n, block_k] : {std::pair{1, 16}, std::pair{50, 1}}) {
        ao::Quantize q{};
        q.blocks = ao::blocks_of(1, kRows, kColumns, block_n, block_k), q.format = f, q.x = raw.data(), q.type = type;
        ao::set_reach(q, f.greatest + 0.5f);
        std::vector<float> scales(static_cast<size_t>(q.blocks.bands * q.blocks.groups));
        Bytes rounded(raw.size()), expected(raw.size()), codes(x.size());
        q.scale = scales.data(), q.y = rounded.data();
        ao::fake_quantize(q);
        q.y = nullptr, q.codes = codes.data(), q.code_bits = 8, q.row_bytes = kColumns;
        ao::quantize(q);
        ao::Dequantize d{};
        d.blocks = q.blocks, d.format = f, d.codes = codes.data(), d.row_bytes = kColumns, d.code_bits = 8;
        d.scale = scales.data(), d.type = type, d.y = expected.data();
        ao::dequantize(d);
        CHECK(rounded == expected);
        std::fill(rounded.begin(), rounded.end(), uint8_t{1});
        q.y = rounded.data();
        ao::round_scaled(q);
        CHECK(rounded == expected);
      }
    }
  }
}

TEST_CASE("a table that does not follow its rule is refused") {
  ao::Format f{};
  f.bits = 4, f.rule = ao::Rule::floating;
  const std::vector<float> table = integers(4);
  std::copy(table.begin(), table.end(), f.table);
  CHECK(ao::complete(f) != nullptr);
  f.rule = ao::Rule::integer;
  CHECK(ao::complete(f) == nullptr);
  f.table[3] = 2.5f;
  CHECK(ao::complete(f) == nullptr);  // least and greatest are integers still
  f.table[7] = 7.5f;
  CHECK(ao::complete(f) != nullptr);
}

TEST_CASE("zeros of both signs have a scale of 1, and what is not a number spoils its block only") {
  const ao::Format f = format(integers(4), ao::Rule::integer);
  std::vector<float> x = ao::test::normal(96, 3);
  std::fill(x.begin(), x.begin() + 32, -0.0f);
  x[40] = std::numeric_limits<float>::quiet_NaN();
  const Parts parts = quantize(f, x, ao::blocks_of(1, 1, 96, 1, 32), 7.5f, 8);
  CHECK(parts.scales[0] == 1.0f);
  CHECK(std::isnan(parts.scales[1]));
  CHECK(parts.scales[2] > 0);
  for (int i = 0; i < 64; ++i) CHECK(parts.codes[i] == 0);
}

TEST_CASE("tiles hold the codes of their rows and columns, padded with 0") {
  Threads pool(2);
  for (int bits = 1; bits <= 8; ++bits) {
    for (const Size& size : {Size{16, 64, 32}, Size{33, 100, 24}, Size{5, 50, 7}}) {
      const int64_t n = size.n, k = size.k, group = size.group;
      CAPTURE(bits);
      CAPTURE(k);
      ao::Tiles t{};
      t.matrices = 2, t.n = n, t.k = k, t.group = group, t.bits = bits;
      t.flip = static_cast<uint8_t>((1 << bits) / 3), t.row_bytes = ao::packed_size(k, bits);
      ao::set_tiles(t);
      Bytes packed(static_cast<size_t>(2 * n * t.row_bytes));
      const Bytes codes = ao::test::codes(static_cast<size_t>(2 * n * k), 1u << bits, 11);
      for (int64_t row = 0; row < 2 * n; ++row) {
        for (int64_t i = 0; i < k * bits; ++i) {
          const unsigned bit = codes[row * k + i / bits] >> i % bits & 1u;
          packed[row * t.row_bytes + i / 8] |= static_cast<uint8_t>(bit << i % 8);
        }
      }
      Bytes qdata(static_cast<size_t>(2 * t.row_blocks * t.tiles * 32 * bits)), back(packed.size());
      t.packed = packed.data(), t.out = qdata.data();
      ao::pack_tiles(t);
      t.qdata = qdata.data(), t.out = back.data();
      ao::unpack_tiles(t);
      CHECK(back == packed);

      // the value of a stored code is the code itself, so that values tell codes
      for (int u = 0; u < 256; ++u) t.table[u] = static_cast<float>(u & ((1 << bits) - 1));
      std::vector<float> scale(static_cast<size_t>(2 * t.row_blocks * t.groups * 16), 1.0f);
      std::vector<float> y(codes.size());
      t.scale.values = scale.data(), t.span = t.groups, t.spans = 1, t.y = y.data();
      ao::dequantize_tiles(t);
      bool same = true;
      for (size_t i = 0; i < y.size(); ++i) same = same && y[i] == (codes[i] ^ t.flip);
      CHECK(same);
      unsigned ones = 0, expected = 0;
      for (const uint8_t byte : qdata) ones += static_cast<unsigned>(__builtin_popcount(byte));
      for (const uint8_t code : codes) {
        expected += static_cast<unsigned>(__builtin_popcount(code ^ t.flip));
      }
      CHECK(ones == expected);  // padding has none

      const std::vector<int64_t> ids = {n - 1, 0, n / 2};
      std::vector<float> rows(static_cast<size_t>(3 * k));
      t.ids = ids.data(), t.y = rows.data();
      ao::gather_tiles(t, 3);
      for (int64_t i = 0; i < 3 * k; ++i) REQUIRE(rows[i] == y[ids[i / k] * k + i % k]);
    }
  }
}
