// The expert kernels on the SIMT machine, stage by stage: each from what the one before it left.
#include <algorithm>
#include <cmath>
#include <limits>

#include "expert_layer.h"
#include "packed_matrix.h"
#include "unpack_matrix.h"
#include "watched_run.h"

using namespace twofold;
using namespace twofold::cuda;
using test::PackedMatrix;
using test::WatchedRun;

namespace {

constexpr int kExperts = 5, kTopK = 2;

struct Sizes {
  int hidden, intermediate, tokens;
};

// Columns of an encoded row as floats.
std::vector<float> decoded(ActivationKind kind, const uint8_t* row, int columns) {
  const int P = int(kernels::activation_columns(columns));
  std::vector<float> out(static_cast<size_t>(columns));
  for (int c = 0; c < columns; ++c) {
    float& value = out[size_t(c)];
    if (kind == ActivationKind::kF32) {
      std::memcpy(&value, row + 4 * c, 4);
    } else if (kind == ActivationKind::kBF16) {
      uint16_t bits;
      std::memcpy(&bits, row + 2 * c, 2);
      value = test::float_of_bf16(bits);
    } else {
      float scale;
      std::memcpy(&scale, row + P + c / 32 * 4, 4);
      value = scale * float(int8_t(row[c]));
    }
  }
  return out;
}

struct Sum {
  double value = 0, magnitude = 0;
};
Sum product(const PackedMatrix& matrix, int row, const std::vector<float>& x, bool round_weights) {
  Sum sum;
  for (int c = 0; c < matrix.columns; ++c) {
    const float weight = matrix.weight(row, c);
    const double term = double(round_weights ? test::rounded(weight) : weight) * double(x[size_t(c)]);
    sum.value += term;
    sum.magnitude += std::abs(term);
  }
  return sum;
}

// Between gate and up, and whether there are biases.
struct Kind {
  kernels::ExpertActivation activation = kernels::ExpertActivation::kSilu;
  bool biases = false;
  float limit = 0;
  bool adapted = false;  // rows use adapters
};

// What adapters add to gate and up of each pair, [pairs][2][intermediate]; zeros without.
std::vector<float> adapters_parts(const Kind& of, int pairs, int intermediate) {
  const size_t count = size_t(pairs) * 2 * size_t(intermediate);
  return of.adapted ? test::random_floats(count, 21) : std::vector<float>(count);
}

double gated(const Kind& of, double gate, double up) {
  const double limit = of.limit > 0 ? double(of.limit) : std::numeric_limits<double>::infinity();
  const double u = std::clamp(up, -limit, limit);
  switch (of.activation) {
    case kernels::ExpertActivation::kSwigluOai: {
      const double g = std::min(gate, limit);
      return g / (1 + std::exp(-1.702 * g)) * (u + 1);
    }
    case kernels::ExpertActivation::kGeluTanh: {
      const double inner = std::sqrt(2 / M_PI) * (gate + 0.044715 * gate * gate * gate);
      return std::min(0.5 * gate * (1 + std::tanh(inner)), limit) * u;
    }
    case kernels::ExpertActivation::kSiluOfLimited: {
      const double g = std::min(gate, limit);
      return g / (1 + std::exp(-g)) * u;
    }
    default:
      return std::min(gate / (1 + std::exp(-gate)), limit) * u;
  }
}

struct Experts {
  Sizes sizes;
  WeightFormat format;
  std::vector<PackedMatrix> gate, up, down;
  ExpertLayout layout{};
  std::vector<uint8_t> slots;
  int64_t bytes;
  std::vector<std::vector<float>> biases;  // as they lie; zeros without

