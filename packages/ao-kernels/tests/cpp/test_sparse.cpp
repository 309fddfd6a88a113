// run_block_sparse, run_two_four and expand_two_four against float64, from parts written by their definition, and
// mask_tiles against all patterns.
#include <algorithm>
#include <bit>
#include <string>

#include "linear_cases.h"
#include "sparse/sparse.h"

using namespace ao;
using namespace ao::test;

namespace {

constexpr Element kElements[] = {Element::f32, Element::bf16, Element::f16};
constexpr ValueType kValues[] = {ValueType::f32, ValueType::bf16, ValueType::f16, ValueType::i8};

Element element_of(ValueType value) {
  return value == ValueType::f32 ? Element::f32 : value == ValueType::bf16 ? Element::bf16 : Element::f16;
}

// Numbers that every type has: multiples of 1/16 below 8.
std::vector<float> coarse(size_t count, uint32_t seed) {
  std::vector<float> out(count);
  const std::vector<uint8_t> random = codes(count, 255, seed);
  for (size_t i = 0; i < count; ++i) out[i] = (static_cast<float>(random[i]) - 127) / 16;
  return out;
}

// Powers of two by which activations, and scales of the weight, are multiplied.
struct Sizes {
  int x = 0, weight = 0;
};

// What belongs to no weight in particular: activations, bias and output, and what must come out.
struct Rows {
  Element type;
  int64_t m, n, k;
  std::vector<float> x, bias;
  std::vector<uint8_t> x_bytes, bias_bytes, y_bytes;

  Rows(Element type_, int64_t m_, int64_t n_, int64_t k_, Sizes sizes)
      : type(type_), m(m_), n(n_), k(k_), x(coarse(static_cast<size_t>(m * k), 1)),
        bias(coarse(static_cast<size_t>(n), 2)), x_bytes(x.size() * size_of(type)),
        bias_bytes(bias.size() * size_of(type)), y_bytes(static_cast<size_t>(m * n) * size_of(type)) {
    for (float& value : x) value = std::ldexp(value, sizes.x);
    for (float& value : bias) value = std::ldexp(value, sizes.x + sizes.weight);
    for (size_t i = 0; i < x.size(); ++i) put(type, x_bytes, static_cast<int64_t>(i), x[i]);
    for (size_t i = 0; i < bias.size(); ++i) put(type, bias_bytes, static_cast<int64_t>(i), bias[i]);
  }

  template <class Call>
  void tell(Call& t) {
    t.n = n, t.k = k, t.m = m, t.x_stride = k, t.type = type;
    t.x = x_bytes.data(), t.bias = bias_bytes.data(), t.y = y_bytes.data();
  }

  // Activations as int8 per token, in float64.
  void quantize() {
    for (int64_t r = 0; r < m; ++r) {
      float* row = x.data() + r * k;
      float greatest = 0;
      for (int64_t c = 0; c < k; ++c) greatest = std::max(greatest, std::abs(row[c]));
      const float scale = greatest == 0 ? 1.0f : greatest / 127.5f;
      for (int64_t c = 0; c < k; ++c) row[c] = std::clamp(std::nearbyint(row[c] / scale), -128.0f, 127.0f) * scale;
    }
  }

