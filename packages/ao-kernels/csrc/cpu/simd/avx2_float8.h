// Codes of 8 bits as floats on AVX2. Included by avx2.h.
#pragma once

namespace ao::AO_ISA {

// Floats of 8 bits, whose codes from 16 to 111, shifted and added to a number, are bfloat16 numbers. Codes
// below (subnormal numbers) and above (NaN, infinity) are corrected by exclusive or, from tables.
template <>
struct FloatDecoder<8, Kind::symmetric> {
  __m128i shift;
  __m256i base, below[2], above[2];
  bool regular;  // else values are looked up one by one
  FloatDecoder<8, Kind::table> any;

  AO_METHOD explicit FloatDecoder(const float* values) : any(values) {
    uint16_t words[128];
    for (int c = 0; c < 128; ++c) {
      uint32_t bits;
      __builtin_memcpy(&bits, values + c, 4);
      words[c] = static_cast<uint16_t>(bits >> 16);
    }
    const int step = words[17] - words[16];
    int bits = 0;
    while (bits < 8 && 1 << bits != step) ++bits;
    const auto first = static_cast<uint16_t>(words[16] - (16 << bits));
    alignas(16) uint8_t parts[2][2][16];
    regular = bits < 8;
    for (int c = 0; c < 128; ++c) {
      const auto error = static_cast<uint16_t>(words[c] ^ static_cast<uint16_t>(first + (c << bits)));
      if (c >= 16 && c < 112) {
        regular = regular && error == 0;
      } else {
        parts[c >= 112][0][c % 16] = static_cast<uint8_t>(error);
        parts[c >= 112][1][c % 16] = static_cast<uint8_t>(error >> 8);
      }
    }
    shift = _mm_cvtsi32_si128(bits);
    base = _mm256_set1_epi16(static_cast<int16_t>(first));
    for (int b = 0; b < 2; ++b) {
      below[b] = _mm256_broadcastsi128_si256(load_half(parts[0][b]));
      above[b] = _mm256_broadcastsi128_si256(load_half(parts[1][b]));
    }
  }

  // Of 32 split codes: the words of columns (4i, 4i + 2) and (4i + 1, 4i + 3).
  AO_METHOD void words(__m256i codes, __m256i& even, __m256i& odd) const {
    const __m256i sign = _mm256_and_si256(codes, _mm256_set1_epi8(-128));
    const __m256i index = _mm256_xor_si256(codes, sign);
    const __m256i low = _mm256_adds_epu8(index, _mm256_set1_epi8(0x70));  // the top bit set from 16 on
    const __m256i high = _mm256_sub_epi8(index, _mm256_set1_epi8(0x70));  // and below 112
    const __m256i error = _mm256_xor_si256(_mm256_shuffle_epi8(below[0], low), _mm256_shuffle_epi8(above[0], high));
    const __m256i error2 = _mm256_xor_si256(
        _mm256_xor_si256(_mm256_shuffle_epi8(below[1], low), _mm256_shuffle_epi8(above[1], high)), sign);
    even = _mm256_add_epi16(_mm256_sll_epi16(_mm256_unpacklo_epi8(index, _mm256_setzero_si256()), shift), base);
    odd = _mm256_add_epi16(_mm256_sll_epi16(_mm256_unpackhi_epi8(index, _mm256_setzero_si256()), shift), base);
    even = _mm256_xor_si256(even, _mm256_unpacklo_epi8(error, error2));
    odd = _mm256_xor_si256(odd, _mm256_unpackhi_epi8(error, error2));
  }

  template <int i>
  AO_METHOD void floats(const uint8_t* tile, F out[4]) const {
    if (!regular) return any.floats<i>(tile, out);
    const Q codes = code_quads<8, i, true>(tile);
    I even, odd;
    words(codes.a, even.a, odd.a);
    words(codes.b, even.b, odd.b);
    widen_words(even, odd, out);
  }
};

}  // namespace ao::AO_ISA
