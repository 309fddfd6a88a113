// Vectors of 16 lanes as four of 16 bytes, in the vector extensions that GCC and Clang share: what the sets
// without a header entirely of their own have in common. A set that includes this provides
//   fma4(x, y, z), nearest4(x)    x * y + z, and floats rounded to integers, ties to even
//   half_to_float4, float_to_half4   float16 in the low halves of integers
//   dot4<kSmall>(acc, w, x)       acc and the products of 4 unsigned bytes and 4 signed ones in each lane
//   load_bits, and the rest that codes.h asks for
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "../element.h"

#define AO_METHOD inline __attribute__((always_inline))
#define AO_INLINE static AO_METHOD

namespace ao::AO_ISA {

typedef float f4 __attribute__((vector_size(16)));
typedef int32_t i4 __attribute__((vector_size(16)));
typedef uint32_t u4 __attribute__((vector_size(16)));
typedef uint16_t u8 __attribute__((vector_size(16)));

struct F {  // 16 floats, one per row of the block
  f4 a, b, c, d;
};
struct I {  // 16 int32
  i4 a, b, c, d;
};
using Q = I;  // 16 quads of bytes

AO_INLINE f4 fma4(f4 x, f4 y, f4 z);
AO_INLINE i4 nearest4(f4 x);
AO_INLINE f4 half_to_float4(i4 half);
AO_INLINE i4 float_to_half4(f4 x);
template <bool kSmall>
AO_INLINE i4 dot4(i4 acc, i4 w, i4 x);

// The same operation on all four.
template <class R, class Operation, class... V>
AO_INLINE R each(Operation f, V... v) {
  return {f(v.a...), f(v.b...), f(v.c...), f(v.d...)};
}

AO_INLINE f4 splat4(float v) { return f4{v, v, v, v}; }
AO_INLINE i4 splat4(int32_t v) { return i4{v, v, v, v}; }
AO_INLINE i4 select4(i4 mask, i4 yes, i4 no) { return (yes & mask) | (no & ~mask); }
AO_INLINE f4 smaller4(f4 x, f4 y) { return (f4)select4(x < y, (i4)x, (i4)y); }
AO_INLINE f4 greater4(f4 x, f4 y) { return (f4)select4(x > y, (i4)x, (i4)y); }

AO_INLINE F splat(float v) { return {splat4(v), splat4(v), splat4(v), splat4(v)}; }
AO_INLINE F zero() { return splat(0.0f); }
AO_INLINE F add(F x, F y) { return each<F>([](f4 p, f4 q) { return p + q; }, x, y); }
AO_INLINE F sub(F x, F y) { return each<F>([](f4 p, f4 q) { return p - q; }, x, y); }
AO_INLINE F mul(F x, F y) { return each<F>([](f4 p, f4 q) { return p * q; }, x, y); }
AO_INLINE F div(F x, F y) { return each<F>([](f4 p, f4 q) { return p / q; }, x, y); }
AO_INLINE F fma(F x, F y, F z) { return each<F>([](f4 p, f4 q, f4 r) { return fma4(p, q, r); }, x, y, z); }
// The second operand where the first is NaN: put the accumulated value second to keep its NaN.
AO_INLINE F min(F x, F y) { return each<F>([](f4 p, f4 q) { return smaller4(p, q); }, x, y); }
AO_INLINE F max(F x, F y) { return each<F>([](f4 p, f4 q) { return greater4(p, q); }, x, y); }
AO_INLINE I bits_of(F v) { return each<I>([](f4 p) { return (i4)p; }, v); }
AO_INLINE F as_float(I v) { return each<F>([](i4 p) { return (f4)p; }, v); }
AO_INLINE I splat_int(int32_t v) { return {splat4(v), splat4(v), splat4(v), splat4(v)}; }
AO_INLINE I splat_byte(int v) { return splat_int(static_cast<int32_t>(static_cast<uint32_t>(v) * 0x01010101u)); }
AO_INLINE I add(I x, I y) { return each<I>([](i4 p, i4 q) { return p + q; }, x, y); }
AO_INLINE I subtract(I x, I y) { return each<I>([](i4 p, i4 q) { return p - q; }, x, y); }
AO_INLINE I and_(I x, I y) { return each<I>([](i4 p, i4 q) { return p & q; }, x, y); }
AO_INLINE I or_(I x, I y) { return each<I>([](i4 p, i4 q) { return p | q; }, x, y); }
AO_INLINE I xor_(I x, I y) { return each<I>([](i4 p, i4 q) { return p ^ q; }, x, y); }
AO_INLINE I max_int(I x, I y) { return each<I>([](i4 p, i4 q) { return select4(p > q, p, q); }, x, y); }
AO_INLINE F abs(F v) { return as_float(and_(bits_of(v), splat_int(0x7fffffff))); }
AO_INLINE F to_float(I v) { return each<F>([](i4 p) { return __builtin_convertvector(p, f4); }, v); }
AO_INLINE I round_to_int(F v) { return each<I>([](f4 p) { return nearest4(p); }, v); }
// Elements 0, 2, 1, 3 of each four: the order in which decoded weights arrive.
AO_INLINE F swap_middle(F v) { return each<F>([](f4 p) { return f4{p[0], p[2], p[1], p[3]}; }, v); }
// Lane i from lane i ^ kDistance.
template <int kDistance>
AO_INLINE F swap_lanes(F v) {
  if constexpr (kDistance == 1) return each<F>([](f4 p) { return __builtin_shufflevector(p, p, 1, 0, 3, 2); }, v);
  if constexpr (kDistance == 2) return each<F>([](f4 p) { return __builtin_shufflevector(p, p, 2, 3, 0, 1); }, v);
  if constexpr (kDistance == 4) return {v.b, v.a, v.d, v.c};
  return {v.c, v.d, v.a, v.b};
}

template <int kBits>
AO_INLINE I shift_left(I v) {
  return each<I>([](i4 p) { return (i4)((u4)p << kBits); }, v);
}
template <int kBits>
AO_INLINE I shift_right(I v) {
  return each<I>([](i4 p) { return p >> kBits; }, v);
}
AO_INLINE I sign_extend_byte(I v) { return shift_right<24>(shift_left<24>(v)); }

AO_INLINE float sum(F v) {
  const f4 s = (v.a + v.b) + (v.c + v.d);
  return (s[0] + s[1]) + (s[2] + s[3]);
}
AO_INLINE int32_t sum_of(I v) {
  const i4 s = (v.a + v.b) + (v.c + v.d);
  return s[0] + s[1] + s[2] + s[3];
}
AO_INLINE int32_t largest(I v) {
  const I other = max_int(v, I{v.b, v.a, v.d, v.c});
  const i4 s = select4(other.a > other.c, other.a, other.c);
  const int32_t x = s[0] > s[1] ? s[0] : s[1], y = s[2] > s[3] ? s[2] : s[3];
  return x > y ? x : y;
}

// -- memory ------------------------------------------------------------------------------------------------

template <class V>
AO_INLINE V load_bytes_as(const void* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof(V));
  return v;
}
// Of all four one by one: gcc would copy them together, by way of the stack.
template <class V, class V4>
AO_INLINE V load_four(const void* p) {
  const auto* q = static_cast<const uint8_t*>(p);
  return {load_bytes_as<V4>(q), load_bytes_as<V4>(q + 16), load_bytes_as<V4>(q + 32), load_bytes_as<V4>(q + 48)};
}
template <class V>
AO_INLINE void store_four(void* p, V v) {
  auto* q = static_cast<uint8_t*>(p);
  __builtin_memcpy(q, &v.a, 16), __builtin_memcpy(q + 16, &v.b, 16);
  __builtin_memcpy(q + 32, &v.c, 16), __builtin_memcpy(q + 48, &v.d, 16);
}
AO_INLINE F load(const float* p) { return load_four<F, f4>(p); }
AO_INLINE void store(float* p, F v) { store_four(p, v); }
AO_INLINE I load_vector(const void* p) { return load_four<I, i4>(p); }
AO_INLINE void store_vector(void* p, I v) { store_four(p, v); }
AO_INLINE void store_weight(uint8_t* p, I w) { store_four(p, w); }
AO_INLINE void store_weight(uint8_t* p, F w) { store_four(p, w); }