  void check(const std::vector<float>& weight, double bound) {
    std::vector<double> expected = product(x, weight, m, n, k);
    std::vector<float> found(expected.size());
    for (size_t i = 0; i < expected.size(); ++i) {
      expected[i] += bias[i % static_cast<size_t>(n)];
      found[i] = static_cast<float>(get(type, y_bytes, static_cast<int64_t>(i)));
    }
    const double rounding = type == Element::f32 ? 0 : type == Element::bf16 ? 0x1p-8 : 0x1p-11;
    CHECK(relative_error(found, expected) <= bound + rounding);
  }
};

struct BlockCase {
  ValueType value = ValueType::bf16;
  Element type = Element::f32;
  int64_t m = 5, n = 70, k = 100, side = 16;
  uint32_t empty = 2;  // one block in so many
  Act act = Act::none;
  bool scale_of_rows = true;
  Sizes sizes = {};
};

void check(const BlockCase& c) {
  CAPTURE(static_cast<int>(c.value));
  CAPTURE(static_cast<int>(c.type));
  CAPTURE(c.m);
  CAPTURE(c.n);
  CAPTURE(c.k);
  CAPTURE(c.side);
  CAPTURE(static_cast<int>(c.act));
  Rows rows(c.type, c.m, c.n, c.k, c.sizes);
  const int64_t block_rows = (c.n + c.side - 1) / c.side, block_columns = (c.k + c.side - 1) / c.side;
  const std::vector<float> dense = coarse(static_cast<size_t>(c.n * c.k), 3);
  const std::vector<uint8_t> random = codes(static_cast<size_t>(block_rows * block_columns), c.empty, 4);
  std::vector<float> weight(dense.size()), scale;
  std::vector<int32_t> columns, starts{0};
  std::vector<uint8_t> blocks;
  for (int64_t n = 0; n < (c.scale_of_rows ? c.n : 1); ++n) scale.push_back(std::ldexp((0.5f + static_cast<float>(n % 7)) / 64, c.sizes.weight));
  const int64_t together = together_of(c.value), size = bytes_of(c.value);
  for (int64_t i = 0; i < block_rows * block_columns; ++i) {
    const int64_t r0 = i / block_columns * c.side, c0 = i % block_columns * c.side;
    if (random[static_cast<size_t>(i)] == 0) {
      columns.push_back(static_cast<int32_t>(i % block_columns));
      const size_t place = blocks.size();
      blocks.resize(place + static_cast<size_t>(c.side * c.side * size), c.value == ValueType::i8 ? 128 : 0);
      for (int64_t r = 0; r < std::min(c.side, c.n - r0); ++r) {
        for (int64_t k = 0; k < std::min(c.side, c.k - c0); ++k) {
          const auto at = static_cast<size_t>((r0 + r) * c.k + c0 + k);
          const int64_t to = (k / together * c.side + r) * together + k % together;
          weight[at] = dense[at];
          if (c.value == ValueType::i8) {
            const float code = dense[at] * 16;  // from -127 to 127
            weight[at] = code * scale[c.scale_of_rows ? static_cast<size_t>(r0 + r) : 0];
            blocks[place + static_cast<size_t>(to)] = static_cast<uint8_t>(static_cast<int>(code) + 128);
          } else {
            std::vector<uint8_t> word(4);
            put(element_of(c.value), word, 0, dense[at]);
            std::memcpy(blocks.data() + place + to * size, word.data(), static_cast<size_t>(size));
          }
        }
      }
    }
    if ((i + 1) % block_columns == 0) starts.push_back(static_cast<int32_t>(columns.size()));
  }
  BlockSparse t{};
  rows.tell(t);
  blocks.push_back(0);  // so that there is an address
  t.blocks = blocks.data(), t.columns = columns.data(), t.starts = starts.data();
  t.value = c.value, t.side = c.side, t.row_blocks = block_rows, t.column_blocks = block_columns, t.act = c.act;
  if (c.value == ValueType::i8) {
    t.scale = scale.data(), t.scale_type = Element::f32, t.scale_of_rows = c.scale_of_rows;
  }
  run_block_sparse(t);
  const std::vector<uint8_t> once = rows.y_bytes;
  {
    Threads threads(3);
    run_block_sparse(t);
  }
  CHECK(rows.y_bytes == once);
  if (c.act == Act::int8) rows.quantize();
  rows.check(weight, 1e-6);
}

struct FourCase {
  ValueType value = ValueType::bf16;
  int bits = 16;  // of a code
  Element type = Element::f32;
  int64_t m = 3, n = 6, k = 150, group = 1 << 20;
  Sizes sizes = {};
};

void check(const FourCase& c) {
  CAPTURE(static_cast<int>(c.value));
  CAPTURE(c.bits);
  CAPTURE(static_cast<int>(c.type));
  CAPTURE(c.m);
  CAPTURE(c.n);
  CAPTURE(c.k);
  CAPTURE(c.group);
  Rows rows(c.type, c.m, c.n, c.k, c.sizes);
  const int64_t fours = (c.k + 3) / 4, place_bytes = (fours + 1) / 2, row_bytes = 2 * fours * c.bits / 8;
  const int64_t group = std::min(c.group, c.k), groups = (c.k + group - 1) / group;
  std::vector<uint8_t> stored(static_cast<size_t>(c.n * row_bytes)), places(static_cast<size_t>(c.n * place_bytes), 0x44);
  std::vector<float> weight(static_cast<size_t>(c.n * c.k)), scale(static_cast<size_t>(c.n * groups));
  for (size_t i = 0; i < scale.size(); ++i) scale[i] = std::ldexp((0.5f + static_cast<float>(i % 7)) / 64, c.sizes.weight);
  const std::vector<float> dense = coarse(static_cast<size_t>(c.n * fours * 2), 5);
  const std::vector<uint8_t> pairs = codes(static_cast<size_t>(c.n * fours), 6, 6);
  constexpr int kPlaces[] = {0b0100, 0b1000, 0b1100, 0b1001, 0b1101, 0b1110};
  const bool coded = c.value == ValueType::i8;
  for (int64_t n = 0; n < c.n; ++n) {
    for (int64_t g = 0; g < fours; ++g) {
      const int where = kPlaces[pairs[static_cast<size_t>(n * fours + g)]];
      uint8_t& place = places[static_cast<size_t>(n * place_bytes + g / 2)];
      place = static_cast<uint8_t>(g % 2 ? (place & 15) | where << 4 : (place & 240) | where);
      for (int64_t j = 0; j < 2; ++j) {
        const int64_t i = 2 * g + j, column = 4 * g + (j ? where >> 2 : where & 3);
        float value = column < c.k ? dense[static_cast<size_t>(n * fours * 2 + i)] : 0;
        uint8_t* to = stored.data() + n * row_bytes + i * c.bits / 8;
        if (c.bits == 4) {
          value = std::trunc(value);  // from -7 to 7
          *to = static_cast<uint8_t>(*to | (static_cast<int>(value) & 15) << (i % 2 * 4));
        } else if (coded) {
          value *= 16;
          *to = static_cast<uint8_t>(static_cast<int>(value));
        } else {
          std::vector<uint8_t> word(4);
          put(element_of(c.value), word, 0, value);
          std::memcpy(to, word.data(), static_cast<size_t>(c.bits / 8));
        }
        if (coded) value *= scale[static_cast<size_t>(n * groups + column / group % groups)];
        if (column < c.k) weight[static_cast<size_t>(n * c.k + column)] = value;
      }
    }
  }
  TwoFour t{};
  rows.tell(t);
  t.codes = stored.data(), t.places = places.data(), t.bits = c.bits, t.value = c.value;
  t.row_bytes = row_bytes, t.place_bytes = place_bytes, t.group = group, t.scale_groups = groups;
  if (coded) t.scale = scale.data(), t.scale_type = Element::f32, t.scale_of_rows = true;
  run_two_four(t);
  const std::vector<uint8_t> once = rows.y_bytes;
  {
    Threads threads(3);
    run_two_four(t);
  }
  CHECK(rows.y_bytes == once);
  rows.check(weight, 1e-6);

  std::vector<float> found(weight.size());
  t.y = found.data(), t.type = Element::f32;
  expand_two_four(t);
  CHECK(found == weight);
}

}  // namespace

