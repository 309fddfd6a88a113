// Paley's matrices: see ao_core.numerics.hadamard and .characters, which this follows step by step.
#include <cstdint>
#include <map>
#include <mutex>

#include "hadamard.h"

namespace ao {
namespace {

using Signs = std::vector<float>;

// q = p**m; p = 0 where q is no power of a prime.
struct Field {
  int64_t q, p, m;
};

Field field_of(int64_t q) {
  if (q < 2) return {q, 0, 0};
  int64_t p = 2;
  while (p * p <= q && q % p != 0) ++p;
  if (q % p != 0) p = q;
  int64_t rest = q, m = 0;
  for (; rest % p == 0; rest /= p) ++m;
  return rest == 1 ? Field{q, p, m} : Field{q, 0, 0};
}

// The numbers of 1, x, x^2, ... until 1 comes again, modulo the polynomial that `digits` of its number stand for.
std::vector<int64_t> powers_of_x(const Field& f, int64_t number) {
  std::vector<int64_t> coefficients(static_cast<size_t>(f.m)), element(static_cast<size_t>(f.m)), powers;
  for (int64_t& digit : coefficients) digit = number % f.p, number /= f.p;
  if (coefficients[0] == 0) return {};
  element[0] = 1;
  int64_t value = 1;
  do {
    powers.push_back(value);
    const int64_t top = element.back();
    for (size_t i = element.size(); i-- > 0;) {
      element[i] = ((i > 0 ? element[i - 1] : 0) + top * coefficients[i]) % f.p;
    }
    value = 0;
    for (size_t i = element.size(); i-- > 0;) value = value * f.p + element[i];
  } while (value != 1);
  return powers;
}

// The quadratic character of every element of the field: 0 of zero, 1 of squares, -1 of the others.
Signs character(const Field& f) {
  Signs signs(static_cast<size_t>(f.q));
  for (int64_t number = 0; number < f.q; ++number) {  // polynomials in increasing order, until one is primitive
    const std::vector<int64_t> powers = powers_of_x(f, number);
    if (static_cast<int64_t>(powers.size()) != f.q - 1) continue;
    for (size_t i = 0; i < powers.size(); ++i) signs[static_cast<size_t>(powers[i])] = i % 2 ? -1.0f : 1.0f;
    break;
  }
  return signs;
}

// The element a - b.
int64_t difference(const Field& f, int64_t a, int64_t b) {
  int64_t out = 0;
  for (int64_t place = 1; place < f.q; place *= f.p) {
    out += (a / place % f.p - b / place % f.p + f.p) % f.p * place;
  }
  return out;
}

// Of order q + 1: zeros on the diagonal, symmetric where q = 1 mod 4, and skew where q = 3.
Signs conference(const Field& f) {
  const int64_t order = f.q + 1;
  const Signs signs = character(f);
  Signs out(static_cast<size_t>(order * order));
  for (int64_t i = 0; i < order; ++i) {
    for (int64_t j = 0; j < order; ++j) {
      float& value = out[static_cast<size_t>(i * order + j)];
      if (i > 0 && j > 0) value = signs[static_cast<size_t>(difference(f, i - 1, j - 1))];
      if (i == 0 && j > 0) value = 1;
      if (i > 0 && j == 0) value = f.q % 4 == 1 ? 1.0f : -1.0f;
    }
  }
  return out;
}

Signs matrix(int64_t order) {
  if (order % 4 != 0 || order > kGreatestOrder) return {};
  if (const Field first = field_of(order - 1); first.p != 0) {
    Signs out = conference(first);
    for (int64_t i = 0; i < order; ++i) out[static_cast<size_t>(i * order + i)] = 1;
    return out;
  }
  const Field second = field_of(order / 2 - 1);
  if (order % 8 != 4 || second.p == 0) return {};
  const Signs inner = conference(second);
  Signs out(static_cast<size_t>(order * order));
  for (int64_t i = 0; i < order; ++i) {
    for (int64_t j = 0; j < order; ++j) {
      const float sign = i % 2 == 1 && j % 2 == 1 ? -1.0f : 1.0f;
      const float of_diagonal = i % 2 == 0 && j % 2 == 0 ? 1.0f : -1.0f;
      const float element = inner[static_cast<size_t>(i / 2 * (order / 2) + j / 2)];
      out[static_cast<size_t>(i * order + j)] = i / 2 == j / 2 ? of_diagonal : element * sign;
    }
  }
  return out;
}

}  // namespace

std::shared_ptr<const Signs> paley(int64_t order) {
  constexpr size_t kMost = 16;  // matrices that are kept
  static std::mutex mutex;
  static std::map<int64_t, std::shared_ptr<const Signs>> made;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = made.find(order);
  if (found != made.end()) return found->second;
  const Signs signs = matrix(order);
  if (signs.empty()) return nullptr;
  if (made.size() >= kMost) made.clear();
  return made[order] = std::make_shared<const Signs>(signs);
}

}  // namespace ao
