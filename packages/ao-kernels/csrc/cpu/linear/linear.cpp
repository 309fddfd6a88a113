#include "linear.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "../invariant.h"
#include "../isa.h"
#include "../memory.h"
#include "../parallel.h"

namespace ao {
namespace {

// A scale is applied after at most so many tiles: 512 columns of bytes fit L1, and sums of
// products of bytes cannot overflow.
constexpr int64_t kStepTiles = 32;
// Bytes of activations that are multiplied by a panel at a time, which the last-level cache holds.
constexpr int64_t kChunkBytes = 8 << 20;
// Bytes of activations that are packed at a time, or two chunks.
constexpr int64_t kWaveBytes = 16 << 20;
// Multiplications below which a second thread costs more than it saves.
constexpr int64_t kSerialWork = 1 << 17;

thread_local ThreadWorkspace activation_workspace, scratch_workspace, tile_workspace;

Mode mode_of(const Linear& t, const LinearKernels& kernels) {
  if (t.act == Act::int8 || t.act == Act::uint8) return Mode::int8;
  // float8 activations are bfloat16 numbers too, but results in float32 show how weights are rounded
  const bool exact = t.type == Element::bf16 || (t.act != Act::none && t.kind != Kind::table);
  return kernels.pairs && exact ? Mode::pairs : Mode::f32;
}

bool in_limbs(const Linear& t) { return t.mode == Mode::limbs2 || t.mode == Mode::limbs3; }

// A power of two of which all values of a table are multiples, in 7 bits: sums of two products of bytes
// below 128 fit 16 bits, which AVX2 adds them in. 0: there is none.
float unit_of(const float* table, int codes) {
  for (float unit = 1.0f; unit >= 0x1p-6f; unit *= 0.5f) {
    const bool fits = std::all_of(table, table + codes, [unit](float v) {
      return v >= -64 * unit && v <= 63 * unit && std::trunc(v / unit) == v / unit;
    });
    if (fits) return unit;
  }
  return 0;
}

// Values up to `greatest` in numbers of several bytes, counted from a whole number of first bytes below 0: the one
// that leaves the least unit. False where there is none.
bool take_apart(Linear& t, float greatest) {
  const double first = t.table_parts == 2 ? 0x1p8 : 0x1p16, low = std::min(t.least, 0.0f), high = std::max(greatest, 0.0f);
  double unit = 0, below = 0;
  const int fair = high > low ? static_cast<int>(256 * (-low / (high - low))) : 0;  // as many bytes as values below 0
  for (int bytes = std::max(low < 0 ? 1 : 0, fair - 1); bytes < std::min(256, fair + 3); ++bytes) {
    const double needed = std::max(bytes ? -low / (bytes * first) : 0.0, high / ((256 - bytes) * first - 1));
    if (unit == 0 || needed < unit) unit = needed, below = bytes;
  }
  t.table_unit = std::nextafter(static_cast<float>(unit), std::numeric_limits<float>::infinity());
  t.least = static_cast<float>(-below);
  return std::isnormal(t.table_unit);
}

// Whether the greatest value of a table is too great for fixed-point numbers, which are as fine as it lets them be:
// groups of small values would lose too many of their limbs.
bool is_wide(const float* table, int codes) {
  constexpr float kWidest = 32;  // times the median magnitude; floats of three bits of exponent have 16
  float sizes[256], greatest = 0;
  int count = 0;
  for (int c = 0; c < codes; ++c) {
    if (table[c] != 0) sizes[count++] = std::fabs(table[c]);
    greatest = std::max(greatest, std::fabs(table[c]));
  }
  std::nth_element(sizes, sizes + count / 2, sizes + count);
  return count > 0 && greatest > kWidest * sizes[count / 2];
}

// A single row takes its activations apart into limbs, and the table where its values are not whole.
bool has_limbs(Linear& t, const LinearKernels& kernels) {
  if (!kernels.pack_limbs || t.m != 1 || t.act != Act::none) return false;
  t.mode = t.type == Element::bf16 ? Mode::limbs2 : Mode::limbs3;
  if (t.kind == Kind::integer) return true;
  if (t.bits > 6 || t.zero_type != Zero::none) return false;
  const int codes = 1 << t.bits;
  t.table_unit = unit_of(t.table, codes);
  if (t.table_unit == 0) {
    if (!kernels.table_limbs || !std::all_of(t.table, t.table + codes, [](float v) { return std::isfinite(v); })) {
      return false;
    }
    if (is_wide(t.table, codes)) return false;
    t.table_parts = t.mode == Mode::limbs2 ? 2 : 3;
    return take_apart(t, *std::max_element(t.table, t.table + codes));
  }
  t.least /= t.table_unit;
  return true;
}

// Numbers in bfloat16 as words, beside weights whose values are whole numbers of one unit. Sums of a group's offsets
// are floats, as ever.
bool has_words(Linear& t, const LinearKernels& kernels) {
  if (!kernels.leaves_rest || (kernels.pairs && !prefers_words()) || t.m == 1) return false;
  if (t.type != Element::bf16 || t.act != Act::none) return false;
  t.mode = Mode::words;
  if (t.kind == Kind::integer) return true;
  if (t.bits > 6) return false;
  t.table_unit = unit_of(t.table, 1 << t.bits);
  t.least /= t.table_unit;
  return t.table_unit != 0;
}

// Tiles of a step, at most.
int64_t step_tiles_of(const Linear& t, const LinearKernels& kernels) {
  if (in_limbs(t) || t.mode == Mode::words) return kLimbTiles;
  if (is_grouped(t)) return kStepTiles;
  if (t.tiling.depth > 0) return t.tiles;
  return t.mode == Mode::f32 ? kernels.float_step : kStepTiles;
}

std::vector<Step> steps_of(const Linear& t, const LinearKernels& kernels) {
  const int64_t step_tiles = step_tiles_of(t, kernels);
  std::vector<Step> steps;
  steps.reserve(static_cast<size_t>(t.groups * ((t.group + 16 * step_tiles - 1) / (16 * step_tiles))));
  int64_t shared = 0;  // tiles of words, up to here, that share a unit
  for (int64_t g = 0; g < t.groups; ++g) {
    const int64_t k = std::min(t.group, t.k - g * t.group);
    for (int64_t tiles = (k + 15) / 16; tiles > 0; tiles -= step_tiles) {
      const int64_t count = std::min(tiles, step_tiles);
      shared = shared + count <= kLimbTiles && !steps.empty() ? shared + count : count;
      steps.push_back({static_cast<int32_t>(count), static_cast<int32_t>(g), static_cast<int32_t>(g / t.span),
                       shared == count});
    }
  }
  return steps;
}

int64_t packed_bytes(const Linear& t) {
  if (t.tiling.depth > 0) return aligned(t.row_blocks * kTileRows * tile_row_bytes(t));
  return aligned(t.m * t.tiles * 16 * bytes_of(t.mode));
}
int64_t sums_bytes(const Linear& t) {
  const int64_t rows = t.tiling.depth > 0 ? t.row_blocks * kTileRows : t.m;
  const size_t bytes = t.m == 1 ? sizeof(LimbStep) : sizeof(float);
  return aligned(rows * t.step_count * static_cast<int64_t>(bytes));
}
int64_t ratios_bytes(const Linear& t) { return t.mode == Mode::words ? sums_bytes(t) : 0; }
int64_t activation_bytes(const Linear& t) {
  return packed_bytes(t) + sums_bytes(t) + ratios_bytes(t) + 2 * aligned(t.m * 4);
}

int64_t blocks_of(int64_t rows, const LinearKernels& kernels) {
  return rows <= kernels.stream_rows ? 1 : (rows + kernels.panel_rows - 1) / kernels.panel_rows;
}

// Some of the rows, in as many blocks as the kernels want.
Linear chunk_of(Linear t, Rows rows, const LinearKernels& kernels) {
  const int64_t size = bytes_of(t.type);
  t.x = static_cast<const uint8_t*>(t.x) + rows.begin * t.x_stride * size;
  t.y = static_cast<uint8_t*>(t.y) + rows.begin * t.y_stride * size;
  t.m = rows.end - rows.begin;
  t.row_blocks = blocks_of(t.m, kernels);
  return t;
}

// Room for what words leave of some rows, behind all rows of a chunk.
void append_rests(Linear& t, const std::vector<int32_t>& rests, const LinearKernels& kernels) {
  t.rests = rests.data(), t.rest_count = static_cast<int64_t>(rests.size());
  t.m += t.rest_count;
  t.row_blocks = blocks_of(t.m, kernels);
}

// Rows of a chunk that words leave a rest of.
std::vector<int32_t> rests_of(const Linear& t, const LinearKernels& kernels) {
  std::vector<uint8_t> found(static_cast<size_t>(t.m));
  parallel_for(0, t.m, std::max<int64_t>(1, kSerialWork / std::max<int64_t>(1, t.k)), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) found[r] = kernels.leaves_rest(t, r);
  });
  std::vector<int32_t> rests;
  for (int64_t r = 0; r < t.m; ++r) {
    if (found[r]) rests.push_back(static_cast<int32_t>(r));
  }
  return rests;
}

