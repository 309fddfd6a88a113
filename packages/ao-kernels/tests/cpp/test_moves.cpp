// Bytes and bfloat16 on AVX-512 without the instructions for them, compared with loops.
#include "support.h"

#if defined(__x86_64__)
#include <bit>
#include <string>

#include "isa.h"
#include "moves.h"

using namespace ao;
using namespace ao::test;

namespace {

bool usable() { return std::string(usable_isas()).find("avx512_vnni") != std::string::npos; }

uint32_t bits_of(float v) {
  uint32_t bits;
  std::memcpy(&bits, &v, 4);
  return bits;
}
float from_bf16(uint16_t word) {
  const uint32_t bits = static_cast<uint32_t>(word) << 16;
  float v;
  std::memcpy(&v, &bits, 4);
  return v;
}
// Floats of any bits: infinities, NaN and subnormal numbers among them.
std::vector<float> any_floats(size_t count, uint32_t seed) {
  std::vector<float> v(count);
  const std::vector<uint8_t> bytes = codes(4 * count, 256, seed);
  std::memcpy(v.data(), bytes.data(), 4 * count);
  constexpr uint32_t kSome[] = {0, 0x80000000, 1, 0x007fffff, 0x7f7fffff, 0x7f800000, 0xff800000, 0x7f800001, 0x7fc00000,
                                0x3f808000, 0x3f818000, 0x3f807fff};
  for (size_t i = 0; i < std::size(kSome); ++i) std::memcpy(&v[i * 7 % count], &kSome[i], 4);
  return v;
}
void check_bf16(float v, uint16_t found) {
  if (std::isnan(v)) {
    CHECK(std::isnan(from_bf16(found)));
  } else {
    CHECK(found == bits_of(test::round_to_bf16(v)) >> 16);
  }
}

}  // namespace

TEST_CASE("bytes are looked up: every index in every place, and any next to each other") {
  if (!usable()) return;
  for (const int size : {64, 128, 256}) {
    const std::vector<uint8_t> table = codes(static_cast<size_t>(size), 256, static_cast<uint32_t>(size));
    for (int round = 0; round < 256 + 2000; ++round) {
      std::vector<uint8_t> index = codes(64, 256, static_cast<uint32_t>(round));
      for (int i = 0; i < 64 && round < 256; ++i) index[i] = static_cast<uint8_t>(i + round);
      uint8_t found[64];
      kMoves.bytes_at(index.data(), table.data(), size, found);
      bool same = true;
      for (int i = 0; i < 64; ++i) same = same && found[i] == table[index[i] % size];
      CHECK(same);
    }
  }
}

TEST_CASE("bits are taken from every place of 64, round the end") {
  if (!usable()) return;
  for (int round = 0; round < 256 + 2000; ++round) {
    std::vector<uint8_t> first = codes(64, 256, static_cast<uint32_t>(round));
    for (int i = 0; i < 64 && round < 256; ++i) first[i] = static_cast<uint8_t>(i + round);
    const std::vector<uint8_t> v = codes(64, 256, static_cast<uint32_t>(round + 5000));
    uint8_t found[64];
    kMoves.bits_from(first.data(), v.data(), found);
    bool same = true;
    for (int i = 0; i < 64; ++i) {
      uint64_t bits;
      std::memcpy(&bits, v.data() + i / 8 * 8, 8);
      same = same && found[i] == static_cast<uint8_t>(std::rotr(bits, first[i] % 64));
    }
    CHECK(same);
  }
}

TEST_CASE("floats are rounded to bfloat16, in order and in pairs") {
  if (!usable()) return;
  for (uint32_t seed = 0; seed < 2000; ++seed) {
    const std::vector<float> v = any_floats(32, seed);
    uint16_t joined[32], paired[32];
    kMoves.join_bf16(v.data(), joined), kMoves.pair_rounded(v.data(), paired);
    for (int i = 0; i < 32; ++i) check_bf16(v[i], joined[i]), check_bf16(v[i], paired[i % 16 * 2 + i / 16]);
  }
}

TEST_CASE("pairs of bfloat16 are multiplied") {
  if (!usable()) return;
  for (uint32_t seed = 0; seed < 500; ++seed) {
    const std::vector<float> numbers = normal(80, seed);
    uint16_t w[32], x[32];
    for (int i = 0; i < 32; ++i) {
      w[i] = static_cast<uint16_t>(bits_of(numbers[i]) >> 16), x[i] = static_cast<uint16_t>(bits_of(numbers[i + 32]) >> 16);
    }
    float found[16];
    kMoves.dot_pairs(numbers.data() + 64, w, x, found);
    for (int i = 0; i < 16; ++i) {
      const double acc = numbers[64 + i], low = static_cast<double>(from_bf16(w[2 * i])) * from_bf16(x[2 * i]);
      const double high = static_cast<double>(from_bf16(w[2 * i + 1])) * from_bf16(x[2 * i + 1]);
      CHECK(std::abs(found[i] - (acc + low + high)) <= 0x1p-22 * (std::abs(acc) + std::abs(low) + std::abs(high)));
    }
  }
}
#endif
