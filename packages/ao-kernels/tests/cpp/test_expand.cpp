// Codes in base 3, and two of every four: matmuls are bit for bit those with the tiles that are made of them.
#include "linear_cases.h"

using namespace ao;
using namespace ao::test;

namespace {

// Digits of the tiles of a weight, five of them in a byte, as the layout defines them.
std::vector<uint8_t> digits_of(const Case& c, const Weight& w) {
  const int64_t blocks = (c.n + 15) / 16, units = (w.tiles + kDigits - 1) / kDigits;
  std::vector<uint8_t> out;
  for (int64_t i = 0; i < blocks * units * kDigitBytes; ++i) {
    const int64_t block = i / (units * kDigitBytes), unit = i / kDigitBytes % units, place = i % kDigitBytes;
    int byte = 0;
    for (int64_t d = kDigits - 1; d >= 0; --d) {
      const int64_t number = 5 * (place / 64) + d, tile = unit * kDigits + number / 4;
      const uint8_t* const at = w.qdata.data() + (block * w.tiles + tile) * 64 + place % 64;
      byte = 3 * byte + (tile < w.tiles ? *at >> 2 * (number % 4) & 3 : 0);
    }
    out.push_back(static_cast<uint8_t>(byte));
  }
  return out;
}

// Makes two of every four codes that of 0; the others and their places, as the layout defines them.
std::vector<uint8_t> two_four_of(const Case& c, Weight& w, int zero) {
  const int64_t tile_bytes = c.bits == 8 ? 160 : 96, quad = c.bits == 8 ? 32 : 16, blocks = (c.n + 15) / 16;
  std::vector<uint8_t> out(static_cast<size_t>(blocks * w.tiles * tile_bytes));
  std::mt19937 random(3);
  for (int64_t tile = 0; tile < blocks * w.tiles; ++tile) {
    uint8_t* const to = out.data() + tile * tile_bytes;
    for (int r = 0; r < 16; ++r) {
      for (int q = 0; q < 4; ++q) {
        const unsigned first = random() % 3, second = first + 1 + random() % (3 - first);
        for (unsigned i = 0; i < 4; ++i) {
          const bool kept = i == first || i == second;
          const auto code = kept ? static_cast<int>(random() >> 8 & ((1u << c.bits) - 1)) : zero;
          put_code(w, c.bits, tile, r, 4 * q + static_cast<int>(i), code);
          const auto turned = static_cast<uint8_t>(code ^ zero);
          if (kept && c.bits == 8) to[quad * q + 16 * (i == second) + r] = turned;
          if (kept && c.bits == 4) to[quad * q + r] |= static_cast<uint8_t>(turned << 4 * (i == second));
        }
        to[4 * quad + 16 * (q / 2) + r] |= static_cast<uint8_t>((first | second << 2) << 4 * (q % 2));
      }
    }
  }
  return out;
}

void check_same(const Case& c, Call& call, const std::vector<uint8_t>& stored, StoredAs how, int fill) {
  run_linear(call.linear);
  const std::vector<uint8_t> expected = call.y;
  std::fill(call.y.begin(), call.y.end(), uint8_t{0xff});
  call.linear.qdata = stored.data(), call.linear.stored = how, call.linear.fill = fill;
  run_linear(call.linear);
  const std::string label = text(c);
  CAPTURE(label);
  CHECK(call.y == expected);
}

constexpr int64_t kRows[] = {1, 3, 40, 130};

}  // namespace

TEST_CASE("codes in base 3 are made the tiles that they came from") {
  for (const int64_t n : {21, 300}) {
    for (const int64_t k : {16, 200, 1100}) {
      for (const int64_t m : kRows) {
        for (const Act act : {Act::none, Act::int8}) {
          const Case c{.bits = 2, .kind = Kind::exact, .m = m, .n = n, .k = k, .group = kAll, .type = Element::bf16,
                       .act = act, .table = {-1, 0, 1, 1}};
          Call call = make_call(c);
          for (uint8_t& byte : call.weight.qdata) byte &= static_cast<uint8_t>(~(byte >> 1 & 0x55));  // no code 3
          check_same(c, call, digits_of(c, call.weight), StoredAs::digits, 0);
        }
      }
    }
  }
}

TEST_CASE("two of every four codes are made the tiles that they came from") {
  for (const int bits : {4, 8}) {
    for (const int64_t k : {16, 200, 1100}) {
      for (const int64_t m : kRows) {
        for (const Act act : {Act::none, Act::int8, Act::e4m3}) {
          for (const int64_t group : {int64_t{32}, kAll}) {
            const Case c{.bits = bits, .m = m, .n = 300, .k = k, .group = group, .type = Element::bf16, .act = act};
            Call call = make_call(c);
            const int zero = static_cast<int>(std::find(call.weight.table.begin(), call.weight.table.end(), 0.0f) -
                                              call.weight.table.begin());
            const std::vector<uint8_t> stored = two_four_of(c, call.weight, zero);
            check_same(c, call, stored, StoredAs::two_four, bits == 8 ? zero : zero * 0x11);
          }
        }
      }
    }
  }
}