void set_memory(Linear& t, uint8_t* memory) {
  t.x_packed = memory;
  t.x_sums = memory + packed_bytes(t);
  t.x_ratios = reinterpret_cast<float*>(memory + packed_bytes(t) + sums_bytes(t));
  t.x_scale = t.x_ratios + ratios_bytes(t) / 4;
  t.x_zero = t.x_scale + aligned(t.m * 4) / 4;
}

// Calls f(qdata, begin, end) with all of blocks of N [begin, end), in order. Codes that are not stored as tiles become
// tiles before, some blocks at a time; `qdata` is where block 0 would be.
template <class F>
void for_tiles(const Linear& t, const LinearKernels& kernels, int64_t begin, int64_t end, const F& f) {
  if (t.stored == StoredAs::tiles) return f(t.qdata, begin, end);
  constexpr int64_t kExpandedBytes = 1 << 20, kMost = 16, kFewest = 4;  // whole units of all kernels
  const int64_t stride = t.tiles * 32 * t.bits;
  const int64_t count = std::clamp(kExpandedBytes / stride / kFewest * kFewest, kFewest, kMost);
  uint8_t* const tiles = tile_workspace.get(count * stride);
  for (int64_t block = begin; block < end; block += count) {
    const int64_t last = std::min(block + count, end);
    kernels.expand(t, block, last, tiles);
    f(tiles - block * stride, block, last);
  }
}