template <class T>
AO_INLINE I widen(const T* p) {
  alignas(16) int32_t lanes[16];
  for (int i = 0; i < 16; ++i) lanes[i] = p[i];
  return load_vector(lanes);
}
template <class T>
AO_INLINE void narrow(T* p, I v) {
  alignas(16) int32_t lanes[16];
  store_vector(lanes, v);
  for (int i = 0; i < 16; ++i) p[i] = static_cast<T>(lanes[i]);
}
AO_INLINE I load_bytes(const uint8_t* p) { return widen(p); }
AO_INLINE I load_words(const uint16_t* p) { return widen(p); }
AO_INLINE F half_to_float(I half) { return each<F>([](i4 p) { return half_to_float4(p); }, half); }
AO_INLINE F half_to_float(const uint16_t* p) { return half_to_float(load_words(p)); }
// 16 bytes: the low ones of 16 integers.
AO_INLINE void store_bytes(uint8_t* p, I v) { narrow(p, v); }
// 16 codes of float8 e4m3, as float16 with the same bits: value / 256, or NaN.
AO_INLINE F e4m3_as_half(const uint8_t* p) {
  const I bits = shift_left<7>(sign_extend_byte(load_bytes(p)));  // the sign in bits 14 and 15
  // with 1 more a magnitude reaches bit 14 if it is that of NaN, whose exponent then has all bits
  const I next = add(bits, splat_int(0x80));
  return half_to_float(and_(xor_(bits, and_(next, splat_int(0x4000))), splat_int(0xffff)));
}

