// Codes of weights as pairs of 16-bit numbers, exactly. A register holds two neighbouring words of a row; plane J of it
// is a pair of numbers that are neighbours along K. Included after a machine, which has U32 and the two elements.
#pragma once

namespace ao::gpu {

// What 4-bit codes are less: -(2^mantissa + zero point), as a pair, where a code lies in the lowest bits of a mantissa
// and, in float16, where it lies four bits up.
struct Less {
  U32 low, up;
};

template <class E>
struct Int4;  // codes 0..15, less a zero point

template <>
struct Int4<Bf16> {
  static constexpr int planes = 4, bits = 4;
  AO_DEVICE static Less less(U32 zero) {
    const U32 pair = (zero | U32(0xc300)) * U32(0x10001);  // -(128 + zero), to which 0..127 are exact
    return {pair, pair};
  }
  template <int J>
  AO_DEVICE static U32 decode(U32 words, const Less& less) {
    const U32 number = masked_or(words >> (4 * J), 0x000f000f, 0x43004300);  // 128 + code
    return Bf16::fma(number, U32(0x3f803f80), less.low);
  }
};

template <>
struct Int4<Fp16> {
  static constexpr int planes = 4, bits = 4;
  AO_DEVICE static Less less(U32 zero) {
    return {(zero | U32(0xe400)) * U32(0x10001),           // -(1024 + zero)
            ((zero << 4) | U32(0xd400)) * U32(0x10001)};  // -(64 + zero), to which 0..63 are exact
  }
  template <int J>
  AO_DEVICE static U32 decode(U32 words, const Less& less) {
    const U32 moved = J < 2 ? words : words >> 8;
    if constexpr (J % 2 == 0) {
      return Fp16::fma(masked_or(moved, 0x000f000f, 0x64006400), U32(0x3c003c00), less.low);  // 1024 + code
    } else {
      return Fp16::fma(masked_or(moved, 0x00f000f0, 0x64006400), U32(0x2c002c00), less.up);  // 1024 + 16 code
    }
  }
};

template <class E>
struct Int8;  // codes 0..255, less 128

template <>
struct Int8<Bf16> {
  static constexpr int planes = 2, bits = 8;
  AO_DEVICE static Less less(U32) { return {}; }
  // seven bits fit into the mantissa: 128 + those, less 256, or less 128 where the eighth is set
  template <int J>
  AO_DEVICE static U32 decode(U32 words, const Less&) {
    const U32 moved = J ? words >> 8 : words;
    const U32 number = masked_or(moved, 0x007f007f, 0x43004300);
    const U32 top = masked_xor(moved, 0x00800080, 0x43804380);
    return Bf16::fma(top, U32(0xbf80bf80), number);
  }
};

template <>
struct Int8<Fp16> {
  static constexpr int planes = 2, bits = 8;
  AO_DEVICE static Less less(U32) { return {}; }
  template <int J>
  AO_DEVICE static U32 decode(U32 words, const Less&) {
    const U32 moved = J ? words >> 8 : words;
    const U32 number = masked_or(moved, 0x00ff00ff, 0x64006400);  // 1024 + code
    return Fp16::fma(number, U32(0x3c003c00), U32(0xe480e480));  // less 1152
  }
};

// Sign, four bits of exponent, three of mantissa, moved into place and multiplied by a power of two. What is NaN in the
// format becomes ±480, as in the Triton kernels.
template <class E>
struct E4m3 {
  static constexpr int planes = 2, bits = 8;
  static constexpr int place = E::mantissa - 3;
  AO_DEVICE static Less less(U32) { return {}; }
  template <int J>
  AO_DEVICE static U32 decode(U32 words, const Less&) {
    constexpr uint32_t digits = 0x7fu << place;
    const U32 moved = J == 0 ? words << place : words >> (8 - place);
    const U32 sign = J == 0 ? words << 8 : words;
    const U32 number = masked_or(sign, 0x80008000, moved & U32(digits * 0x10001));
    return E::fma(number, U32(E::times_float8), U32(0x80008000));  // -0 keeps the sign of 0
  }
};

}  // namespace ao::gpu
