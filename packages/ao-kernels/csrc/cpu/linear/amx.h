// Matmuls in AMX tile registers. Weights are unpacked into a panel of 32 of N that stays in L1, and
// meet 32 rows of activations at a time, in 2 x 2 registers of sums.
//
// Registers take bfloat16 and bytes. What more an activation or a weight with its scale has is kept in further
// bfloat16 numbers, of 8 bits each: a second one for float16, a third one for float32.
#pragma once
#include "../simd/amx.h"
#include "amx_grouped.h"
#include "amx_pack.h"
#include "expand.h"
#include "output.h"

namespace ao::AO_ISA {

// -- when, and how ------------------------------------------------------------------------------------------

// Columns of bytes whose products' sum cannot overflow.
constexpr int64_t kGreatestGroup = 1 << 16;
// Tiles of the layout that a group must have for its sums to be scaled one by one: beside bfloat16 there is another way.
static int64_t least_group_tiles(Element type) { return type == Element::bf16 ? 8 : 4; }

static bool has_infinity(const Linear& t) {
  for (int c = 0; c < 1 << t.bits; ++c) {
    if (__builtin_isinf(t.table[c])) return true;
  }
  return false;
}

// Rows from which on vectors take longer than more than three matmuls of parts, or than sums that leave the registers
// after every 16 columns, as measured.
constexpr int64_t kManyRows = 192;

// Matmuls of parts that make up one matmul.
static int products_of(const Tiling& tiling) {
  const int x = tiling.x_parts, w = tiling.w_parts < 1 ? 1 : tiling.w_parts;
  return x == 1 || w == 1 ? x * w : x * (x + 1) / 2;
}

// Rows of quantized activations from which on weights with their scales are rounded to bfloat16, where that is what
// the output is in: for bytes, and for float8. (From as many rows on vectors round them for float8.)
constexpr int64_t kRoundedByteRows = 48, kRoundedRows = 96;

// Rows of activations from which on they are faster than matmuls in vectors, as measured.
static int64_t least_rows(const Linear& t) {
  if (t.mode == Mode::int8) return t.groups == 1 ? 32 : 64;
  if (t.act == Act::int8 || t.act == Act::uint8) return kRoundedByteRows;
  switch (products_of(t.tiling)) {
    case 1: return t.kind == Kind::table ? 4 : 5;
    case 2: return 6;
    case 3: return 12;
    default: return kManyRows;
  }
}

// Whether codes are multiplied as they are, and their sums by scales: those of groups where a weight with its scale is
// more than one number, and that takes less time, as measured.
static bool multiplies_codes(const Linear& t) {
  if (t.kind == Kind::table) return false;
  if (t.groups == 1) return t.type != Element::bf16 || t.zero_type == Zero::none;
  const int64_t group_tiles = (t.group + 15) / 16;
  if (t.type == Element::f16) return group_tiles >= 4 || t.m < 48;
  return t.type == Element::f32 && (group_tiles > 1 || t.m >= kManyRows);
}

// Tiles of the layout in a register of at most so many, which does not cross groups.
static int depth_of(const Linear& t, int most) {
  const int64_t group_tiles = t.groups == 1 ? most : (t.group + 15) / 16;
  return group_tiles % most == 0 ? most : group_tiles % 2 == 0 ? 2 : 1;
}

static bool plan_tiles(Linear& t) {
  const bool bytes = t.act == Act::int8 || t.act == Act::uint8;
  const int64_t group_tiles = (t.group + 15) / 16;
  if (t.k == 0 || t.group > kGreatestGroup) return false;
  if (bytes && (t.groups == 1 || group_tiles >= least_group_tiles(t.type))) {
    t.mode = Mode::int8;
    // registers do not cross groups
    t.tiling = {depth_of(t, 4), 1, 0};
    return t.m >= least_rows(t);
  }
  if (bytes && t.type != Element::bf16) return false;  // small groups cost less as bfloat16, where that will do
  t.mode = Mode::pairs;
  // bytes and float8 are bfloat16, too; and so are most codes, if one scale may be applied to their sums
  int parts = t.type == Element::bf16 ? 1 : t.type == Element::f16 ? 2 : 3;
  // decoding takes the time
  if (t.type == Element::bf16 && !bytes && t.act != Act::none && t.m < kRoundedRows) parts = 2;
  const bool exact = multiplies_codes(t);
  t.tiling = {exact ? depth_of(t, 2) : 2, t.act == Act::none ? parts : 1, exact ? 0 : parts};
  // a part of infinity that is 0 would make NaN of it
  const bool finite = (t.tiling.x_parts == 1 && t.tiling.w_parts <= 1) || !has_infinity(t);
  return finite && t.m >= least_rows(t);
}

static int parts_of(const Linear& t) { return t.tiling.w_parts < 1 ? 1 : t.tiling.w_parts; }
// Bytes of a tile of the layout, decoded.
static int64_t tile_bytes_of(const Linear& t) { return 256 * bytes_of(t.mode); }

// Tiles of the layout in a panel.
static int64_t panel_tiles_of(const Linear& t) {
  constexpr int64_t kPanelBytes = 32 << 10;
  const int64_t fitting = kPanelBytes / (kPanelBlocks * tile_bytes_of(t) * parts_of(t));
  return fitting / t.tiling.depth * t.tiling.depth;
}
// Units of columns that a part of the activations is multiplied with before the next part is: where they do not
// fit L2 all together, so many times fewer of them are read from beyond.
static int64_t wide_of(const Linear& t) {
  constexpr int64_t kNear = 768 << 10;
  return t.row_blocks * kTileRows * tile_row_bytes(t) > kNear ? 8 : 1;
}
// Floats, or integers, of the sums of a unit.
static int64_t sums_of(const Linear& t) { return t.row_blocks * kTileRows * kPanelBlocks * 16; }

static int64_t tile_scratch(const Linear& t) {
  const int64_t scales = 2 * kPanelBlocks * t.groups * 64, sums = sums_of(t) * 4;
  const int64_t panel = kPanelBlocks * parts_of(t) * panel_tiles_of(t) * tile_bytes_of(t);
  return wide_of(t) * (scales + sums) + panel + static_cast<int64_t>(sizeof(GroupSums)) + 64;
}

// -- weights ------------------------------------------------------------------------------------------------

// Columns of a block, from a tile on: `used` tiles of a step are behind.
struct Place {
  int64_t step, used;
};

// Decodes `count` tiles of a block of N from `place` on, which moves on.
static void decode(const Linear& t, const Decoder& d, const void* table, const uint8_t* codes, int64_t count,
                   const float* scales, const float* zero_terms, Place& place, uint8_t* out) {
  const int64_t size = tile_bytes_of(t), part_bytes = panel_tiles_of(t) * size;
  const int64_t missing = (t.tiling.depth - count % t.tiling.depth) % t.tiling.depth;
  for (int part = 0; missing > 0 && part < parts_of(t); ++part) {
    __builtin_memset(out + part * part_bytes + count * size, 0, static_cast<size_t>(missing * size));
  }
  if (!d.fold) return d.unpack(codes, count, out, table);
  while (count > 0) {
    const Step& step = t.steps[place.step];
    const int64_t left = step.tiles - place.used, tiles = left < count ? left : count, at = step.group * 16;
    const F zero_term = t.zero_type == Zero::none ? zero() : load(zero_terms + at);
    d.fold(codes, tiles, out, part_bytes, table, load(scales + at), zero_term);
    codes += tiles * d.tile_bytes, out += tiles * size, count -= tiles, place.used += tiles;
    if (place.used == step.tiles) ++place.step, place.used = 0;
  }
}

// -- sums ---------------------------------------------------------------------------------------------------

// Sums of a block of N as floats, with what was not folded into the weights.
static void finish(const Linear& t, const float* scales, const float* zero_terms, float* sums) {
  if (t.tiling.w_parts > 0 || is_grouped(t)) return;
  const bool zeros = t.zero_type != Zero::none;
  const F scale = load(scales), zero_term = zeros ? load(zero_terms) : zero();
  for (int64_t r = 0; r < t.m; ++r, sums += kPanelBlocks * 16) {
    const I whole = load_vector(sums);
    if (zeros) {
      const F x_sum = splat(static_cast<const float*>(t.x_sums)[r]);
      store(sums, fma(zero_term, x_sum, mul(t.mode == Mode::pairs ? load(sums) : to_float(whole), scale)));
    } else if (t.mode == Mode::pairs) {
      store(sums, mul(load(sums), scale));
    } else {
      const I start = splat_int(static_cast<const int32_t*>(t.x_sums)[r]);
      store(sums, mul(to_float(add(whole, start)), scale));
    }
  }
}

// -- all of it ----------------------------------------------------------------------------------------------

// What a task needs, in its scratch.
struct Task {
  const Linear& t;
  Decoder d;
  int64_t wide, scale_stride, unit_sums;
  float *scales, *zero_terms, *sums;  // (block, group, 16) twice, (unit, row, N block, 16)
  uint8_t* panel;
  GroupSums* groups;
  alignas(64) uint8_t table[kTableBytes];