  Experts(WeightFormat which, const Sizes& given, const Kind& kind = {}) : sizes(given), format(which) {
    const int H = sizes.hidden, I = sizes.intermediate;
    for (uint32_t e = 0; e < kExperts; ++e) {
      gate.emplace_back(format, I, H, 3 * e + 1);
      up.emplace_back(format, I, H, 3 * e + 2);
      down.emplace_back(format, H, I, 3 * e + 3);
    }
    const int64_t first = kernels::panel_bytes(format, H) * kernels::num_panels(I);
    const int64_t second = kernels::panel_bytes(format, I) * kernels::num_panels(H);
    layout = {format,          format,    H, I, first, 2 * first, kind.biases ? 2 * first + second : 0,
              kind.activation, kind.limit};
    const int64_t bias_bytes = kernels::expert_bias_bytes(H, I);
    bytes = 2 * first + second + (kind.biases ? bias_bytes : 0);
    slots.resize(size_t(bytes) * kExperts);
    for (size_t e = 0; e < kExperts; ++e) {
      uint8_t* at = slots.data() + size_t(bytes) * e;
      std::memcpy(at, gate[e].data(), size_t(first));
      std::memcpy(at + first, up[e].data(), size_t(first));
      std::memcpy(at + 2 * first, down[e].data(), size_t(second));
      biases.emplace_back(size_t(bias_bytes / 4), 0.0f);
      if (!kind.biases) continue;
      std::mt19937 random(uint32_t(e) + 77);
      std::normal_distribution<float> normal;
      for (float& bias : biases.back()) bias = normal(random);
      std::memcpy(at + layout.bias_offset, biases.back().data(), size_t(bias_bytes));
    }
  }
};

Sum plus(Sum sum, float bias) { return {sum.value + double(bias), sum.magnitude + std::abs(double(bias))}; }

// Pairs by expert, all of them or, where `few`, without the first expert's.
struct Grouped {
  std::vector<int32_t> ids, begin{0}, pairs;
  std::vector<int> experts;

