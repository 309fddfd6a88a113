// Consecutive decoder blocks over a cache of keys and values, for a few tokens.
#pragma once
#include "../attend/attend.h"
#include "block.h"

namespace ao {

// One block, and the cache of its attention.
struct DecoderBlock {
  NormWeight norm;        // before attention
  Linear qkv;             // weight and bias
  Attend attend;          // all but queries and result; `tokens` counts those before the call
  Mlp mlp;                // weights, norm and gate
  int64_t* counts;        // tokens, and those in blocks
  void *tail_key, *tail_value;  // where `attend` reads them
};

struct Decoder {
  const void* x;  // (batch, tokens, width)
  void* y;        // (block, batch, tokens, width): what each block returns
  int64_t batch, tokens, width;
  Heads rotary;   // type and tables of the rotary embedding, and `tokens`
};

// The new tokens go into the exact tail of each cache, which has room for them.
void run_decoder(const Decoder& call, const DecoderBlock* blocks, int64_t count);

}  // namespace ao
