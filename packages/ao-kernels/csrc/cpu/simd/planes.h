// Values from look-ups of bytes: 2 where bfloat16 holds the values, else 4, each in a table of its own. For
// sets with an instruction for that, which provide
//   even_words, odd_words(low, high)    from split bytes: columns (4i, 4i + 2), (4i + 1, 4i + 3) as 16 bits
//   even_dwords, odd_dwords(low, high)  from these words: the low ones and the high ones, as 32 bits
#pragma once
#include "codes.h"

namespace ao::AO_ISA {

// Pairs of bfloat16 as floats.
AO_INLINE void widen_words(I even, I odd, F out[4]) {
  const I mask = splat_int(static_cast<int32_t>(0xffff0000));
  out[0] = as_float(shift_left<16>(even)), out[1] = as_float(and_(even, mask));
  out[2] = as_float(shift_left<16>(odd)), out[3] = as_float(and_(odd, mask));
}

constexpr bool in_planes(int bits, Kind kind) {
  return kind == Kind::exact || kind == Kind::symmetric || (kind == Kind::table && bits <= 6);
}

template <int kBits, Kind kKind>
  requires(in_planes(kBits, kKind))
struct FloatDecoder<kBits, kKind> {
  static constexpr int kPlanes = kKind == Kind::table ? 4 : 2;
  static constexpr int kSize = kKind == Kind::symmetric ? 128 : 1 << kBits;
  Lookup<kSize> planes[kPlanes];

  AO_METHOD explicit FloatDecoder(const float* values) {
    uint8_t bytes[kSize];
    for (int plane = 0; plane < kPlanes; ++plane) {
      for (int c = 0; c < kSize; ++c) {
        uint32_t value;
        __builtin_memcpy(&value, values + c, 4);
        bytes[c] = static_cast<uint8_t>(value >> 8 * (4 - kPlanes + plane));
      }
      planes[plane] = Lookup<kSize>(bytes);
    }
  }

  template <int i>
  AO_METHOD void floats(const uint8_t* tile, F out[4]) const {
    if constexpr (kPlanes == 4) {
      const Q codes = code_quads<kBits, i, true>(tile);
      const I low = planes[0].look_up(codes), high = planes[1].look_up(codes);
      const I low2 = planes[2].look_up(codes), high2 = planes[3].look_up(codes);
      const I even = even_words(low, high), even2 = even_words(low2, high2);
      out[0] = as_float(even_dwords(even, even2)), out[1] = as_float(odd_dwords(even, even2));
      const I odd = odd_words(low, high), odd2 = odd_words(low2, high2);
      out[2] = as_float(even_dwords(odd, odd2)), out[3] = as_float(odd_dwords(odd, odd2));
    } else {
      I two[2];
      words<i>(tile, two);
      widen_words(two[0], two[1], out);
    }
  }
  // Of two planes, the words of both: even columns and odd ones.
  template <int i>
  AO_METHOD void words(const uint8_t* tile, I out[2]) const {
    const Q codes = code_quads<kBits, i, true>(tile);
    I low, high;
    if constexpr (kKind == Kind::symmetric) {
      const I index = and_(codes, splat_byte(127));
      low = planes[0].look_up(index);
      high = xor_(planes[1].look_up(index), and_(codes, splat_byte(128)));
    } else {
      low = planes[0].look_up(codes), high = planes[1].look_up(codes);
    }
    out[0] = even_words(low, high), out[1] = odd_words(low, high);
  }
};

}  // namespace ao::AO_ISA