  explicit Grouped(int tokens, bool few = false) {
    std::mt19937 random(9);
    for (int t = 0; t < tokens; ++t) {
      const int first = int(std::min(random() % kExperts, random() % kExperts));  // some have many
      for (int k = 0; k < kTopK; ++k) ids.push_back((first + k) % kExperts);
    }
    for (int e = few ? 1 : 0; e < kExperts; ++e) {
      const size_t before = pairs.size();
      for (size_t p = 0; p < ids.size(); ++p) {
        if (ids[p] == e) pairs.push_back(int32_t(p));
      }
      if (pairs.size() == before) continue;
      experts.push_back(e);
      begin.push_back(int32_t(pairs.size()));
    }
  }
  ExpertGroups on(WatchedRun& run, const uint8_t* slots, int64_t bytes, int capacity) const {
    std::vector<uint64_t> addresses;
    for (const int e : experts) addresses.push_back(reinterpret_cast<uint64_t>(slots + e * bytes));
    return {run.copy("num_groups", std::vector<int32_t>{int32_t(experts.size())}),
            run.copy("weights", addresses), run.copy("begin", begin), run.copy("pairs", pairs), capacity};
  }
};

void close_to(double ours, double expected, double room, const char* what) {
  if (!(std::abs(ours - expected) <= room))
    test::fail(what, 0, std::to_string(ours) + " instead of " + std::to_string(expected));
}

void check_decode(WeightFormat format, const Sizes& sizes, int shared_bytes, const Kind& of = {}) {
  const Experts experts(format, sizes, of);
  const int H = sizes.hidden, I = sizes.intermediate, T = sizes.tokens, pairs = T * kTopK;
  const std::vector<uint16_t> x = test::random_bf16(size_t(T * H), 4);
  const Grouped grouped(T, T > 1);
  const std::vector<float> parts = adapters_parts(of, pairs, I);
  const ActivationKind kind = activation_of(format);
  const int64_t x_bytes = kernels::activation_row_bytes(kind, H),
                h_bytes = kernels::activation_row_bytes(kind, I);
  test::under_schedules([&](WatchedRun& run) {
    const uint8_t* slots = run.copy("slots", experts.slots);
    const ExpertGroups groups = grouped.on(run, slots, experts.bytes, max_groups(pairs, kExperts));
    auto* encoded = run.memory<uint8_t>("encoded", size_t(T * x_bytes));
    auto* h = run.memory<uint8_t>("intermediate", size_t(pairs * h_bytes));
    auto* outputs = run.memory<float>("outputs", size_t(pairs * H));
    run.check(launch_encode({kind, run.copy("x", x), T, H, encoded}, nullptr), "encode");
    float* adapted = of.adapted ? run.copy("adapted", parts) : nullptr;
    run.check(launch_decode_experts(experts.layout, groups, {encoded, h, outputs, nullptr, adapted},
                                    {T, kTopK, kExperts, shared_bytes}, nullptr),
              "decode");
    for (int t = 0; t < T; ++t) {
      const std::vector<float> row = decoded(kind, encoded + t * x_bytes, H);
      for (int c = 0; c < H; ++c) {
        const double value = test::float_of_bf16(x[size_t(t * H + c)]);
        close_to(row[size_t(c)], value, kind == ActivationKind::kQ8 ? 0.02 : 0, "encode");
      }
    }
    for (const int32_t p : grouped.pairs) {
      const size_t e = size_t(grouped.ids[size_t(p)]);
      const std::vector<float> in = decoded(kind, encoded + p / kTopK * x_bytes, H);
      const std::vector<float> inner = decoded(kind, h + p * h_bytes, I);
      double peak = 0;
      std::vector<Sum> wanted(static_cast<size_t>(I));
      for (int i = 0; i < I; ++i) {
        const float* bias = experts.biases[e].data();
        const float* part = parts.data() + int64_t(p) * 2 * I;
        const Sum gate = plus(plus(product(experts.gate[e], i, in, false), bias[i]), part[i]);
        const Sum up =
            plus(plus(product(experts.up[e], i, in, false), bias[kernels::up_bias_at(I) + i]), part[I + i]);
        const double both = gated(of, gate.value, up.value);
        wanted[size_t(i)] = {
            both, std::abs(gate.value) * up.magnitude + 1.8 * gate.magnitude * (1 + std::abs(up.value))};
        if (i % 32 == 0) peak = 0;
        peak = std::max(peak, std::abs(both));
        // q8: half a step of its subblock of 32, whose peak is known at its end.
        if (i % 32 != 31 && i != I - 1) continue;
        for (int j = i / 32 * 32; j <= i; ++j) {
          const Sum& sum = wanted[size_t(j)];
          const double rounding = kind == ActivationKind::kQ8     ? peak / 250
                                  : kind == ActivationKind::kBF16 ? std::abs(sum.value) / 256
                                                                  : 0;
          close_to(inner[size_t(j)], sum.value, 1.01 * rounding + 4e-5 * sum.magnitude + 1e-6, "gate_up");
          if (adapted != nullptr)
            close_to(adapted[int64_t(p) * 2 * I + j], sum.value, 4e-5 * sum.magnitude + 1e-6, "kept h");
        }
      }
      for (int n = 0; n < H; ++n) {
        const float bias = experts.biases[e][size_t(kernels::down_bias_at(I) + n)];
        const Sum sum = plus(product(experts.down[e], n, inner, false), bias);
        CHECK(test::close(outputs[int64_t(p) * H + n], sum.value, sum.magnitude));
      }
    }
  });
}

void check_prefill(WeightFormat format, const Sizes& sizes, int tile_tokens, const Kind& of = {}) {
  const Experts experts(format, sizes, of);
  const int H = sizes.hidden, I = sizes.intermediate, T = sizes.tokens, pairs = T * kTopK;
  const std::vector<uint16_t> x = test::random_bf16(size_t(T * H), 4);
  const Grouped grouped(T, of.adapted);
  const std::vector<float> parts = adapters_parts(of, pairs, I);
  const int num_groups = int(grouped.experts.size());
  std::vector<int32_t> tiles(size_t(2 * tile_groups(grouped.begin.data(), num_groups, tile_tokens, nullptr)));
  tile_groups(grouped.begin.data(), num_groups, tile_tokens, tiles.data());
  test::under_schedules([&](WatchedRun& run) {
    const uint8_t* slots = run.copy("slots", experts.slots);
    const ExpertGroups groups = grouped.on(run, slots, experts.bytes, max_groups(pairs, kExperts));
    auto* gate_up = run.memory<float>("gate_up", size_t(pairs * 2 * I));
    float* adapted = of.adapted ? run.copy("adapted", parts) : nullptr;
    auto* h = run.memory<uint16_t>("intermediate", size_t(pairs * I));
    auto* outputs = run.memory<float>("outputs", size_t(pairs * H));
    run.check(launch_prefill_experts(experts.layout, groups, {nullptr, h, outputs, gate_up, adapted},
                                     {run.copy("tiles", tiles), int(tiles.size() / 2), tile_tokens},
                                     {run.copy("x", x), T, kTopK}, nullptr),
              "prefill");
    for (int p = 0; of.adapted && p < pairs; ++p) {  // another launch's are left alone
      if (std::find(grouped.pairs.begin(), grouped.pairs.end(), p) != grouped.pairs.end()) continue;
      const auto first = parts.begin() + std::ptrdiff_t(p) * 2 * I;
      CHECK(std::equal(first, first + 2 * I, adapted + int64_t(p) * 2 * I));
    }
    for (const int32_t p : grouped.pairs) {
      const size_t e = size_t(grouped.ids[size_t(p)]);
      std::vector<float> in(static_cast<size_t>(H)), inner(static_cast<size_t>(I));
      for (int c = 0; c < H; ++c) in[size_t(c)] = test::float_of_bf16(x[size_t(p / kTopK * H + c)]);
      for (int i = 0; i < I; ++i) {
        const float* own = gate_up + int64_t(p) * 2 * I;
        const float* bias = experts.biases[e].data();
        const Sum gate = plus(product(experts.gate[e], i, in, true), bias[i]);
        const Sum up = plus(product(experts.up[e], i, in, true), bias[kernels::up_bias_at(I) + i]);
        CHECK(test::close(own[i], gate.value, gate.magnitude));
        CHECK(test::close(own[I + i], up.value, up.magnitude));
        const float* part = parts.data() + int64_t(p) * 2 * I;
        const double both =
            gated(of, double(own[i]) + double(part[i]), double(own[I + i]) + double(part[I + i]));
        if (of.adapted)
          close_to(adapted[int64_t(p) * 2 * I + i], both, 1e-5 * std::abs(both) + 1e-6, "kept h");
        inner[size_t(i)] = test::float_of_bf16(h[int64_t(p) * I + i]);
        close_to(inner[size_t(i)], both, std::abs(both) / 255 + 1e-5 * std::abs(own[i]) + 1e-30, "gated");
      }
      for (int n = 0; n < H; ++n) {
        const float bias = experts.biases[e][size_t(kernels::down_bias_at(I) + n)];
        const Sum sum = plus(product(experts.down[e], n, inner, true), bias);
        CHECK(test::close(outputs[int64_t(p) * H + n], sum.value, sum.magnitude));
      }
    }
  });
}

// Rows beyond the matrix's are not written, and no weight is rounded but to bf16.
void check_unpack(WeightFormat format, int rows, int columns) {
  PackedMatrix matrix(format, rows, columns, 21);
  const int64_t bytes = kernels::panel_bytes(format, columns) * kernels::num_panels(rows);
  const std::vector<uint8_t> panels(matrix.data(), matrix.data() + bytes);
  test::under_schedules([&](WatchedRun& run) {
    const uint8_t* from = run.copy("panels", panels);
    auto* floats = run.memory<float>("floats", size_t(rows * columns));
    auto* halves = run.memory<uint16_t>("halves", size_t(rows * columns));
    run.check(launch_unpack_matrix({format, from, rows, columns, floats, false}, nullptr), "unpack");
    run.check(launch_unpack_matrix({format, from, rows, columns, halves, true}, nullptr), "unpack to bf16");
    for (int row = 0; row < rows; ++row) {
      for (int c = 0; c < columns; ++c) {
        const double weight = double(matrix.weight(row, c));
        const int at = row * columns + c;
        close_to(floats[at], weight, 1e-6 * std::abs(weight), "unpack");
        CHECK(test::float_of_bf16(halves[at]) == test::rounded(floats[at]));
      }
    }
    CHECK(launch_unpack_matrix({format, from, rows, columns - 8, floats, false}, nullptr) != 0);
  });
}

int whole(int columns, WeightFormat format, int other = 1) {
  const int block = std::max(kernels::layout_of(format).block_columns, other);
  return (columns + block - 1) / block * block;
}

void check_format(WeightFormat format) {
  for (const auto& [hidden, intermediate, tokens] : {Sizes{100, 70, 1}, Sizes{70, 34, 3}, Sizes{288, 40, 9}})
    check_decode(format, {whole(hidden, format), whole(intermediate, format), tokens}, 48 * 1024);
  check_unpack(format, 37, whole(144, format, 16));
  if (format == WeightFormat::kF32) return;
  check_prefill(format, {whole(112, format, 16), whole(80, format, 16), 5}, kFewTokens);
  check_prefill(format, {whole(48, format, 16), whole(80, format, 16), 60}, kFewTokens);
  check_prefill(format, {whole(80, format, 16), whole(144, format, 16), 7}, kManyTokens);
}

}  // namespace

