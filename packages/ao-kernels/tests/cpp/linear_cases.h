// Calls of run_linear, and what they must give: weights in tiles written bit by bit as the layout defines
// them, activations quantized by the definition, products in float64.
#pragma once
#include <algorithm>
#include <string>

#include "linear/linear.h"
#include "numbers.h"

namespace ao::test {

constexpr int64_t kAll = 1 << 20;  // group: the whole row

struct Case {
  int bits = 4;
  Kind kind = Kind::integer;
  int64_t m = 3, n = 37, k = 200, group = 32;
  Element type = Element::f32;
  Act act = Act::none;
  Scale scale = Scale::bf16;
  Zero zero = Zero::none;
  bool bias = false;
  int64_t span = 0;  // groups that share an outer scale, of f16 or f32; 0: there are none
  Scale offset = Scale::f16;  // of Zero::scaled
  int64_t x_gap = 0, y_gap = 0;  // elements between rows
  std::vector<float> table = {};  // instead of one that the kind suggests
};

inline std::string text(const Case& c) {
  const auto name = [](const char* label, auto value) { return label + std::to_string(static_cast<int64_t>(value)); };
  return name("bits ", c.bits) + name(", kind ", c.kind) + name(", m ", c.m) + name(", n ", c.n) +
         name(", k ", c.k) + name(", group ", c.group) + name(", type ", c.type) + name(", act ", c.act) +
         name(", scale ", c.scale) + name(", zero ", c.zero) + name(", bias ", c.bias) +
         name(", span ", c.span) + name(", offset ", c.offset);
}

// -- weights -----------------------------------------------------------------------------------------------

// Where bit `bit` of the code of row r, column c of a tile is stored.
struct Place {
  int64_t byte;
  int bit;
};
inline Place place(int bits, int r, int c, int bit) {
  if (bits == 8) return {64 * (c / 4) + 4 * r + c % 4, bit};
  int64_t plane = 0;
  if (bits & 4) {
    if (bit < 4) return {64 * (c / 8) + 4 * r + c % 4, 4 * (c / 4 % 2) + bit};
    bit -= 4, plane += 128;
  }
  if (bits & 2) {
    if (bit < 2) return {plane + 4 * r + c % 4, 2 * (c / 4) + bit};
    plane += 64;
  }
  // bit j of byte h is the element e(j) + 2h, e(j) = 4j for j < 4 and 4 (j - 4) + 1 from there on
  const int h = c % 4 / 2, j = c / 4 + (c % 2 ? 4 : 0);
  return {plane + 2 * r + h, j};
}

inline std::vector<float> table_of(int bits, Kind kind, bool integers, uint32_t seed) {
  const int size = 1 << bits;
  std::vector<float> table(static_cast<size_t>(size));
  const std::vector<float> noise = normal(table.size(), seed);
  for (int c = 0; c < size; ++c) {
    float& value = table[static_cast<size_t>(c)];
    const auto wave = static_cast<float>((37 * c + 11) % 101 - 50);  // integers in no order
    if (kind == Kind::integer) value = static_cast<float>(c - (seed % 2 ? 0 : size / 2));
    if (kind == Kind::table) value = integers ? wave : noise[static_cast<size_t>(c)];
    if (kind == Kind::exact) value = integers ? wave : round_to_bf16(noise[static_cast<size_t>(c)]);
    if (kind == Kind::symmetric) {
      const double magnitude = c % 128 == 127 ? 480 : e4m3(c % 128);
      value = static_cast<float>((c < 128) == (seed % 2 == 0) ? magnitude : -magnitude);
    }
  }
  return table;
}

// A weight in tiles, and its values in float64.
struct Weight {
  std::vector<float> table;
  std::vector<uint8_t> qdata, scale, scale_outer, zero, offset, offset_outer;
  std::vector<float> rowsum;
  int64_t groups = 0, span = 1, spans = 1, tiles = 0;
  std::vector<double> values;  // (n, k)
  std::vector<double> sizes;   // of what is subtracted to make them
};

// The code of row r, column c of a tile, counted over all blocks.
inline void put_code(Weight& w, int bits, int64_t tile, int r, int c, int code) {
  for (int bit = 0; bit < bits; ++bit) {
    const Place p = place(bits, r, c, bit);
    uint8_t& byte = w.qdata[static_cast<size_t>(tile * 32 * bits + p.byte)];
    byte = static_cast<uint8_t>((byte & ~(1 << p.bit)) | (code >> bit & 1) << p.bit);
  }
}

template <class T>
inline void set(std::vector<uint8_t>& data, int64_t i, T value) {
  std::memcpy(data.data() + i * static_cast<int64_t>(sizeof(T)), &value, sizeof(T));
}

inline double make_scale(Scale type, std::vector<uint8_t>& data, int64_t i, uint32_t random) {
  switch (type) {
    case Scale::f32: {
      const float value = 0.25f + static_cast<float>(random % 1000) / 517.0f;
      return set(data, i, value), value;
    }
    case Scale::bf16: {
      const auto code = static_cast<uint16_t>(0x3f00 + random % 256);  // from 0.5 to 2
      return set(data, i, code), brain(code);
    }
    case Scale::f16: {
      const auto code = static_cast<uint16_t>(random % 5 ? 0x3800 + random % 2048 : random % 1024);
      return set(data, i, code), half(code);
    }
    case Scale::e8m0: {
      const auto code = static_cast<uint8_t>(124 + random % 6);
      return set(data, i, code), std::ldexp(1.0, code - 127);
    }
    case Scale::u8: {
      const auto code = static_cast<uint8_t>(random % 256);
      return set(data, i, code), code;
    }
    case Scale::i8: {
      const auto code = static_cast<int8_t>(random % 256 - 128);
      return set(data, i, code), code;
    }
    default: {
      const auto code = static_cast<uint8_t>(random % 127 | (random >> 8 & 0x80));
      return set(data, i, code), e4m3(code);
    }
  }
}

inline double make_zero(Zero type, const Case& c, const std::vector<float>& table, std::vector<uint8_t>& data, int64_t i,
                 uint32_t random) {
  const auto value = static_cast<float>(random % 64) / 8.0f - 3.0f;
  switch (type) {
    case Zero::none:
    case Zero::scaled: return 0;
    case Zero::u8: {
      const auto stored = random % (1u << c.bits);
      return set(data, i, static_cast<uint8_t>(table[0] < 0 ? stored ^ 1u << (c.bits - 1) : stored)), table[stored];
    }
    case Zero::f32: return set(data, i, value), value;
    default: break;
  }
  std::vector<uint8_t> word(2);
  put(type == Zero::bf16 ? Element::bf16 : Element::f16, word, 0, value);
  data[static_cast<size_t>(2 * i)] = word[0], data[static_cast<size_t>(2 * i + 1)] = word[1];
  return value;
}

inline size_t bytes_of_scale(Scale type) { return type == Scale::f32 ? 4 : type < Scale::e8m0 ? 2 : 1; }

inline Scale outer_type(const Case& c) { return c.span % 2 ? Scale::f16 : Scale::f32; }

// Scales of a weight; the values of its rows and groups.
inline std::vector<double> make_scales(const Case& c, const Weight& w, Scale type, int64_t rows, std::mt19937& random,
                                       std::vector<uint8_t>& data, std::vector<uint8_t>& outer) {
  data.assign(static_cast<size_t>(rows * w.groups) * bytes_of_scale(type), 0);
  if (c.span) outer.assign(static_cast<size_t>(rows * w.spans) * bytes_of_scale(outer_type(c)), 0);
  std::vector<double> values(static_cast<size_t>(rows * w.groups)), factors(static_cast<size_t>(rows * w.spans), 1.0);
  const auto at = [](int64_t row, int64_t count, int64_t i) { return (row / 16 * count + i) * 16 + row % 16; };
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t s = 0; c.span && s < w.spans; ++s) {
      const int64_t i = at(row, w.spans, s);
      factors[static_cast<size_t>(i)] = make_scale(outer_type(c), outer, i, random());
    }
    for (int64_t g = 0; g < w.groups; ++g) {
      const int64_t i = at(row, w.groups, g);
      values[static_cast<size_t>(i)] = make_scale(type, data, i, random()) *
                                       factors[static_cast<size_t>(at(row, w.spans, g / w.span))];
    }
  }
  return values;
}

