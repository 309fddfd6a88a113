// The weight-only matmul for up to 64 rows of activations. One source for the GPU and for the CPU, where tests run it:
// it is included after a machine (machine.h; tests/cuda/emulated.h), which says what U32 and F32 are (a number per thread)
// and has what only hardware can do: copies, barriers, tensor cores.
//
// A CTA has 8 warps and makes 32 of N times n_warps. Warps that share a slab of 32 of N take turns along K, and CTAs of a
// cluster share the rest of K; their sums are added in a fixed order. Weights go from global memory to shared memory
// piece by piece, 32 of N times a tile of K, each read by one warp only; so do scales and zero points. Activations are
// for all warps. A turn has one barrier: where it is passed, the turn before is done with its stage, which is filled anew.
#pragma once

#include "params.h"
#include "decode.h"

namespace ao::gpu {

// Weights are the left operand of m16n8k16. Lane (g, t) = (lane / 4, lane % 4) has rows g and g + 8 of it; which rows of
// the slab those are is free, and so is the order along K, as long as both operands share it. A lane takes rows
// 4g .. 4g + 3, so its scales are neighbours, and of each plane eight neighbours along K at a time: 16 bytes of either.
template <class Codes_, class E_, int PLANE, bool SUMS>
struct Format {
  using Codes = Codes_;
  using E = E_;
  static constexpr int plane = PLANE, planes = Codes::planes, width = plane * planes;
  static constexpr int chunks = plane / 32;  // 16 bytes of each lane in a row of a piece
  static constexpr int piece = kSlab * plane * 2;
  // with sums, zero points are floats: 8 is subtracted from codes, and the rest times the sum of activations is added
  static constexpr bool sums = SUMS;
};

template <class F, int BM>
struct Matmul {
  using E = typename F::E;
  static constexpr int C = BM / 8;  // column blocks of 8 rows of activations

  const Linear& p;
  uint8_t* const shared;
  const int warp = warp_index(), k_warps = kWarps >> log2_of(p.n_warps);
  const int own_n = warp & (p.n_warps - 1), own_k = warp >> log2_of(p.n_warps);
  const int slab = cta_x() * p.n_warps + own_n;
  const int first = cta_y() * p.tiles_per_split;
  const int last = least(first + p.tiles_per_split, p.k_tiles);
  const U32 lane = lane_index(), g = lane >> 2, t = lane & U32(3);
  F32 acc[2][C][4], part[2][C][4], sum[C][4];

  AO_DEVICE Matmul(const Linear& params, uint8_t* memory) : p(params), shared(memory) {}

  AO_DEVICE uint8_t* stage(int slot) const { return shared + kHeader + slot * p.stage_bytes; }
  AO_DEVICE uint64_t* barrier(int slot) const { return reinterpret_cast<uint64_t*>(shared) + slot * kWarps + warp; }
  AO_DEVICE int tile_of(int turn) const { return first + turn * k_warps + own_k; }
  AO_DEVICE bool has(int turn) const { return slab < p.slabs && tile_of(turn) < last; }

  AO_DEVICE int group_mask() const { return (1 << p.group_shift) - 1; }

  // A tile of a slab: its words, and its first scale.
  AO_DEVICE int64_t piece_of(int tile) const {
    return (((int64_t(slab / 4) * p.k_tiles + tile) * 4 + slab % 4)) * F::piece;
  }
  AO_DEVICE int64_t scale_of(int tile) const {
    return (int64_t(slab / 4) * p.k_tiles + tile) * p.groups_per_tile * kTileN + slab % 4 * kSlab;
  }

  // The scales, or zero points, of a piece: groups_per_tile runs of 32, 128 apart.
  AO_DEVICE void fill_grid(uint8_t* to, const void* from, Number type, int tile) const {
    const int size = bytes_of(type), shift = log2_of(kSlab * size / 16);  // 2 to 8 chunks
    const U32 group = lane >> shift, at = (lane & U32((1 << shift) - 1)) * U32(16);
    copy16(to, group * U32(kSlab * size) + at, static_cast<const uint8_t*>(from) + scale_of(tile) * size,
           group * U32(kTileN * size) + at, U32(16), lane < U32(p.groups_per_tile << shift));
  }

