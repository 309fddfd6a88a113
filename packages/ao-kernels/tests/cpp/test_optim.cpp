#include "optim/optim.h"

#include <limits>

#include "isa.h"
#include "support.h"

using ao::test::Threads;

namespace {

// The codes of a format in the order of their values.
struct Book {
  std::vector<float> values;  // of each code
  std::vector<uint8_t> order;
  std::vector<int32_t> steps;
};

// Steps just beyond the middles.
Book book(const std::vector<float>& values) {
  Book b{values, std::vector<uint8_t>(256), {}};
  for (int i = 0; i < 256; ++i) b.order[i] = static_cast<uint8_t>(i);
  std::stable_sort(b.order.begin(), b.order.end(), [&](int i, int j) { return values[i] < values[j]; });
  for (int i = 1; i < 256; ++i) {
    const double middle = (double(values[b.order[i - 1]]) + values[b.order[i]]) / 2;
    float first = static_cast<float>(middle);
    if (first <= middle) first = std::nextafter(first, std::numeric_limits<float>::infinity());
    int32_t bits;
    std::memcpy(&bits, &first, 4);
    b.steps.push_back(bits < 0 ? bits ^ 0x7fffffff : bits);
  }
  return b;
}

// Doubling in each decade, as the formats of optimizers do; or powers of whole numbers.
std::vector<float> decades(bool negative) {
  std::vector<float> values = {0, 1};
  for (int decade = 0; decade < 7; ++decade) {
    const int count = (negative ? 1 : 2) << decade;
    for (int i = 0; i < count; ++i) {
      const double value = std::pow(10.0, decade - 6) * (0.1 + 0.9 * (i + 0.5) / count);
      values.push_back(static_cast<float>(value));
      if (negative) values.push_back(-values.back());
    }
  }
  std::sort(values.begin(), values.end());
  return values;
}

std::vector<float> powers(int exponent, int shift) {
  std::vector<float> values(256);
  for (int u = 0; u < 256; ++u) values[u] = static_cast<float>(std::pow((u + shift) / 256.0, exponent));
  return values;
}

ao::Adam adam(const Book& b) {
  ao::Adam a{};
  REQUIRE(ao::make_state(b.values.data(), b.steps.data(), b.order.data(), 1, a.m) == nullptr);
  a.v = a.m;
  return a;
}

// Values whose codes are computed: i |i| / 127^2, and (i / 255)^4.
std::vector<float> squares() {
  std::vector<float> values(256, 1.0f);
  for (int i = -127; i <= 127; ++i) values[i + 127] = static_cast<float>(i * std::abs(i) / 16129.0);
  return values;
}

std::vector<float> fourths() {
  std::vector<float> values(256);
  for (int i = 0; i < 256; ++i) values[i] = static_cast<float>(std::pow(i / 255.0, 4));
  return values;
}

// Codes of numbers of at most 1 as first moments: of gradients, the old moments forgotten.
std::vector<uint8_t> encode(const Book& b, std::vector<float> numbers) {
  ao::Adam a = adam(b);
  a.rest1 = a.rest2 = a.decay = a.unbias = 1;
  a.size = 1;
  const size_t blocks = (numbers.size() + 254) / 255;
  std::vector<float> p(numbers.size() + blocks), g, scales(blocks), scales2(blocks);
  for (size_t i = 0; i < numbers.size(); ++i) {
    if (i % 255 == 0) g.push_back(1);  // so that the scale is 1
    g.push_back(numbers[i]);
  }
  std::vector<uint8_t> m(g.size()), v(g.size()), codes;
  ao::StepTensor tensor{p.data(),      g.data(),       m.data(),
                        v.data(),      scales.data(),  scales2.data(),
                        static_cast<int64_t>(g.size()), 0};
  ao::adam_step(a, &tensor);
  for (float scale : scales) REQUIRE(scale == 1);
  for (size_t i = 0; i < g.size(); ++i) {
    if (i % 256 != 0) codes.push_back(m[i]);
  }
  return codes;
}

// The value nearest in float64, of two the lower one.
float nearest(const Book& b, float x) {
  const auto above = std::lower_bound(b.order.begin(), b.order.end(), x,
                                      [&](uint8_t code, float bound) { return b.values[code] < bound; });
  if (above == b.order.begin()) return b.values[b.order.front()];
  if (above == b.order.end()) return b.values[b.order.back()];
  const float low = b.values[*(above - 1)], high = b.values[*above];
  return double(x) - low <= double(high) - x ? low : high;
}

}  // namespace

TEST_CASE("moments are encoded as the nearest value: every bfloat16, and beside every middle") {
  struct Case {
    std::vector<float> values;
    ao::Coding coding;
    double near;  // how far from a middle, over its size, the farther value may be taken
  };
  const Case cases[] = {{decades(true), ao::Coding::table, 0},  {decades(false), ao::Coding::table, 0},
                        {powers(4, 0), ao::Coding::table, 0},   {powers(3, -128), ao::Coding::table, 0},
                        {powers(1, -127), ao::Coding::table, 0}, {squares(), ao::Coding::square, 0x1p-13},
                        {fourths(), ao::Coding::fourth, 6 * 0x1p-14}};
  for (const auto& [values, coding, near] : cases) {
    const Book b = book(values);
    CHECK(adam(b).m.coding == coding);
    std::vector<float> numbers;
    for (uint32_t bits = 0; bits <= 0x3f80; ++bits) {
      for (uint32_t sign : {0u, 0x80000000u}) {
        const uint32_t pattern = bits << 16 | sign;
        float number;
        std::memcpy(&number, &pattern, 4);
        if (values[0] < 0 || number >= 0) numbers.push_back(number);
      }
    }
    for (int i = 1; i < 256; ++i) {
      float number = (values[i - 1] + values[i]) / 2;
      for (int j = 0; j < 4; ++j) number = std::nextafter(number, -2.0f);
      for (int j = 0; j < 9; ++j, number = std::nextafter(number, 2.0f)) {
        if (number <= 1) numbers.push_back(number);
      }
    }
    const std::vector<uint8_t> codes = encode(b, numbers);
    int others = 0;
    for (size_t i = 0; i < numbers.size(); ++i) {
      const double x = numbers[i], found = values[codes[i]], wanted = nearest(b, numbers[i]);
      others += found != wanted;
      REQUIRE(std::abs(found - x) - std::abs(wanted - x) <= 2 * near * std::abs(x));
      if (near == 0) REQUIRE(found == wanted);
    }
    // of those beside middles many
    CHECK(others <= (near == 0 ? 0 : 2000));
  }
}

