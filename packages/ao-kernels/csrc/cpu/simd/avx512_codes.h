// Codes of the layout cpu_tiles on AVX-512, and what they stand for. Included by avx512.h.
#pragma once
#include "avx512.h"

namespace ao::AO_ISA {

// Codes of columns (4i + h, 4i + h + 2) of a tile in the 16-bit halves of each row's lane, with other
// codes above them.
template <int kBits, int i, int h>
AO_INLINE I code_words(const uint8_t* tile);

template <int kShift>
AO_INLINE I shift_words(I v) {
  if constexpr (kShift > 0) return _mm512_srli_epi16(v, kShift);
  if constexpr (kShift < 0) return _mm512_slli_epi16(v, -kShift);
  return v;
}
template <int i, int h, int kTo>
AO_INLINE I plane4(const uint8_t* p) {
  return shift_words<8 * h + 4 * (i % 2) - kTo>(load_vector(p + 64 * (i / 2)));
}
template <int i, int h, int kTo>
AO_INLINE I plane2(const uint8_t* p) {
  return shift_words<8 * h + 2 * i - kTo>(load_vector(p));
}
template <int i, int h, int kTo>
AO_INLINE I plane1(const uint8_t* p) {
  const I both = load_words(reinterpret_cast<const uint16_t*>(p));
  return shift_words<i + 4 * h - kTo>(_mm512_or_si512(both, _mm512_slli_epi32(both, 8)));
}
// Low `kLow` bits of each word from `low`, the others from `high`.
template <int kLow>
AO_INLINE I join(I low, I high) {
  const I mask = _mm512_set1_epi16((1 << kLow) - 1);
  return _mm512_ternarylogic_epi32(mask, low, high, 0xCA);
}
template <int kBits, int i, int h>
AO_INLINE I code_words(const uint8_t* p) {
  if constexpr (kBits == 1) return plane1<i, h, 0>(p);
  if constexpr (kBits == 2) return plane2<i, h, 0>(p);
  if constexpr (kBits == 3) return join<2>(plane2<i, h, 0>(p), plane1<i, h, 2>(p + 64));
  if constexpr (kBits == 4) return plane4<i, h, 0>(p);
  if constexpr (kBits == 5) return join<4>(plane4<i, h, 0>(p), plane1<i, h, 4>(p + 128));
  if constexpr (kBits == 6) return join<4>(plane4<i, h, 0>(p), plane2<i, h, 4>(p + 128));
  if constexpr (kBits == 7) {
    return join<4>(plane4<i, h, 0>(p), join<6>(plane2<i, h, 4>(p + 128), plane1<i, h, 6>(p + 192)));
  }
  if constexpr (kBits == 8) return shift_words<8 * h>(load_vector(p + 64 * i));
}

// Low `kLow` bits of each byte from `low`, the others from `high`.
template <int kLow>
AO_INLINE I join_bytes(I low, I high) {
  // written over `high`, which nothing else needs
  return _mm512_ternarylogic_epi32(high, low, _mm512_set1_epi8((1 << kLow) - 1), 0xD8);
}
// A plane of 1 bit: the bits of columns 4j to 4j + 3 in bit kTo + j of the bytes of each row's lane, for all j.
template <int kTo>
AO_INLINE I plane1_bytes(const uint8_t* p) {
  constexpr auto at = [](int bit) { return static_cast<uint64_t>((bit - kTo) & 63); };
  constexpr uint64_t offsets =
      at(0) | at(4) << 8 | at(8) << 16 | at(12) << 24 | at(32) << 32 | at(36) << 40 | at(40) << 48 | at(44) << 56;
  const I rows = load_words(reinterpret_cast<const uint16_t*>(p));
  if constexpr (kHasByteMoves) return bits_from(_mm512_set1_epi64(static_cast<int64_t>(offsets)), rows);
  // nibbles: a byte in two bytes of a lane each, of which the second has its upper half
  const I twice = _mm512_shuffle_epi8(rows, _mm512_set4_epi32(0x0d0d0c0c, 0x09090808, 0x05050404, 0x01010000));
  return _mm512_ternarylogic_epi32(_mm512_set1_epi16(255), shift_words<-kTo>(twice), shift_words<4 - kTo>(twice), 0xCA);
}

// Codes of columns 4i to 4i + 3 in the bytes of each row's lane, for look-ups by their low 6 bits: each code in
// the bits that code_in says, other bits around it. Several quads share what they can.
template <int kBits, int i>
AO_INLINE Q indices(const uint8_t* p) {
  // bits 4 and 5: the plane of 1 bit of quads 0 and 1, or of 2 and 3
  if constexpr (kBits == 1) return shift_words<2 * (i / 2)>(plane1_bytes<4>(p));
  // bits 0 to 3: the plane of 2 bits of the same
  if constexpr (kBits == 2) return shift_words<4 * (i / 2)>(load_vector(p));
  if constexpr (kBits == 3) return join_bytes<4>(indices<2, i>(p), indices<1, i>(p + 64));
  if constexpr (kBits == 4) return shift_words<4 * (i % 2)>(load_vector(p + 64 * (i / 2)));
  if constexpr (kBits == 5) return join_bytes<4>(indices<4, i>(p), indices<1, i>(p + 128));
  if constexpr (kBits == 6) return join_bytes<4>(indices<4, i>(p), shift_words<2 * i - 4>(load_vector(p + 128)));
}
// The code in an index of quad i.
template <int kBits>
static constexpr int code_in(int index, int i) {
  const int odd = i % 2, bit = (index >> (4 + odd) & 1) << (kBits - 1);
  if (kBits == 1) return bit;
  if (kBits == 2) return index >> 2 * odd & 3;
  if (kBits == 3) return (index >> 2 * odd & 3) | bit;
  if (kBits == 5) return (index & 15) | bit;
  return index & ((1 << kBits) - 1);
}

// Bytes of codes.
template <int kBits>
struct ByteTable {
  static constexpr int kMaps = kBits == 4 || kBits == 6 ? 1 : 2;  // for even and for odd quads
  // without moves of bytes, look-ups are those of 4 bits, and of one more that chooses between two of them
  static constexpr bool kFours = !kHasByteMoves && kBits < 6;
  static constexpr int kMore = kFours && kBits % 2 == 1 ? kMaps : 0;  // where those of the other ones begin
  I maps[kMaps + kMore];
  ByteTable() = default;
  inline __attribute__((always_inline)) explicit ByteTable(const uint8_t* bytes) {
    alignas(64) uint8_t map[64];
    for (int m = 0; m < kMaps; ++m) {
      for (int index = 0; index < 64; ++index) map[index] = bytes[code_in<kBits>(index, m)];
      maps[m] = kFours ? in_quarters(map) : load_vector(map);
      if constexpr (kMore > 0) maps[kMore + m] = in_quarters(map + (16 << m));
    }
  }
  template <int i>
  inline __attribute__((always_inline)) Q look_up(Q indices) const {
    if constexpr (!kFours) return bytes_at(indices, maps[i % kMaps]);
    const I low = and_(indices, _mm512_set1_epi8(15));
    const I found = _mm512_shuffle_epi8(maps[i % kMaps], low);
    if constexpr (kMore == 0) return found;
    const __mmask64 second = _mm512_test_epi8_mask(indices, _mm512_set1_epi8(16 << i % kMaps));
    return _mm512_mask_shuffle_epi8(found, second, maps[kMore + i % kMaps], low);
  }
  AO_INLINE I in_quarters(const uint8_t* p) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
};

// Codes of columns 4i to 4i + 3 in the bytes of each row's lane, with other bits above them.
template <int kBits, int i>
AO_INLINE Q raw_quads(const uint8_t* p) {
  if constexpr (kBits == 2) return shift_words<2 * i>(load_vector(p));
  if constexpr (kBits == 4 || kBits == 6) return indices<kBits, i>(p);
  if constexpr (kBits == 7) return join_bytes<6>(indices<6, i>(p), shift_words<i - 3>(plane1_bytes<3>(p + 192)));
  if constexpr (kBits == 8) return load_vector(p + 64 * i);
}

// The lower halves of `low` and the upper ones of `high`.
AO_INLINE F join_halves(I low, I high) {
  return as_float(_mm512_ternarylogic_epi32(splat_int(0xffff), low, high, 0xCA));
}
// Pairs of floats that are exact in bfloat16.
AO_INLINE P pair_exact(F low, F high) {
  return _mm512_mask_mov_epi16(bits_of(high), 0x55555555, _mm512_srli_epi32(bits_of(low), 16));
}
AO_INLINE P pair_rounded(F low, F high) {
  const I packed = join_bf16(low, high);
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7,
                                         22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(order, packed);
}

// What a format's codes mean, ready in registers.
template <int kBits, Kind kKind>
struct FloatDecoder {
  static constexpr int kSize = 1 << kBits;
  I low, high;        // bfloat16 values of 32 codes each (<= 6 bits), or byte planes of 64 each
  I low2, high2;      // the same of what bfloat16 leaves of a table (<= 6 bits)
  F wide, wide2, wide3, wide4;  // float values of 16 codes each
  I planes[4][4];       // bytes 0 to 3 of the float values of 256 codes (a table of 7 or 8 bits)
  F offset;
  I magic;

