// run_hadamard against the product with the dense matrix in float64, and Paley's matrices.
#include "hadamard/hadamard.h"

#include <bit>

#include "numbers.h"

using namespace ao;
using namespace ao::test;

namespace {

using Orders = std::vector<int64_t>;  // Paley's, then a power of two

struct Case {
  Orders orders;
  int64_t blocks = 3;
  Element type = Element::f32;
  bool inverse = false;
};

// The Kronecker product of all factors, by its definition.
std::vector<double> dense(const Orders& orders) {
  std::vector<double> out{1};
  int64_t size = 1;
  for (size_t factor = 0; factor < orders.size(); ++factor) {
    const int64_t order = orders[factor];
    const bool last = factor + 1 == orders.size();
    const auto signs = last ? nullptr : paley(order);
    std::vector<double> next(static_cast<size_t>(size * order * size * order));
    for (int64_t i = 0; i < size * order; ++i) {
      for (int64_t j = 0; j < size * order; ++j) {
        const int64_t r = i % order, c = j % order;
        const double sign = last ? (std::popcount(static_cast<uint64_t>(r & c)) % 2 ? -1.0 : 1.0)
                                 : (*signs)[static_cast<size_t>(r * order + c)];
        next[static_cast<size_t>(i * size * order + j)] = out[static_cast<size_t>(i / order * size + j / order)] * sign;
      }
    }
    out = std::move(next), size *= order;
  }
  return out;
}

struct Run {
  std::vector<float> x;
  std::vector<uint8_t> y_bytes;
  int64_t block = 1;

  Run(const Case& c, uint32_t seed = 1, float size = 1) {
    Hadamard h{};
    std::vector<std::shared_ptr<const std::vector<float>>> kept;
    for (size_t i = c.orders.size(); i-- > 0;) {
      const int64_t order = c.orders[i];
      block *= order;
      if (i == c.orders.size() - 1) continue;
      kept.push_back(paley(order));
      REQUIRE(kept.back() != nullptr);
      h.factor[h.factors++] = {kept.back()->data(), order, c.inverse ? 1 : order, c.inverse ? order : 1};
    }
    h.block = block, h.power = c.orders.back(), h.count = block * c.blocks, h.type = c.type;
    h.before = 0.25f, h.after = 4.0f / std::sqrt(static_cast<float>(block));
    x = normal(static_cast<size_t>(h.count), seed);
    std::vector<uint8_t> bytes(x.size() * size_of(c.type));
    for (size_t i = 0; i < x.size(); ++i) {
      x[i] = std::nearbyint(x[i] * 32) / 32 * size;  // exact in every type
      put(c.type, bytes, static_cast<int64_t>(i), x[i]);
    }
    y_bytes.resize(bytes.size());
    h.x = bytes.data(), h.y = y_bytes.data();
    run_hadamard(h);
  }
};

void check(const Case& c) {
  CAPTURE(c.orders.front());
  CAPTURE(c.orders.back());
  CAPTURE(c.blocks);
  CAPTURE(static_cast<int>(c.type));
  CAPTURE(c.inverse);
  const Run run(c);
  const std::vector<double> matrix = dense(c.orders);
  const int64_t n = run.block;
  std::vector<double> expected(run.x.size());
  std::vector<float> found(run.x.size());
  for (int64_t b = 0; b < c.blocks; ++b) {
    for (int64_t i = 0; i < n; ++i) {
      double sum = 0;
      for (int64_t j = 0; j < n; ++j) {
        sum += matrix[static_cast<size_t>(c.inverse ? j * n + i : i * n + j)] * run.x[static_cast<size_t>(b * n + j)];
      }
      const auto at = static_cast<size_t>(b * n + i);
      expected[at] = sum / std::sqrt(static_cast<double>(n));
      found[at] = static_cast<float>(get(c.type, run.y_bytes, static_cast<int64_t>(at)));
    }
  }
  const double rounding = c.type == Element::f32 ? 3e-7 : c.type == Element::bf16 ? 0x1p-8 : 0x1p-11;
  CHECK(relative_error(found, expected) <= rounding);
}

}  // namespace

