// Matmuls with blocks of 16 of N (rows of the weight): scales, unpacking or packed panels, and the inner loops.
#pragma once
#if AO_HAS_LIMBS
#include "digits.h"
#endif
#include "expand.h"
#include "output.h"
#include "panel.h"
#include "sources.h"
#if AO_HAS_WORDS
#include "words.h"
#endif

namespace ao::AO_ISA {

// -- the functions of a format ----------------------------------------------------------------------------

// The matmul of so many rows and kPanelBlocks blocks of N.
template <Mode kMode, class Source, int kRows = kPanelRows>
static Multiply panel_product(int64_t rows) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return panel_product<kMode, Source, kRows - 1>(rows);
  }
  return multiply_any<kMode, Source, kRows, kPanelBlocks>;
}

constexpr int kStreamRows = 4;
// Blocks of rows up to which it takes less time to decode half bytes for each than to unpack them.
constexpr int64_t kDirectBlocks = 2;

struct Functions {
  Multiply stream[kStreamRows];  // by rows of activations less 1
  Multiply (*direct)(int64_t rows);  // decodes on the way; null: that takes longer than to unpack
  Multiply (*panel)(int64_t rows);
  Unpack unpack;
  Fold fold;  // null: scales cannot be folded in
  int tile_bytes, panel_tile_bytes;
  void (*make_table)(const Linear&, void* table);
};

template <Mode kMode, class Source>
static Functions functions() {
  // bytes are read as they are stored, and half bytes need three operations for two vectors
  constexpr int kBits = Source::kCodeBits;
  constexpr bool decodes = kMode == Mode::int8 && Source::kCodes == Kind::integer && (kBits == 8 || kBits == 4);
  Fold folding = nullptr;
  if constexpr (kMode == Mode::f32 || kMode == Mode::pairs) folding = fold<kMode, Source>;
  return {{multiply_any<kMode, Source, 1, 1>, multiply_any<kMode, Source, 2, 1>,
           multiply_any<kMode, Source, 3, 1>, multiply_any<kMode, Source, 4, 1>},
          decodes ? panel_product<kMode, Source> : nullptr,
          panel_product<kMode, Panel<kMode, kWideBytes || Source::kSmall, Source::kFew>>,
          unpack<kMode, Source>,
          folding,
          Source::kTileBytes,
          4 * Arithmetic<kMode>::kVectors * 64,
          make_table<kMode, Source>};
}

// -- all of it --------------------------------------------------------------------------------------------

// Bytes of a panel, which stays in a cache while all rows are multiplied by it. Where two of its vectors serve 14
// products, L2 brings them in time, and a longer panel leaves less to begin and to end; elsewhere it is to leave the
// activations room in L1.
constexpr int64_t kPanelBytes = kRegisters == 1 ? 192 << 10 : 8 << 10;

static int64_t panel_tiles(const Linear& t, int panel_tile_bytes) {
  int64_t longest = 1;
  for (int64_t s = 0; s < t.step_count; ++s) longest = t.steps[s].tiles > longest ? t.steps[s].tiles : longest;
  const int64_t fitting = kPanelBytes / (kPanelBlocks * panel_tile_bytes);
  return fitting > longest ? fitting : longest;
}

static int64_t scratch_bytes(const Linear& t) {
  const int64_t scales = 2 * kPanelBlocks * t.groups * 64;
  const int64_t totals = t.m * kPanelBlocks * 64;
  return scales + totals + kPanelBlocks * panel_tiles(t, 1024) * 1024 + 64;
}

static const uint8_t* x_of(const Linear& t, int64_t row, int64_t rows, int64_t tile) {
  return t.x_packed + (row * t.tiles + tile * rows) * 16 * bytes_of(t.mode);
}

// Scales cost about 4 cycles for 64 codes, and to round what they make 8 more: as much as is saved with so many rows
// and tiles of a step.
static bool pays_to_fold(const Linear& t) {
  const bool rounds = t.mode == Mode::pairs;
  if (rounds && t.kind == Kind::table) return true;  // rounded once, as `dequantize` does
  if ((rounds && t.type != Element::bf16) || (t.groups == 1 && t.zero_type == Zero::none)) return false;
  const int64_t saved = t.zero_type == Zero::none ? 1 : 2;
  return t.rows * saved * t.step_count >= (rounds ? 48 : 16) * t.tiles;
}