  AO_INLINE uint16_t rounded(float v) {
    uint32_t bits;
    __builtin_memcpy(&bits, &v, 4);
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
  AO_INLINE float widened(uint16_t word) {
    const uint32_t bits = static_cast<uint32_t>(word) << 16;
    float v;
    __builtin_memcpy(&v, &bits, 4);
    return v;
  }
  inline __attribute__((always_inline)) explicit FloatDecoder(const float* values) {
    if constexpr (kBits <= 6) {
      alignas(64) uint16_t words[64];
      for (int c = 0; c < 64; ++c) words[c] = rounded(values[c % kSize]);
      low = load_vector(words);
      high = load_vector(words + 32);
      for (int c = 0; c < 64; ++c) words[c] = rounded(values[c % kSize] - widened(words[c]));
      low2 = load_vector(words);
      high2 = load_vector(words + 32);
      alignas(64) float floats[64];
      for (int c = 0; c < 64; ++c) floats[c] = values[c % kSize];
      wide = load(floats), wide2 = load(floats + 16), wide3 = load(floats + 32), wide4 = load(floats + 48);
    } else if constexpr (kKind == Kind::symmetric) {
      alignas(64) uint8_t lows[128], highs[128];
      for (int c = 0; c < 128; ++c) {
        const uint16_t word = rounded(values[c]);
        lows[c] = static_cast<uint8_t>(word), highs[c] = static_cast<uint8_t>(word >> 8);
      }
      low = load_vector(lows), low2 = load_vector(lows + 64);
      high = load_vector(highs), high2 = load_vector(highs + 64);
    } else if constexpr (kKind == Kind::table) {
      alignas(64) uint8_t bytes[4][256];
      for (int c = 0; c < 256; ++c) {
        uint32_t bits;
        __builtin_memcpy(&bits, values + c % kSize, 4);
        for (int b = 0; b < 4; ++b) bytes[b][c] = static_cast<uint8_t>(bits >> 8 * b);
      }
      for (int b = 0; b < 4; ++b) {
        for (int i = 0; i < 4; ++i) planes[b][i] = load_vector(bytes[b] + 64 * i);
      }
    } else if constexpr (kKind == Kind::integer) {
      offset = kBits == 8 ? splat(0x1p23f - values[0]) : splat(values[0]);
      magic = splat_int(0x4b000000);
    }
  }

  // Byte b of each lane in the lowest one of `magic`.
  template <int b>
  inline __attribute__((always_inline)) F wide_byte(Q codes) const {
    if constexpr (kHasByteMoves) {
      const I lane = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 52, 56, 60);
      const I places = _mm512_add_epi32(_mm512_mullo_epi32(lane, splat_int(0x01010101)), splat_int(0x43424100 + b));
      return as_float(bytes_at(places, codes, magic));
    }
    return as_float(_mm512_ternarylogic_epi32(_mm512_srli_epi32(codes, 8 * b), splat_int(255), magic, 0xEA));  // a & b | c
  }

