// Runs the CUDA matmul on the CPU. Reads cases from standard input and writes the results to standard output:
// numbers (int64: the order is that of `Case` in emulation.py), then the bytes of x, qdata, scale, zero, bias.
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <thread>

#include "emulated.h"

#include "linear.h"
#include "plan.h"

namespace {

using namespace ao::gpu;

enum { kM, kN, kK, kGroup, kBits, kFloat8, kElement, kScale, kZero, kStride, kProcessors, kShared, kHopper, kShuffle,
       kXBytes, kWBytes, kScaleBytes, kZeroBytes, kBiasBytes, kCount };

struct Free {
  void operator()(void* p) const { std::free(p); }
};
using Memory = std::unique_ptr<uint8_t, Free>;

// Exactly so many bytes, aligned as torch aligns them: the sanitizer sees whoever reads more.
Memory read_bytes(int64_t count) {
  if (count == 0) return nullptr;
  void* memory = nullptr;
  if (posix_memalign(&memory, 64, count) || std::fread(memory, 1, count, stdin) != size_t(count)) std::exit(2);
  return Memory(static_cast<uint8_t*>(memory));
}

template <class F, int BM>
void run(const Plan& plan, const Linear& call, int shuffle) {
  for (int x = 0; x < plan.ctas; ++x) {
    Cluster cluster(plan.splits, plan.shared);
    std::vector<std::thread> threads;
    for (int i = 0; i < plan.splits * kWarps; ++i) {
      const int place = (i * 5 + shuffle) % (plan.splits * kWarps);  // in another order
      threads.emplace_back([&, place] {
        Self me{place % kWarps, x, place / kWarps, &cluster, {}, {}, {}};
        self = &me;
        try {
          Matmul<F, BM>(call, cluster.shared[me.y].get()).run();
        } catch (const std::exception& error) {
          std::fprintf(stderr, "CTA %d, warp %d: %s\n", x, me.warp, error.what());
          std::_Exit(3);
        }
        for (const auto& group : me.committed) {
          if (!group.empty()) std::fprintf(stderr, "copies were not waited for\n"), std::_Exit(3);
        }
        if (!me.pieces.empty() || !me.open.empty()) std::fprintf(stderr, "copies were not waited for\n"), std::_Exit(3);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
}

template <class F>
void run_rows(const Plan& plan, const Linear& call, int shuffle) {
  switch (plan.block_m) {
    case 8: return run<F, 8>(plan, call, shuffle);
    case 16: return run<F, 16>(plan, call, shuffle);
    case 32: return run<F, 32>(plan, call, shuffle);
    default: return run<F, 64>(plan, call, shuffle);
  }
}

template <class E>
void run_format(const Plan& plan, const Linear& call, int bits, bool float8, int shuffle) {
  const bool sums = call.zero && call.zero_type != Number::u8;
  if (bits == 8 && float8) return run_rows<Format<E4m3<E>, E, 64, false>>(plan, call, shuffle);
  if (bits == 8) return run_rows<Format<Int8<E>, E, 64, false>>(plan, call, shuffle);
  if (plan.plane == 32) {
    if (sums) return run_rows<Format<Int4<E>, E, 32, true>>(plan, call, shuffle);
    return run_rows<Format<Int4<E>, E, 32, false>>(plan, call, shuffle);
  }
  if (sums) return run_rows<Format<Int4<E>, E, 64, true>>(plan, call, shuffle);
  return run_rows<Format<Int4<E>, E, 64, false>>(plan, call, shuffle);
}

}  // namespace

int main() {
  int64_t in[kCount];
  while (std::fread(in, sizeof(in), 1, stdin) == 1) {
    const Memory x = read_bytes(in[kXBytes]), w = read_bytes(in[kWBytes]), scale = read_bytes(in[kScaleBytes]),
                 zero = read_bytes(in[kZeroBytes]), bias = read_bytes(in[kBiasBytes]);
    const Sizes sizes{in[kM], in[kN], in[kK], in[kGroup], int(in[kBits]), Number(in[kScale]), Number(in[kZero])};
    const int shared = int(in[kShared]);
    const Plan plan = ao::gpu::plan(sizes, {int(in[kProcessors]), shared, shared + 1024, in[kHopper] != 0});
    if (plan.shared > shared) std::fprintf(stderr, "does not fit\n"), std::exit(4);
    Linear call = plan.call;
    call.x = x.get(), call.qdata = w.get(), call.scale = scale.get(), call.zero = zero.get(), call.bias = bias.get();
    call.x_stride = in[kStride];
    std::vector<uint16_t> out(size_t(in[kM] * in[kN]), 0x7fff);
    call.out = out.data();
    if (Number(in[kElement]) == Number::bf16) run_format<Bf16>(plan, call, int(in[kBits]), in[kFloat8] != 0, int(in[kShuffle]));
    else run_format<Fp16>(plan, call, int(in[kBits]), in[kFloat8] != 0, int(in[kShuffle]));
    const int64_t told[] = {plan.block_m, call.n_warps, plan.splits, call.stages, plan.shared};
    std::fwrite(told, sizeof(told), 1, stdout);
    std::fwrite(out.data(), 2, out.size(), stdout);
  }
  return 0;
}
