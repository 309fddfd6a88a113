// Look-ups of bytes by up to 6 bits, on 64-bit ARM. Included by sets with products of bytes.
#pragma once
#include "planes.h"

namespace ao::AO_ISA {

// Codes of columns 4i to 4i + 3, and bytes of them.
template <int kBits, int i>
AO_INLINE Q indices(const uint8_t* tile) {
  return code_quads<kBits, i>(tile);
}
template <int kBits>
struct ByteTable {
  Lookup<1 << kBits> map;
  ByteTable() = default;
  AO_METHOD explicit ByteTable(const uint8_t* bytes) : map(bytes) {}
  template <int i>
  AO_METHOD Q look_up(Q codes) const {
    return map.look_up(codes);
  }
};

}  // namespace ao::AO_ISA
