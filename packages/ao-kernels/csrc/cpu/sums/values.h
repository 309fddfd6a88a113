// Values of a format that are nearest to numbers, without their codes; included by the unit of an instruction set.
#pragma once
#include "../quantize/decode.h"
#include "../quantize/encode.h"
#include "kernels.h"

namespace ao::AO_ISA::sums {
namespace {  // members of templates are exported otherwise

// What is added to numbers to round them.
constexpr float kMagic = 0x1.8p23f;

// Nearest values of a format: integers, floats that have a mantissa, and any others. `kShifts`: a product with 1 / scale
// and the rounding are one operation; `kIsShort`: the code is, so that two candidates fit into registers.
struct Integers {
  static constexpr bool kShifts = true, kIsShort = true;
  F least, greatest;

  explicit AO_METHOD Integers(const Format& f) : least(splat(f.least)), greatest(splat(f.greatest)) {}
  // A sum with 1.5 * 2^23 rounds, ties to even.
  AO_METHOD F values(F ratio) const {
    const F magic = splat(kMagic);
    return sub(add(min(max(ratio, least), greatest), magic), magic);
  }
};

struct Floats {
  static constexpr bool kShifts = false, kIsShort = true;
  F greatest, to_quanta;
  I least;

  explicit AO_METHOD Floats(const Format& f)
      : greatest(splat(f.greatest)),
        to_quanta(splat(__builtin_bit_cast(float, (127 + 23 - f.mantissa) << 23))),
        least(splat_int(__builtin_bit_cast(int32_t, f.smallest_normal))) {}
  // A sum with 2^23 quanta rounds, as in `encode_floats`.
  AO_METHOD F values(F ratio) const {
    const F magnitude = min(abs(ratio), greatest);
    const I power = max_int(and_(bits_of(magnitude), splat_int(0x7f800000)), least);
    const F quanta = mul(as_float(power), to_quanta);
    const I sign = and_(bits_of(ratio), splat_int(INT32_MIN));
    return as_float(or_(bits_of(sub(add(quanta, magnitude), quanta)), sign));
  }
};

// Up to 16 values in any order of codes: steps between intervals are passed one by one.
struct Steps {
  static constexpr bool kShifts = false, kIsShort = false;
  static constexpr int kMost = 16;
  int count;
  F least, greatest, below[kMost];  // the greatest number of each interval but the last
  I first, changes[kMost];          // the value of the lowest interval, and which bits of it change at each step

  explicit Steps(const Format& f)
      : count((1 << f.bits) - 1), least(splat(f.least)), greatest(splat(f.greatest)), first(bits_at(f, 0)) {
    for (int level = 0; level < f.bits; ++level) {  // as `set_steps` puts them into the tree
      const int nodes = 1 << level, span = 1 << (f.bits - level);
      for (int i = 0; i < nodes; ++i) {
        const int32_t key = f.tree[nodes - 1 + i];
        const int place = i * span + span / 2 - 1;
        const bool none = key > static_cast<int32_t>(coding::kInfinity);
        below[place] = splat(none ? __builtin_inff() : coding::of_key(key - 1));
        changes[place] = xor_(bits_at(f, place), bits_at(f, place + 1));
      }
    }
  }
  static AO_METHOD I bits_at(const Format& f, int interval) {
    return splat_int(__builtin_bit_cast(int32_t, f.table[f.order[interval]]));
  }
  AO_METHOD F values(F ratio) const {
    const F inside = min(max(ratio, least), greatest);
    I value = first;
    for (int i = 0; i < count; ++i) {
      const I above = shift_right<31>(bits_of(sub(below[i], inside)));
      value = xor_(value, and_(above, changes[i]));
    }
    return as_float(value);
  }
};

// Any format, by the way that encodes and decodes: one copy of it, whoever calls it.
struct Coded {
  static constexpr bool kShifts = false, kIsShort = false;
  const Format& format;

  explicit Coded(const Format& f) : format(f) {}
  __attribute__((noinline)) F values(F ratio) const {
    alignas(64) float v[16];
    alignas(64) uint8_t codes[16] = {};
    store(v, ratio);
    coding::encode_values(format, v, 16, codes);
    coding::decode_values(format, codes, 16, v);
    return load(v);
  }
};

// What `take` gives for the values of a format.
template <class Take>
AO_INLINE auto with_values(const Format& f, const Take& take) {
  switch (f.rule) {
    case Rule::integer: return take(Integers(f));
    case Rule::floating: return take(Floats(f));
    case Rule::search: break;
  }
  return f.bits <= 4 ? take(Steps(f)) : take(Coded(f));
}

}  // namespace
}  // namespace ao::AO_ISA::sums
