#include "attend.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <limits>
#include <memory>

#include "../hadamard/hadamard.h"
#include "../invariant.h"
#include "../isa.h"
#include "../memory.h"
#include "../parallel.h"

namespace ao {
namespace {

// Tokens of the shortest part; and about how many items and parts there are, where that many can be had. None of it
// depends on the number of threads, so results do not.
constexpr int64_t kShortest = 4 * kTokenTile, kEnough = 32, kMost = 256;
// Multiplications that are worth more than one thread, where threads must be woken.
constexpr int64_t kWorth = 1 << 19;

thread_local ThreadWorkspace kept_tiles, kept_parts;

int64_t up(int64_t count, int64_t size) { return (count + size - 1) / size; }

// Bytes that a thread takes in the unit: panels of keys and values, and what there is of each row.
int64_t scratch_of(const Attend& a) {
  const int64_t wide = up(a.key.size, 64) * 64, pieces = 20;
  const int64_t panels = kTokenTile * (wide + a.value_size) * 4;
  const int64_t row = wide * (4 + 3) + kTokenTile * (4 + 3) + 64 + (a.rows <= kFewRows ? 8 * wide : 0);
  return panels + a.rows * row + (wide + kTokenTile + a.staging + 3 * kTokenTile) * 4 + pieces * 64;
}

// Whether a table of 256 values is that of float8 e4m3fn.
bool is_e4m3(const float* table) {
  for (int code = 0; code < 256; ++code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    float value = std::ldexp(exponent ? 1 + mantissa / 8.0f : mantissa / 8.0f, exponent ? exponent - 7 : -6);
    if ((code & 127) == 127) value = std::numeric_limits<float>::quiet_NaN();
    value = code & 128 ? -value : value;
    if (table[code] != value && !(std::isnan(value) && std::isnan(table[code]))) return false;
  }
  return true;
}

// Low and high bytes of the values of 128 codes as bfloat16; false where these are not exact, or where the top bit of
// a code is no sign.
bool as_words(const float* table, uint8_t* bytes) {
  for (int code = 0; code < 128; ++code) {
    const float value = table[code], negative = table[code + 128];
    const auto bits = std::bit_cast<uint32_t>(value), other = std::bit_cast<uint32_t>(negative);
    const bool none = std::isnan(value) && std::isnan(negative);
    if (bits >> 31 || bits & 0xffff || (!none && other != (bits | 0x80000000))) return false;
    bytes[code] = static_cast<uint8_t>(bits >> 16), bytes[code + 128] = static_cast<uint8_t>(bits >> 24);
  }
  return true;
}

bool as_floats(Scale type) { return type == Scale::f32 || type == Scale::bf16 || type == Scale::f16; }

}  // namespace

void choose_grid(Stored& s, bool is_key) {
  const Dequantize& d = s.coded;
  const Blocks& b = d.blocks;
  s.grid = Grid::floats;
  const int bits = d.code_bits;
  s.float8 = bits == 8 && s.size % 16 == 0 && b.block_n == 1 && b.groups == 1 && as_floats(d.scale_type) &&
             d.zero_type == Zero::none && !d.format.is_integer && is_e4m3(d.format.table);
  s.words = bits == 8 && b.block_n == 1 && b.groups == 1 && as_floats(d.scale_type) && d.zero_type == Zero::none &&
            !d.format.is_integer && as_words(d.format.table, s.table);
  if (!d.format.is_integer || d.format.bits != bits || (bits != 4 && bits != 8)) return;
  if (!as_floats(d.scale_type) || d.zero_type == Zero::u8 || d.zero_type == Zero::scaled) return;
  s.least = d.format.least;
  const uint8_t sign = static_cast<uint8_t>(1 << (bits - 1));
  s.flip = s.least < 0 ? sign : 0;
  if (b.block_n == 1) {
    s.group = b.groups == 1 ? s.size : b.block_k;
    if (b.groups == 1 || (!is_key && b.block_k % 64 == 0)) s.grid = Grid::token;
  } else if (is_key && b.block_k == 1 && b.block_n % kTokenTile == 0) {
    s.grid = Grid::channel;
  }
}

void run_attend(const Attend& call) {
  if (call.batch * call.heads * call.group * call.queries * call.value.size == 0) return;
  Attend a = call;
  const int64_t width = a.batch * a.heads;
  const bool alone = batch_invariant();  // each query is an item, whose parts are those of one query of one text
  a.item_queries = alone ? 1 : std::max<int64_t>(1, std::min(a.queries, kItemRows / a.group));
  a.query_blocks = up(a.queries, a.item_queries);
  a.together = alone ? a.query_blocks : 1;
  a.rows = a.item_queries * a.group;
  a.value_size = up(a.value.size, 64) * 64;
  a.partial = a.rows * (a.value_size + 2);
  plan_hadamard(a.key.rotation), plan_hadamard(a.value.rotation);
  a.staging = std::max({16 * up(std::max(a.key.size, a.value.size), 64) * 64, a.key.rotation.scratch, a.value.rotation.scratch});
  a.scratch = scratch_of(a);
  const int64_t items = width * a.query_blocks, counted = alone ? a.heads : items;
  const int64_t parts = counted >= kEnough ? 1 : std::max<int64_t>(1, kMost / counted);
  a.chunk = std::max(kShortest, up(up(std::max<int64_t>(a.coded, 1), parts), kTokenTile) * kTokenTile);
  if (parts == 1) a.chunk = up(std::max<int64_t>(a.coded, 1), kTokenTile) * kTokenTile;
  a.chunks = up(a.coded, a.chunk);
  const int64_t seen = a.window ? std::min(a.tokens, a.window + a.queries) : a.tokens;
  const int64_t work = width * a.group * a.queries * seen * (a.key.size + a.value.size);
  const int64_t threads = work < kWorth && !in_team() ? 1 : num_threads(), all = a.chunks + 1;
  const AttendKernels& kernels = isa().attend;
  const auto scratch = [&] { return kept_tiles.get(a.scratch); };
  const int64_t bytes = all * a.partial * static_cast<int64_t>(sizeof(float));
  if (parts == 1 || threads == 1) {  // an item in one go
    return run_dynamic(items, 1, threads, [&](int64_t first, int64_t last, int64_t) {
      float* const partials = reinterpret_cast<float*>(kept_parts.get(bytes));
      for (int64_t item = first; item < last; ++item) {
        for (int64_t chunk = 0; chunk < all; ++chunk) {
          kernels.part(a, item, chunk, partials + chunk * a.partial, scratch());
        }
        kernels.finish(a, item, partials);
      }
    });
  }
  float* const partials = reinterpret_cast<float*>(kept_parts.get(items * bytes));
  const int64_t groups = items / a.together;
  const std::unique_ptr<std::atomic<int64_t>[]> left(new std::atomic<int64_t>[static_cast<size_t>(groups)]);
  for (int64_t i = 0; i < groups; ++i) left[static_cast<size_t>(i)] = all;
  const auto of_item = [&](int64_t item) { return partials + item * all * a.partial; };
  // whoever ends the last part of items finishes them
  run_dynamic(all, groups, threads, [&](int64_t first, int64_t last, int64_t group) {
    const int64_t begin = group * a.together, end = begin + a.together;
    for (int64_t chunk = first; chunk < last; ++chunk) {
      for (int64_t item = begin; item < end; ++item) {
        kernels.part(a, item, chunk, of_item(item) + chunk * a.partial, scratch());
      }
    }
    if (left[static_cast<size_t>(group)].fetch_sub(last - first) != last - first) return;
    for (int64_t item = begin; item < end; ++item) kernels.finish(a, item, of_item(item));
  });
}

}  // namespace ao