  // All of a turn: its own piece by each warp, the activations by all.
  AO_DEVICE void fill(int turn, int slot) const {
    uint8_t* to = stage(slot);
    if (has(turn)) {
      const int tile = tile_of(turn);
      copy_piece<F::piece>(to + warp * F::piece, static_cast<const uint8_t*>(p.qdata) + piece_of(tile), barrier(slot));
      if (p.groups_per_tile) {
        const int most = 4 * kSlab;  // scales of a piece
        fill_grid(to + p.scale_at + warp * most * bytes_of(p.scale_type), p.scale, p.scale_type, tile);
        if (p.zero) fill_grid(to + p.zero_at + warp * most * bytes_of(p.zero_type), p.zero, p.zero_type, tile);
      }
    }
    const int begin = (first + turn * k_warps) * F::width;  // of K
    if (begin < last * F::width) {
      const int shift = log2_of(k_warps * F::width / 8);  // of 8 numbers, in a row
      for (int base = 0; base < p.m << shift; base += kThreads) {
        const U32 index = U32(base + warp * 32) + lane, row = index >> shift, chunk = index & U32((1 << shift) - 1);
        const U32 k = U32(begin) + chunk * U32(8), end = U32(p.k);
        // what is behind the end is 0: codes of padding meet it
        const U32 bytes = smaller(larger(end, k) - k, U32(8)) * U32(2);
        copy16(to + p.x_at, row * U32(p.x_row) + chunk * U32(16), static_cast<const uint8_t*>(p.x),
               row * U32(p.x_stride * 2) + choose(k < end, k, U32(0)) * U32(2), bytes, index < U32(p.m << shift));
      }
    }
    commit();
  }

  // Scales or zero points of this lane's four rows in one group of the piece.
  AO_DEVICE void load_grid(F32 (&out)[4], const uint8_t* from, Number type, int group) const {
    const U32 at = (U32(group * kSlab) + g * U32(4)) * U32(bytes_of(type));
    load_numbers(out, from, at, type);
  }

