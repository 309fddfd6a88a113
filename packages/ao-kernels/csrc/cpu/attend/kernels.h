// Attention over quantized keys and values: what an instruction set provides, and what it is told.
//
// Sizes: B rows of a batch, H heads of keys and values, G heads of queries for each of them, T queries, D and Dv
// elements of a key and of a value. A *row* here is one query of one head of queries.
#pragma once
#include <stdint.h>

#include "../hadamard/kernels.h"
#include "../quantize/kernels.h"

namespace ao {

// Tokens whose keys and values are decoded at a time. Chunks of tokens that items take begin at multiples of it.
constexpr int64_t kTokenTile = 128;
// Rows that share what is decoded, unless one query has more heads.
constexpr int64_t kItemRows = 64;
// Rows that are not worth decoding a tile into memory, where codes can be multiplied as they lie there.
constexpr int64_t kFewRows = 8;

// How codes meet the queries: as float32, or as bytes in products with limbs, where one scale serves a token (or a
// group of 64 elements of it) or, of keys, a channel of a tile.
enum class Grid : int32_t { floats, token, channel };

// Keys or values (B, H, S, elements) in blocks of tokens.
struct Stored {
  Dequantize coded;   // codes, format and scales; its rows are tokens
  int64_t tokens;     // S
  int64_t size;       // elements of a token
  Grid grid;
  uint8_t flip;       // what turns 8 stored bits into codes that count up from `least`
  float least;        // value of code 0 after that
  bool float8;        // Grid::floats: codes are float8 e4m3, with one scale per token and no zero points
  bool words;         // Grid::floats: codes are bytes whose top bit is a sign, with values that are bfloat16, and
                      // likewise; then the low bytes of the values of 128 codes, and the high ones
  uint8_t table[256];
  int64_t group;      // Grid::token: elements that share a scale, a multiple of 64 or `size`
  Hadamard rotation;  // what was done to each token; block = 0: nothing
};

// Keys or values (B, H, slots, size) of the last tokens: token p is in slot p % slots.
struct Tail {
  const void* data;
  int64_t slots;
};

struct Attend {
  const void* q;  // (B, H * G, T, D), elements of a head contiguous
  int64_t q_batch, q_head, q_token;  // strides in elements
  void* y;        // (B, H * G, T, Dv), contiguous
  Element type;   // of q, y and the tails
  int64_t batch, heads, group, queries;
  Stored key, value;
  Tail tail_key, tail_value;
  int64_t tokens, coded;  // there are, and in blocks
  const float* center;    // (B, H, D), or null
  const int64_t* start;   // (B), or null
  const int64_t* stop;
  const float* sinks;     // (H * G), or null
  float scale, softcap;
  bool causal;
  int64_t window;
  // made by the driver
  int64_t item_queries;   // of an item; the last item of a head may have fewer
  int64_t query_blocks;
  int64_t together;       // items that read a part of the tokens one after the other
  int64_t chunk, chunks;  // tokens of a part, and parts of all coded tokens; the tail is one more
  int64_t rows;           // at most of an item
  int64_t value_size;     // Dv rounded up to 64
  int64_t partial;        // floats of a part: for each row its greatest logit, its sum of weights, its values
  float* partials;        // (item, chunks + 1, partial)
  int64_t staging, scratch;  // floats for a few tokens or a rotation, and bytes of all that a thread needs
};

struct AttendKernels {
  // One part of the tokens for one item: (b, h, block of queries). The part `chunks` is the tail.
  void (*part)(const Attend&, int64_t item, int64_t chunk, float* partial, uint8_t* scratch);
  // The result from all parts of an item.
  void (*finish)(const Attend&, int64_t item, float* partials);
};

}  // namespace ao