void run_blocks(const Linear& t, const LinearKernels& kernels, int64_t begin, int64_t end, int64_t then,
                uint8_t* scratch) {
  for_tiles(t, kernels, begin, end, [&](const uint8_t* qdata, int64_t first, int64_t last) {
    Linear part = t;
    part.qdata = qdata;
    kernels.run_blocks(part, first, last, last == end && t.stored == StoredAs::tiles ? then : last, scratch);
  });
}

// Each thread packs a single row for itself: to wait for another that does takes longer. It knows its next turn
// before the last one ends, so that weights arrive without a pause. False where the row cannot be taken apart into
// limbs.
bool run_row(const Linear& t, const LinearKernels& kernels, int64_t blocks, int64_t threads) {
  const Linear row = chunk_of(t, {0, 1}, kernels);
  const int64_t memory = activation_bytes(row), scratch = aligned(kernels.scratch(row));
  std::atomic<bool> packed{true};
  // a thread begins with two thirds of its part: to take a turn costs as much as some blocks
  WorkQueue queue(blocks, 1, std::max<int64_t>(2, 3 * threads / 2), kernels.row_blocks);
  in_threads(threads, [&] {
    auto work = queue.next();
    if (!work) return;
    Linear own = row;
    set_memory(own, activation_workspace.get(memory));
    if (!in_limbs(t)) {
      kernels.pack(own, 0, 1);
    } else if (!kernels.pack_limbs(own, work.first)) {
      packed = false;
      return;
    }
    while (work) {
      const auto then = queue.next();
      run_blocks(own, kernels, work.first, work.last, then ? then.first : blocks, scratch_workspace.get(scratch));
      work = then;
    }
  });
  return packed;
}

