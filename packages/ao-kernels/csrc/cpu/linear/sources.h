// The functions of a format: which of the types `Coded` has its codes.
#pragma once
#include "product.h"

namespace ao::AO_ISA {

// f(Constant<bits>) for a number of bits that is known when it runs only.
template <int kBits = 1, class Function>
AO_INLINE auto for_bits(int bits, const Function& f) {
  if constexpr (kBits < 8) {
    if (bits != kBits) return for_bits<kBits + 1>(bits, f);
  }
  return f(Constant<kBits>{});
}

template <Mode kMode, int kBits, class Function>
AO_INLINE auto for_kind(Kind kind, const Function& f) {
  if constexpr (kMode == Mode::int8) {
    if constexpr (kBits <= 4) {
      if (kind != Kind::integer) return f(Coded<kMode, kBits, Kind::table>{});
    }
    return f(Coded<kMode, kBits, Kind::integer>{});
  } else if constexpr (kMode == Mode::words) {
    if constexpr (kBits <= 6) {
      if (kind != Kind::integer) return f(Coded<kMode, kBits, Kind::table>{});
    }
    return f(Coded<kMode, kBits, Kind::integer>{});
  } else if constexpr (kBits <= 6) {
    if (kind != Kind::table) return f(Coded<kMode, kBits, Kind::exact>{});
    return f(Coded<kMode, kBits, Kind::table>{});
  } else {
    if (kind == Kind::integer) return f(Coded<kMode, kBits, Kind::integer>{});
    if constexpr (kBits == 8) {
      if (kind == Kind::symmetric) return f(Coded<kMode, kBits, Kind::symmetric>{});
    }
    return f(Coded<kMode, kBits, Kind::table>{});
  }
}

// f(Coded<...>{}) for the codes of a weight.
template <Mode kMode, class Function>
AO_INLINE auto for_source(const Linear& t, const Function& f) {
  return for_bits(t.bits, [&](auto bits) { return for_kind<kMode, bits.value>(t.kind, f); });
}

constexpr int kTableBytes = 2048;

// Puts the table that decodes the codes of `Source` into so many bytes.
template <Mode kMode, class Source>
static void make_table(const Linear& t, void* table) {
  using Table = typename Source::Table;
  static_assert(sizeof(Table) <= kTableBytes);
  constexpr bool whole = kMode == Mode::int8 || kMode == Mode::words;
  if constexpr (whole) *static_cast<Table*>(table) = Table(t.table, t.least, t.table_unit);
  if constexpr (!whole) *static_cast<Table*>(table) = Table(t.table);
}

}  // namespace ao::AO_ISA
