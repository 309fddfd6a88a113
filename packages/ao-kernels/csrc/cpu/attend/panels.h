// Keys and values of a tile as the products read them.
//
// Bytes: for keys [16 tokens][4 elements] in each vector, for values [16 of 64 elements][4 tokens], see `interleave`.
// Floats: for keys [16 tokens] in each vector, for values rows of tokens.
#pragma once
#include "../quantize/decode.h"
#include "numbers.h"

namespace ao::AO_ISA::attention {

// 64 codes from `p` on, as unsigned bytes, where `left` bytes of the token are left; codes beyond its end are anything.
template <int kBits, bool kWhole>
AO_INLINE I load_codes(const uint8_t* p, int64_t left, I flip) {
  alignas(64) uint8_t part[64];
  if (!kWhole && left < 8 * kBits) {
    __builtin_memset(part, 0, 64);
    __builtin_memcpy(part, p, static_cast<size_t>(left));
    p = part;
  }
  if constexpr (kBits == 8) return xor_(load_vector(p), flip);
  return xor_(spread_nibbles(p), flip);
}

// f.template operator()<bits of codes, whether tokens consist of whole vectors>()
template <class F>
AO_INLINE void by_width(const Stored& s, const F& f) {
  const bool whole = s.size % 64 == 0;
  if (s.coded.code_bits == 8) return whole ? f.template operator()<8, true>() : f.template operator()<8, false>();
  return whole ? f.template operator()<4, true>() : f.template operator()<4, false>();
}

AO_INLINE const uint8_t* row_of(const Stored& s, int64_t matrix, int64_t token) {
  return s.coded.codes + (matrix * s.tokens + token) * s.coded.row_bytes;
}

// Asks for the codes of tokens that come next.
AO_INLINE void prefetch(const Stored& s, int64_t matrix, int64_t token, int64_t count) {
  if (token + count > s.tokens) return;
  const uint8_t* p = row_of(s, matrix, token);
  for (int64_t i = 0; i < count * s.coded.row_bytes; i += 64) __builtin_prefetch(p + i, 0, 2);
}

// Prefetches the first two lines of each page of tokens that come next. This translates the page's address, and the
// hardware prefetcher begins to fetch the rest of it.
AO_INLINE void begin_pages(const Stored& s, int64_t matrix, int64_t token, int64_t count) {
  if (token + count > s.tokens) return;
  const uint8_t* const p = row_of(s, matrix, token);
  for (int64_t i = 0; i < count * s.coded.row_bytes; i += 4096) {
    __builtin_prefetch(p + i, 0, 2), __builtin_prefetch(p + i + 64, 0, 2);
  }
}

// kCount tokens from `token` on, the last one again where there are fewer, 64 elements of each.
template <int kBits, bool kWhole, int kCount>
AO_INLINE void load_tokens(const uint8_t* row, int64_t bytes, int64_t rows, int64_t at, I flip, I (&v)[kCount]) {
  const int64_t begin = at * kBits / 8, left = bytes - begin;
  row += begin;
  if (rows >= kCount) {
#pragma GCC unroll 16
    for (int i = 0; i < kCount; ++i) v[i] = load_codes<kBits, kWhole>(row + i * bytes, left, flip);
  } else {
    for (int i = 0; i < kCount; ++i) v[i] = load_codes<kBits, kWhole>(row + (i < rows ? i : rows - 1) * bytes, left, flip);
  }
}

// What turns stored bytes into those that products take, and the value of 0 after that: where products are of signed
// bytes, codes of 8 bits are kByteBase less.
AO_INLINE int32_t base_of(const Stored& s) { return s.coded.code_bits == 8 ? kByteBase : 0; }
AO_INLINE I flip_of(const Stored& s) {
  return splat_int(static_cast<int32_t>(static_cast<uint8_t>(s.flip ^ base_of(s)) * 0x01010101u));
}
AO_INLINE int32_t least_of(const Stored& s) { return static_cast<int32_t>(s.least) + base_of(s); }

static inline void key_bytes(const Stored& s, const Stored& next, int64_t matrix, int64_t token, int64_t count,
                             int64_t wide, uint8_t* panel) {
  const int64_t bytes = s.coded.row_bytes;
  const I flip = flip_of(s);
  by_width(s, [&]<int kBits, bool kWhole>() {
    const uint8_t* row = row_of(s, matrix, token);
    for (int64_t t = 0; t < count; t += 16, row += 16 * bytes) {
      prefetch(next, matrix, token + t, 16);
      for (int64_t at = 0; at < wide; at += 64) {
        I v[16];
        load_tokens<kBits, kWhole>(row, bytes, count - t, at, flip, v);
        transpose(v);
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) store_vector(panel + (t / 16 * wide / 4 + at / 4 + i) * 64, v[i]);
      }
    }
  });
}

static inline void value_bytes(const Stored& s, const Stored& next, int64_t matrix, int64_t token, int64_t count,
                               int64_t wide, uint8_t* panel) {
  const int64_t bytes = s.coded.row_bytes;
  const I flip = flip_of(s);
  by_width(s, [&]<int kBits, bool kWhole>() {
    const uint8_t* row = row_of(s, matrix, token);
    for (int64_t t = 0; t < count; t += 4, row += 4 * bytes) {
      if (t % 16 == 0) prefetch(next, matrix, token + kTokenTile + t, 16);
      for (int64_t at = 0; at < wide; at += 64) {
        I v[4];
        load_tokens<kBits, kWhole>(row, bytes, count - t, at, flip, v);
        interleave(v);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) store_vector(panel + (at / 64 * kTokenTile + t + i) * 64, v[i]);
      }
    }
  });
}