// Chunks [some.begin, some.end) of the `count` that rows are cut into.
void run_chunks(const Linear& t, const LinearKernels& kernels, int64_t count, Rows some, int64_t blocks, int64_t units,
                int64_t threads) {
  std::vector<Linear> chunks;
  std::vector<std::vector<int32_t>> rests;
  int64_t memory = 0, scratch = 0;
  for (int64_t c = some.begin; c < some.end; ++c) {
    chunks.push_back(chunk_of(t, rows_of(t.m, count, c), kernels));
    if (t.mode == Mode::words) {
      rests.push_back(rests_of(chunks.back(), kernels));
      append_rests(chunks.back(), rests.back(), kernels);
    }
    memory += activation_bytes(chunks.back());
    scratch = std::max(scratch, aligned(kernels.scratch(chunks.back())));
  }
  uint8_t* place = activation_workspace.get(memory);
  for (Linear& part : chunks) {
    set_memory(part, place);
    place += activation_bytes(part);
    if (threads == 1 || part.row_blocks == 1) {
      kernels.pack(part, 0, part.row_blocks);
    } else {
      parallel_for(0, part.row_blocks, 1, [&](int64_t b, int64_t e) { kernels.pack(part, b, e); });
    }
  }
  run_dynamic(units, some.end - some.begin, threads, [&](int64_t first, int64_t last, int64_t chunk) {
    const int64_t end = std::min(last * kernels.panel_blocks, blocks);
    run_blocks(chunks[chunk], kernels, first * kernels.panel_blocks, end, blocks, scratch_workspace.get(scratch));
  });
}

void run_rows(const Linear& t, const LinearKernels& kernels, int64_t blocks, int64_t threads) {
  const int64_t units = (blocks + kernels.panel_blocks - 1) / kernels.panel_blocks;
  const int64_t bytes = t.m * t.tiles * 16 * bytes_of(t.mode);
  const int64_t fitting = std::max((t.m - 1) / kernels.chunk_rows, (bytes - 1) / kChunkBytes) + 1;
  // more chunks of rows than needed for the cache, where there are too few columns for all threads
  const int64_t count = std::max(fitting, std::min((2 * threads - 1) / units, t.m / 16));
  // and no more of them packed at a time than keep all threads busy, or take too much memory
  const int64_t busy = std::min((16 * threads - 1) / units + 1, 2 * threads);
  const int64_t together = std::max<int64_t>(2, std::min(busy, kWaveBytes * count / std::max<int64_t>(1, bytes)));
  const int64_t waves = (count + together - 1) / together;
  for (int64_t wave = 0; wave < waves; ++wave) {
    run_chunks(t, kernels, count, rows_of(count, waves, wave), blocks, units, threads);
  }
}