  // Two vectors of pairs: columns (4i, 4i + 2) and (4i + 1, 4i + 3).
  template <int i>
  inline __attribute__((always_inline)) void pairs(const uint8_t* tile, P out[2]) const {
    if constexpr (kBits <= 5) {
      out[0] = _mm512_permutexvar_epi16(code_words<kBits, i, 0>(tile), low);
      out[1] = _mm512_permutexvar_epi16(code_words<kBits, i, 1>(tile), low);
    } else if constexpr (kBits == 6) {
      out[0] = _mm512_permutex2var_epi16(low, code_words<kBits, i, 0>(tile), high);
      out[1] = _mm512_permutex2var_epi16(low, code_words<kBits, i, 1>(tile), high);
    } else if constexpr (kKind == Kind::symmetric) {
      const Q codes = load_vector(tile + 64 * i);
      const I low_bytes = bytes_at(codes, low, low2);
      const I high_bytes =
          _mm512_ternarylogic_epi32(splat_int(static_cast<int>(0x80808080)),
                                    codes, bytes_at(codes, high, high2), 0x6A);
      const I mask = _mm512_set1_epi16(255);
      out[0] = _mm512_ternarylogic_epi32(mask, low_bytes, _mm512_slli_epi16(high_bytes, 8), 0xCA);
      out[1] = _mm512_ternarylogic_epi32(mask, _mm512_srli_epi16(low_bytes, 8), high_bytes, 0xCA);
    } else {
      F wide4[4];
      floats<i>(tile, wide4);
      if constexpr (kKind == Kind::integer) {
        out[0] = pair_exact(wide4[0], wide4[1]);
        out[1] = pair_exact(wide4[2], wide4[3]);
      } else {
        out[0] = pair_rounded(wide4[0], wide4[1]);
        out[1] = pair_rounded(wide4[2], wide4[3]);
      }
    }
  }

