#include "quantize.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "../isa.h"
#include "../parallel.h"

namespace ao {
namespace {

// Elements that are worth a thread.
constexpr int64_t kGrain = 1 << 15;

int64_t up(int64_t count, int64_t size) { return (count + size - 1) / size; }

// Items of `elements` each that are worth a thread.
int64_t grain_of(int64_t elements) { return up(kGrain, std::max<int64_t>(elements, 1)); }

template <class Work>
void share_out(const Work& work, void (*kernel)(const Work&, int64_t, int64_t), int64_t items,
               int64_t elements) {
  parallel_for(0, items, grain_of(elements),
               [&](int64_t begin, int64_t end) { kernel(work, begin, end); });
}

// Groups of whole tiles arrange codes as one group of all columns does.
Tiles as_one_group(Tiles t) {
  if (t.group % 16 == 0) t.group = t.k;
  set_tiles(t);
  return t;
}

using Kernel = void (*)(const Quantize&, int64_t, int64_t);

// Finds the ranges of all blocks, then calls `kernel` with them.
void by_ranges(Quantize& q, Kernel kernel) {
  const Blocks& b = q.blocks;
  q.shares = up(b.block_k, kShare);
  const int64_t items = b.matrices * b.n * b.groups * q.shares;
  const std::unique_ptr<KeyRange[]> ranges(new KeyRange[static_cast<size_t>(items)]);
  q.ranges = ranges.get();
  share_out(q, isa().quantize.ranges, items, std::min(b.block_k, kShare));
  share_out(q, kernel, b.matrices * b.bands, b.block_n * b.groups * q.shares);
}

// Chunks of rows, with scales that there are.
void by_chunks(Quantize& q, Kernel kernel) {
  const Blocks& b = q.blocks;
  q.chunks = up(b.k, kChunk);
  share_out(q, kernel, b.matrices * b.n * q.chunks, std::min(b.k, kChunk));
}

// Scales, then `given`; or `fused`, which does both, where blocks are short parts of rows.
void by_blocks(Quantize& q, Kernel fused, Kernel given) {
  const Blocks& b = q.blocks;
  if (b.block_n > 1 || b.block_k > kShare) {
    by_ranges(q, isa().quantize.scales);
    return by_chunks(q, given);
  }
  // a chunk starts at a whole byte of codes
  const int64_t multiple = b.block_k % 8 == 0 ? 1 : 8;
  const int64_t wanted = up(up(kChunk, b.block_k), multiple) * multiple;
  q.chunk_groups = std::min(wanted, kChunkGroups);
  q.chunks = up(b.groups, q.chunk_groups);
  const int64_t elements = std::min(q.chunk_groups * b.block_k, b.k);
  share_out(q, fused, b.matrices * b.n * q.chunks, elements);
}

}  // namespace

Blocks blocks_of(int64_t matrices, int64_t n, int64_t k, int64_t block_n, int64_t block_k) {
  return {matrices, n, k, block_n, block_k, up(n, block_n), up(k, block_k)};
}

void set_steps(Format& f, const int32_t* steps) {
  for (int level = 0; level < f.bits; ++level) {
    const int nodes = 1 << level, span = 1 << (f.bits - level);
    for (int i = 0; i < nodes; ++i) f.tree[nodes - 1 + i] = steps[i * span + span / 2 - 1];
  }
}

const char* complete(Format& f) {
  const int codes = 1 << f.bits;
  float least = std::numeric_limits<float>::infinity(), greatest = -least;
  bool is_unsigned = true, is_signed = true;
  for (int u = 0; u < codes; ++u) {
    if (std::isfinite(f.table[u])) {
      least = std::min(least, f.table[u]);
      greatest = std::max(greatest, f.table[u]);
    }
    const int value = (u ^ codes / 2) - codes / 2;
    is_unsigned = is_unsigned && f.table[u] == static_cast<float>(u);
    is_signed = is_signed && f.table[u] == static_cast<float>(value);
  }
  if (!(least < greatest)) return "needs two finite values at least";
  f.is_integer = is_unsigned || is_signed;
  f.least = least;
  f.greatest = greatest;
  for (int u = codes; u < 256; ++u) f.table[u] = f.table[u & (codes - 1)];
  f.lacks_zero = std::find(f.table, f.table + codes, 0.0f) == f.table + codes;
  f.is_float = false;
  f.in_order = true;
  for (int u = 0; u < codes; ++u) f.in_order = f.in_order && f.order[u] == u;
  if (f.rule == Rule::integer) {
    const float bound = static_cast<float>(codes - 1);
    if (least != std::floor(least) || greatest != std::floor(greatest) || least < -bound ||
        greatest > bound) {
      return "is not of integers";
    }
  }
  if (f.rule == Rule::floating) {
    int linear = 1;  // codes whose values are multiples of the least: one binade and the subnormals
    while (linear < codes / 2 && f.table[linear] == static_cast<float>(linear) * f.table[1]) {
      ++linear;
    }
    f.mantissa = std::bit_width(static_cast<unsigned>(linear)) - 2;
    f.smallest_normal = std::ldexp(f.table[1], f.mantissa);
    int exponent = 0;
    const bool power = std::frexp(f.smallest_normal, &exponent) == 0.5f;
    if (f.bits < 3 || f.mantissa < 1 || !power || exponent < -100 || exponent > 100 ||
        greatest != -least || !(greatest > f.smallest_normal)) {
      return "is not of floats";
    }
    f.is_float = true;
    for (int u = 0; u < codes / 2; ++u) {
      const int binade = u >> f.mantissa, fraction = u & ((1 << f.mantissa) - 1);
      const int quanta = binade ? fraction + (1 << f.mantissa) : fraction;
      const float value = std::ldexp(static_cast<float>(quanta) * f.table[1], std::max(binade - 1, 0));
      const bool given = value <= greatest;  // others are no code of a number
      f.is_float = f.is_float && (!given || (f.table[u] == value && f.table[u + codes / 2] == -value));
    }
  }
  return nullptr;
}

void set_reach(Quantize& q, double reach) {
  q.reach = static_cast<float>(reach);
  const double mantissa = std::frexp(reach, &q.reach_exponent);
  q.reach_mantissa = static_cast<float>(mantissa);
  const Format& f = q.format;
  float below = f.least;
  for (int u = 0; u < 1 << f.bits; ++u) {
    if (f.table[u] < f.greatest) below = std::max(below, f.table[u]);
  }
  const float power = static_cast<float>(std::ldexp(1.0, q.reach_exponent + 1));
  q.even_from = 1.0f - (f.greatest - below) / power;
}

void quantize(Quantize& q) { by_blocks(q, isa().quantize.fused, isa().quantize.encode); }

void fake_quantize(Quantize& q) {
  const Blocks& b = q.blocks;
  if (b.block_n > 1 && b.block_k == 1 && q.zero_kind == ZeroKind::none && q.type != Element::f16) {
    const int64_t elements = b.block_n * std::min(b.k, kColumns);
    return share_out(q, isa().quantize.round_columns, b.matrices * b.bands * up(b.k, kColumns), elements);
  }
  by_blocks(q, isa().quantize.fused_round, isa().quantize.round);
}

void round_scaled(Quantize& q) { by_chunks(q, isa().quantize.round); }

void block_absmax(Quantize& q) { by_ranges(q, isa().quantize.absmax); }

void encode(Quantize& q) { by_chunks(q, isa().quantize.encode); }

void dequantize(Dequantize& d) {
  const Blocks& b = d.blocks;
  d.chunks = up(b.k, kChunk);
  share_out(d, isa().quantize.decode, b.matrices * b.n * d.chunks, std::min(b.k, kChunk));
}

void error_sums(Dequantize& d, double* sums) {
  const int64_t items = up(d.counted, kShare);
  std::vector<double> shares(static_cast<size_t>(2 * items));
  d.sums = shares.data();
  share_out(d, isa().quantize.errors, items, kShare);
  sums[0] = sums[1] = 0;
  for (int64_t i = 0; i < items; ++i) sums[0] += shares[2 * i], sums[1] += shares[2 * i + 1];
}

void set_tiles(Tiles& t) {
  t.row_blocks = up(t.n, 16);
  t.groups = up(t.k, t.group);
  t.group_tiles = up(t.group, 16);
  t.tiles = (t.groups - 1) * t.group_tiles + up(t.k - (t.groups - 1) * t.group, 16);
}

void pack_tiles(const Tiles& tiles) {
  const Tiles t = as_one_group(tiles);
  share_out(t, isa().quantize.pack_tiles, t.matrices * t.row_blocks, 16 * t.k);
}

void unpack_tiles(const Tiles& tiles) {
  const Tiles t = as_one_group(tiles);
  share_out(t, isa().quantize.unpack_tiles, t.matrices * t.row_blocks, 16 * t.k);
}

void dequantize_tiles(const Tiles& t) {
  share_out(t, isa().quantize.decode_tiles, t.matrices * t.row_blocks, 16 * t.k);
}

void gather_tiles(const Tiles& t, int64_t count) {
  share_out(t, isa().quantize.gather, count, 4 * t.k);
}

int64_t packed_size(int64_t count, int32_t bits) {
  const int64_t unit = 8 / (bits & -bits);
  return up(count, unit) * unit * bits / 8;
}

}  // namespace ao
