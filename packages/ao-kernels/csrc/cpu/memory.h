// Memory that kernels work in.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace ao {

struct Free {
  void operator()(uint8_t* p) const { std::free(p); }
};
using Memory = std::unique_ptr<uint8_t[], Free>;

// A number of bytes as a multiple of 64.
inline int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

inline Memory allocate(int64_t bytes) {
  void* p = std::aligned_alloc(64, aligned(bytes + 1));
  if (!p) throw std::bad_alloc();
  return Memory(static_cast<uint8_t*>(p));
}

// A thread-local workspace: memory that a thread keeps from call to call, up to 8 MiB. To get fresh pages from the
// system each time would cost as much as packing the activations.
class ThreadWorkspace {
 public:
  uint8_t* get(int64_t bytes) {
    constexpr int64_t kMost = 8 << 20;
    if (bytes > size_ || (size_ > kMost && bytes <= kMost)) {
      memory_ = nullptr, size_ = 0;
      memory_ = allocate(bytes);
      size_ = bytes;
    }
    return memory_.get();
  }

 private:
  Memory memory_;
  int64_t size_ = 0;
};

}  // namespace ao
