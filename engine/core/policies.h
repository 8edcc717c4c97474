// The policies by name; each maker lives with its policy. Private to core: everyone else asks
// make_cache_policy.
#pragma once

#include <memory>

#include "twofold/cache_policy.h"

namespace twofold {

std::unique_ptr<CachePolicy> make_payback(const CacheConfig& config);
std::unique_ptr<CachePolicy> make_lru(const CacheConfig& config);
std::unique_ptr<CachePolicy> make_lfu(const CacheConfig& config);
std::unique_ptr<CachePolicy> make_lfru(const CacheConfig& config);
std::unique_ptr<CachePolicy> make_mrs(const CacheConfig& config);
std::unique_ptr<CachePolicy> make_two_in_eight(const CacheConfig& config);
std::unique_ptr<CachePolicy> make_static(const CacheConfig& config);
std::unique_ptr<CachePolicy> make_belady(const CacheConfig& config);
std::unique_ptr<CachePolicy> make_oracle_payback(const CacheConfig& config);

}  // namespace twofold