inline Weight make_weight(const Case& c, bool integers) {
  Weight w;
  const auto seed = static_cast<uint32_t>(c.bits * 1000 + c.n * 10 + c.k + c.m);
  w.table = c.table.empty() ? table_of(c.bits, c.kind, integers, seed) : c.table;
  const int64_t group = std::min(c.group, c.k), blocks = (c.n + 15) / 16;
  w.groups = (c.k + group - 1) / group;
  if (c.span) w.span = std::min(c.span, w.groups);
  w.spans = (w.groups + w.span - 1) / w.span;
  std::vector<int64_t> first_tile(static_cast<size_t>(w.groups));
  for (int64_t g = 0; g < w.groups; ++g) {
    first_tile[static_cast<size_t>(g)] = w.tiles;
    w.tiles += (std::min(group, c.k - g * group) + 15) / 16;
  }
  const size_t zero_bytes[] = {0, 1, 4, 2, 2, 0};
  w.qdata.assign(static_cast<size_t>(blocks * w.tiles * 32 * c.bits), 0);
  w.zero.assign(static_cast<size_t>(blocks * w.groups * 16) * zero_bytes[static_cast<int>(c.zero)], 0);
  w.rowsum.assign(static_cast<size_t>(blocks * 16), 0);
  w.values.resize(static_cast<size_t>(c.n * c.k)), w.sizes.resize(w.values.size());
  std::mt19937 random(seed);
  const std::vector<double> scales = make_scales(c, w, c.scale, blocks * 16, random, w.scale, w.scale_outer);
  std::vector<double> offsets(scales.size(), 0.0);
  if (c.zero == Zero::scaled) offsets = make_scales(c, w, c.offset, blocks * 16, random, w.offset, w.offset_outer);
  for (int64_t row = 0; row < c.n; ++row) {
    double total = 0;
    for (int64_t g = 0; g < w.groups; ++g) {
      const int64_t at = (row / 16 * w.groups + g) * 16 + row % 16;
      const double scale = scales[static_cast<size_t>(at)], offset = offsets[static_cast<size_t>(at)];
      const double zero = make_zero(c.zero, c, w.table, w.zero, at, random());
      for (int64_t k = g * group; k < std::min(c.k, (g + 1) * group); ++k) {
        auto code = static_cast<int>(random() >> 8 & ((1u << c.bits) - 1));
        if (!std::isfinite(w.table[static_cast<size_t>(code)])) code = 0;
        const int64_t tile = row / 16 * w.tiles + first_tile[static_cast<size_t>(g)] + (k - g * group) / 16;
        put_code(w, c.bits, tile, static_cast<int>(row % 16), static_cast<int>((k - g * group) % 16), code);
        const double value = w.table[static_cast<size_t>(code)];
        const double number = (value - zero) * scale - offset;
        w.values[static_cast<size_t>(row * c.k + k)] = number;
        w.sizes[static_cast<size_t>(row * c.k + k)] = std::hypot(value * scale, zero * scale, offset);
        total += number;
      }
    }
    w.rowsum[static_cast<size_t>(row)] = static_cast<float>(total);
  }
  return w;
}

