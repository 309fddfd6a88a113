// run_attend against the softmax over all tokens at once in float64.
#include "attend/attend.h"
#include "isa.h"

#include "numbers.h"
#include "quantize/quantize.h"

using namespace ao;
using namespace ao::test;

namespace {

struct Case {
  int64_t size = 64, value_size = 64, tokens = 300, coded = 260, queries = 1, group = 2;
  int bits = 8;
  bool channel = false;  // keys have a scale per channel of 128 tokens
  bool float8 = false;   // codes are float8 e4m3
  int64_t part = 0;      // elements of a value that share a scale; 0: all
  Element type = Element::f32;
  int64_t window = 0;
  bool causal = true, padded = false;
};

constexpr int64_t kBatch = 2, kHeads = 2, kSlots = 64;

float e4m3(int code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const double value = exponent ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
  return static_cast<float>((code & 127) == 127 ? std::nan("") : code & 128 ? -value : value);
}

// Keys or values in codes, with scales and zero points of float32.
struct Side {
  std::vector<uint8_t> bytes;
  std::vector<float> scale, zero;
  std::vector<double> values;  // (B * H, S, size)
  Stored stored{};

  Side(int64_t size, int64_t tokens, int bits, bool float8, bool channel, int64_t part, uint32_t seed) {
    const int64_t matrices = kBatch * kHeads, bands = channel ? (tokens + 127) / 128 : tokens;
    part = channel ? 1 : part ? part : size;
    const int64_t row = (size * bits + 7) / 8, groups = (size + part - 1) / part;
    bytes = codes(static_cast<size_t>(matrices * tokens * row), 256, seed);
    scale = normal(static_cast<size_t>(matrices * bands * groups), seed + 1);
    zero = scale;
    for (float& s : scale) s = std::abs(s) * (bits == 8 ? 0.01f : 0.2f) + 0.001f;
    for (float& z : zero) z = bits == 8 ? 0 : 7 + z;
    Dequantize& d = stored.coded;
    for (int c = 0; c < 256; ++c) {
      const int code = c % (1 << bits);
      d.format.table[c] = float8 ? e4m3(code) : static_cast<float>(bits == 8 && code > 127 ? code - 256 : code);
    }
    for (uint8_t& code : bytes) {
      if (float8 && code % 128 > 0x57) code -= 0x28;  // up to 15, and no NaN
    }
    d.format.bits = bits;
    REQUIRE(complete(d.format) == nullptr);
    d.codes = bytes.data(), d.code_bits = bits, d.row_bytes = row;
    d.blocks = blocks_of(matrices, tokens, size, channel ? 128 : 1, part);
    d.scale = scale.data(), d.scale_type = Scale::f32;
    if (bits != 8) d.zero = zero.data(), d.zero_type = Zero::f32;
    stored.tokens = tokens, stored.size = size;
    values.resize(static_cast<size_t>(matrices * tokens * size));
    for (int64_t i = 0; i < static_cast<int64_t>(values.size()); ++i) {
      const int64_t token = i / size % tokens, m = i / size / tokens, at = i % size;
      const uint8_t byte = bytes[static_cast<size_t>(i / size * row + at * bits / 8)];
      const uint8_t code = bits == 8 ? byte : at % 2 ? byte >> 4 : byte & 15;
      const auto place = static_cast<size_t>((m * bands + (channel ? token / 128 : token)) * groups + at / part);
      const double off = bits == 8 ? 0 : zero[place];
      values[static_cast<size_t>(i)] = (d.format.table[code] - off) * scale[place];
    }
  }
};

struct Run {
  std::vector<uint8_t> y;
  double error = 0;

  explicit Run(const Case& c) {
    const int64_t room = 384;  // tokens that there is memory for
    Side key(c.size, room, c.bits, c.float8, c.channel, 0, 1), value(c.value_size, room, c.bits, c.float8, false, c.part, 5);
    choose_grid(key.stored, true), choose_grid(value.stored, false);
    REQUIRE(key.stored.grid == (c.float8 ? Grid::floats : c.channel ? Grid::channel : Grid::token));
    REQUIRE(value.stored.grid == (c.float8 ? Grid::floats : Grid::token));
    REQUIRE(key.stored.words == c.float8);
    const int64_t matrices = kBatch * kHeads, rows = matrices * c.group * c.queries;
    std::vector<float> q = normal(static_cast<size_t>(rows * c.size), 9);
    for (float& x : q) x = std::nearbyint(x * 32) / 32;  // exact in every type
    const auto bytes_of_q = packed(c.type, q);
    std::vector<float> tail_k = normal(static_cast<size_t>(matrices * kSlots * c.size), 10);
    std::vector<float> tail_v = normal(static_cast<size_t>(matrices * kSlots * c.value_size), 11);
    for (auto* tail : {&tail_k, &tail_v}) {
      for (float& x : *tail) x = std::nearbyint(x * 32) / 32;
    }
    const auto tk = packed(c.type, tail_k), tv = packed(c.type, tail_v);
    const std::vector<float> center = normal(static_cast<size_t>(matrices * c.size), 12);
    const std::vector<int64_t> start{7, 150}, stop{c.tokens - 3, c.tokens};
    Attend a{};
    a.q = bytes_of_q.data(), a.type = c.type;
    a.q_token = c.size, a.q_head = c.size * c.queries, a.q_batch = a.q_head * kHeads * c.group;
    y.resize(static_cast<size_t>(rows * c.value_size) * size_of(c.type));
    a.y = y.data();
    a.batch = kBatch, a.heads = kHeads, a.group = c.group, a.queries = c.queries;
    a.key = key.stored, a.value = value.stored;
    a.tail_key = {tk.data(), kSlots}, a.tail_value = {tv.data(), kSlots};
    a.tokens = c.tokens, a.coded = c.coded, a.center = center.data();
    a.start = c.padded ? start.data() : nullptr, a.stop = c.padded ? stop.data() : nullptr;
    a.scale = 0.125f, a.causal = c.causal, a.window = c.window;
    run_attend(a);
    double noise = 0, signal = 0;
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t query = r % c.queries, head = r / c.queries % (kHeads * c.group), b = r / c.queries / (kHeads * c.group);
      const int64_t m = b * kHeads + head / c.group, own = c.tokens - c.queries + query;
      std::vector<double> out(static_cast<size_t>(c.value_size));
      double total = 0;
      for (int64_t t = 0; t < c.tokens; ++t) {
        if ((c.causal && t > own) || (c.window && t <= own - c.window)) continue;
        if (c.padded && (t < start[static_cast<size_t>(b)] || t >= stop[static_cast<size_t>(b)])) continue;
        const bool coded = t < c.coded;
        double logit = 0;
        for (int64_t d = 0; d < c.size; ++d) {
          const double k = coded ? key.values[static_cast<size_t>((m * room + t) * c.size + d)] + center[static_cast<size_t>(m * c.size + d)]
                                 : tail_k[static_cast<size_t>((m * kSlots + t % kSlots) * c.size + d)];
          logit += q[static_cast<size_t>(r * c.size + d)] * k;
        }
        const double weight = std::exp(logit * 0.125);
        total += weight;
        for (int64_t d = 0; d < c.value_size; ++d) {
          out[static_cast<size_t>(d)] += weight * (coded ? value.values[static_cast<size_t>((m * room + t) * c.value_size + d)]
                                                         : tail_v[static_cast<size_t>((m * kSlots + t % kSlots) * c.value_size + d)]);
        }
      }
      for (int64_t d = 0; d < c.value_size; ++d) {
        const double wanted = total == 0 ? 0 : out[static_cast<size_t>(d)] / total;
        const double difference = get(c.type, y, r * c.value_size + d) - wanted;
        noise += difference * difference, signal += wanted * wanted;
      }
    }
    error = std::sqrt(noise / signal);
  }