// Up to 16 elements as floats; the lanes beyond `count` are 0.
AO_INLINE F load_as(Element type, const void* p, int count) {
  alignas(16) uint8_t part[64];
  if (count < 16) {
    __builtin_memset(part, 0, 64);
    __builtin_memcpy(part, p, static_cast<size_t>(count * (type == Element::f32 ? 4 : 2)));
    p = part;
  }
  if (type == Element::f32) return load_four<F, f4>(p);
  alignas(16) uint16_t words[16];
  __builtin_memcpy(words, p, 32);
  return type == Element::f16 ? half_to_float(words) : as_float(shift_left<16>(load_words(words)));
}

// To bfloat16, ties to even; NaN stays NaN.
AO_INLINE i4 float_to_bf16(f4 x) {
  const u4 bits = (u4)x;
  const u4 rounded = bits + 0x7fff + (bits >> 16 & 1);
  return (i4)((u4)select4(x == x, (i4)rounded, (i4)(bits | 0x400000)) >> 16);
}

AO_INLINE void store_as(Element type, void* p, F v, int count) {
  const size_t lanes = static_cast<size_t>(count < 16 ? count : 16);
  if (type == Element::f32) {
    __builtin_memcpy(p, &v, 4 * lanes);
    return;
  }
  const bool half = type == Element::f16;
  alignas(16) uint16_t words[16];
  narrow(words, each<I>([half](f4 x) { return half ? float_to_half4(x) : float_to_bf16(x); }, v));
  __builtin_memcpy(p, words, 2 * lanes);
}

// -- products ----------------------------------------------------------------------------------------------

AO_INLINE F splat_float(const uint8_t* p) { return splat(load_bytes_as<float>(p)); }
AO_INLINE I splat_dword(const void* p) { return splat_int(load_bytes_as<int32_t>(p)); }
// `kSmall`: w < 128.
template <bool kSmall>
AO_INLINE I dot_quads(I acc, Q w, Q x) {
  return each<I>([](i4 p, i4 q, i4 r) { return dot4<kSmall>(p, q, r); }, acc, w, x);
}

// -- rows of codes -----------------------------------------------------------------------------------------

typedef uint8_t b4 __attribute__((vector_size(16)));  // the bytes of four lanes

