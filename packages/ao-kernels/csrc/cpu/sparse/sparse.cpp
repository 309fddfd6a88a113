#include "sparse.h"

#include <algorithm>

#include "../isa.h"
#include "../memory.h"
#include "../parallel.h"

namespace ao {
namespace {

// Rows of activations whose sums, for a row of blocks, stay in L2.
constexpr int64_t kChunkRows = 256;
// Multiplications below which a second thread costs more than it saves.
constexpr int64_t kSerialWork = 1 << 17;

thread_local ThreadWorkspace activation_workspace, scale_workspace, scratch_workspace;

Mode mode_of(const BlockSparse& t, bool pairs) {
  if (t.act == Act::int8) return Mode::int8;
  // both factors are exact in bfloat16
  const bool exact = t.type == Element::bf16 && (t.value == ValueType::bf16 || t.value == ValueType::i8);
  return pairs && exact ? Mode::pairs : Mode::f32;
}

// Whether sums of the activations times what is stored may leave the range of a float, or of the mode, though the
// output does not: codes, which scales bring back, and bfloat16, whose products take subnormal numbers for 0.
bool is_narrow(const BlockSparse& t) {
  return t.mode == Mode::pairs || (t.mode == Mode::f32 && t.value == ValueType::i8);
}

// Into how many chunks rows of activations are cut: so that sums stay near, and that the row with the most blocks
// keeps no thread busy when the others have ended.
int64_t chunks_of(const BlockSparse& t, int64_t threads) {
  const int64_t stored = t.starts[t.row_blocks];
  int64_t most = 0;
  for (int64_t r = 0; r < t.row_blocks; ++r) most = std::max<int64_t>(most, t.starts[r + 1] - t.starts[r]);
  const int64_t fair = threads == 1 || stored == 0 ? 1 : (4 * threads * most + stored - 1) / stored;
  return std::max({(t.m + kChunkRows - 1) / kChunkRows, std::min(fair, t.m / 16), int64_t{1}});
}

// What is packed: float32, or bfloat16 as the upper half of one.
uint32_t bits_at(const TwoFour& t, int64_t row, int64_t k) {
  const int64_t i = row * t.width + k;
  if (t.mode == Mode::f32) return reinterpret_cast<const uint32_t*>(t.x_packed)[i];
  return static_cast<uint32_t>(reinterpret_cast<const uint16_t*>(t.x_packed)[i]) << 16;
}

// Makes NaN of the outputs of a row where an infinity or NaN of the activations meets a weight that is not stored:
// as the product with 0 would, which is left out.
void meet_removed(const TwoFour& t, int64_t row) {
  const uint16_t none = t.type == Element::f16 ? 0x7e00 : 0x7fc0;
  const auto make_nan = [&](int64_t n) {
    const int64_t i = row * t.n + n;
    if (t.type == Element::f32) static_cast<uint32_t*>(t.y)[i] = 0x7fc00000;
    if (t.type != Element::f32) static_cast<uint16_t*>(t.y)[i] = none;
  };
  for (int64_t four = 0; four * 4 < t.k; ++four) {
    int odd = 0;  // a bit for each of the columns
    for (int64_t k = four * 4; k < std::min(four * 4 + 4, t.k); ++k) {
      odd |= ((bits_at(t, row, k) & 0x7fffffff) >= 0x7f800000) << k % 4;
    }
    if (odd == 0) continue;
    for (int64_t n = 0; n < t.n; ++n) {
      const int places = t.places[n * t.place_bytes + four / 2] >> four % 2 * 4;
      const int stored = 1 << (places & 3) | 1 << (places >> 2 & 3);
      if (odd & ~stored) make_nan(n);
    }
  }
}

}  // namespace

void run_block_sparse(const BlockSparse& call) {
  if (call.m == 0 || call.n == 0) return;
  const SparseKernels& kernels = isa().sparse;
  BlockSparse t = call;
  t.mode = mode_of(t, isa().linear.pairs);
  const bool as_they_are = (t.mode == Mode::f32 && t.type == Element::f32) || t.mode == Mode::pairs;
  t.x_direct = as_they_are ? t.k / t.side : 0;

  const int64_t work = t.starts[t.row_blocks] * t.side * t.side;
  const bool serial = work <= kSerialWork / t.m;
  const int64_t threads = serial ? 1 : num_threads();
  const int64_t grain = serial ? t.m : std::max<int64_t>(1, kSerialWork / 8 / std::max<int64_t>(1, t.k));
  const bool quantized = t.mode == Mode::int8;
  t.x_scale = quantized || is_narrow(t) ? reinterpret_cast<float*>(scale_workspace.get(t.m * 4)) : nullptr;
  if (is_narrow(t)) {
    parallel_for(0, t.m, grain, [&](int64_t begin, int64_t end) { kernels.measure(t, begin, end); });
    const bool lifted = std::any_of(t.x_scale, t.x_scale + t.m, [](float scale) { return scale != 1.0f; });
    if (lifted) t.x_direct = 0;
  }
  const int64_t packed = aligned(t.m * (t.column_blocks - t.x_direct) * t.side * (quantized ? 1 : 4));
  t.x_packed = activation_workspace.get(packed + (quantized ? t.m * t.column_blocks * 4 : 0));
  t.x_sums = reinterpret_cast<int32_t*>(t.x_packed + packed);
  if (t.x_direct < t.column_blocks) {
    parallel_for(0, t.m, grain, [&](int64_t begin, int64_t end) { kernels.pack(t, begin, end); });
  }

  const int64_t chunks = chunks_of(t, threads);
  const int64_t scratch = kernels.scratch(t, (t.m + chunks - 1) / chunks);
  run_dynamic(t.row_blocks, chunks, threads, [&](int64_t first, int64_t last, int64_t chunk) {
    uint8_t* memory = scratch_workspace.get(scratch);
    for (int64_t r = first; r < last; ++r) kernels.blocks(t, r, rows_of(t.m, chunks, chunk), memory);
  });
}

void run_two_four(const TwoFour& call) {
  if (call.m == 0 || call.n == 0) return;
  const SparseKernels& kernels = isa().sparse;
  TwoFour t = call;
  const bool one_scale = !t.scale || t.scale_groups == 1;  // others are multiplied into the weights, in float32
  const bool exact = t.type == Element::bf16 && (t.bits <= 8 || t.value == ValueType::bf16) && one_scale;
  t.mode = isa().linear.pairs && exact ? Mode::pairs : Mode::f32;
  t.width = (t.k + kWindow - 1) / kWindow * kWindow;
  const int64_t packed = t.m * t.width * 4;
  t.x_packed = activation_workspace.get(packed + t.m);
  t.x_scale = reinterpret_cast<float*>(scale_workspace.get(t.m * 4));
  t.x_odd = t.x_packed + packed;
  kernels.pack_two_four(t, 0, t.m);
  const int64_t threads = t.n * t.k <= kSerialWork / t.m ? 1 : num_threads();
  run_dynamic((t.n + 3) / 4, 1, threads, [&](int64_t first, int64_t last, int64_t) {
    kernels.two_four(t, first * 4, std::min(last * 4, t.n));
  });
  for (int64_t r = 0; r < t.m; ++r) {
    if (t.x_odd[r]) meet_removed(t, r);
  }
}

void expand_two_four(const TwoFour& call) {
  const SparseKernels& kernels = isa().sparse;
  const int64_t grain = std::max<int64_t>(1, kSerialWork / 8 / std::max<int64_t>(1, call.k));
  parallel_for(0, call.n, grain, [&](int64_t begin, int64_t end) { kernels.expand(call, begin, end); });
}

void mask_tiles(const TileMask& call) {
  const SparseKernels& kernels = isa().sparse;
  const int64_t grain = std::max<int64_t>(1, kSerialWork / 32 / std::max<int64_t>(1, call.k));
  parallel_for(0, (call.n + 3) / 4, grain, [&](int64_t begin, int64_t end) { kernels.tile_mask(call, begin, end); });
}

}  // namespace ao
