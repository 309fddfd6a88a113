// Caches of keys and values: tokens that become codes, what an instruction set provides for it, and what it is told.
//
// Sizes: B rows of a batch, H heads, S tokens that there is memory for in blocks, T tokens that are new.
#pragma once
#include <stdint.h>

#include "../hadamard/kernels.h"
#include "../quantize/kernels.h"

namespace ao {

// Tokens that one item encodes; it begins at a multiple of it.
constexpr int64_t kCacheBlock = 128;

// Keys or values of the last T tokens (B, H, T, size): elements of a token are contiguous.
struct NewRows {
  const void* data;
  int64_t batch, head, token;  // strides in elements
};

// Keys or values that are encoded.
struct EncodeSide {
  NewRows rows;
  const void* tail;      // (B, H, slots, size), contiguous: token p is in slot p % slots
  int64_t size;          // elements of a token
  const float* center;   // (B, H, size), subtracted first; null: nothing
  Hadamard rotation;     // of each token, then; block = 0: none
  Quantize coded;        // the memory of codes, scales and zero points: matrices B * H of (S, size); blocks are of one
                         // token, or of one element of several tokens, which divide kCacheBlock. `x` is not read.
};

// Tokens [begin, end) become codes: those from `tokens` on are new, those before are in the tail.
struct EncodeTokens {
  Element type;  // of new tokens and tails
  int64_t batch, heads, slots;
  int64_t tokens, begin, end;
  EncodeSide key, value;
  // made by the driver
  int64_t blocks;   // of tokens
  int64_t scratch;  // bytes that a thread needs
};

struct CacheKernels {
  // Tokens of one block of one head. False: finite values are beyond half of float32 after a rotation.
  bool (*encode)(const EncodeTokens&, const EncodeSide&, int64_t matrix, int64_t block, uint8_t* scratch);
};

}  // namespace ao
