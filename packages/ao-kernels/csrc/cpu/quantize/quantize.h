// Quantization with all threads. Arguments have been checked.
#pragma once
#include "kernels.h"

namespace ao {

// Blocks of that extent, which is at most n x k.
Blocks blocks_of(int64_t matrices, int64_t n, int64_t k, int64_t block_n, int64_t block_k);

// Fills in the tree of 2^bits - 1 increasing steps.
void set_steps(Format& format, const int32_t* steps);

// Fills in what follows from the table, `order` and `rule` of a format.
// nullptr, or a sentence that says why the table cannot be of that rule.
const char* complete(Format& format);

// Fills in what follows from `reach`, for scales that are powers of two.
void set_reach(Quantize& q, double reach);

// Scales, zero points and codes. Blocks, formats, pointers and sizes of rows are set.
void quantize(Quantize& q);
// Scales, zero points and y: what `dequantize` gives for the codes.
void fake_quantize(Quantize& q);
// y, from scales and zero points.
void round_scaled(Quantize& q);
// The greatest magnitude of every block, to float32 scales.
void block_absmax(Quantize& q);
// Codes, from scales and zero points.
void encode(Quantize& q);
void dequantize(Dequantize& d);
// Sums of |x|^2 and of |x - y|^2, where y is what `dequantize` gives.
void error_sums(Dequantize& d, double* sums);

// What follows from n, k and group: see the layout cpu_tiles.
void set_tiles(Tiles& t);
void pack_tiles(const Tiles& t);
void unpack_tiles(const Tiles& t);
void dequantize_tiles(const Tiles& t);
void gather_tiles(const Tiles& t, int64_t count);

// Bytes that a row of `count` codes takes in a bit stream.
int64_t packed_size(int64_t count, int32_t bits);

}  // namespace ao