// -- activations -------------------------------------------------------------------------------------------

inline float clamp_scale(float v) { return std::min(std::max(v, 0x1p-126f), 3.40282347e38f); }

// What a row of activations is after quantization, times its scale.
inline std::vector<double> quantized(const std::vector<double>& row, Act act) {
  std::vector<double> out = row;
  if (act == Act::none) return out;
  float least = 0, greatest = 0;
  for (double v : row) {
    least = std::min(least, static_cast<float>(v)), greatest = std::max(greatest, static_cast<float>(v));
  }
  const float reach = act == Act::int8 ? 127.5f : act == Act::e4m3 ? 448.0f : 57344.0f;
  float scale = clamp_scale(std::max(greatest, -least) / reach);
  if (act == Act::uint8) scale = clamp_scale((greatest * 0.5f - least * 0.5f) / 127.5f);
  if (least == 0 && greatest == 0) scale = 1;
  const float zero_point = std::nearbyint(std::clamp(0.0f - least / scale, 0.0f, 255.0f));
  for (double& v : out) {
    const float ratio = static_cast<float>(v) / scale;
    double code = 0;
    if (act == Act::int8) code = std::clamp(std::nearbyint(ratio), -128.0f, 127.0f);
    if (act == Act::uint8) code = std::clamp(std::nearbyint(ratio + zero_point), 0.0f, 255.0f) - zero_point;
    if (act == Act::e4m3) code = nearest(ratio, 256, e4m3);
    if (act == Act::e5m2) code = nearest(ratio, 256, e5m2);
    v = code * static_cast<double>(scale);
  }
  return out;
}

// -- one call ----------------------------------------------------------------------------------------------

struct Call {
  Weight weight;
  std::vector<uint8_t> x, y, bias;
  Linear linear{};
};

