// Warm start: the cache's learned state in a small binary file. Little-endian; magic, version, shape, policy
// name, then doubles. Everything is checked before anything is changed.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <fstream>
#include <numeric>
#include <stdexcept>

#include "twofold/expert_cache.h"

namespace twofold {
namespace {

constexpr std::array<char, 8> kMagic{'T', 'W', 'F', 'C', 'A', 'C', 'H', '1'};
constexpr uint64_t kMaxValues = uint64_t{1} << 28;

struct Header {
  std::array<char, 8> magic{};
  int32_t num_layers = 0;
  int32_t num_experts = 0;
  int32_t top_k = 0;
  std::array<char, 28> policy{};
  uint64_t num_state = 0;
};

void write_doubles(std::ofstream& file, const std::vector<double>& values) {
  file.write(reinterpret_cast<const char*>(values.data()),
             static_cast<std::streamsize>(values.size() * sizeof(double)));
}

std::vector<double> read_doubles(std::ifstream& file, size_t count, const std::string& path) {
  std::vector<double> values(count);
  file.read(reinterpret_cast<char*>(values.data()), static_cast<std::streamsize>(count * sizeof(double)));
  if (!file) {
    throw std::runtime_error("warm start " + path + ": file ends early; delete it to start cold");
  }
  for (double value : values) {
    if (!std::isfinite(value)) {
      throw std::runtime_error("warm start " + path +
                               ": holds a value that is not a number; delete it to start cold");
    }
  }
  return values;
}

}  // namespace

void ExpertCache::save(const std::string& path, std::span<const uint8_t> held) const {
  const std::vector<double> state = policy_->state();
  Header header;
  header.magic = kMagic;
  header.num_layers = config().num_layers;
  header.num_experts = config().num_experts;
  header.top_k = config().top_k;
  config().policy.copy(header.policy.data(), header.policy.size() - 1);
  header.num_state = state.size();
  std::vector<double> resident(state_.size());
  for (size_t cell = 0; cell < state_.size(); ++cell)
    resident[cell] = (held.empty() ? state_[cell] != ExpertState::kAbsent : held[cell] != 0) ? 1 : 0;

  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(reinterpret_cast<const char*>(&header), sizeof(header));
  write_doubles(file, usage_);
  write_doubles(file, resident);
  write_doubles(file, state);
  file.flush();
  if (!file)
    throw std::runtime_error("warm start " + path + ": cannot be written; check the folder and free space");
}

std::vector<int> ExpertCache::load(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("warm start " + path + ": cannot be opened");
  Header header;
  file.read(reinterpret_cast<char*>(&header), sizeof(header));
  if (!file || header.magic != kMagic) {
    throw std::runtime_error("warm start " + path + ": not a Twofold cache file (or another version)");
  }
  header.policy.back() = 0;
  if (header.num_layers != config().num_layers || header.num_experts != config().num_experts ||
      header.top_k != config().top_k || config().policy != header.policy.data()) {
    throw std::runtime_error("warm start " + path + ": made for " + std::to_string(header.num_layers) +
                             " layers x " + std::to_string(header.num_experts) + " experts, top-" +
                             std::to_string(header.top_k) + ", policy " + header.policy.data() +
                             "; expected " + std::to_string(config().num_layers) + " x " +
                             std::to_string(config().num_experts) + ", top-" +
                             std::to_string(config().top_k) + ", policy " + config().policy);
  }
  if (header.num_state > kMaxValues) throw std::runtime_error("warm start " + path + ": damaged header");
  const std::vector<double> usage = read_doubles(file, usage_.size(), path);
  const std::vector<double> resident = read_doubles(file, state_.size(), path);
  const std::vector<double> state = read_doubles(file, header.num_state, path);
  policy_->restore(state);
  usage_ = usage;
  std::fill(values_fresh_.begin(), values_fresh_.end(), uint8_t{0});

  std::vector<int> order(state_.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    const auto x = static_cast<size_t>(a);
    const auto y = static_cast<size_t>(b);
    if (resident[x] != resident[y]) return resident[x] > resident[y];
    return usage[x] > usage[y];
  });
  return order;
}

}  // namespace twofold