template <Mode kMode>
static void run_blocks_as(const Linear& t, int64_t begin, int64_t end, uint8_t* memory) {
  const Functions f = for_source<kMode>(t, [](auto source) { return functions<kMode, decltype(source)>(); });
  alignas(64) uint8_t table[kTableBytes];
  f.make_table(t, table);
  const bool stream = t.m <= kStreamRows;
  // whole bytes that rows meet two by two are zipped by unpacking
  const bool direct = f.direct && ((t.bits == 8 && !AO_HAS_ROW_PAIRS) || t.row_blocks <= kDirectBlocks);
  const int64_t width = stream ? 1 : kPanelBlocks;
  const int64_t scale_stride = t.groups * 16;
  float* scales = reinterpret_cast<float*>(memory);
  float* zero_terms = scales + kPanelBlocks * scale_stride;
  float* totals = zero_terms + kPanelBlocks * scale_stride;
  uint8_t* panel = reinterpret_cast<uint8_t*>(totals + t.m * kPanelBlocks * 16);
  const bool folded = f.fold && !stream && pays_to_fold(t);
  alignas(64) float ones[16];
  store(ones, splat(1.0f));
  const bool sums_init = kMode == Mode::int8 && t.zero_type == Zero::none;

  for (int64_t block = begin; block < end; block += width) {
    const int64_t blocks = end - block < width ? end - block : width;
    [[maybe_unused]] F lowered[kPanelBlocks];
    for (int64_t c = 0; c < blocks; ++c) {
      read_block(t, block + c, scales + c * scale_stride, zero_terms + c * scale_stride);
#if AO_HAS_WORDS
      if constexpr (kMode == Mode::words) {
        lowered[c] = lower_scales(t, block + c, scales + c * scale_stride, zero_terms + c * scale_stride);
      }
#endif
    }
    __builtin_memset(totals, 0, t.m * kPanelBlocks * 64);
    const uint8_t* weights = t.qdata + block * t.tiles * f.tile_bytes;
    Part part{};
    part.scales = folded ? ones : scales, part.zero_terms = zero_terms, part.scale_stride = folded ? 0 : scale_stride;

    Step whole;
    const int64_t limit = stream ? t.tiles : panel_tiles(t, f.panel_tile_bytes);
    for (int64_t s = 0, tile = 0; s < t.step_count;) {
      const int64_t first = s, first_tile = tile;
      while (s < t.step_count && tile + t.steps[s].tiles - first_tile <= limit) tile += t.steps[s++].tiles;
      part.steps = t.steps + first, part.step_count = s - first;
      if (stream || direct) {
        part.weights = weights + first_tile * f.tile_bytes;
        part.stride = blocks > 1 ? t.tiles * f.tile_bytes : 0;
      } else {
        part.weights = panel;
        part.stride = (tile - first_tile) * f.panel_tile_bytes;
        for (int64_t c = 0; c < kPanelBlocks; ++c) {
          const int64_t source = c < blocks ? c : blocks - 1;  // the last pair may be one block twice
          const uint8_t* codes = weights + (source * t.tiles + first_tile) * f.tile_bytes;
          uint8_t* out = panel + c * part.stride;
          if (!folded) {
            f.unpack(codes, tile - first_tile, out, table);
            continue;
          }
          for (int64_t i = first; i < s; ++i) {
            const int64_t tiles = t.steps[i].tiles, at = source * scale_stride + t.steps[i].group * 16;
            const F zero_term = t.zero_type == Zero::none ? zero() : load(zero_terms + at);
            f.fold(codes, tiles, out, table, load(scales + at), zero_term);
            codes += tiles * f.tile_bytes, out += tiles * f.panel_tile_bytes;
          }
        }
        if (folded) {
          whole = {static_cast<int32_t>(tile - first_tile), 0};
          part.steps = &whole, part.step_count = 1;
        }
      }
      // the next codes are asked for little by little: of these columns, or the first ones of the next
      const uint8_t* next = s < t.step_count ? weights + tile * f.tile_bytes
                                             : weights + blocks * t.tiles * f.tile_bytes;
      const bool more = !stream && (s < t.step_count || block + blocks < end);
      const int64_t lines = (f.tile_bytes + 63) / 64;
      const int64_t sharers = lines < t.row_blocks ? lines : t.row_blocks;
      part.prefetch_lines = (lines + sharers - 1) / sharers;
      part.prefetch_stride = blocks > 1 ? t.tiles * f.tile_bytes : 0;
      for (int64_t b = 0; b < t.row_blocks; ++b) {
        const Rows rows = rows_of(t.m, t.row_blocks, b);
        const int64_t count = rows.end - rows.begin;
        part.prefetch = more && b < sharers ? next + b * (tile - first_tile) * part.prefetch_lines * 64 : nullptr;
        part.x = x_of(t, rows.begin, count, first_tile);
        part.totals = totals + rows.begin * kPanelBlocks * 16;
        const int64_t at = rows.begin * t.step_count + first * count;
        part.acc_init = sums_init ? static_cast<const int32_t*>(t.x_sums) + at : nullptr;
        part.x_ratios = kMode == Mode::words ? t.x_ratios + at : nullptr;
        part.x_sums = t.zero_type != Zero::none && !folded ? static_cast<const float*>(t.x_sums) + at : nullptr;
        if (stream) {
          f.stream[count - 1](part, table);
        } else {
          (direct ? f.direct : f.panel)(count)(part, table);
        }
      }
    }
#if AO_HAS_WORDS
    if constexpr (kMode == Mode::words) add_rests(t, blocks, totals), finish_words(t, blocks, lowered, totals);
#endif
    write_rows(t, {0, outputs_of(t)}, block, blocks, totals);
  }
}