// All arrays have exactly the bytes that may be touched.
inline Call make_call(const Case& c) {
  const bool integers = c.act == Act::int8 || c.act == Act::uint8;
  Call call{make_weight(c, integers), {}, {}, {}};
  const size_t size = size_of(c.type);
  const int64_t x_stride = c.k + c.x_gap, y_stride = c.n + c.y_gap;
  call.x.assign(static_cast<size_t>((c.m - 1) * x_stride + c.k) * size, 0xff);  // NaN between rows
  call.y.assign(static_cast<size_t>((c.m - 1) * y_stride + c.n) * size, 0xff);
  const std::vector<float> numbers = normal(static_cast<size_t>(c.m * c.k), 5);
  for (int64_t r = 0; r < c.m; ++r) {
    for (int64_t i = 0; i < c.k; ++i) {
      put(c.type, call.x, r * x_stride + i, numbers[static_cast<size_t>(r * c.k + i)]);
    }
  }
  call.bias.resize(c.bias ? static_cast<size_t>(c.n) * size : 0);
  const std::vector<float> offsets = normal(static_cast<size_t>(c.n), 6);
  for (int64_t i = 0; c.bias && i < c.n; ++i) put(c.type, call.bias, i, 9 * offsets[static_cast<size_t>(i)]);

  const Weight& w = call.weight;
  Linear& t = call.linear;
  const auto pointer = [](const std::vector<uint8_t>& data) { return data.empty() ? nullptr : data.data(); };
  t.scale = {pointer(w.scale), pointer(w.scale_outer), c.scale, outer_type(c)};
  t.offset = {pointer(w.offset), pointer(w.offset_outer), c.offset, outer_type(c)};
  t.qdata = w.qdata.data(), t.zero = w.zero.data(), t.span = w.span, t.spans = w.spans;
  t.rowsum = c.act == Act::uint8 ? w.rowsum.data() : nullptr;
  t.table = w.table.data();
  t.zero_type = c.zero, t.kind = c.kind, t.bits = c.bits;
  t.n = c.n, t.k = c.k, t.group = std::min(c.group, c.k), t.groups = w.groups, t.tiles = w.tiles;
  t.x = call.x.data(), t.y = call.y.data(), t.bias = c.bias ? call.bias.data() : nullptr;
  t.type = c.type, t.m = c.m, t.x_stride = x_stride, t.y_stride = y_stride, t.act = c.act;
  return call;
}

// The exact output, and its norm were no terms to cancel others.
struct Exact {
  std::vector<double> y;
  double norm = 0;
};

inline Exact expected(const Case& c, const Call& call) {
  Exact out{std::vector<double>(static_cast<size_t>(c.m * c.n))};
  std::vector<double> row(static_cast<size_t>(c.k));
  for (int64_t r = 0; r < c.m; ++r) {
    for (int64_t i = 0; i < c.k; ++i) row[static_cast<size_t>(i)] = get(c.type, call.x, r * (c.k + c.x_gap) + i);
    const std::vector<double> x = quantized(row, c.act);
    for (int64_t n = 0; n < c.n; ++n) {
      double sum = c.bias ? get(c.type, call.bias, n) : 0, squares = sum * sum;
      for (int64_t i = 0; i < c.k; ++i) {
        const auto at = static_cast<size_t>(n * c.k + i);
        sum += x[static_cast<size_t>(i)] * call.weight.values[at];
        squares += std::pow(x[static_cast<size_t>(i)] * call.weight.sizes[at], 2);
      }
      out.y[static_cast<size_t>(r * c.n + n)] = sum;
      out.norm += std::max(squares, sum * sum);
    }
  }
  out.norm = std::sqrt(out.norm);
  return out;
}

inline std::vector<float> results(const Case& c, const Call& call) {
  std::vector<float> y;
  for (int64_t r = 0; r < c.m; ++r) {
    for (int64_t n = 0; n < c.n; ++n) y.push_back(static_cast<float>(get(c.type, call.y, r * (c.n + c.y_gap) + n)));
  }
  return y;
}

// The relative error that a case may have: sums in float32, then the rounding of the output; beside bfloat16
// activations weights may be rounded, too.
inline double bound(const Case& c) {
  return c.type == Element::f32 ? 1e-6 : c.type == Element::f16 ? 0x1p-12 + 1e-6 : 0x1p-8;
}

inline void check(const Case& c) {
  const std::string label = text(c);
  CAPTURE(label);
  Call call = make_call(c);
  run_linear(call.linear);
  const Exact exact = expected(c, call);
  const std::vector<float> y = results(c, call);
  double noise = 0;
  for (size_t i = 0; i < y.size(); ++i) noise += (y[i] - exact.y[i]) * (y[i] - exact.y[i]);
  CHECK(std::sqrt(noise) <= bound(c) * exact.norm);
}

}  // namespace ao::test