  static std::vector<uint8_t> packed(Element type, const std::vector<float>& x) {
    std::vector<uint8_t> out(x.size() * size_of(type));
    for (size_t i = 0; i < x.size(); ++i) put(type, out, static_cast<int64_t>(i), x[i]);
    return out;
  }
};

void check(const Case& c, double bf16 = 6e-3) {
  CAPTURE(c.size);
  CAPTURE(c.bits);
  CAPTURE(c.channel);
  CAPTURE(static_cast<int>(c.type));
  CHECK(Run(c).error <= (c.type == Element::f32 ? 4e-6 : c.type == Element::f16 ? 1e-3 : bf16));
}

}  // namespace

TEST_CASE("attention: heads of any size, codes of 8 and 4 bits, every type") {
  for (const Element type : {Element::f32, Element::bf16, Element::f16}) {
    for (const int64_t size : {2, 16, 64, 80, 130}) {
      check({.size = size, .value_size = size + 2, .type = type});
      check({.size = size, .value_size = size + 2, .bits = 4, .type = type});
      check({.size = size, .value_size = size + 2, .bits = 4, .channel = true, .type = type});
    }
  }
}

TEST_CASE("attention: few rows of bfloat16, which meet tokens as they lie in memory") {
  // AVX-512 multiplies codes of 4 bits by rows of one limb; rounding normal numbers to 4 bits costs 0.1
  const std::string set = isa().name;
  const double short_rows = set.starts_with("avx512") || set == "amx" ? 3e-2 : 6e-3;
  const auto all = [&](Case c) {
    c.type = Element::bf16;
    check(c);
    c.float8 = true, check(c);
    c.float8 = false, c.bits = 4, check(c, short_rows);
    c.channel = true, check(c, short_rows);
  };
  for (const int64_t size : {64, 128, 192, 256}) {
    for (const int64_t coded : {256, 299}) all({.size = size, .value_size = size, .coded = coded});
    all({.size = size, .value_size = 320 - size, .coded = 300 - size / 8, .causal = false});
  }
  for (const int64_t group : {1, 3, 4, 7, 8}) all({.tokens = 333, .coded = 270, .group = group});
  all({.tokens = 60, .coded = 0, .window = 30});
  all({.coded = 261, .queries = 3, .window = 40, .padded = true});
  for (const int bits : {8, 4}) {
    check({.size = 128, .value_size = 128, .bits = bits, .part = 64, .type = Element::bf16},
          bits == 4 ? short_rows : 6e-3);
  }
}

TEST_CASE("attention: few and many queries, in groups of any number") {
  for (const int64_t queries : {1, 2, 5, 33, 129}) {
    for (const int64_t group : {1, 3, 4, 7, 70}) check({.queries = queries, .group = group});
  }
}

TEST_CASE("attention: what queries see") {
  for (const int64_t coded : {245, 256, 300}) {
    check({.coded = coded, .queries = 9, .window = 20});
    check({.coded = coded, .queries = 9, .window = 200, .padded = true});
    check({.coded = coded, .queries = 4, .causal = false});
    check({.coded = coded, .queries = 140, .padded = true});
  }
  check({.tokens = 5, .coded = 0, .queries = 5});
  check({.tokens = 1, .coded = 1});
}

TEST_CASE("attention: the same bits for any number of threads") {
  for (const int64_t queries : {1, 40}) {
    const Case c{.tokens = 384, .coded = 384, .queries = queries, .group = 8, .bits = 4, .channel = true};
    const std::vector<uint8_t> expected = Run(c).y;
    for (const int count : {2, 3, 4}) {
      const Threads threads(count);
      CHECK(Run(c).y == expected);
    }
  }
}