// One token of a tail, or of a block, as floats.
static inline void read_token(const Stored& s, const Tail* tail, Element type, int64_t matrix, int64_t token,
                              float* out) {
  if (tail == nullptr && s.float8) {
    const uint8_t* const codes = row_of(s, matrix, token);
    // halves with the bits of codes are values / 256
    const F scale = splat(256 * coding::load_scale(s.coded.scale, s.coded.scale_type, matrix * s.tokens + token));
    for (int64_t i = 0; i < s.size; i += 16) store(out + i, mul(e4m3_as_half(codes + i), scale));
    return;
  }
  if (tail == nullptr) return coding::decode_piece(s.coded, matrix * s.tokens + token, 0, s.size, out);
  const int64_t place = (matrix * tail->slots + token % tail->slots) * s.size;
  const auto* p = static_cast<const uint8_t*>(tail->data) + place * bytes_of(type);
  for (int64_t i = 0; i < s.size; i += 16) {
    store(out + i, load_as(type, p + i * bytes_of(type), s.size - i < 16 ? static_cast<int>(s.size - i) : 16));
  }
}

static inline void key_floats(const Stored& s, const Tail* tail, Element type, int64_t matrix, int64_t token,
                              int64_t count, int64_t wide, float* panel, float* staging) {
  __builtin_memset(staging, 0, static_cast<size_t>(16 * wide) * sizeof(float));
  for (int64_t t = 0; t < count; t += 16) {
    const int64_t rows = count - t < 16 ? count - t : 16;
    for (int64_t i = 0; i < rows; ++i) read_token(s, tail, type, matrix, token + t + i, staging + i * wide);
    for (int64_t at = 0; at < s.size; at += 16) {
      I v[16];
      for (int i = 0; i < 16; ++i) v[i] = bits_of(load(staging + i * wide + at));
      transpose(v);
      for (int i = 0; i < 16; ++i) store(panel + (t * wide + (at + i) * 16), as_float(v[i]));
    }
  }
}

static inline void value_floats(const Stored& s, const Tail* tail, Element type, int64_t matrix, int64_t token,
                                int64_t count, int64_t wide, float* panel) {
  for (int64_t t = 0; t < count; ++t) {
    float* const row = panel + t * wide;
    read_token(s, tail, type, matrix, token + t, row);
    for (int64_t i = s.size; i < wide; ++i) row[i] = 0;
  }
}

// -- scales of tokens --------------------------------------------------------------------------------------

AO_INLINE Element element_of(Scale type) {
  return type == Scale::f32 ? Element::f32 : type == Scale::bf16 ? Element::bf16 : Element::f16;
}
AO_INLINE Element element_of(Zero type) {
  return type == Zero::f32 ? Element::f32 : type == Zero::bf16 ? Element::bf16 : Element::f16;
}

// `count` scales or zero points from place `at` on, as floats; up to 15 more are 0.
AO_INLINE void read_scales(const void* from, Element type, int64_t at, int64_t count, float* out) {
  const auto* p = static_cast<const uint8_t*>(from) + at * bytes_of(type);
  for (int64_t i = 0; i < count; i += 16) {
    store(out + i, load_as(type, p + i * bytes_of(type), count - i < 16 ? static_cast<int>(count - i) : 16));
  }
}

// Scales of the tokens of a tile, and less what they stand above 0: (code - zero) * scale is code * scale + shift.
struct TokenScales {
  alignas(64) float scale[kTokenTile], shift[kTokenTile];
  bool shifted;
};

// `staging`: 16 numbers for each group of a tile's tokens.
static inline void token_scales(const Stored& s, int64_t matrix, int64_t token, int64_t count, int64_t group,
                                float* staging, TokenScales& out) {
  const Dequantize& d = s.coded;
  const int64_t groups = d.blocks.groups, from = (matrix * s.tokens + token) * groups;
  out.shifted = d.zero_type != Zero::none;
  if (groups == 1) {
    read_scales(d.scale, element_of(d.scale_type), from, count, out.scale);
    if (out.shifted) read_scales(d.zero, element_of(d.zero_type), from, count, out.shift);
  } else {
    // of all groups in a row, of which one is picked
    const auto pick = [&](float* to) {
      for (int64_t t = 0; t < count; ++t) to[t] = staging[t * groups + group];
      for (int64_t t = count; t % 16; ++t) to[t] = 0;
    };
    read_scales(d.scale, element_of(d.scale_type), from, count * groups, staging), pick(out.scale);
    if (out.shifted) read_scales(d.zero, element_of(d.zero_type), from, count * groups, staging), pick(out.shift);
  }
  for (int64_t t = 0; out.shifted && t < count; t += 16) {
    store(out.shift + t, sub(zero(), mul(load(out.scale + t), load(out.shift + t))));
  }
}

}  // namespace ao::AO_ISA::attention