  Task(const Linear& call, const Decoder& decoder, uint8_t* memory)
      : t(call), d(decoder), wide(wide_of(call)), scale_stride(call.groups * 16), unit_sums(sums_of(call)) {
    groups = reinterpret_cast<GroupSums*>(memory);
    scales = reinterpret_cast<float*>(groups + 1);
    zero_terms = scales + wide * kPanelBlocks * scale_stride;
    sums = zero_terms + wide * kPanelBlocks * scale_stride;
    panel = reinterpret_cast<uint8_t*>(sums + wide * unit_sums);
    d.make_table(t, table);
  }
};

// All rows times the weights in the panel, `count` tiles from `tile` on.
static TilePart tile_part(const Task& task, int64_t tile, int64_t count) {
  const Linear& t = task.t;
  const int64_t depth = t.tiling.depth;
  TilePart part{};
  part.line = tile_line(t), part.x_step = kTileRows * part.line, part.w_step = depth * tile_bytes_of(t);
  part.x_part = tile_steps(t) * part.x_step, part.x_block = kTileRows * tile_row_bytes(t);
  part.x_parts = t.tiling.x_parts, part.w_parts = parts_of(t);
  part.w_part = panel_tiles_of(t) * tile_bytes_of(t), part.w_block = part.w_parts * part.w_part, part.w = task.panel;
  part.x = t.x_packed + tile / depth * part.x_step;
  part.steps = (count + depth - 1) / depth, part.starts = tile == 0;
  return part;
}

// The panel is of the unit of N blocks that begins with `n_block` of those at hand. `prefetch`: codes of the next product.
template <bool kBytes>
static void multiply_panel(const Task& task, int64_t n_block, int64_t tile, int64_t count, const uint8_t* prefetch) {
  const Linear& t = task.t;
  TilePart part = tile_part(task, tile, count);
  // a part of the codes with every register, so that memory is never idle
  const int64_t lines = (count * task.d.tile_bytes + 63) / 64, registers = part.steps * ((t.row_blocks + 1) / 2);
  part.prefetch_lines = (lines + registers - 1) / registers, part.prefetch_stride = t.tiles * task.d.tile_bytes;
  float* out = task.sums + n_block / kPanelBlocks * task.unit_sums;
  for (int64_t b = 0; b < t.row_blocks; b += 2, part.x += 2 * part.x_block, out += 2 * kTileRows * kPanelBlocks * 16) {
    part.prefetch = prefetch + b / 2 * part.steps * part.prefetch_lines * 64;
    if (b + 1 < t.row_blocks) {
      multiply_tiles<kBytes, 2>(part, out);
    } else {
      multiply_tiles<kBytes, 1>(part, out);
    }
  }
}

// The same with scales of groups of columns: steps from `first` on.
static void multiply_grouped_panel(const Task& task, int64_t n_block, int64_t n_blocks, int64_t tile, int64_t first,
                                   int64_t steps) {
  const Linear& t = task.t;
  const bool bytes = t.mode == Mode::int8, zeros = t.zero_type != Zero::none;
  TilePart tiles = tile_part(task, tile, 0);
  GroupedPart part{};
  part.line = tiles.line, part.x_step = tiles.x_step, part.w_step = tiles.w_step, part.depth = t.tiling.depth;
  part.steps = t.steps + first, part.step_count = steps, part.x_sums_stride = t.row_blocks * kTileRows;
  part.scale_stride = n_block + 1 < n_blocks ? task.scale_stride : 0;  // the last may be twice
  const int64_t width = bytes ? 1 : 2;  // blocks of rows, and of N
  float* out = task.sums + n_block / kPanelBlocks * task.unit_sums;
  for (int64_t b = 0; b < t.row_blocks; b += width, out += width * kTileRows * kPanelBlocks * 16) {
    part.x = tiles.x = t.x_packed + b * tiles.x_block + tile / part.depth * tiles.x_step;
    part.x_sums = static_cast<const int32_t*>(t.x_sums) + first * part.x_sums_stride + b * kTileRows;
    for (int64_t i = 0; i < kPanelBlocks && n_block + i < n_blocks; i += width) {
      part.w = task.panel + i * tiles.w_block;
      part.scales = task.scales + (n_block + i) * task.scale_stride;
      part.zero_terms = zeros ? task.zero_terms + (n_block + i) * task.scale_stride : nullptr;
      part.totals = out + i * 16;
      if (bytes) {
        multiply_groups(part, *task.groups);
      } else if (b + 1 < t.row_blocks) {
        multiply_pair_groups<2>(part, tiles, *task.groups);
      } else {
        multiply_pair_groups<1>(part, tiles, *task.groups);
      }
    }
  }
}

// Blocks of N [base, base + n_blocks), as many as units are worked on together.
template <Mode kMode>
static void multiply_units(const Task& task, int64_t base, int64_t n_blocks) {
  const Linear& t = task.t;
  const int64_t code_stride = t.tiles * task.d.tile_bytes, w_block = parts_of(t) * panel_tiles_of(t) * tile_bytes_of(t);
  if (is_grouped(t)) __builtin_memset(task.sums, 0, static_cast<size_t>(task.wide * task.unit_sums * 4));
  Place place{0, 0}, next{0, 0};
  for (int64_t tile = 0, count; tile < t.tiles; tile += count, place = next) {
    count = t.tiles - tile < panel_tiles_of(t) ? t.tiles - tile : panel_tiles_of(t);
    int64_t steps = 0;
    if (is_grouped(t)) {  // whole steps
      for (count = 0; place.step + steps < t.step_count; ++steps) {
        const int64_t tiles = t.steps[place.step + steps].tiles;
        if (count + tiles > panel_tiles_of(t)) break;
        count += tiles;
      }
    }
    for (int64_t c = 0; c < n_blocks; c += kPanelBlocks) {
      const uint8_t* codes = t.qdata + (base + c) * code_stride + tile * task.d.tile_bytes;
      for (int64_t i = 0; i < kPanelBlocks; ++i) {
        const int64_t own = c + i < n_blocks ? i : 0, at = (c + own) * task.scale_stride;  // the last may be twice
        next = place;
        decode(t, task.d, task.table, codes + own * code_stride, count, task.scales + at, task.zero_terms + at, next,
               task.panel + i * w_block);
      }
      if (is_grouped(t)) {
        multiply_grouped_panel(task, c, n_blocks, tile, place.step, steps);
        next = {place.step + steps, 0};
        continue;
      }
      const uint8_t* prefetch = codes + kPanelBlocks * code_stride;  // of the next unit, or further on, or beyond
      if (c + kPanelBlocks >= n_blocks && tile + count < t.tiles) {
        prefetch = codes - c * code_stride + count * task.d.tile_bytes;
      }
      if (c + kPanelBlocks >= n_blocks && tile + count == t.tiles) prefetch = t.qdata + (base + n_blocks) * code_stride;
      multiply_panel<kMode == Mode::int8>(task, c, tile, count, prefetch);
    }
  }
}

template <Mode kMode>
static void run_tile_blocks_as(const Linear& t, int64_t begin, int64_t end, uint8_t* memory) {
  const Task task(t, decoder_of<kMode>(t), memory);
  configure_tiles(static_cast<int>(tile_line(t)));
  for (int64_t base = begin; base < end; base += task.wide * kPanelBlocks) {
    const int64_t n_blocks = end - base < task.wide * kPanelBlocks ? end - base : task.wide * kPanelBlocks;
    for (int64_t c = 0; c < n_blocks; ++c) {
      read_block(t, base + c, task.scales + c * task.scale_stride, task.zero_terms + c * task.scale_stride);
    }
    multiply_units<kMode>(task, base, n_blocks);
    for (int64_t c = 0; c < n_blocks; c += kPanelBlocks) {
      const int64_t blocks = n_blocks - c < kPanelBlocks ? n_blocks - c : kPanelBlocks;
      float* sums = task.sums + c / kPanelBlocks * task.unit_sums;
      for (int64_t i = 0; i < blocks; ++i) {
        const int64_t at = (c + i) * task.scale_stride;
        finish(t, task.scales + at, task.zero_terms + at, sums + i * 16);
      }
      write_rows(t, {0, t.m}, base + c, blocks, sums);
    }
  }
  release_tiles();
}

static void run_tile_blocks(const Linear& t, int64_t begin, int64_t end, int64_t, uint8_t* scratch) {
  if (t.mode == Mode::pairs) return run_tile_blocks_as<Mode::pairs>(t, begin, end, scratch);
  run_tile_blocks_as<Mode::int8>(t, begin, end, scratch);
}

static const LinearKernels kAmxKernels = {
    .pairs = true,
    .leaves_rest = nullptr,
    .panel_rows = kTileRows,
    .panel_blocks = kPanelBlocks,
    .row_blocks = kPanelBlocks,
    .stream_rows = 0,
    .chunk_rows = 560,
    .float_step = 0,
    .scratch = tile_scratch,
    .pack = pack_tiles,
    .table_limbs = false,
    .pack_limbs = nullptr,
    .run_blocks = run_tile_blocks,
    .expand = expand,
    .tiles = nullptr,
    .plan = plan_tiles,
};

}  // namespace ao::AO_ISA
