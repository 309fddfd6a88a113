// Tokens that are appended to a cache of keys and values. Arguments have been checked.
#pragma once
#include "kernels.h"

namespace ao {

// Writes the last `added` tokens into the tail, where token p is in slot p % slots, and the counts.
struct WriteTail {
  int64_t* counts;  // tokens, and those in blocks; both are updated
  Element type;
  int64_t batch, heads, added, slots;
  int64_t key_size, value_size;
  NewRows key, value;
  void *tail_key, *tail_value;  // (B, H, slots, size), contiguous
  int64_t coded;                // so many tokens are in blocks now, if that is more than before: these are left out
};

void write_tail(const WriteTail& call);

// Fields of `EncodeTokens` up to `value` are the caller's. False: finite values are beyond half of float32 after a
// rotation; the codes of these tokens may then be anything.
bool encode_tokens(const EncodeTokens& call);

// nullptr, or what `encode_tokens` cannot do with blocks of this extent.
const char* why_not_encoded(const Blocks& blocks, int64_t begin, int64_t end);

}  // namespace ao
