// From rings of codes to values; included by the unit of an instruction set.
#pragma once
#include "kernels.h"

namespace ao::AO_ISA::trellis {

constexpr int64_t kVectors = kHalf / 16;

// Values, as integers, of the 64 rows of half a ring, in 4 vectors.
template <int kBits>
struct Decoder {
  static constexpr int64_t kBytes = kRing * kBits / 8;

  explicit Decoder(const Trellis& t) : values(t.values) {}

  AO_METHOD void decode(const uint8_t* ring, int64_t half, F (&w)[kVectors]) const {
    // the ring, with the bits before its first code in front
    alignas(64) uint8_t bytes[2 + kBytes + 8];
    __builtin_memcpy(bytes, ring + kBytes - 2, 2);
    __builtin_memcpy(bytes + 2, ring, kBytes);
    alignas(64) float found[kHalf];
    for (int64_t i = 0; i < kHalf; ++i) {
      // the state ends with the code of the row
      const int64_t bit = 16 + (half * kHalf + i + 1) * kBits - kStateBits;
      uint32_t window;
      __builtin_memcpy(&window, bytes + bit / 8, 4);
      found[i] = values[window >> bit % 8 & (kStates - 1)];
    }
    for (int64_t v = 0; v < kVectors; ++v) w[v] = load(found + 16 * v);
  }

  const float* values;
};

#if AO_HAS_BYTE_TABLES
#define AO_HAS_WINDOWS 1
// Windows of 16 bits whose lower 12 are the state, 32 rows in a vector: bytes to where four rows find theirs, and the
// bits at which these begin. Times the multiplier, in 16 bits, the upper byte is the place in the table.
template <int kBits>
struct Windows {
  static constexpr int64_t kBytes = kRing * kBits / 8;
  uint8_t bytes[kRing / 32][64], bits[64];

  constexpr Windows() : bytes(), bits() {
    for (int64_t group = 0; group < kRing / 32; ++group) {
      for (int64_t four = 0; four < 8; ++four) {
        const int64_t bit = (32 * group + 4 * four + 1) * kBits - kStateBits + 8 * kBytes;  // not negative
        for (int64_t i = 0; i < 8; ++i) {
          bytes[group][8 * four + i] = static_cast<uint8_t>((bit / 8 + i) % kBytes);
          bits[8 * four + i] = static_cast<uint8_t>(bit % 8 + i / 2 * kBits + i % 2 * 8);
        }
      }
    }
  }
};

template <int kBits>
alignas(64) static constexpr Windows<kBits> kWindows;  // here, because clang exports those of members

template <int kBits>
struct FastDecoder {
  static constexpr int64_t kBytes = kRing * kBits / 8;

  explicit FastDecoder(const Trellis& t) : multiplier(_mm512_set1_epi16(static_cast<int16_t>(t.multiplier << 4))) {
    for (int i = 0; i < 4; ++i) table[i] = _mm512_loadu_si512(t.table + 64 * i);
    bits = _mm512_load_si512(kWindows<kBits>.bits);
    for (int64_t i = 0; i < kRing / 32; ++i) bytes[i] = _mm512_loadu_si512(kWindows<kBits>.bytes[i]);
  }

  AO_METHOD I products(I ring, I places) const {
    const I windows = bits_from(bits, bytes_at(places, ring));
    return _mm512_mullo_epi16(windows, multiplier);
  }

  AO_METHOD void decode(const uint8_t* from, int64_t half, F (&w)[kVectors]) const {
    constexpr __mmask64 kThere = kBytes == 64 ? ~__mmask64{0} : (__mmask64{1} << kBytes % 64) - 1;
    const I ring = _mm512_maskz_loadu_epi8(kThere, from);
    const I low = products(ring, bytes[2 * half]), high = products(ring, bytes[2 * half + 1]);
    // row i in the lower byte of word i, row 32 + i in the upper one: a | (b & c)
    const I places = _mm512_ternarylogic_epi32(_mm512_srli_epi16(low, 8), high, _mm512_set1_epi16(-256), 0xf8);
    const I found = bytes_at(places, table);
    const I first = _mm512_srai_epi16(_mm512_slli_epi16(found, 8), 8), second = _mm512_srai_epi16(found, 8);
    w[0] = _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm512_castsi512_si256(first)));
    w[1] = _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm512_extracti64x4_epi64(first, 1)));
    w[2] = _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm512_castsi512_si256(second)));
    w[3] = _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm512_extracti64x4_epi64(second, 1)));
  }

  I multiplier, bits, table[4], bytes[kRing / 32];
};
#else
template <int kBits>
using FastDecoder = Decoder<kBits>;
#endif

}  // namespace ao::AO_ISA::trellis