TEST_CASE("formats that cannot be a state say so") {
  ao::StateFormat state;
  Book b = book(powers(1, 100000));
  const auto problem = [&] {
    return std::string(ao::make_state(b.values.data(), b.steps.data(), b.order.data(), 1, state));
  };
  CHECK(problem() == "lie too near to each other");
  std::reverse(b.steps.begin(), b.steps.end());
  CHECK(problem() == "must increase");
}

TEST_CASE("any number of threads makes the same step, tensors without elements among others") {
  const Book b = book(decades(true));
  std::vector<std::vector<float>> results;
  for (int threads : {1, 2, 3, 7}) {
    Threads pool(threads);
    ao::Adam a = adam(b);
    a.beta1 = a.beta2 = 0.5f, a.rest1 = a.rest2 = 0.5f, a.decay = 0.9f, a.unbias = 1.5f, a.rate = 0.1f, a.eps = 1e-8f;
    std::vector<float> p, g;
    std::vector<ao::StepTensor> tensors;
    const int64_t sizes[] = {0, 70001, 1, 0, 256, 40000, 0};
    int64_t total = 0, blocks = 0;
    for (int64_t size : sizes) total += size, blocks += (size + 255) / 256;
    p = ao::test::normal(static_cast<size_t>(total), 1), g = ao::test::normal(static_cast<size_t>(total), 2);
    std::vector<uint8_t> m(p.size(), 200), v(p.size(), 200);
    std::vector<float> m_scales(static_cast<size_t>(blocks), 0.01f), v_scales = m_scales;
    int64_t at = 0, block = 0;
    for (int64_t size : sizes) {
      tensors.push_back({p.data() + at, g.data() + at, m.data() + at, v.data() + at, m_scales.data() + block,
                         v_scales.data() + block, size, 0});
      at += size, block += (size + 255) / 256;
    }
    a.size = static_cast<int64_t>(tensors.size());
    ao::adam_step(a, tensors.data());
    p.insert(p.end(), m_scales.begin(), m_scales.end());
    for (size_t i = 0; i < m.size(); ++i) p.push_back(static_cast<float>(m[i] * 256 + v[i]));
    results.push_back(p);
  }
  for (const std::vector<float>& other : results) CHECK(other == results[0]);
}

TEST_CASE("Lion moves parameters by signs of blends, in float64 but for rounding, with any number of threads") {
  const Book b = book(squares());
  const int64_t size = 70001, blocks = (size + 255) / 256;
  const std::vector<float> first = ao::test::normal(static_cast<size_t>(size), 1);
  const std::vector<float> grads = ao::test::normal(static_cast<size_t>(size), 2);
  std::vector<std::vector<float>> results;
  for (int threads : {1, 3}) {
    Threads pool(threads);
    ao::Lion lion{};
    REQUIRE(ao::make_state(b.values.data(), b.steps.data(), b.order.data(), 1, lion.m) == nullptr);
    lion.size = 1, lion.beta1 = 0.75f, lion.rest1 = 0.25f, lion.beta2 = 0.5f, lion.rest2 = 0.5f;
    lion.decay = 0.9f, lion.rate = 0.1f;
    std::vector<float> p = first, scales(static_cast<size_t>(blocks), 0.5f);
    std::vector<uint8_t> m(first.size());
    for (size_t i = 0; i < m.size(); ++i) m[i] = static_cast<uint8_t>(i * 7 % 255);
    const std::vector<uint8_t> old = m;
    ao::StepTensor tensor{p.data(), grads.data(), m.data(), nullptr, scales.data(), nullptr, size, 0};
    ao::lion_step(lion, &tensor);
    for (size_t i = 0; i < m.size(); ++i) {
      const double moment = 0.5 * b.values[old[i]], blend = 0.75 * moment + 0.25 * grads[i];
      const double wanted = double(0.9f) * first[i] - double(0.1f) * ((blend > 0) - (blend < 0));
      if (std::abs(blend) > 1e-6) REQUIRE(p[i] == doctest::Approx(wanted).epsilon(1e-6));
      const double next = 0.5 * moment + 0.5 * grads[i], stored = double(b.values[m[i]]) * scales[i / 256];
      // half a step of i |i| / 127^2, at the magnitude of the number
      const double step = scales[i / 256] * (std::sqrt(std::abs(next) / scales[i / 256]) / 127 + 1.0 / 16129);
      REQUIRE(std::abs(stored - next) <= 1.01 * step);
    }
    p.insert(p.end(), scales.begin(), scales.end());
    p.insert(p.end(), m.begin(), m.end());
    results.push_back(p);
  }
  CHECK(results[0] == results[1]);
}
