// Runs programs one instruction at a time, each for a whole block, which takes far longer than to choose the
// instruction.
#pragma once
#include "numbers.h"
#include "program.h"

namespace ao::AO_ISA::programs {

using optim::kBlock;
using optim::Numbers;

template <class Value>
static inline void fill(float* out, Value value) {
  for (int i = 0; i < kBlock; i += 16) store(out + i, value(i));
}

// In a loop for the compiler to vectorize; `out` may be `of`.
template <class Value>
static inline void map(float* out, const float* of, Value value) {
  float found[kBlock];
  for (int i = 0; i < kBlock; ++i) found[i] = value(of[i]);
  __builtin_memcpy(out, found, sizeof found);
}

// What sums up to a norm; the first `count` numbers.
static inline float sum_of_squares(const float* x, int count) {
  F sums = splat(0.0f);
  for (int i = 0; i < count; i += 16) {
    const F v = load_as(Element::f32, x + i, count - i);
    sums = fma(v, v, sums);
  }
  return sum(sums);
}

// norms: known ones, or, where `sums` is not null, of no account: then their sums of squares are written there.
static inline void interpret(const Program& program, Numbers* registers, int count, const float* norms,
                             float* sums = nullptr) {
  for (int n = 0; n < program.size; ++n) {
    const Instruction& of = program.code[n];
    float* r = registers[of.result].values;
    const float* x = registers[of.operands[0]].values;
    const float *y = registers[of.operands[1]].values, *z = registers[of.operands[2]].values;
    const F s = splat(of.number);
    const auto a = [x](int i) { return load(x + i); };
    const auto b = [y](int i) { return load(y + i); };
    const auto c = [z](int i) { return load(z + i); };
    switch (of.operation) {
      case Operation::scale: fill(r, [&](int i) { return mul(a(i), s); }); break;
      case Operation::shift: fill(r, [&](int i) { return add(a(i), s); }); break;
      case Operation::add: fill(r, [&](int i) { return fma(b(i), s, a(i)); }); break;
      case Operation::multiply: fill(r, [&](int i) { return mul(a(i), b(i)); }); break;
      case Operation::divide: fill(r, [&](int i) { return div(a(i), b(i)); }); break;
      case Operation::over: fill(r, [&](int i) { return div(s, a(i)); }); break;
      case Operation::add_product: fill(r, [&](int i) { return add(a(i), mul(mul(s, b(i)), c(i))); }); break;
      case Operation::add_ratio: fill(r, [&](int i) { return add(a(i), div(mul(s, b(i)), c(i))); }); break;
      case Operation::root: map(r, x, [](float v) { return __builtin_sqrtf(v); }); break;
      case Operation::sign: map(r, x, [](float v) { return (v > 0 ? 1.0f : 0.0f) - (v < 0 ? 1.0f : 0.0f); }); break;
      case Operation::magnitude: fill(r, [&](int i) { return abs(a(i)); }); break;
      case Operation::at_least: fill(r, [&](int i) { return max(s, a(i)); }); break;
      case Operation::at_most: fill(r, [&](int i) { return min(s, a(i)); }); break;
      case Operation::constant: fill(r, [&](int) { return s; }); break;
      case Operation::above: map(r, x, [&](float v) { return v > of.number ? 1.0f : 0.0f; }); break;
      case Operation::choose: {
        float found[kBlock];
        for (int i = 0; i < kBlock; ++i) found[i] = x[i] != 0 ? y[i] : z[i];
        __builtin_memcpy(r, found, sizeof found);
        break;
      }
      case Operation::norm:
        if (sums != nullptr) {
          sums[of.norm] = sum_of_squares(x, count);
        } else {
          fill(r, [known = splat(norms[of.norm])](int) { return known; });
        }
        break;
    }
  }
}

}  // namespace ao::AO_ISA::programs