#if AO_HAS_LIMBS
template <int kLimbs, int kBits>
static void run_limb_blocks_of(const Linear& t, int64_t begin, int64_t end, int64_t then) {
#if AO_HAS_BYTE_TABLES
  if constexpr (kBits <= 6 && kLimbs > 1) {
    if (t.table_parts > 1) {
      using Table = SplitTable<kBits, kLimbs>;
      return run_limb_blocks<kBits, Table, kLimbs>(t, begin, end, then, write_rows);
    }
  }
#endif
  if constexpr (kBits <= 6) {
    if (t.kind != Kind::integer) {
      using Table = WholeTable<kBits, Kind::table>;
      return run_limb_blocks<kBits, Table, kLimbs>(t, begin, end, then, write_rows);
    }
  }
  using Table = WholeTable<kBits, Kind::integer>;
  run_limb_blocks<kBits, Table, kLimbs>(t, begin, end, then, write_rows);
}
template <int kLimbs>
static void run_limb_blocks_of(const Linear& t, int64_t begin, int64_t end, int64_t then) {
  for_bits(t.bits, [&](auto bits) { run_limb_blocks_of<kLimbs, bits.value>(t, begin, end, then); });
}
static bool pack_limbs_any(const Linear& t, int64_t block) {
  return t.mode == Mode::limbs2 ? pack_limbs<2>(t, block) : pack_limbs<3>(t, block);
}
#endif

static void pack(const Linear& t, int64_t begin, int64_t end) {
  for (int64_t b = begin; b < end; ++b) {
    const Rows rows = rows_of(t.m, t.row_blocks, b);
    const int64_t count = rows.end - rows.begin;
    for (int64_t r = 0; r < count; ++r) {
      uint8_t* out = t.x_packed + (rows.begin * t.tiles + r) * 16 * bytes_of(t.mode);
      void* sums = static_cast<float*>(t.x_sums) + rows.begin * t.step_count + r;
      const int64_t row = rows.begin + r;
      if (t.mode == Mode::int8) pack_row<Mode::int8>(t, row, out, count, sums);
#if AO_HAS_PAIRS
      if (t.mode == Mode::pairs) pack_row<Mode::pairs>(t, row, out, count, sums);
#endif
#if AO_HAS_WORDS
      if (t.mode == Mode::words) pack_words(t, row, out, count, rows.begin * t.step_count + r);
#endif
      if (t.mode == Mode::f32) pack_row<Mode::f32>(t, row, out, count, sums);
    }
  }
}

static void pack_any(const Linear& t, int64_t begin, int64_t end) {
#if AO_HAS_LIMBS
  if (t.mode == Mode::int8 && t.m == 1) return pack_byte(t);
#endif
  pack(t, begin, end);
}

static void run_blocks(const Linear& t, int64_t begin, int64_t end, [[maybe_unused]] int64_t then, uint8_t* scratch) {
#if AO_HAS_LIMBS
  if (t.mode == Mode::int8 && t.m == 1) return run_limb_blocks_of<1>(t, begin, end, then);
#endif
  switch (t.mode) {
    case Mode::f32: return run_blocks_as<Mode::f32>(t, begin, end, scratch);
    case Mode::int8: return run_blocks_as<Mode::int8>(t, begin, end, scratch);
#if AO_HAS_PAIRS
    case Mode::pairs: return run_blocks_as<Mode::pairs>(t, begin, end, scratch);
#endif
#if AO_HAS_WORDS
    case Mode::words: return run_blocks_as<Mode::words>(t, begin, end, scratch);
#endif
#if AO_HAS_LIMBS
    case Mode::limbs2: return run_limb_blocks_of<2>(t, begin, end, then);
    case Mode::limbs3: return run_limb_blocks_of<3>(t, begin, end, then);
#endif
    default: return;
  }
}

static const LinearKernels kLinearKernels = {
    .pairs = AO_HAS_PAIRS != 0,
#if AO_HAS_WORDS
    .leaves_rest = leaves_rest,
#else
    .leaves_rest = nullptr,
#endif
    .panel_rows = kPanelRows,
    .panel_blocks = kPanelBlocks,
#if AO_HAS_LIMBS
    .row_blocks = kLimbBlocks,
#else
    .row_blocks = 1,
#endif
    .stream_rows = kStreamRows,
    .chunk_rows = kRegisters == 1 ? 560 : 192,
    .float_step = kRegisters == 1 ? 32 : 8,
    .scratch = scratch_bytes,
    .pack = pack_any,
    .table_limbs = AO_HAS_BYTE_TABLES != 0,
#if AO_HAS_LIMBS
    .pack_limbs = pack_limbs_any,
#else
    .pack_limbs = nullptr,
#endif
    .run_blocks = run_blocks,
    .expand = expand,
    .tiles = nullptr,
    .plan = nullptr,
};

}  // namespace ao::AO_ISA
