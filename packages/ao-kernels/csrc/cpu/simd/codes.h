// Codes of tiles and what they mean, for sets whose look-ups are of bytes: shared by the headers beside.
//
// A set provides the vectors, Lookup<kSize> (look-ups in kSize bytes), and in the order of the tile (a row's
// four bytes in its lane) or, "split", in an order of its own (see planes.h):
//   load_plane<kSplit>(p)  64 bytes
//   load_bits<kSplit>(p)   a plane of 1 bit: bits i of the bytes of a row's lane are columns 4i to 4i + 3
#pragma once

namespace ao::AO_ISA {

// Bits of each byte, shifted right; what enters from the next byte is masked where bytes are not shifted separately.
template <int kShift, int kMask>
AO_INLINE I bits_at(I v) {
  if constexpr (kByteShifts && kShift > 0 && kMask == 255 >> (kShift > 0 ? kShift : 0)) return shift_bytes<kShift>(v);
  return and_(shift_words<kShift>(v), splat_byte(kMask));
}

// Codes of columns 4i to 4i + 3.
template <int kBits, int i, bool kSplit = false>
AO_INLINE Q code_quads(const uint8_t* p) {
  constexpr bool has4 = (kBits & 4) != 0, has2 = (kBits & 2) != 0;
  if constexpr (kBits == 8) {
    return load_plane<kSplit>(p + 64 * i);
  } else if constexpr (kBits == 1) {
    return bits_at<i, 1>(load_bits<kSplit>(p));
  } else if constexpr (kBits % 2 == 1) {
    return or_(code_quads<kBits - 1, i, kSplit>(p),
               bits_at<i - (kBits - 1), 1 << (kBits - 1)>(load_bits<kSplit>(p + 32 * (kBits - 1))));
  } else if constexpr (has4 && has2) {
    return or_(code_quads<4, i, kSplit>(p), bits_at<2 * i - 4, 3 << 4>(load_plane<kSplit>(p + 128)));
  } else if constexpr (has4) {
    return bits_at<4 * (i % 2), 15>(load_plane<kSplit>(p + 64 * (i / 2)));
  } else {
    return bits_at<2 * i, 3>(load_plane<kSplit>(p));
  }
}

// -- values ------------------------------------------------------------------------------------------

// What a format's codes mean: floats<i> are columns 4i, 4i + 2, 4i + 1, 4i + 3. Here looked up one by one.
template <int kBits, Kind kKind>
struct FloatDecoder {
  const float* table;

  AO_METHOD explicit FloatDecoder(const float* values) : table(values) {}

  template <int i>
  AO_METHOD void floats(const uint8_t* tile, F out[4]) const {
    alignas(64) uint8_t codes[64];
    alignas(64) float lanes[4][16];
    store_vector(codes, code_quads<kBits, i>(tile));
    for (int r = 0; r < 16; ++r) {
      for (int c = 0; c < 4; ++c) lanes[c][r] = table[codes[4 * r + c]];
    }
    out[0] = load(lanes[0]), out[1] = load(lanes[2]), out[2] = load(lanes[1]), out[3] = load(lanes[3]);
  }
};

template <int kBits, Kind kKind>
  requires(kKind == Kind::integer)
struct FloatDecoder<kBits, kKind> {
  F offset;

  AO_METHOD explicit FloatDecoder(const float* values) : offset(splat(values[0])) {}

  template <int i>
  AO_METHOD void floats(const uint8_t* tile, F out[4]) const {
    const Q codes = code_quads<kBits, i>(tile);
    out[0] = add(to_float(byte_of<0>(codes)), offset), out[1] = add(to_float(byte_of<2>(codes)), offset);
    out[2] = add(to_float(byte_of<1>(codes)), offset), out[3] = add(to_float(byte_of<3>(codes)), offset);
  }
};

// Codes as bytes: values in units of `unit`, less the least of them (which is given in units). Codes of 8 bits are
// kByteBase less than that.
template <int kBits, Kind kKind>
struct ByteDecoder {
  static constexpr int kSize = kBits <= 4 ? 16 : 1 << kBits;
  Lookup<kSize> map;

  AO_METHOD ByteDecoder(const float* values, float least, float unit) {
    uint8_t bytes[kSize];
    for (int c = 0; c < kSize; ++c) {
      bytes[c] = static_cast<uint8_t>(static_cast<int>(values[c & ((1 << kBits) - 1)] / unit - least));
    }
    map = Lookup<kSize>(bytes);
  }
  template <int i>
  AO_METHOD Q quads(const uint8_t* tile) const {
    return map.look_up(code_quads<kBits, i>(tile));
  }
};

template <int kBits>
struct ByteDecoder<kBits, Kind::integer> {
  AO_METHOD ByteDecoder(const float*, float, float) {}
  template <int i>
  AO_METHOD Q quads(const uint8_t* tile) const {
    const Q codes = code_quads<kBits, i>(tile);
    if constexpr (kBits == 8 && kByteBase > 0) return xor_(codes, splat_byte(kByteBase));
    return codes;
  }
};

}  // namespace ao::AO_ISA
