// The registry of cache policies. Each policy's factory is in the file that implements it.
#include "twofold/cache_policy.h"

#include <stdexcept>

#include "twofold/expert_cache.h"

namespace twofold {

void CachePolicy::set_future(const std::vector<std::vector<std::vector<int>>>&) {
  throw std::invalid_argument(
      "cache policy: a future was given to an online policy; only offline policies take one");
}

void CachePolicy::restore(std::span<const double> state) {
  if (!state.empty()) {
    throw std::runtime_error("cache policy: saved state of " + std::to_string(state.size()) +
                             " values given, none expected by this policy");
  }
}

MakeCachePolicy make_payback, make_lru, make_lfu, make_lfru, make_mrs, make_two_in_eight, make_frequency_lru,
    make_pinned_lru, make_half_lru, make_static, make_belady, make_oracle_payback;

namespace {

using enum Prefetching;

// name, make, offline, pooled, prefetches, help
constexpr CachePolicyEntry kRegistry[] = {
    {"payback", make_payback, false, true, kAuto,
     "admits an expert whose value exceeds the victim's by the price of an upload"},
    {"lru", make_lru, false, false, kOnRequest, "evicts the least recently used"},
    {"lfu", make_lfu, false, false, kOnRequest, "evicts the least frequently used"},
    {"lfru", make_lfru, false, false, kOnRequest, "evicts the lowest frequency over age"},
    {"mrs", make_mrs, false, false, kOnRequest, "evicts the lowest recent router weight"},
    {"two-in-eight", make_two_in_eight, false, false, kOnRequest,
     "lru; admits at the second use within eight steps"},
    {"frequency-lru", make_frequency_lru, false, false, kOnRequest,
     "evicts the lowest class of recent frequency, within it lru"},
    {"pinned-lru", make_pinned_lru, false, true, kOnRequest,
     "half of the slots keep the most used experts of earlier runs, the rest lru"},
    {"half-lru", make_half_lru, false, true, kOnRequest, "lru; admits half of the misses"},
    {"static", make_static, false, false, kNever, "never evicts"},
    {"belady", make_belady, true, false, kOnRequest, "evicts the furthest next use"},
    {"oracle-payback", make_oracle_payback, true, false, kOnRequest, "payback with the true future uses"},
};

}  // namespace

std::span<const CachePolicyEntry> cache_policies() { return kRegistry; }

const CachePolicyEntry& cache_policy(const std::string& name) {
  std::string valid;
  for (const CachePolicyEntry& entry : kRegistry) {
    if (name == entry.name) return entry;
    valid += (valid.empty() ? "" : ", ") + std::string(entry.name);
  }
  throw std::invalid_argument("expert cache: policy '" + name + "' given, one of " + valid + " expected");
}

}  // namespace twofold