  AO_DEVICE void flush(const uint8_t* from, int group) {
    F32 scale[4], zero[4];
    load_grid(scale, from + p.scale_at + warp * 4 * kSlab * bytes_of(p.scale_type), p.scale_type, group);
    if constexpr (F::sums) {
      load_grid(zero, from + p.zero_at + warp * 4 * kSlab * bytes_of(p.zero_type), p.zero_type, group);
    }
#pragma unroll
    for (int b = 0; b < 2; ++b) {
#pragma unroll
      for (int c = 0; c < C; ++c) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int row = 2 * b + e / 2;
          if constexpr (F::sums) part[b][c][e] = fma(F32(8.f) - zero[row], sum[c][e], part[b][c][e]);
          acc[b][c][e] = fma(part[b][c][e], scale[row], acc[b][c][e]);
          part[b][c][e] = F32(0.f);
        }
      }
    }
    if constexpr (F::sums) {
#pragma unroll
      for (int c = 0; c < C; ++c) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[c][e] = F32(0.f);
      }
    }
  }

  template <int J>
  AO_DEVICE void plane(const uint8_t* from, const U32 (&words)[4][F::chunks][4], Less (&less)[4]) {
    if constexpr (F::Codes::bits == 4 && !F::sums) {
      if (p.zero && (J & group_mask()) == 0) {
        const U32 zeros = load32(from + p.zero_at + warp * 4 * kSlab,
                                 U32((J >> p.group_shift) * kSlab) + g * U32(4));
#pragma unroll
        for (int r = 0; r < 4; ++r) less[r] = F::Codes::less((zeros >> (8 * r)) & U32(0xff));
      }
    }
    const U32 x_at = U32(own_k * F::width * 2 + J * F::plane * 2) + t * U32(16);
#pragma unroll
    for (int i = 0; i < F::chunks; ++i) {
      U32 x[C][4];
#pragma unroll
      for (int c = 0; c < C; ++c) {
        // rows of activations that do not exist give columns that nobody stores
        const U32 row = smaller(g + U32(8 * c), U32(p.m - 1));
        load128(x[c], from + p.x_at, row * U32(p.x_row) + x_at + U32(64 * i));
      }
#pragma unroll
      for (int h = 0; h < 4; h += 2) {
#pragma unroll
        for (int b = 0; b < 2; ++b) {
          U32 a[4];
#pragma unroll
          for (int q = 0; q < 4; ++q) {
            const int row = 2 * b + q % 2;
            a[q] = F::Codes::template decode<J>(words[row][i][h + q / 2], less[row]);
          }
#pragma unroll
          for (int c = 0; c < C; ++c) E::mma(part[b][c], a, x[c][h], x[c][h + 1]);
        }
        if constexpr (F::sums) {
          const U32 ones[4] = {U32(E::ones), U32(E::ones), U32(E::ones), U32(E::ones)};
#pragma unroll
          for (int c = 0; c < C; ++c) E::mma(sum[c], ones, x[c][h], x[c][h + 1]);
        }
      }
    }
    if (p.groups_per_tile && ((J + 1) & group_mask()) == 0) flush(from, J >> p.group_shift);
  }

  AO_DEVICE void multiply(int slot) {
    const uint8_t* from = stage(slot);
    U32 words[4][F::chunks][4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
#pragma unroll
      for (int i = 0; i < F::chunks; ++i) {
        load128(words[r][i], from + warp * F::piece, (g * U32(4) + U32(r)) * U32(F::plane * 2) + t * U32(16) + U32(64 * i));
      }
    }
    Less less[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) less[r] = F::Codes::less(U32(8));
    plane<0>(from, words, less);
    plane<1>(from, words, less);
    if constexpr (F::planes == 4) {
      plane<2>(from, words, less);
      plane<3>(from, words, less);
    }
  }

  AO_DEVICE void run() {
#pragma unroll
    for (int c = 0; c < C; ++c) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        sum[c][e] = F32(0.f);
#pragma unroll
        for (int b = 0; b < 2; ++b) acc[b][c][e] = part[b][c][e] = F32(0.f);
      }
    }
    for (int slot = 0; slot < p.stages; ++slot) start_barrier(barrier(slot));
    sync_threads();
    const int turns = greatest(last - first + k_warps - 1, 0) >> log2_of(k_warps);
    // the next kernel may start. Until the one before has ended, this one only brings weights nearer: their numbers are
    // read afterwards, so that a kernel in front may have written them
    launch_dependents();
    for (int turn = 0; turn < least(p.stages - 1, turns); ++turn) {
      if (has(turn)) prefetch_piece<F::piece>(static_cast<const uint8_t*>(p.qdata) + piece_of(tile_of(turn)));
    }
    wait_for_kernel_before();
    for (int turn = 0; turn < p.stages - 1; ++turn) fill(turn, turn);
    int slot = 0, phase = 0, free = p.stages - 1;
    for (int turn = 0; turn < turns; ++turn) {
      wait_committed(p.stages - 2);
      if (has(turn)) wait_piece(barrier(slot), phase);
      sync_threads();
      fill(turn + p.stages - 1, free);
      free = slot;
      if (has(turn)) multiply(slot);
      if (++slot == p.stages) slot = 0, phase ^= 1;
    }
    finish();
  }

  // The epilogue: sums of warps, in shared memory; of CTAs, in that of the cluster.
  AO_DEVICE void finish() {
    const int rows = p.n_warps * kSlab;
    float* sums = reinterpret_cast<float*>(shared + kHeader);  // [k_warps][BM][rows]
    wait_committed(0);
    sync_threads();
#pragma unroll
    for (int c = 0; c < C; ++c) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        F32 four[4];
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const F32 scaled = acc[r / 2][c][r % 2 * 2 + e];
          four[r] = p.groups_per_tile ? scaled : part[r / 2][c][r % 2 * 2 + e];
        }
        const U32 column = t * U32(2) + U32(8 * c + e);
        store128(sums, (U32(own_k * BM) + column) * U32(rows) + U32(own_n * kSlab) + g * U32(4), four);
      }
    }
    sync_threads();
    const int splits = ctas_y(), rank = cta_y();
    if (splits > 1) {
      for (int base = 0; base < p.m * rows; base += kThreads) {
        const U32 index = U32(base + warp * 32) + lane;
        store_shared(sums, index, add_warps(sums, index), index < U32(p.m * rows));
      }
      sync_cluster();
    }
    for (int base = rank * kThreads; base < p.m * rows; base += splits * kThreads) {
      const U32 index = U32(base + warp * 32) + lane, row = index >> log2_of(rows);
      const U32 n = U32(cta_x() * rows) + (index & U32(rows - 1));
      const Bool inside = (index < U32(p.m * rows)) & (n < U32(p.n));
      F32 value = F32(0.f);
      if (splits == 1) value = add_warps(sums, index);
      for (int other = 0; splits > 1 && other < splits; ++other) value = value + load_cluster(sums, index, other, inside);
      if (p.groups_per_tile == 0) value = value * load_global(p.scale, n, p.scale_type, inside);
      if (p.bias) value = value + load_global(p.bias, n, E::number, inside);
      store_global<E>(p.out, row, U32(p.n), n, value, inside);
    }
    if (splits > 1) sync_cluster();  // others may still read what this CTA has
  }

  AO_DEVICE F32 add_warps(const float* sums, U32 index) const {
    F32 value = F32(0.f);
    for (int k = 0; k < k_warps; ++k) {
      value = value + load_shared(sums, index + U32(k * BM * p.n_warps * kSlab), index < U32(BM * p.n_warps * kSlab));
    }
    return value;
  }
};

}  // namespace ao::gpu