// Every row as if it were alone. Blocks of N are read from memory once, and meet one row after the other. Rows that
// cannot be taken apart into limbs are left in `rows`.
void run_alone(Linear t, const LinearKernels& kernels, std::vector<int64_t>& rows) {
  t.m = t.rows = 1;
  const int64_t blocks = (t.n + 15) / 16, count = static_cast<int64_t>(rows.size());
  const int64_t threads = t.n * t.k <= kSerialWork / count ? 1 : num_threads();
  const std::vector<Step> steps = steps_of(t, kernels);
  t.steps = steps.data(), t.step_count = static_cast<int64_t>(steps.size());
  std::vector<Linear> each;
  std::vector<int64_t> refused;
  const int64_t memory = activation_bytes(chunk_of(t, {0, 1}, kernels));
  uint8_t* place = activation_workspace.get(count * memory);
  for (const int64_t r : rows) {
    Linear one = chunk_of(t, {r, r + 1}, kernels);
    set_memory(one, place);
    if (!in_limbs(t)) {
      kernels.pack(one, 0, 1);
    } else if (!kernels.pack_limbs(one, 0)) {
      refused.push_back(r);
      continue;
    }
    each.push_back(one), place += memory;
  }
  rows = std::move(refused);
  if (each.empty()) return;
  const int64_t scratch = aligned(kernels.scratch(each[0])), width = kernels.row_blocks;
  run_dynamic((blocks + width - 1) / width, 1, threads, [&](int64_t first, int64_t last, int64_t) {
    uint8_t* const own = scratch_workspace.get(scratch);
    for (int64_t block = first * width; block < std::min(last * width, blocks); block += width) {
      const int64_t end = std::min(block + width, blocks);
      for_tiles(each[0], kernels, block, end, [&](const uint8_t* qdata, int64_t from, int64_t to) {
        for (const Linear& one : each) {
          Linear part = one;
          part.qdata = qdata;
          kernels.run_blocks(part, from, to, &one == &each.back() ? to : blocks, own);
        }
      });
    }
  });
}

// Rows of a call that are computed alone at a time: what is packed for them stays in a cache.
constexpr int64_t kRowsAlone = 64;

void run_rows_alone(const Linear& t, const LinearKernels& kernels) {
  for (int64_t begin = 0; begin < t.m; begin += kRowsAlone) {
    std::vector<int64_t> rows;
    for (int64_t r = begin; r < std::min(t.m, begin + kRowsAlone); ++r) rows.push_back(r);
    Linear one = t;
    one.m = 1;
    if (Linear limbs = one; has_limbs(limbs, kernels)) run_alone(limbs, kernels, rows);
    if (rows.empty()) continue;
    if (Linear tiled = one; kernels.tiles && kernels.tiles->plan(tiled)) {
      run_alone(tiled, *kernels.tiles, rows);
      continue;
    }
    one.mode = mode_of(one, kernels);
    run_alone(one, kernels, rows);
  }
}

// False where activations cannot be taken apart into limbs.
bool run(Linear t, const LinearKernels& kernels) {
  const std::vector<Step> steps = steps_of(t, kernels);
  t.steps = steps.data(), t.step_count = static_cast<int64_t>(steps.size());
  t.rows = t.m;
  const int64_t threads = t.n * t.k <= kSerialWork / t.m ? 1 : num_threads();
  const int64_t blocks = (t.n + 15) / 16;
  if (t.m == 1) return run_row(t, kernels, blocks, threads);
  run_rows(t, kernels, blocks, threads);
  return true;
}

}  // namespace

bool in_tile_registers(Linear call) {
  const LinearKernels* tiles = isa().linear.tiles;
  return tiles != nullptr && tiles->plan(call);
}

void run_linear(const Linear& call) {
  if (call.m == 0 || call.n == 0) return;
  const LinearKernels& kernels = isa().linear;
  Linear t = call;
  t.table_unit = 1, t.table_parts = 1;
  t.least = *std::min_element(t.table, t.table + (1 << t.bits));
  t.zero_flip = t.least < 0 ? 1 << (t.bits - 1) : 0;
  if (t.m > 1 && batch_invariant()) return run_rows_alone(t, kernels);
  if (Linear limbs = t; has_limbs(limbs, kernels) && run(limbs, kernels)) return;
  if (Linear tiled = t; kernels.tiles && kernels.tiles->plan(tiled)) {
    run(tiled, *kernels.tiles);
    return;
  }
  if (Linear words = t; has_words(words, kernels)) {
    run(words, kernels);
    return;
  }
  t.mode = mode_of(t, kernels);
  run(t, kernels);
}

}  // namespace ao