TEST_CASE("blocks of every type, with every number of rows") {
  for (ValueType value : kValues) {
    for (Element type : kElements) {
      for (int64_t m : {1, 2, 6, 7, 8, 9, 17}) check(BlockCase{.value = value, .type = type, .m = m});
    }
  }
}

TEST_CASE("blocks of every size, at edges, none and all of them") {
  for (ValueType value : kValues) {
    for (int64_t side : {16, 32, 48, 64, 80, 256}) {
      for (uint32_t empty : {1, 2, 200}) {
        check(BlockCase{.value = value, .type = Element::bf16, .m = 13, .n = 3 * side, .k = 2 * side, .side = side,
                        .empty = empty});
        check(BlockCase{.value = value, .n = side - 7, .k = 2 * side + 3, .side = side, .empty = empty});
      }
    }
  }
}

TEST_CASE("activations in bytes, and one scale for all") {
  for (Element type : kElements) {
    for (int64_t side : {16, 64}) {
      for (bool scale_of_rows : {false, true}) {
        for (Act act : {Act::none, Act::int8}) {
          check(BlockCase{.value = ValueType::i8, .type = type, .m = 19, .side = side, .act = act,
                          .scale_of_rows = scale_of_rows});
        }
      }
    }
  }
}

TEST_CASE("more rows than are worked on at a time, and a row with all of the blocks") {
  check(BlockCase{.type = Element::bf16, .m = 530, .n = 20, .k = 40});
  check(BlockCase{.value = ValueType::f32, .m = 100, .n = 16, .k = 4000, .empty = 1});
}