  // What `pairs` leaves of the values.
  template <int i>
  inline __attribute__((always_inline)) void low_pairs(const uint8_t* tile, P out[2]) const {
    if constexpr (kBits <= 5) {
      out[0] = _mm512_permutexvar_epi16(code_words<kBits, i, 0>(tile), low2);
      out[1] = _mm512_permutexvar_epi16(code_words<kBits, i, 1>(tile), low2);
    } else if constexpr (kBits == 6) {
      out[0] = _mm512_permutex2var_epi16(low2, code_words<kBits, i, 0>(tile), high2);
      out[1] = _mm512_permutex2var_epi16(low2, code_words<kBits, i, 1>(tile), high2);
    } else {
      F all[4];
      P near[2];
      floats<i>(tile, all);
      pairs<i>(tile, near);
      out[0] = pair_rounded(sub(all[0], low_halves(near[0])), sub(all[1], high_halves(near[0])));
      out[1] = pair_rounded(sub(all[2], low_halves(near[1])), sub(all[3], high_halves(near[1])));
    }
  }

  // Four vectors of floats: columns 4i, 4i + 2, 4i + 1, 4i + 3.
  template <int i>
  inline __attribute__((always_inline)) void floats(const uint8_t* tile, F out[4]) const {
    if constexpr (kKind == Kind::exact || kKind == Kind::symmetric) {
      P two[2];
      pairs<i>(tile, two);
      out[0] = low_halves(two[0]), out[1] = high_halves(two[0]);
      out[2] = low_halves(two[1]), out[3] = high_halves(two[1]);
    } else if constexpr (kKind == Kind::integer && kBits == 8) {
      // a byte in the mantissa of 2^23, whose unit is 1
      const Q codes = load_vector(tile + 64 * i);
      out[0] = sub(wide_byte<0>(codes), offset), out[1] = sub(wide_byte<2>(codes), offset);
      out[2] = sub(wide_byte<1>(codes), offset), out[3] = sub(wide_byte<3>(codes), offset);
    } else if constexpr (kBits >= 7 && kKind == Kind::table) {
      // the bytes of all values, and their words, even columns and odd ones
      const Q codes = raw_quads<kBits, i>(tile);
      I bytes[4];
#pragma GCC unroll 4
      for (int b = 0; b < 4; ++b) {
        bytes[b] = kBits == 8 ? bytes_at(codes, planes[b]) : bytes_at(codes, planes[b][0], planes[b][1]);
      }
      const I mask = _mm512_set1_epi16(255);
      const I low_even = _mm512_ternarylogic_epi32(mask, bytes[0], _mm512_slli_epi16(bytes[1], 8), 0xCA);
      const I low_odd = _mm512_ternarylogic_epi32(mask, _mm512_srli_epi16(bytes[0], 8), bytes[1], 0xCA);
      const I high_even = _mm512_ternarylogic_epi32(mask, bytes[2], _mm512_slli_epi16(bytes[3], 8), 0xCA);
      const I high_odd = _mm512_ternarylogic_epi32(mask, _mm512_srli_epi16(bytes[2], 8), bytes[3], 0xCA);
      out[0] = join_halves(low_even, _mm512_slli_epi32(high_even, 16));
      out[1] = join_halves(_mm512_srli_epi32(low_even, 16), high_even);
      out[2] = join_halves(low_odd, _mm512_slli_epi32(high_odd, 16));
      out[3] = join_halves(_mm512_srli_epi32(low_odd, 16), high_odd);
    } else {
      const I even = code_words<kBits, i, 0>(tile), odd = code_words<kBits, i, 1>(tile);
      out[0] = look_up(even), out[1] = look_up(_mm512_srli_epi32(even, 16));
      out[2] = look_up(odd), out[3] = look_up(_mm512_srli_epi32(odd, 16));
    }
  }

