#include "append.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "../hadamard/hadamard.h"
#include "../isa.h"
#include "../memory.h"
#include "../parallel.h"

namespace ao {
namespace {

// Elements that are worth a thread.
constexpr int64_t kGrain = 1 << 14;

thread_local ThreadWorkspace kept_blocks;

// Rows of tokens [first, tokens) to their slots; `from` holds the last `added` tokens.
void write_rows(const WriteTail& call, const NewRows& from, int64_t size, void* tail, int64_t first, int64_t tokens) {
  const int64_t element = bytes_of(call.type), bytes = size * element;
  const auto* const x = static_cast<const uint8_t*>(from.data);
  auto* to = static_cast<uint8_t*>(tail);
  for (int64_t b = 0; b < call.batch; ++b) {
    for (int64_t h = 0; h < call.heads; ++h, to += call.slots * bytes) {
      const uint8_t* const of_head = x + (b * from.batch + h * from.head) * element;
      for (int64_t token = first; token < tokens; ++token) {
        const int64_t place = token - (tokens - call.added);
        std::memcpy(to + token % call.slots * bytes, of_head + place * from.token * element, static_cast<size_t>(bytes));
      }
    }
  }
}

}  // namespace

void write_tail(const WriteTail& call) {
  const int64_t tokens = call.counts[0] + call.added, coded = std::max(call.coded, call.counts[1]);
  const int64_t first = std::max(tokens - call.added, coded);
  write_rows(call, call.key, call.key_size, call.tail_key, first, tokens);
  write_rows(call, call.value, call.value_size, call.tail_value, first, tokens);
  call.counts[0] = tokens, call.counts[1] = coded;
}

const char* why_not_encoded(const Blocks& b, int64_t begin, int64_t end) {
  if (b.block_n > 1 && b.block_k > 1) return "blocks are of several tokens and several elements";
  if (kCacheBlock % b.block_n) return "tokens of a block do not divide 128";
  if (begin % b.block_n || end % b.block_n) return "tokens of a block must be encoded together";
  if (b.block_n == 1 && b.groups > kChunkGroups) return "a token has more than 256 blocks";
  return nullptr;
}

bool encode_tokens(const EncodeTokens& call) {
  if (call.begin >= call.end) return true;
  EncodeTokens c = call;
  plan_hadamard(c.key.rotation), plan_hadamard(c.value.rotation);
  c.blocks = (c.end + kCacheBlock - 1) / kCacheBlock - c.begin / kCacheBlock;
  const int64_t size = std::max(c.key.size, c.value.size), wide = (size + 15) / 16 * 16;
  // numbers twice, codes twice, and what a rotation needs
  c.scratch = kCacheBlock * wide * (2 * 4 + 2) + 4 * std::max(c.key.rotation.scratch, c.value.rotation.scratch) + 1024;
  std::atomic<bool> fits{true};
  const int64_t items = c.batch * c.heads * c.blocks;
  const CacheKernels& kernels = isa().cache;
  const int64_t grain = std::max<int64_t>(1, kGrain / (kCacheBlock * size));
  parallel_for(0, 2 * items, grain, [&](int64_t first, int64_t last) {
    uint8_t* const scratch = kept_blocks.get(c.scratch);
    for (int64_t i = first; i < last; ++i) {
      const int64_t item = i / 2;
      const EncodeSide& side = i % 2 ? c.value : c.key;
      if (!kernels.encode(c, side, item / c.blocks, c.begin / kCacheBlock + item % c.blocks, scratch)) fits = false;
    }
  });
  return fits;
}

}  // namespace ao