template <class Get>
AO_INLINE void transpose4(const I (&v)[16], Get part, i4 (&out)[4], int first) {
  const i4 a = part(v[first]), b = part(v[first + 1]), c = part(v[first + 2]), d = part(v[first + 3]);
  const i4 low = __builtin_shufflevector(a, b, 0, 4, 1, 5), high = __builtin_shufflevector(a, b, 2, 6, 3, 7);
  const i4 low2 = __builtin_shufflevector(c, d, 0, 4, 1, 5), high2 = __builtin_shufflevector(c, d, 2, 6, 3, 7);
  out[0] = __builtin_shufflevector(low, low2, 0, 1, 4, 5), out[1] = __builtin_shufflevector(low, low2, 2, 3, 6, 7);
  out[2] = __builtin_shufflevector(high, high2, 0, 1, 4, 5), out[3] = __builtin_shufflevector(high, high2, 2, 3, 6, 7);
}
// Lane i of vector j becomes lane j of vector i.
AO_INLINE void transpose(I (&v)[16]) {
  i4 made[4][4][4];  // [four lanes][four vectors][lane]
  for (int i = 0; i < 4; ++i) {
    transpose4(v, [](const I& x) { return x.a; }, made[0][i], 4 * i);
    transpose4(v, [](const I& x) { return x.b; }, made[1][i], 4 * i);
    transpose4(v, [](const I& x) { return x.c; }, made[2][i], 4 * i);
    transpose4(v, [](const I& x) { return x.d; }, made[3][i], 4 * i);
  }
  for (int i = 0; i < 16; ++i) {
    const auto& lanes = made[i / 4];
    v[i] = {lanes[0][i % 4], lanes[1][i % 4], lanes[2][i % 4], lanes[3][i % 4]};
  }
}
// Bytes of four rows, one after the other in each lane.
AO_INLINE void interleave4(i4 p, i4 q, i4 r, i4 s, i4 (&out)[4]) {
  const auto low = [](b4 x, b4 y) {
    return __builtin_shufflevector(x, y, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  };
  const auto high = [](b4 x, b4 y) {
    return __builtin_shufflevector(x, y, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  };
  const auto low_words = [](u8 x, u8 y) { return (i4)__builtin_shufflevector(x, y, 0, 8, 1, 9, 2, 10, 3, 11); };
  const auto high_words = [](u8 x, u8 y) { return (i4)__builtin_shufflevector(x, y, 4, 12, 5, 13, 6, 14, 7, 15); };
  const u8 a = (u8)low((b4)p, (b4)q), b = (u8)high((b4)p, (b4)q), c = (u8)low((b4)r, (b4)s), d = (u8)high((b4)r, (b4)s);
  out[0] = low_words(a, c), out[1] = high_words(a, c), out[2] = low_words(b, d), out[3] = high_words(b, d);
}
// Byte 16L + 4k + i of each of four rows, to lane 4L + i of vector k.
AO_INLINE void interleave(I (&v)[4]) {
  i4 a[4], b[4], c[4], d[4];
  interleave4(v[0].a, v[1].a, v[2].a, v[3].a, a);
  interleave4(v[0].b, v[1].b, v[2].b, v[3].b, b);
  interleave4(v[0].c, v[1].c, v[2].c, v[3].c, c);
  interleave4(v[0].d, v[1].d, v[2].d, v[3].d, d);
  for (int k = 0; k < 4; ++k) v[k] = {a[k], b[k], c[k], d[k]};
}
// The half bytes of 32 bytes, lower ones first, as 64 bytes.
AO_INLINE I spread_nibbles(const uint8_t* p) {
  i4 v[2];
  __builtin_memcpy(v, p, 32);
  const auto low = [](b4 x, b4 y) {
    return (i4)__builtin_shufflevector(x, y, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  };
  const auto high = [](b4 x, b4 y) {
    return (i4)__builtin_shufflevector(x, y, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  };
  const i4 mask = splat4(0x0f0f0f0f);
  const b4 a = (b4)(v[0] & mask), b = (b4)((i4)((u4)v[0] >> 4) & mask);
  const b4 c = (b4)(v[1] & mask), d = (b4)((i4)((u4)v[1] >> 4) & mask);
  return {low(a, b), high(a, b), low(c, d), high(c, d)};
}

// -- codes -------------------------------------------------------------------------------------------------

template <int kShift>
AO_INLINE I shift_words(I v) {
  if constexpr (kShift > 0) return each<I>([](i4 p) { return (i4)((u8)p >> kShift); }, v);
  if constexpr (kShift < 0) return each<I>([](i4 p) { return (i4)((u8)p << -kShift); }, v);
  return v;
}
// A split order is that of the tile.
template <bool>
AO_INLINE I load_plane(const uint8_t* p) {
  return load_vector(p);
}
template <int kByte>
AO_INLINE I byte_of(Q v) {
  return each<I>([](i4 p) { return (i4)((u4)p >> 8 * kByte & 255); }, v);
}

// -- two of every four columns -----------------------------------------------------------------------------

// 16 half bytes.
AO_INLINE I load_nibbles(const uint8_t* p) {
  alignas(16) int32_t lanes[16];
  for (int i = 0; i < 16; ++i) lanes[i] = p[i / 2] >> i % 2 * 4 & 15;
  return load_vector(lanes);
}
// Columns, of 32, of 16 values whose places within four columns stand in 2 bits each.
AO_INLINE I places_of(const uint8_t* p) {
  alignas(16) int32_t lanes[16];
  for (int i = 0; i < 16; ++i) lanes[i] = (p[i / 4] >> i % 4 * 2 & 3) | i / 2 * 4;
  return load_vector(lanes);
}
AO_INLINE F pick(const float* x, I columns) {
  alignas(16) int32_t lanes[16];
  alignas(16) float picked[16];
  store_vector(lanes, columns);
  for (int i = 0; i < 16; ++i) picked[i] = x[lanes[i]];
  return load(picked);
}

}  // namespace ao::AO_ISA