  // Values of the codes in the low bits of each lane.
  inline __attribute__((always_inline)) F look_up(I code) const {
    if constexpr (kBits <= 4) return _mm512_permutexvar_ps(code, wide);
    if constexpr (kBits == 5) return _mm512_permutex2var_ps(wide, code, wide2);
    if constexpr (kBits == 6) {
      return _mm512_mask_blend_ps(_mm512_test_epi32_mask(code, splat_int(32)),
                                  _mm512_permutex2var_ps(wide, code, wide2),
                                  _mm512_permutex2var_ps(wide3, code, wide4));
    }
    return add(to_float(and_(code, splat_int(kSize - 1))), offset);
  }
};

template <int kBits, Kind kKind>
using PairDecoder = FloatDecoder<kBits, kKind>;

// Codes as unsigned bytes: values in units of `unit`, less the least of them (which is given in units).
template <int kBits, Kind kKind>
struct ByteDecoder {
  ByteTable<kBits> table;
  inline __attribute__((always_inline)) explicit ByteDecoder(const float* values, float least, float unit) {
    uint8_t bytes[1 << kBits];
    for (int c = 0; c < 1 << kBits; ++c) {
      bytes[c] = static_cast<uint8_t>(static_cast<int>(values[c] / unit - least));
    }
    table = ByteTable<kBits>(bytes);
  }
  template <int i>
  inline __attribute__((always_inline)) Q quads(const uint8_t* tile) const {
    return table.template look_up<i>(indices<kBits, i>(tile));
  }
};

// Integers that one plane holds are cut out: products and look-ups compete for a pipe of the processor. So are
// those of 6 and 7 bits: of 7 there are no look-ups.
template <int kBits>
  requires(kBits == 2 || kBits == 4 || kBits >= 6)
struct ByteDecoder<kBits, Kind::integer> {
  inline __attribute__((always_inline)) explicit ByteDecoder(const float*, float, float) {}
  template <int i>
  inline __attribute__((always_inline)) Q quads(const uint8_t* tile) const {
    const Q codes = raw_quads<kBits, i>(tile);
    return kBits == 8 ? codes : and_(codes, _mm512_set1_epi8(static_cast<char>((1 << kBits) - 1)));
  }
};

}  // namespace ao::AO_ISA
