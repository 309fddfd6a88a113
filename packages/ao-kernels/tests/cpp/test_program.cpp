#include "isa.h"
#include "optim/optim.h"
#include "support.h"

using ao::Operation;
using ao::test::Threads;

namespace {

ao::Program program(const std::vector<ao::Instruction>& code) {
  ao::Program made{};
  for (const ao::Instruction& of : code) made.code[made.size++] = of;
  return made;
}

// A step of one dense tensor without moments, whose parameter becomes a register.
std::vector<float> run(const std::vector<ao::Instruction>& code, uint8_t output, std::vector<float> p,
                       const std::vector<float>& g) {
  ao::ProgramStep s{};
  s.outputs[0] = output;
  s.update = ao::needed(program(code), 1u << output);
  std::vector<ao::ProgramTensor> tensors(1);
  tensors[0].p = p.data(), tensors[0].g = g.data(), tensors[0].count = static_cast<int64_t>(p.size());
  ao::program_step(s, tensors);
  return p;
}

// Values (i + 1) / 16, of which the nearest is found.
ao::NibbleFormat sixteenths() {
  ao::NibbleFormat f{};
  for (int i = 0; i < 16; ++i) f.values[i] = static_cast<float>(i + 1) / 16, f.order[i] = static_cast<uint8_t>(i);
  for (int i = 0; i < 15; ++i) {
    const float middle = (f.values[i] + f.values[i + 1]) / 2;
    std::memcpy(&f.steps[i], &middle, 4);
  }
  f.in_order = true, f.nan_code = 15, f.reach = 1, f.of_zeros = 0x1p-126f;
  return f;
}

}  // namespace

TEST_CASE("operations are those of float32, at any place of an element") {
  const size_t size = 1000;
  const std::vector<float> p = ao::test::normal(size, 1), g = ao::test::normal(size, 2);
  const float s = 0.5f;  // so that a + s b is the same rounded once or twice
  struct Case {
    Operation operation;
    float (*value)(float a, float b, float s);
  };
  const Case cases[] = {
      {Operation::scale, [](float a, float, float s) { return s * a; }},
      {Operation::shift, [](float a, float, float s) { return a + s; }},
      {Operation::add, [](float a, float b, float s) { return std::fma(b, s, a); }},
      {Operation::multiply, [](float a, float b, float) { return a * b; }},
      {Operation::divide, [](float a, float b, float) { return a / b; }},
      {Operation::over, [](float a, float, float s) { return s / a; }},
      {Operation::add_product, [](float a, float b, float s) { const float x = s * b * a; return a + x; }},
      {Operation::add_ratio, [](float a, float b, float s) { return a + s * b / a; }},
      {Operation::sign, [](float a, float, float) { return a > 0 ? 1.0f : -1.0f; }},
      {Operation::magnitude, [](float a, float, float) { return std::abs(a); }},
      {Operation::at_least, [](float a, float, float s) { return std::max(a, s); }},
      {Operation::at_most, [](float a, float, float s) { return std::min(a, s); }},
      {Operation::constant, [](float, float, float s) { return s; }},
      {Operation::above, [](float a, float, float s) { return a > s ? 1.0f : 0.0f; }},
  };
  for (const Case& of : cases) {
    const auto found = run({{of.operation, 5, {0, 1, 0}, s, 0}}, 5, p, g);
    for (size_t i = 0; i < size; ++i) REQUIRE(found[i] == of.value(p[i], g[i], s));
  }
  const auto roots = run({{Operation::multiply, 0, {0, 0}, 0, 0}, {Operation::root, 0, {0}, 0, 0}}, 0, p, g);
  for (size_t i = 0; i < size; ++i) REQUIRE(roots[i] == std::sqrt(p[i] * p[i]));
  const auto chosen = run({{Operation::above, 3, {0}, 0, 0}, {Operation::choose, 0, {3, 0, 1}, 0, 0}}, 0, p, g);
  for (size_t i = 0; i < size; ++i) REQUIRE(chosen[i] == (p[i] > 0 ? p[i] : g[i]));
}

TEST_CASE("only what outputs depend on is left of a program") {
  const ao::Program all = program({{Operation::scale, 4, {1}, 2, 0},
                                   {Operation::scale, 5, {0}, 2, 0},
                                   {Operation::add, 4, {4, 2}, 1, 0},
                                   {Operation::add, 0, {5, 4}, 1, 0}});
  const ao::Program found = ao::needed(all, 1u << 4);
  CHECK(found.size == 2);
  CHECK(found.inputs == 0b110);
  CHECK(ao::needed(all, 1u).size == 4);
}

