// What tests share: random data, exact references, and a pool of threads.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "parallel.h"

namespace ao::test {

// Normal numbers; the same seed gives the same ones everywhere.
inline std::vector<float> normal(size_t count, uint32_t seed) {
  std::mt19937 bits(seed);
  std::vector<float> out(count);
  // Box and Muller's method: std::normal_distribution differs between standard libraries
  for (float& value : out) {
    const double u = (bits() + 1.0) / 4294967296.0, v = bits() / 4294967296.0;
    value = static_cast<float>(std::sqrt(-2 * std::log(u)) * std::cos(2 * M_PI * v));
  }
  return out;
}

// Integers in [0, bound).
inline std::vector<uint8_t> codes(size_t count, uint32_t bound, uint32_t seed) {
  std::mt19937 bits(seed);
  std::vector<uint8_t> out(count);
  for (uint8_t& value : out) value = static_cast<uint8_t>(bits() % bound);
  return out;
}

inline float round_to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
  std::memcpy(&value, &bits, 4);
  return value;
}

// y[m][n] = sum over k of x[m][k] w[n][k], in float64.
inline std::vector<double> product(const std::vector<float>& x, const std::vector<float>& w,
                                   int64_t m, int64_t n, int64_t k) {
  std::vector<double> y(static_cast<size_t>(m * n));
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      double sum = 0;
      for (int64_t l = 0; l < k; ++l) {
        sum += static_cast<double>(x[i * k + l]) * w[j * k + l];
      }
      y[i * n + j] = sum;
    }
  }
  return y;
}

// Frobenius norm of the difference over that of the reference.
inline double relative_error(const std::vector<float>& found, const std::vector<double>& expected) {
  REQUIRE(found.size() == expected.size());
  double noise = 0, signal = 0;
  for (size_t i = 0; i < found.size(); ++i) {
    const double difference = found[i] - expected[i];
    noise += difference * difference;
    signal += expected[i] * expected[i];
  }
  return std::sqrt(noise / signal);
}

// While it lives, parallel_for cuts its range for `count` threads as torch does: equal parts, but
// none below the grain.
class Threads {
 public:
  explicit Threads(int count) : before_(host()) {
    count_ = count;
    set_host({run, [] { return count_; }});
  }
  ~Threads() { set_host(before_); }
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

 private:
  static void run(int64_t begin, int64_t end, int64_t grain, Body body, void* context) {
    const int64_t size = end - begin;
    const int64_t full = size / std::max<int64_t>(1, grain);
    const int64_t parts = std::max<int64_t>(1, std::min<int64_t>(count_, full));
    const int64_t chunk = (size + parts - 1) / parts;
    std::vector<std::thread> threads;
    for (int64_t first = begin + chunk; first < end; first += chunk) {
      threads.emplace_back(body, first, std::min(end, first + chunk), context);
    }
    body(begin, std::min(end, begin + chunk), context);
    for (std::thread& thread : threads) thread.join();
  }

  static inline int count_ = 1;
  Host before_;
};

}  // namespace ao::test
