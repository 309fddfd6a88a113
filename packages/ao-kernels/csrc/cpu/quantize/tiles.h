// The layout cpu_tiles: 16 rows x 16 columns a tile, its codes in planes of 8, or of 4, 2 and 1 bits.
//
// A row of a tile is four dwords d[i] of one byte per column: columns 4i..4i+3. A plane takes some bits of
// each code; in it the dwords (in the plane of 1 bit: words) of the 16 rows follow one another.
#pragma once
#include "decode.h"

namespace ao::AO_ISA::coding {

typedef uint32_t Dwords __attribute__((vector_size(16)));

static inline Dwords load_dwords(const void* from) {
  Dwords v;
  __builtin_memcpy(&v, from, 16);
  return v;
}
static inline void store_dwords(void* to, Dwords v) { __builtin_memcpy(to, &v, 16); }

// Rows a, b, c, d of a 4 x 4 matrix become its columns.
static inline void transpose(Dwords& a, Dwords& b, Dwords& c, Dwords& d) {
  const Dwords ab_low = __builtin_shufflevector(a, b, 0, 4, 1, 5);
  const Dwords ab_high = __builtin_shufflevector(a, b, 2, 6, 3, 7);
  const Dwords cd_low = __builtin_shufflevector(c, d, 0, 4, 1, 5);
  const Dwords cd_high = __builtin_shufflevector(c, d, 2, 6, 3, 7);
  a = __builtin_shufflevector(ab_low, cd_low, 0, 1, 4, 5);
  b = __builtin_shufflevector(ab_low, cd_low, 2, 3, 6, 7);
  c = __builtin_shufflevector(ab_high, cd_high, 0, 1, 4, 5);
  d = __builtin_shufflevector(ab_high, cd_high, 2, 3, 6, 7);
}

// Writes a tile from 16 rows of 16 codes, a row every `stride` bytes, and an exclusive or on them.
static inline void write_tile(const uint8_t* codes, int64_t stride, int bits, uint8_t flip,
                              uint8_t* tile) {
  const uint32_t flips = flip * 0x01010101u;
  for (int r = 0; r < 16; r += 4) {
    Dwords d[4];
    for (int i = 0; i < 4; ++i) d[i] = load_dwords(codes + (r + i) * stride) ^ flips;
    transpose(d[0], d[1], d[2], d[3]);
    if (bits == 8) {
      for (int i = 0; i < 4; ++i) store_dwords(tile + i * 64 + r * 4, d[i]);
      continue;
    }
    uint8_t* plane = tile;
    if (bits & 4) {
      for (int v = 0; v < 2; ++v) {
        store_dwords(plane + v * 64 + r * 4,
                     (d[2 * v] & 0x0f0f0f0f) | (d[2 * v + 1] & 0x0f0f0f0f) << 4);
      }
      plane += 128;
      for (int i = 0; i < 4; ++i) d[i] >>= 4;
    }
    if (bits & 2) {
      Dwords pairs = d[0] & 0x03030303;
      for (int i = 1; i < 4; ++i) pairs |= (d[i] & 0x03030303) << (2 * i);
      store_dwords(plane + r * 4, pairs);
      plane += 64;
      for (int i = 0; i < 4; ++i) d[i] >>= 2;
    }
    if (bits & 1) {
      Dwords single = d[0] & 0x01010101;
      for (int i = 1; i < 4; ++i) single |= (d[i] & 0x01010101) << i;
      // byte 2h has the bits of columns 4i + 2h, byte 2h + 1 those of columns 4i + 2h + 1
      single = (single | single >> 4) & 0x00ff00ff;
      single = single | single >> 8;
      for (int i = 0; i < 4; ++i) {
        const uint16_t word = static_cast<uint16_t>(single[i]);
        __builtin_memcpy(plane + (r + i) * 2, &word, 2);
      }
    }
  }
}

// The dwords of 8 columns of 4 bits each: byte i gets columns i and 4 + i.
static inline Dwords to_plane(Dwords packed) {
  Dwords low = packed & 0xffff, high = packed >> 16;
  low = (low | low << 8) & 0x00ff00ff;
  high = (high | high << 8) & 0x00ff00ff;
  return ((low | low << 4) & 0x0f0f0f0f) | ((high | high << 4) & 0x0f0f0f0f) << 4;
}

// Writes tiles side by side from 16 rows of packed codes of 4 bits, which never become bytes: 8 columns are
// a dword of a row, and a plane has these of all rows.
static inline void write_nibble_tiles(const uint8_t* packed, int64_t row_bytes, int64_t tiles,
                                      uint8_t flip, uint8_t* out) {
  const uint32_t flips = flip * 0x11111111u;
  for (int64_t dword = 0; dword < 2 * tiles; dword += 4) {
    const int count = 2 * tiles - dword < 4 ? 2 : 4;
    for (int r = 0; r < 16; r += 4) {
      Dwords d[4] = {};
      for (int i = 0; i < 4; ++i) {
        const uint8_t* from = packed + (r + i) * row_bytes + dword * 4;
        if (count == 4) d[i] = load_dwords(from);
        else __builtin_memcpy(&d[i], from, 8);
      }
      transpose(d[0], d[1], d[2], d[3]);
      for (int i = 0; i < count; ++i) {
        store_dwords(out + (dword + i) * 64 + r * 4, to_plane(d[i] ^ flips));
      }
    }
  }
}

// Dwords d of four rows from r on.
static inline void read_rows(const uint8_t* tile, int bits, int r, Dwords* d) {
  if (bits == 8) {
    for (int i = 0; i < 4; ++i) d[i] = load_dwords(tile + i * 64 + r * 4);
    return;
  }
  int shift = 0;
  for (int i = 0; i < 4; ++i) d[i] = Dwords{};
  if (bits & 4) {
    for (int v = 0; v < 2; ++v) {
      const Dwords plane = load_dwords(tile + v * 64 + r * 4);
      d[2 * v] = plane & 0x0f0f0f0f;
      d[2 * v + 1] = plane >> 4 & 0x0f0f0f0f;
    }
    tile += 128, shift += 4;
  }
  if (bits & 2) {
    const Dwords plane = load_dwords(tile + r * 4);
    for (int i = 0; i < 4; ++i) d[i] |= (plane >> (2 * i) & 0x03030303) << shift;
    tile += 64, shift += 2;
  }
  if (bits & 1) {
    Dwords plane;
    for (int i = 0; i < 4; ++i) {
      uint16_t word;
      __builtin_memcpy(&word, tile + (r + i) * 2, 2);
      plane[i] = word;
    }
    plane = (plane | plane << 8) & 0x00ff00ff;
    plane = (plane | plane << 4) & 0x0f0f0f0f;
    for (int i = 0; i < 4; ++i) d[i] |= (plane >> i & 0x01010101) << shift;
  }
}

// 16 rows of 16 codes, a row every `stride` bytes.
static inline void read_tile(const uint8_t* tile, int bits, int64_t stride, uint8_t* codes) {
  for (int r = 0; r < 16; r += 4) {
    Dwords d[4];
    read_rows(tile, bits, r, d);
    transpose(d[0], d[1], d[2], d[3]);
    for (int i = 0; i < 4; ++i) store_dwords(codes + (r + i) * stride, d[i]);
  }
}

// The 16 codes of one row.
static inline void read_tile_row(const uint8_t* tile, int bits, int row, uint8_t* codes) {
  Dwords d[4];
  read_rows(tile, bits, row & ~3, d);
  for (int i = 0; i < 4; ++i) {
    const uint32_t four = d[i][row & 3];
    __builtin_memcpy(codes + 4 * i, &four, 4);
  }
}

// -- tensors -----------------------------------------------------------------------------------------

// A run of tiles side by side in one group.
struct Run {
  int64_t tile, tiles;  // the first one, of the row
  int64_t begin, end;   // columns
};

// Columns that are handled at a time, whole tiles and whole bytes of packed codes.
constexpr int64_t kColumns = 256;

// Calls f with every run of at most kColumns columns of a group, in order.
template <class F>
static inline void for_runs(const Tiles& t, const F& f) {
  for (int64_t group = 0; group < t.groups; ++group) {
    const int64_t first = group * t.group;
    const int64_t last = first + t.group < t.k ? first + t.group : t.k;
    int64_t tile = group * t.group_tiles;
    for (int64_t begin = first; begin < last; begin += kColumns, tile += kColumns / 16) {
      const int64_t end = begin + kColumns < last ? begin + kColumns : last;
      f(Run{tile, (end - begin + 15) / 16, begin, end});
    }
  }
}

static inline const uint8_t* tile_at(const Tiles& t, int64_t block, int64_t tile) {
  return t.qdata + (block * t.tiles + tile) * 32 * t.bits;
}

// Rows of a block that there are.
static inline int rows_of_block(const Tiles& t, int64_t block) {
  const int64_t rest = t.n - block % t.row_blocks * 16;
  return rest < 16 ? static_cast<int>(rest) : 16;
}
static inline int64_t first_row(const Tiles& t, int64_t block) {
  return block / t.row_blocks * t.n + block % t.row_blocks * 16;
}

static inline void pack_tiles(const Tiles& t, int64_t begin, int64_t end) {
  constexpr int64_t kStride = kColumns + 64;
  alignas(64) uint8_t codes[16 * kStride];
  for (int64_t block = begin; block < end; ++block) {
    const int rows = rows_of_block(t, block);
    const uint8_t* packed = t.packed + first_row(t, block) * t.row_bytes;
    // what will be 0 in rows that there are not
    if (rows < 16) __builtin_memset(codes, t.flip, sizeof(codes));
    for_runs(t, [&](const Run& run) {
      // whole bytes start at multiples of 8 codes
      const int64_t lead = run.begin % 8, count = run.end - run.begin;
      const int64_t padding = run.tiles * 16 - count;
      uint8_t* out = t.out + (block * t.tiles + run.tile) * 32 * t.bits;
      if (t.bits == 4 && rows == 16 && !lead && !padding) {
        return write_nibble_tiles(packed + run.begin / 2, t.row_bytes, run.tiles, t.flip, out);
      }
      for (int r = 0; r < rows; ++r) {
        uint8_t* row = codes + r * kStride;
        unpack_codes(packed + r * t.row_bytes, t.row_bytes, run.begin - lead, lead + count, t.bits,
                     row);
        if (padding) __builtin_memset(row + lead + count, t.flip, static_cast<size_t>(padding));
      }
      for (int64_t i = 0; i < run.tiles; ++i) {
        write_tile(codes + lead + 16 * i, kStride, t.bits, t.flip, out + i * 32 * t.bits);
      }
    });
  }
}

// Calls f(tile, first column of it, begin, end) with the columns [begin, end) of every tile
// that are among [first, last).
template <class F>
static inline void for_tiles(const Tiles& t, int64_t first, int64_t last, const F& f) {
  int64_t group = first / t.group;
  for (int64_t column = first; column < last; ++group) {
    const int64_t start = group * t.group;
    const int64_t end = start + t.group < last ? start + t.group : last;
    int64_t tile = (column - start) / 16;
    for (; column < end; ++tile) {
      const int64_t left = start + tile * 16, right = left + 16 < end ? left + 16 : end;
      f(group * t.group_tiles + tile, left, column, right);
      column = right;
    }
  }
}

// Codes of columns [first, last), a row every kColumns bytes.
static inline void read_columns(const Tiles& t, int64_t block, int64_t first, int64_t last,
                                uint8_t* codes) {
  for_tiles(t, first, last, [&](int64_t tile, int64_t left, int64_t begin, int64_t end) {
    const uint8_t* from = tile_at(t, block, tile);
    if (end - begin == 16) return read_tile(from, t.bits, kColumns, codes + (begin - first));
    uint8_t whole[16 * 16];
    read_tile(from, t.bits, 16, whole);
    for (int r = 0; r < 16; ++r) {
      __builtin_memcpy(codes + r * kColumns + (begin - first), whole + r * 16 + (begin - left),
                       static_cast<size_t>(end - begin));
    }
  });
}

static inline void unpack_tiles(const Tiles& t, int64_t begin, int64_t end) {
  alignas(64) uint8_t codes[16 * kColumns];
  for (int64_t block = begin; block < end; ++block) {
    const int rows = rows_of_block(t, block);
    for (int64_t column = 0; column < t.k; column += kColumns) {
      const int64_t last = column + kColumns < t.k ? column + kColumns : t.k;
      read_columns(t, block, column, last, codes);
      for (int64_t i = 0; i < 16 * kColumns; ++i) codes[i] ^= t.flip;
      for (int r = 0; r < rows; ++r) {
        uint8_t* out = t.out + (first_row(t, block) + r) * t.row_bytes + column * t.bits / 8;
        pack_codes(codes + r * kColumns, last - column, t.bits, out);
      }
    }
  }
}

// Numbers of the codes of columns [first, last) of row r of a block, to a dense row.
static inline void decode_columns(const Tiles& t, const uint8_t* codes, int64_t block, int r,
                                  int64_t first, int64_t last, int64_t row) {
  alignas(64) float values[kColumns];
  look_up(t.table, t.bits, codes, last - first, values);
  int64_t group = first / t.group;
  for (int64_t column = first; column < last; ++group) {
    const int64_t end = (group + 1) * t.group < last ? (group + 1) * t.group : last;
    const float scale = load_scale(t, t.scale, block, group, r);
    float* v = values + (column - first);
    if (t.zero_type == Zero::none) {
      for (int64_t i = 0; i < end - column; ++i) v[i] *= scale;
    } else if (t.zero_type == Zero::scaled) {
      const float offset = load_scale(t, t.offset, block, group, r);
      for (int64_t i = 0; i < end - column; ++i) v[i] = v[i] * scale - offset;
    } else {
      const int64_t place = (block * t.groups + group) * 16 + r;
      const float zero = load_zero(t.zero, t.zero_type, place, t.table, t.flip);
      for (int64_t i = 0; i < end - column; ++i) v[i] = (v[i] - zero) * scale;
    }
    column = end;
  }
  write(t.type, values, last - first, at(t.y, t.type, row * t.k + first));
}

static inline void decode_tiles(const Tiles& t, int64_t begin, int64_t end) {
  alignas(64) uint8_t codes[16 * kColumns];
  for (int64_t block = begin; block < end; ++block) {
    const int rows = rows_of_block(t, block);
    for (int64_t first = 0; first < t.k; first += kColumns) {
      const int64_t last = first + kColumns < t.k ? first + kColumns : t.k;
      read_columns(t, block, first, last, codes);
      for (int r = 0; r < rows; ++r) {
        decode_columns(t, codes + r * kColumns, block, r, first, last, first_row(t, block) + r);
      }
    }
  }
}

// Rows of one matrix by their numbers.
static inline void gather_rows(const Tiles& t, int64_t begin, int64_t end) {
  alignas(64) uint8_t codes[kColumns];
  for (int64_t item = begin; item < end; ++item) {
    const int64_t block = t.ids[item] / 16;
    const int row = static_cast<int>(t.ids[item] % 16);
    for (int64_t first = 0; first < t.k; first += kColumns) {
      const int64_t last = first + kColumns < t.k ? first + kColumns : t.k;
      for_tiles(t, first, last, [&](int64_t tile, int64_t left, int64_t from, int64_t to) {
        uint8_t whole[16];
        read_tile_row(tile_at(t, block, tile), t.bits, row, whole);
        __builtin_memcpy(codes + (from - first), whole + (from - left),
                         static_cast<size_t>(to - from));
      });
      decode_columns(t, codes, block, row, first, last, item);
    }
  }
}

}  // namespace ao::AO_ISA::coding
