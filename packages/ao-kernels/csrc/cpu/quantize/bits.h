// Bit streams of codes, as ao_core.numerics.pack_bits makes them, from and to one byte a code.
//
// Eight codes at a time, in one 64-bit word: both byte orders that are compiled for are little-endian.
#pragma once
#include "numbers.h"

namespace ao::AO_ISA::coding {

// Codes and bytes of the smallest run that fills whole bytes.
static inline int64_t unit_codes(int bits) { return 8 / (bits & -bits); }

// Bytes that `count` codes take, the last unit padded.
static inline int64_t packed_bytes(int64_t count, int bits) {
  const int64_t unit = unit_codes(bits);
  return (count + unit - 1) / unit * unit * bits / 8;
}

// Eight codes of kBits, one per byte, to the low 8 * kBits bits.
template <int kBits>
static inline uint64_t squeeze(uint64_t w) {
  w = (w & 0x00ff00ff00ff00ff) | (w & 0xff00ff00ff00ff00) >> (8 - kBits);
  w = (w & 0x0000ffff0000ffff) | (w & 0xffff0000ffff0000) >> (16 - 2 * kBits);
  return (w & 0xffffffff) | w >> 32 << 4 * kBits;
}

template <int kBits>
static inline uint64_t spread(uint64_t w) {
  constexpr uint64_t kFour = (1ull << 4 * kBits) - 1, kTwo = (1ull << 2 * kBits) - 1,
                     kOne = (1ull << kBits) - 1;
  w = (w & kFour) | (w >> 4 * kBits & kFour) << 32;
  w = (w & kTwo * 0x0000000100000001) | (w & (kTwo << 2 * kBits) * 0x0000000100000001)
                                             << (16 - 2 * kBits);
  return (w & kOne * 0x0001000100010001) | (w & (kOne << kBits) * 0x0001000100010001) << (8 - kBits);
}

template <int kBits>
static inline void pack_units(const uint8_t* codes, int64_t count, uint8_t* out) {
  const int64_t whole = count / 8 * 8;
  for (int64_t i = 0; i < whole; i += 8) {
    uint64_t w;
    __builtin_memcpy(&w, codes + i, 8);
    w = squeeze<kBits>(w);
    __builtin_memcpy(out + i / 8 * kBits, &w, kBits);
  }
  if (whole == count) return;
  uint64_t w = 0;
  __builtin_memcpy(&w, codes + whole, static_cast<size_t>(count - whole));
  w = squeeze<kBits>(w);
  __builtin_memcpy(out + whole / 8 * kBits, &w,
                   static_cast<size_t>(packed_bytes(count - whole, kBits)));
}

// `bytes` may be read.
template <int kBits>
static inline void unpack_units(const uint8_t* packed, int64_t bytes, int64_t count,
                                uint8_t* codes) {
  int64_t i = 0, from = 0;
  for (; from + 8 <= bytes && i + 8 <= count; i += 8, from += kBits) {
    uint64_t w;
    __builtin_memcpy(&w, packed + from, 8);
    w = spread<kBits>(w);
    __builtin_memcpy(codes + i, &w, 8);
  }
  for (; i < count; i += 8, from += kBits) {
    const int64_t here = count - i < 8 ? count - i : 8;
    uint64_t w = 0;
    for (int64_t b = 0; b < packed_bytes(here, kBits); ++b) {
      w |= static_cast<uint64_t>(packed[from + b]) << 8 * b;
    }
    w = spread<kBits>(w);
    __builtin_memcpy(codes + i, &w, static_cast<size_t>(here));
  }
}

// Two codes a byte, the commonest width: every pair by itself, which vectorizes.
static inline void pack_nibbles(const uint8_t* codes, int64_t count, uint8_t* out) {
  for (int64_t i = 0; i < count / 2; ++i) {
    uint16_t pair;
    __builtin_memcpy(&pair, codes + 2 * i, 2);
    out[i] = static_cast<uint8_t>(pair | pair >> 4);
  }
  if (count % 2) out[count / 2] = codes[count - 1];
}

static inline void unpack_nibbles(const uint8_t* packed, int64_t count, uint8_t* codes) {
  for (int64_t i = 0; i < count / 2; ++i) {
    const uint16_t byte = packed[i];
    const uint16_t pair = static_cast<uint16_t>((byte | byte << 4) & 0x0f0f);
    __builtin_memcpy(codes + 2 * i, &pair, 2);
  }
  if (count % 2) codes[count - 1] = packed[count / 2] & 15;
}

// `count` codes, each below 1 << bits, to packed_bytes(count, bits) bytes.
static inline void pack_codes(const uint8_t* codes, int64_t count, int bits, uint8_t* out) {
  switch (bits) {
    case 1: return pack_units<1>(codes, count, out);
    case 2: return pack_units<2>(codes, count, out);
    case 3: return pack_units<3>(codes, count, out);
    case 4: return pack_nibbles(codes, count, out);
    case 5: return pack_units<5>(codes, count, out);
    case 6: return pack_units<6>(codes, count, out);
    case 7: return pack_units<7>(codes, count, out);
    default: __builtin_memcpy(out, codes, static_cast<size_t>(count));
  }
}

// Codes [begin, begin + count) of a row of so many bytes; `begin` a multiple of 8.
static inline void unpack_codes(const uint8_t* row, int64_t row_bytes, int64_t begin, int64_t count,
                                int bits, uint8_t* codes) {
  const int64_t skip = begin * bits / 8, bytes = row_bytes - skip;
  const uint8_t* packed = row + skip;
  switch (bits) {
    case 1: return unpack_units<1>(packed, bytes, count, codes);
    case 2: return unpack_units<2>(packed, bytes, count, codes);
    case 3: return unpack_units<3>(packed, bytes, count, codes);
    case 4: return unpack_nibbles(packed, count, codes);
    case 5: return unpack_units<5>(packed, bytes, count, codes);
    case 6: return unpack_units<6>(packed, bytes, count, codes);
    case 7: return unpack_units<7>(packed, bytes, count, codes);
    default: __builtin_memcpy(codes, packed, static_cast<size_t>(count));
  }
}

}  // namespace ao::AO_ISA::coding
