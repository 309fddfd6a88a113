// Gradients of rounding by scales that are learned; included by the unit of an instruction set.
#pragma once
#include "values.h"

namespace ao::AO_ISA::sums {
namespace {  // members of templates are exported otherwise

// The sums of 16 lanes: of gradients of the scale, and of those outside.
struct Moved {
  F scale = zero(), outside = zero();
};

template <bool kZero, class Values>
struct Learning {
  const LearnedGradients& call;
  const Values values;
  const F low, high;

  Learning(const LearnedGradients& of, const Values& by)
      : call(of), values(by), low(splat(of.low)), high(splat(of.high)) {}

  // Up to 16 elements from `at` on; numbers behind them are 0, and so are their gradients.
  AO_METHOD void step(int64_t at, int count, F scale, F point, Moved& moved) const {
    const int64_t width = bytes_of(call.type), grad_width = bytes_of(call.grad_type);
    const F x = load_as(call.type, static_cast<const uint8_t*>(call.x) + at * width, count);
    const F grad = load_as(call.grad_type, static_cast<const uint8_t*>(call.grad) + at * grad_width, count);
    const F quotient = div(x, scale);
    const F place = kZero ? add(quotient, point) : quotient;
    // 0 is what these give where the place is NaN
    const F beyond = max(max(sub(low, place), sub(place, high)), zero());
    const I outside = shift_right<31>(bits_of(sub(zero(), beyond)));
    const I of_grad = bits_of(grad), lost = and_(of_grad, outside);
    store_as(call.grad_type, static_cast<uint8_t*>(call.out) + at * grad_width, as_float(xor_(of_grad, lost)), count);
    const I of_place = bits_of(place);
    const F inside = as_float(xor_(of_place, and_(of_place, outside)));
    moved.scale = fma(sub(values.values(place), inside), grad, moved.scale);
    moved.outside = add(moved.outside, as_float(lost));
  }

  void row(int64_t row) const {
    const F scale = splat(call.scale[row]), point = kZero ? splat(call.zero[row]) : zero();
    double of_scale = 0, of_outside = 0;
    for (int64_t begin = 0; begin < call.columns; begin += kPart) {
      const int64_t count = call.columns - begin < kPart ? call.columns - begin : kPart;
      const int64_t first = row * call.columns + begin;
      Moved moved;
      for (int64_t i = 0; i < count; i += 16) {
        step(first + i, count - i < 16 ? static_cast<int>(count - i) : 16, scale, point, moved);
      }
      of_scale += sum(moved.scale), of_outside += sum(moved.outside);
    }
    call.sums[row] = static_cast<float>(of_scale);
    call.sums[call.rows + row] = static_cast<float>(of_outside);
  }
};

template <bool kZero>
static inline void learned_rows_as(const LearnedGradients& call, int64_t begin, int64_t end) {
  with_values(call.format, [&]<class Values>(const Values& values) {
    const Learning<kZero, Values> learning(call, values);
    for (int64_t r = begin; r < end; ++r) learning.row(r);
  });
}

static inline void learned_rows(const LearnedGradients& call, int64_t begin, int64_t end) {
  call.zero ? learned_rows_as<true>(call, begin, end) : learned_rows_as<false>(call, begin, end);
}

}  // namespace
}  // namespace ao::AO_ISA::sums
