// Numbers in bfloat16 that differ much in size, times weights of whole numbers: where an ISA takes them as fixed-point
// numbers of 16 bits, none may lose what the output keeps.
#include <sys/resource.h>

#include "linear_cases.h"

using namespace ao;
using namespace ao::test;

namespace {

// Makes the weights of a column 0, and its activations `times` as large.
void make_outliers(const Case& c, Call& call, int64_t column, float times) {
  const int zero = static_cast<int>(std::find(call.weight.table.begin(), call.weight.table.end(), 0.0f) -
                                    call.weight.table.begin());
  const int64_t group = std::min(c.group, c.k), g = column / group, at = column - g * group;
  int64_t tile = at / 16;
  for (int64_t i = 0; i < g; ++i) tile += (group + 15) / 16;
  for (int64_t n = 0; n < c.n; ++n) {
    put_code(call.weight, c.bits, n / 16 * call.weight.tiles + tile, static_cast<int>(n % 16),
             static_cast<int>(at % 16), zero);
    double& value = call.weight.values[static_cast<size_t>(n * c.k + column)];
    call.weight.rowsum[static_cast<size_t>(n)] -= static_cast<float>(value);
    value = 0;
    call.weight.sizes[static_cast<size_t>(n * c.k + column)] = 0;
  }
  for (int64_t r = 0; r < c.m; ++r) {
    const int64_t i = r * c.k + column;
    put(c.type, call.x, i, static_cast<float>(get(c.type, call.x, i)) * times);
  }
}

double error(const Case& c, Call& call) {
  run_linear(call.linear);
  const Exact exact = expected(c, call);
  const std::vector<float> y = results(c, call);
  double noise = 0;
  for (size_t i = 0; i < y.size(); ++i) noise += std::pow(y[i] - exact.y[i], 2);
  return std::sqrt(noise) / exact.norm;
}

std::vector<Case> cases() {
  std::vector<Case> found;
  for (int bits : {2, 4, 8}) {
    for (int64_t group : {int64_t{24}, int64_t{32}, int64_t{128}, kAll}) {
      for (int64_t m : {1, 2, 6, 40}) found.push_back({.bits = bits, .m = m, .n = 20, .k = 648, .group = group});
    }
  }
  // whole numbers of a unit, which are no integers
  const std::vector<float> fp4 = {0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6};
  found.push_back({.kind = Kind::exact, .m = 6, .n = 20, .k = 648, .group = 16, .zero = Zero::f32, .table = fp4});
  // codes of activations most of which are the zero point then
  for (int64_t m : {6, 97}) found.push_back({.m = m, .n = 20, .k = 648, .act = Act::uint8});
  for (Case& c : found) c.type = Element::bf16;
  return found;
}

}  // namespace

TEST_CASE("columns that are thousands of times as large, beside weights of 0, cost the others nothing") {
  for (const Case& c : cases()) {
    if (c.zero != Zero::none) continue;  // of which the weights are not 0
    for (float times : {30.0f, 3000.0f, 1e6f, 1e12f}) {
      if (c.act != Act::none && times > 30) continue;  // all other codes are the zero point then
      Call call = make_call(c);
      for (int64_t column = 5; column < c.k; column += 100) make_outliers(c, call, column, times);
      const std::string label = text(c);
      CAPTURE(label);
      CAPTURE(times);
      CHECK(error(c, call) <= bound(c));
    }
  }
}

TEST_CASE("numbers of all sizes, and groups of zeros") {
  for (const Case& c : cases()) {
    Call call = make_call(c);
    for (int64_t i = 0; i < c.m * c.k; ++i) {
      const int64_t block = i % c.k / 128;
      const double v = block == 1 ? 0 : std::ldexp(get(c.type, call.x, i), static_cast<int>(i * 37 % 23 - 9 * block));
      put(c.type, call.x, i, static_cast<float>(v));
    }
    const std::string label = text(c);
    CAPTURE(label);
    CHECK(error(c, call) <= bound(c));
  }
}

TEST_CASE("a row is the same whatever the others need") {
  const Case c{.m = 9, .n = 20, .k = 648, .type = Element::bf16};
  Call call = make_call(c);
  run_linear(call.linear);
  const std::vector<float> before = results(c, call);
  for (int64_t i = 0; i < c.k; i += 50) put(c.type, call.x, 3 * c.k + i, 1e4f);
  run_linear(call.linear);
  const std::vector<float> after = results(c, call);
  for (size_t i = 0; i < before.size(); ++i) CHECK((before[i] == after[i]) == (i / 20 != 3));
}

TEST_CASE("memory for many rows is bounded") {
  constexpr int64_t kRows = 20000, kMostKiB = 64 << 10;
  const Threads threads(16);
  for (Act act : {Act::none, Act::int8}) {
    const Case c{.m = 1, .n = 20, .k = 4096, .type = Element::bf16, .act = act};
    Call call = make_call(c);
    for (int64_t i = 0; i < c.k; i += 100) put(c.type, call.x, i, 1e4f);  // 16 bits leave a rest
    call.y.assign(static_cast<size_t>(kRows * c.n * 2), 0);
    call.linear.y = call.y.data(), call.linear.m = kRows, call.linear.x_stride = 0;  // one row, many times
    rusage before{}, after{};
    getrusage(RUSAGE_SELF, &before);
    run_linear(call.linear);
    getrusage(RUSAGE_SELF, &after);
    CHECK(after.ru_maxrss - before.ru_maxrss <= kMostKiB);
  }
}
