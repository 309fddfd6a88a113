// Attention over quantized keys and values; included by the unit of an instruction set.
#pragma once
#include "quarters.h"
#include "words.h"

namespace ao::AO_ISA::attention {

template <int kLimbs>
static inline void run_part(const Attend& a, int64_t item, bool is_tail, Span tokens, float* partial, uint8_t* scratch) {
  Worker<kLimbs>(a, item, is_tail, partial, scratch).run(tokens);
}

static void attend_part(const Attend& a, int64_t item, int64_t chunk, float* partial, uint8_t* scratch) {
  const bool is_tail = chunk == a.chunks;
  const int64_t end = (chunk + 1) * a.chunk;
  const Span blocks{chunk * a.chunk, end < a.coded ? end : a.coded}, tail{a.coded, a.tokens};
  if (a.type == Element::bf16) return run_part<2>(a, item, is_tail, is_tail ? tail : blocks, partial, scratch);
  run_part<3>(a, item, is_tail, is_tail ? tail : blocks, partial, scratch);
}

static void attend_finish(const Attend& a, int64_t index, float* partials) {
  constexpr float kNone = -__builtin_inff();
  const Item item = item_at(a, index);
  const int64_t parts = a.chunks + 1;
  for (int64_t r = 0; r < item.rows; ++r) {
    const int64_t head = item.h * a.group + r % a.group;
    float most = a.sinks ? a.sinks[head] : kNone;
    for (int64_t c = 0; c < parts; ++c) {
      const float one = part_at(a, partials + c * a.partial).greatest[r];
      most = one > most ? one : most;
    }
    const float base = most == kNone ? 0.0f : most;
    float total = a.sinks ? exp_of(a.sinks[head] - base) : 0.0f;
    for (int64_t c = 0; c < parts; ++c) {
      const Part part = part_at(a, partials + c * a.partial);
      part.greatest[r] = exp_of(part.greatest[r] - base);  // from here on the factor of the part
      total += part.greatest[r] * part.total[r];
    }
    const F by = splat(total == 0 ? 1.0f : 1 / total);
    const int64_t row = ((item.b * a.heads * a.group + head) * a.queries + item.first + r / a.group) * a.value.size;
    auto* const y = static_cast<uint8_t*>(a.y) + row * bytes_of(a.type);
    for (int64_t i = 0; i < a.value.size; i += 16) {
      F sums = zero();
      for (int64_t c = 0; c < parts; ++c) {
        const Part part = part_at(a, partials + c * a.partial);
        if (part.total[r] == 0) continue;  // it has seen nothing
        sums = fma(splat(part.greatest[r]), load(part.values + r * a.value_size + i), sums);
      }
      const int64_t left = a.value.size - i;
      store_as(a.type, y + i * bytes_of(a.type), mul(sums, by), left < 16 ? static_cast<int>(left) : 16);
    }
  }
}

static const AttendKernels kAttendKernels = {.part = attend_part, .finish = attend_finish};

}  // namespace ao::AO_ISA::attention