#define TWOFOLD_FORMAT(name) \
  CASE(experts_of_##name) { check_format(WeightFormat::k##name); }
TWOFOLD_WEIGHT_FORMATS(TWOFOLD_FORMAT)
#undef TWOFOLD_FORMAT

CASE(experts_with_biases_and_another_activation) {
  for (const Kind& kind :
       {Kind{kernels::ExpertActivation::kSwigluOai, true, 0.5f},
        Kind{kernels::ExpertActivation::kGeluTanh, false}, Kind{kernels::ExpertActivation::kSilu, true},
        Kind{kernels::ExpertActivation::kSilu, false, 0.5f},
        Kind{kernels::ExpertActivation::kSiluOfLimited, false, 0.5f}}) {
    check_decode(WeightFormat::kMXFP4, {96, 64, 1}, 48 * 1024, kind);
    check_decode(WeightFormat::kF32, {70, 34, 3}, 48 * 1024, kind);
    check_prefill(WeightFormat::kMXFP4, {64, 96, 5}, kFewTokens, kind);
  }
}

CASE(experts_add_the_parts_of_adapters_before_the_activation) {
  const Kind plain{.adapted = true}, biased{kernels::ExpertActivation::kSwigluOai, true, 0.5f, true};
  for (const Kind& kind : {plain, biased}) {
    check_decode(WeightFormat::kBF16, {70, 34, 3}, 48 * 1024, kind);
    check_decode(WeightFormat::kQ8_0, {96, 64, 1}, 48 * 1024, kind);
    check_prefill(WeightFormat::kBF16, {48, 80, 5}, kFewTokens, kind);
  }
  check_decode(WeightFormat::kF32, {2500, 40, 9}, 100 * 1024, plain);
}
CASE(decode_tiles_take_turns_where_shared_memory_is_small) {
  // Room for two tokens at once, and for more than a kernel has without asking.
  check_decode(WeightFormat::kBF16, {96, 64, 9}, 12 * 1024);
  check_decode(WeightFormat::kF32, {2500, 40, 9}, 100 * 1024);
}