TEST_CASE("powers of two") {
  for (const Element type : {Element::f32, Element::bf16, Element::f16}) {
    for (const int64_t power : {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024}) check({{power}, 3, type});
  }
}

TEST_CASE("short blocks end anywhere in a vector") {
  for (const int64_t power : {1, 2, 4, 8}) {
    for (const int64_t blocks : {1, 2, 15, 16, 17, 4097}) check({{power}, blocks});
  }
}

TEST_CASE("other factors, both ways") {
  for (const bool inverse : {false, true}) {
    for (const Element type : {Element::f32, Element::bf16, Element::f16}) {
      check({{12, 16}, 2, type, inverse});
      check({{28, 2}, 5, type, inverse});
    }
    for (const int64_t order : {12, 20, 28, 36, 44, 52, 60, 76, 100, 244, 344}) check({{order, 1}, 17, Element::f32, inverse});
    for (const int64_t power : {1, 2, 4, 8, 16, 32, 64, 128}) check({{20, power}, 2, Element::f32, inverse});
    check({{20, 12, 1}, 18, Element::f32, inverse});
    check({{12, 12, 16}, 1, Element::f32, inverse});
    check({{12, 12, 12, 2}, 1, Element::f32, inverse});
  }
}

TEST_CASE("lanes without a block") {
  for (const int64_t blocks : {1, 15, 16, 31, 33}) check({{12, 2}, blocks});
}

TEST_CASE("the same bits for any number of threads") {
  for (const Orders& orders : {Orders{4096}, Orders{8}, Orders{12, 1}, Orders{344, 32}, Orders{28, 512}}) {
    const Case c{orders, orders.back() == 8 ? 20000 : 70};
    const std::vector<uint8_t> expected = Run(c).y_bytes;
    for (const int count : {2, 3, 5}) {
      const Threads threads(count);
      CHECK(Run(c).y_bytes == expected);
    }
  }
}

TEST_CASE("nothing to do") {
  Hadamard h{};
  h.block = h.power = 16;
  run_hadamard(h);
}

TEST_CASE("a number that is none stays in its block") {
  for (const Orders& orders : {Orders{32}, Orders{12, 2}, Orders{4}}) {
    Hadamard h{};
    std::vector<std::shared_ptr<const std::vector<float>>> kept;
    h.block = h.power = orders.back();
    if (orders.size() == 2) {
      kept.push_back(paley(orders[0]));
      h.factor[h.factors++] = {kept.back()->data(), orders[0], orders[0], 1};
      h.block *= orders[0];
    }
    std::vector<float> x(static_cast<size_t>(3 * h.block), 1.0f), y(x.size());
    x[static_cast<size_t>(h.block) + 1] = NAN;
    h.x = x.data(), h.y = y.data(), h.count = 3 * h.block, h.before = h.after = 1;
    run_hadamard(h);
    for (int64_t i = 0; i < h.count; ++i) CHECK(std::isnan(y[static_cast<size_t>(i)]) == (i / h.block == 1));
  }
}

TEST_CASE("Paley's matrices") {
  // construction I of prime and other fields, II of both; none of these orders
  for (const int64_t order : {4, 12, 28, 36, 52, 100, 148, 244, 344}) {
    const auto found = paley(order);
    REQUIRE(found != nullptr);
    int64_t wrong = 0;
    for (int64_t i = 0; i < order; ++i) {
      for (int64_t j = 0; j <= i; ++j) {
        float sum = 0;
        for (int64_t k = 0; k < order; ++k) {
          const float a = (*found)[static_cast<size_t>(i * order + k)], b = (*found)[static_cast<size_t>(j * order + k)];
          wrong += std::abs(a) != 1;
          sum += a * b;
        }
        wrong += sum != static_cast<float>(i == j ? order : 0);
      }
    }
    CHECK(wrong == 0);
  }
  for (const int64_t order : {-4, 0, 1, 2, 6, 16, 40, 92, 172, 1024, 1028, 4096}) CHECK(paley(order) == nullptr);
}