TEST_CASE("two of four of every type") {
  for (Element type : kElements) {
    for (int64_t m : {1, 2, 4, 5, 9}) {
      for (int64_t k : {1, 4, 5, 31, 63, 64, 100, 128, 700}) {
        check(FourCase{.value = ValueType::f32, .bits = 32, .type = type, .m = m, .k = k});
        check(FourCase{.value = ValueType::bf16, .bits = 16, .type = type, .m = m, .k = k});
        check(FourCase{.value = ValueType::f16, .bits = 16, .type = type, .m = m, .k = k});
        check(FourCase{.value = ValueType::i8, .bits = 8, .type = type, .m = m, .k = k});
        check(FourCase{.value = ValueType::i8, .bits = 4, .type = type, .m = m, .k = k});
      }
    }
  }
}

TEST_CASE("two of four with scales of groups") {
  for (int bits : {4, 8}) {
    for (Element type : kElements) {
      for (int64_t group : {32, 64, 96}) check(FourCase{.value = ValueType::i8, .bits = bits, .type = type, .group = group});
    }
  }
}

TEST_CASE("a mask keeps two of four each way, and as much as any") {
  for (const int64_t n : {1, 4, 7}) {
    for (const int64_t k : {1, 3, 64, 70, 131}) {
      const std::vector<float> x = normal(static_cast<size_t>(n * k), 7);
      std::vector<uint8_t> mask(x.size(), 2);
      mask_tiles({x.data(), Element::f32, mask.data(), n, k});
      for (int64_t r = 0; r < n; r += 4) {
        for (int64_t c = 0; c < k; c += 4) {
          double kept = 0, sizes[4][4] = {};
          int rows[4] = {}, columns[4] = {};
          for (int64_t i = 0; i < std::min<int64_t>(4, n - r); ++i) {
            for (int64_t j = 0; j < std::min<int64_t>(4, k - c); ++j) {
              const size_t at = static_cast<size_t>((r + i) * k + c + j);
              REQUIRE(mask[at] <= 1);
              sizes[i][j] = std::abs(x[at]);
              kept += mask[at] * sizes[i][j], rows[i] += mask[at], columns[j] += mask[at];
            }
          }
          double best = 0;
          for (uint32_t bits = 0; bits < 65536; ++bits) {
            if (std::popcount(bits) != 8) continue;
            int counts[4] = {}, each = 0;
            double sum = 0;
            for (int i = 0; i < 16; ++i) {
              if (bits >> i & 1) sum += sizes[i / 4][i % 4], ++counts[i % 4];
            }
            for (int i = 0; i < 4; ++i) each += counts[i] == 2 && std::popcount(bits >> 4 * i & 15u) == 2;
            if (each == 4) best = std::max(best, sum);
          }
          for (int i = 0; i < 4; ++i) CHECK((rows[i] <= 2 && columns[i] <= 2));
          CHECK(kept >= best * (1 - 1e-6));
        }
      }
    }
  }
}

TEST_CASE("sums of stored codes do not leave float32 where scales bring them back") {
  for (const Sizes sizes : {Sizes{120, -30}, Sizes{-125, 60}}) {
    for (Element type : {Element::f32, Element::bf16}) {
      for (int64_t m : {1, 5, 17}) {
        for (int64_t k : {64, 100}) {
          check(BlockCase{.value = ValueType::i8, .type = type, .m = m, .k = k, .sizes = sizes});
          for (int64_t group : {32, 1 << 20}) {
            check(FourCase{.value = ValueType::i8, .bits = 8, .type = type, .m = m, .k = k, .group = group, .sizes = sizes});
            check(FourCase{.value = ValueType::i8, .bits = 4, .type = type, .m = m, .k = k, .group = group, .sizes = sizes});
          }
        }
      }
    }
  }
}
