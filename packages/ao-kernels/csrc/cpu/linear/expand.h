// Codes that are stored in less memory than tiles take, made tiles while they are in a cache.
#pragma once
#include "scales.h"

namespace ao::AO_ISA {

// 256 bytes of 5 digits each are 5 tiles of 2 bits. Byte i of a tile has 4 codes, of columns 4 apart; digit d of byte i
// of quarter q is code number (5 q + d) % 4 of byte i of tile (5 q + d) / 4.
static void expand_digits(const Linear& t, const uint8_t* in, uint8_t* out) {
  const auto fill = static_cast<uint8_t>(t.fill);
  for (int64_t tile = 0; tile < t.tiles; tile += kDigits, in += kDigitBytes) {
    alignas(64) uint8_t codes[4 * kDigits][64];
    for (int q = 0; q < 4; ++q) {
      for (int i = 0; i < 64; ++i) {
        auto rest = static_cast<uint16_t>(in[q * 64 + i]);
#pragma GCC unroll 5
        for (int d = 0; d < kDigits; ++d) {
          const auto third = static_cast<uint16_t>(static_cast<uint16_t>(rest * 171) >> 9);  // of numbers below 256
          codes[q * kDigits + d][i] = static_cast<uint8_t>(rest - 3 * third);
          rest = third;
        }
      }
    }
    const int64_t left = t.tiles - tile, count = left < kDigits ? left : kDigits;
    for (int64_t j = 0; j < count; ++j, out += 64) {
      const auto* const of = codes + 4 * j;
      for (int i = 0; i < 64; ++i) {
        out[i] = static_cast<uint8_t>((of[0][i] | of[1][i] << 2 | of[2][i] << 4 | of[3][i] << 6) ^ fill);
      }
    }
  }
}

// Two of every four codes, and where they are, of 16 rows and four columns: a lane of 4 bytes of each row.
template <bool kBytes>
AO_INLINE void expand_quads(const uint8_t* codes, const uint8_t* index, uint32_t shift, uint32_t (&quads)[16]) {
  for (int r = 0; r < 16; ++r) {
    const uint32_t places = static_cast<uint32_t>(index[r]) >> shift;
    const uint32_t first = kBytes ? codes[r] : codes[r] & 15, second = kBytes ? codes[16 + r] : codes[r] >> 4;
    quads[r] = first << ((places & 3) * 8) | second << ((places >> 2 & 3) * 8);
  }
}

// A tile has 4 quads of columns: 16 first and 16 second codes of each, then places of two quads in each of 32 bytes.
template <bool kBytes>
static void expand_two_four(const Linear& t, const uint8_t* in, uint8_t* out) {
  const uint32_t fill = static_cast<uint32_t>(t.fill) * 0x01010101u;
  constexpr int kQuad = kBytes ? 32 : 16;
  for (int64_t tile = 0; tile < t.tiles; ++tile, in += 4 * kQuad + 32) {
    const uint8_t* const index = in + 4 * kQuad;
    for (int pair = 0; pair < 2; ++pair) {
      uint32_t even[16], odd[16];
      expand_quads<kBytes>(in + 2 * pair * kQuad, index + pair * 16, 0, even);
      expand_quads<kBytes>(in + (2 * pair + 1) * kQuad, index + pair * 16, 4, odd);
      if constexpr (kBytes) {
        for (int r = 0; r < 16; ++r) even[r] ^= fill, odd[r] ^= fill;
        __builtin_memcpy(out, even, 64), __builtin_memcpy(out + 64, odd, 64);
        out += 128;
      } else {
        for (int r = 0; r < 16; ++r) even[r] = (even[r] | odd[r] << 4) ^ fill;
        __builtin_memcpy(out, even, 64);
        out += 64;
      }
    }
  }
}

// The tiles of blocks of N [begin, end).
static void expand(const Linear& t, int64_t begin, int64_t end, uint8_t* out) {
  const int64_t stored = stored_bytes(t), bytes = t.tiles * 32 * t.bits;
  for (int64_t block = begin; block < end; ++block, out += bytes) {
    const uint8_t* const in = t.qdata + block * stored;
    switch (t.stored) {
      case StoredAs::tiles: break;
      case StoredAs::digits: expand_digits(t, in, out); break;
      case StoredAs::two_four: t.bits == 8 ? expand_two_four<true>(t, in, out) : expand_two_four<false>(t, in, out);
    }
  }
}

}  // namespace ao::AO_ISA