TEST_CASE("norms are of whole tensors, the same with any number of threads") {
  const std::vector<float> first = ao::test::normal(70001, 1), second = ao::test::normal(300, 2);
  std::vector<std::vector<float>> results;
  for (int threads : {1, 3}) {
    Threads pool(threads);
    ao::ProgramStep s{};
    // what is not 0 in the padding of a block does not count
    const ao::Program all = program({{Operation::shift, 3, {0}, 1, 0},
                                     {Operation::norm, 3, {3}, 0, 0},
                                     {Operation::norm, 4, {1}, 0, 1},
                                     {Operation::add, 0, {3, 4}, -1, 0}});
    s.norms = 2, s.update = ao::needed(all, 1), s.measure = ao::needed(all, 0, true);
    CHECK(s.update.inputs == 0);
    CHECK(s.measure.size == 3);
    std::vector<float> p = first, p2 = second;
    std::vector<ao::ProgramTensor> tensors(3);
    tensors[0].p = p.data(), tensors[0].g = first.data(), tensors[0].count = static_cast<int64_t>(p.size());
    tensors[2].p = p2.data(), tensors[2].g = second.data(), tensors[2].count = static_cast<int64_t>(p2.size());
    ao::program_step(s, tensors);
    const auto norm = [](const std::vector<float>& of, double more) {
      double sum = 0;
      for (float v : of) sum += (v + more) * (v + more);
      return std::sqrt(sum);
    };
    for (float v : p) REQUIRE(v == doctest::Approx(norm(first, 1) - norm(first, 0)).epsilon(1e-5));
    for (float v : p2) REQUIRE(v == doctest::Approx(norm(second, 1) - norm(second, 0)).epsilon(1e-5));
    p.insert(p.end(), p2.begin(), p2.end());
    results.push_back(p);
  }
  CHECK(results[0] == results[1]);
}

TEST_CASE("scales of rows and columns are the greatest of new moments, with any number of threads") {
  // an odd number of columns: rows end amid a byte, and blocks begin amid others
  const int64_t rows = 301, columns = 221, size = rows * columns, width = (columns + 1) / 2;
  const std::vector<float> g = ao::test::normal(static_cast<size_t>(size), 2);
  std::vector<std::vector<float>> results;
  for (int threads : {1, 3}) {
    Threads pool(threads);
    ao::ProgramStep s{};
    s.moments = 1, s.kinds[0].keep = ao::Keep::rank1, s.kinds[0].nibbles = sixteenths();
    s.outputs[0] = 0, s.outputs[1] = 2;
    // v becomes v / 2 + g^2 / 2, and p becomes v
    const ao::Program all = program({{Operation::scale, 2, {2}, 0.5f, 0},
                                     {Operation::add_product, 2, {2, 1, 1}, 0.5f, 0},
                                     {Operation::scale, 0, {2}, 1, 0}});
    s.update = ao::needed(all, 0b101), s.survey = ao::needed(all, 0b100);
    std::vector<float> p(g.size()), of_rows(static_cast<size_t>(rows), 0.25f), of_columns(static_cast<size_t>(columns));
    for (size_t j = 0; j < of_columns.size(); ++j) of_columns[j] = 0.01f * static_cast<float>(j);
    std::vector<uint8_t> codes = ao::test::codes(static_cast<size_t>(rows * width), 256, 3);
    const auto value = [&](size_t i) {
      const float scale = std::min(of_rows[i / columns], of_columns[i % columns]);
      const size_t column = i % columns;
      return static_cast<float>((codes[i / columns * width + column / 2] >> 4 * (column % 2) & 15) + 1) / 16 * scale;
    };
    std::vector<float> wanted(g.size());
    for (size_t i = 0; i < wanted.size(); ++i) wanted[i] = value(i) * 0.5f + 0.5f * g[i] * g[i];
    std::vector<ao::ProgramTensor> tensors(3);  // one of them without elements
    for (ao::ProgramTensor& t : tensors) t.columns = 2;
    ao::ProgramTensor& t = tensors[1];
    t.p = p.data(), t.g = g.data(), t.count = size, t.columns = columns;
    t.moments[0] = {codes.data(), of_rows.data(), of_columns.data(), nullptr, nullptr};
    ao::program_step(s, tensors);
    REQUIRE(p == wanted);
    for (size_t i = 0; i < wanted.size(); ++i) {
      REQUIRE(of_rows[i / columns] >= wanted[i]);
      REQUIRE(of_columns[i % columns] >= wanted[i]);
      const float scale = std::min(of_rows[i / columns], of_columns[i % columns]);
      // half a step, and a step at 0, which has no code
      REQUIRE(std::abs(value(i) - wanted[i]) <= (wanted[i] < scale / 16 ? 1.001f : 0.501f) / 16 * scale);
    }
    CHECK(*std::max_element(of_rows.begin(), of_rows.end()) == *std::max_element(wanted.begin(), wanted.end()));
    p.insert(p.end(), of_rows.begin(), of_rows.end());
    p.insert(p.end(), of_columns.begin(), of_columns.end());
    p.insert(p.end(), codes.begin(), codes.end());
    results.push_back(p);
  }
  CHECK(results[0] == results[1]);
}
