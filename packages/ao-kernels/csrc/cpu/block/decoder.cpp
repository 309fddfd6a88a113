#include "decoder.h"

#include <cstring>

#include "../cache/append.h"
#include "../memory.h"
#include "../parallel.h"

namespace ao {
namespace {

// Not that of the halves of a block, which run in between.
thread_local ThreadWorkspace kept_heads;

// (heads, tokens, size) as (tokens, heads, size) for each text of a batch.
void to_rows(const uint8_t* from, uint8_t* to, int64_t batch, int64_t heads, int64_t tokens, int64_t bytes) {
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t t = 0; t < tokens; ++t, from += bytes) {
        std::memcpy(to + ((b * tokens + t) * heads + h) * bytes, from, static_cast<size_t>(bytes));
      }
    }
  }
}

void run_block(const Decoder& call, const DecoderBlock& block, const void* x, void* y) {
  const int64_t m = call.batch * call.tokens, size = bytes_of(call.rotary.type), dim = block.attend.key.size;
  const int64_t kv = block.attend.heads, q = kv * block.attend.group, row = m * dim * size;
  const int64_t values = m * q * block.attend.value.size * size;
  uint8_t* memory = kept_heads.get(aligned(q * row) + 2 * aligned(kv * row) + 2 * aligned(values));
  const auto take = [&](int64_t bytes) {
    memory += aligned(bytes);
    return memory - aligned(bytes);
  };
  uint8_t *const query = take(q * row), *const key = take(kv * row), *const value = take(kv * row);
  Qkv first{.x = x, .m = m, .norm = block.norm, .linear = block.qkv, .heads = call.rotary};
  first.heads.q = q, first.heads.kv = kv, first.heads.dim = dim;
  first.heads.query = query, first.heads.key = key, first.heads.value = value;
  run_qkv(first);

  Attend attend = block.attend;
  attend.tokens = block.counts[0], attend.coded = block.counts[1], attend.queries = call.tokens;
  attend.start = call.start, attend.stop = call.stop;
  const auto rows = [&](const void* data) { return NewRows{data, kv * call.tokens * dim, call.tokens * dim, dim}; };
  write_tail({.counts = block.counts,
              .type = call.rotary.type,
              .batch = call.batch,
              .heads = kv,
              .added = call.tokens,
              .slots = attend.tail_key.slots,
              .key_size = dim,
              .value_size = dim,
              .key = rows(key),
              .value = rows(value),
              .tail_key = block.tail_key,
              .tail_value = block.tail_value,
              .coded = attend.coded});
  attend.tokens += call.tokens;
  attend.q = query, attend.q_batch = q * call.tokens * dim, attend.q_head = call.tokens * dim, attend.q_token = dim;
  uint8_t* mixed = take(values);
  attend.y = mixed;
  run_attend(attend);
  if (call.tokens > 1) {
    uint8_t* const turned = take(values);
    to_rows(mixed, turned, call.batch, q, call.tokens, attend.value.size * size);
    mixed = turned;
  }
  Mlp second = block.mlp;
  second.x = mixed, second.residual = x, second.y = y, second.m = m, second.type = call.rotary.type;
  run_mlp(second);
}

}  // namespace

void run_decoder(const Decoder& call, const DecoderBlock* blocks, int64_t count) {
  const int64_t step = call.batch * call.tokens * call.width * bytes_of(call.rotary.type);
  if (step == 0) return;
  with_team([&] {
    const void* x = call.x;
    auto* y = static_cast<uint8_t*>(call.y);
    for (int64_t i = 0; i < count; ++i, y += step) {
      run_block(call, blocks[i], x, y);
      x = y;
    }
    if (call.head.n > 0) {
      run_normed_product({x, call.logits, call.batch * call.tokens, call.norm, call.head, call.rotary.type});
    }
  });
}

}  // namespace ao
