#include "dispatch_measured.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <utility>

namespace twofold::kernels {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kTokens = 32, kRows = 64, kColumns = 512;  // the weights stay in the second-level cache
constexpr int kMaxRounds = 10;
constexpr auto kMostTime = std::chrono::milliseconds(4);  // for one format, on a CPU that is busy elsewhere
constexpr double kClearlyFaster = 0.8;                    // the product of two times: about a tenth off each

struct Free {
  void operator()(void* p) const { std::free(p); }
};
using Buffer = std::unique_ptr<void, Free>;

Buffer zeros(int64_t bytes) {
  const size_t size = static_cast<size_t>((bytes + 63) / 64 * 64);
  Buffer buffer(std::aligned_alloc(64, size));
  if (buffer == nullptr) throw std::bad_alloc();
  std::memset(buffer.get(), 0, size);
  return buffer;
}

struct Candidate {
  FormatKernels kernels;
  double one_us = std::numeric_limits<double>::infinity(), many_us = one_us;
};

// All products for the activations that the best level takes, best level last; not the scalar ones. Of BF16
// weights those for float32 activations too: where bfloat16 instructions run at half their speed (Intel's
// vdpbf16ps, 94 against 185 GFLOP/s a core) the level below is faster, and it rounds less.
std::vector<Candidate> candidates(const std::vector<const KernelTable*>& levels, WeightFormat format) {
  const ActivationKind kind = levels.back()->of(format).activation;
  std::vector<Candidate> found;
  for (size_t l = 1; l < levels.size(); ++l) {
    const FormatKernels& kernels = levels[l]->of(format);
    const bool known = std::any_of(found.begin(), found.end(), [&](const Candidate& other) {
      return other.kernels.matmul == kernels.matmul;
    });
    if ((kernels.activation == kind || format == WeightFormat::kBF16) &&
        kernels.matmul != levels[0]->of(format).matmul && !known) {
      found.push_back({.kernels = kernels});
    }
  }
  return found;
}

double took_us(const FormatKernels& kernels, const void* x, int64_t row_bytes, const void* weights, float* y,
               int tokens) {
  const Clock::time_point start = Clock::now();
  kernels.matmul(x, row_bytes, weights, y, kRows, tokens, kRows, kColumns);
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

// The candidates take turns and the best turn counts, so that a busy neighbour hits all of them or none.
void measure(WeightFormat format, std::vector<Candidate>& all) {
  const auto row_bytes = [](const Candidate& c) {
    return activation_row_stride(c.kernels.activation, kColumns);
  };
  int64_t widest = 0;
  for (const Candidate& c : all) widest = std::max(widest, row_bytes(c));
  const Buffer x = zeros(widest * kTokens), weights = zeros(packed_bytes(format, kRows, kColumns));
  const Buffer y = zeros(static_cast<int64_t>(sizeof(float)) * kTokens * kRows);
  float* out = static_cast<float*>(y.get());
  const Clock::time_point end = Clock::now() + kMostTime;
  for (int turn = 0; turn < kMaxRounds && (turn == 0 || Clock::now() < end); ++turn) {
    for (Candidate& c : all) {
      const double many_us = took_us(c.kernels, x.get(), row_bytes(c), weights.get(), out, kTokens);
      const double one_us = took_us(c.kernels, x.get(), row_bytes(c), weights.get(), out, 1);
      c.many_us = std::min(c.many_us, many_us);
      c.one_us = std::min(c.one_us, one_us);
    }
  }
}

const Candidate& fastest(const std::vector<Candidate>& all) {
  const Candidate* best = &all.back();
  double to_beat = kClearlyFaster * best->one_us * best->many_us;
  for (const Candidate& c : all) {
    if (c.one_us * c.many_us >= to_beat) continue;
    best = &c;
    to_beat = c.one_us * c.many_us;
  }
  return *best;
}

}  // namespace

std::string choose_by_measurement(const std::vector<const KernelTable*>& levels, KernelTable& table) {
  std::vector<std::pair<std::string, std::string>> chosen;  // level, its formats
  for (int f = 0; f < kNumWeightFormats; ++f) {
    const WeightFormat format = static_cast<WeightFormat>(f);
    std::vector<Candidate> all = candidates(levels, format);
    if (all.size() < 2) continue;
    measure(format, all);
    table.formats[f] = fastest(all).kernels;
    const std::string level = table.formats[f].level;
    const auto it =
        std::find_if(chosen.begin(), chosen.end(), [&](const auto& c) { return c.first == level; });
    if (it == chosen.end()) {
      chosen.emplace_back(level, layout_of(format).name);
    } else {
      it->second += std::string(", ") + layout_of(format).name;
    }
  }
  std::string text;
  for (const auto& [level, formats] : chosen) text += (text.empty() ? "" : "; ") + level + " for " + formats;
  return text;
}

}  // namespace twofold::kernels
