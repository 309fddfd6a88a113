// Consecutive decoder blocks over a cache of keys and values, for a few tokens.
#pragma once
#include "../attend/attend.h"
#include "block.h"

namespace ao {

// One block, and the cache of its attention.
struct DecoderBlock {
  NormWeight norm;        // before attention
  Linear qkv;             // weight and bias
  Attend attend;          // of keys and values; what a call changes is that of the call
  Mlp mlp;                // weights, norm and gate
  int64_t* counts;        // tokens, and those in blocks
  void *tail_key, *tail_value;  // where `attend` reads them
};

struct Decoder {
  const void* x;  // (batch, tokens, width)
  void* y;        // (block, batch, tokens, width): what each block returns
  int64_t batch, tokens, width;
  const int64_t *start, *stop;  // (batch), of the tokens that are seen, or nullptr
  Heads rotary;   // type and tables of the rotary embedding, and `tokens`
  // after the last block: norm, weight and bias; no columns: there is none
  NormWeight norm;
  Linear head;
  void* logits;   // (batch, tokens, head.n)
};

// The new tokens go into the exact tail of each cache, which has room for them.
void run_decoder(const Decoder& call, const DecoderBlock* blocks, int64_t count);

}  // namespace ao
