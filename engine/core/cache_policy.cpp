#include "twofold/cache_policy.h"

#include <stdexcept>

#include "policies.h"
#include "twofold/expert_cache.h"

namespace twofold {

void CachePolicy::set_future(const std::vector<std::vector<std::vector<int>>>&) {
  throw std::invalid_argument(
      "cache policy: a future was given to a policy that works online; only belady and "
      "oracle-payback take one");
}

void CachePolicy::restore(std::span<const double> state) {
  if (!state.empty()) {
    throw std::runtime_error("cache policy: saved state of " + std::to_string(state.size()) +
                             " values given, none expected by this policy");
  }
}

namespace {

using Maker = std::unique_ptr<CachePolicy> (*)(const CacheConfig&);

struct Entry {
  const char* name;
  Maker make;
};

constexpr Entry kRegistry[] = {
    {"payback", make_payback}, {"lru", make_lru},       {"lfu", make_lfu},
    {"lfru", make_lfru},       {"mrs", make_mrs},       {"two-in-eight", make_two_in_eight},
    {"static", make_static},   {"belady", make_belady}, {"oracle-payback", make_oracle_payback},
};

}  // namespace

const std::vector<std::string>& cache_policy_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> list;
    for (const Entry& entry : kRegistry) list.emplace_back(entry.name);
    return list;
  }();
  return names;
}

bool cache_policy_is_offline(const std::string& name) { return name == "belady" || name == "oracle-payback"; }

std::unique_ptr<CachePolicy> make_cache_policy(const CacheConfig& config) {
  for (const Entry& entry : kRegistry) {
    if (config.policy == entry.name) return entry.make(config);
  }
  std::string valid;
  for (const std::string& name : cache_policy_names()) valid += (valid.empty() ? "" : ", ") + name;
  throw std::invalid_argument("expert cache: policy '" + config.policy + "' given, one of " + valid +
                              " expected");
}

}  // namespace twofold
