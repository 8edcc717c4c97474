// Derived values of a scheduler's configuration: the price of an upload, and the cache.
#include <utility>

#include "twofold/layer_scheduler.h"

namespace twofold {

namespace {

// An upload slows the CPU's experts only while there are any: between a third and two thirds of decode on the
// machines described, and simulated speed is flat around it (docs/explanation/scheduling.md).
constexpr double kCpuBusyShare = 0.5;

}  // namespace

double default_upload_price(const CostModel& cost) {
  return kCpuBusyShare * cost.profile().contention * cost.upload_us() / cost.miss_us();
}

std::unique_ptr<ExpertCache> make_cache(const CostModel& cost, const LayerSchedulerConfig& config) {
  CacheConfig cache;
  cache.num_layers = config.num_layers;
  cache.num_experts = config.num_experts;
  cache.top_k = config.top_k;
  cache.slots_per_layer = spread_slots(config.num_slots, config.num_layers, config.num_experts, config.pins);
  cache.pins = config.pins;
  cache.policy = config.policy;
  cache.upload_price = config.upload_price < 0 ? default_upload_price(cost) : config.upload_price;
  cache.shared_pool = config.shared_pool;
  cache.prior_usage = config.prior_usage;
  return ExpertCache::make(std::move(cache));
}

}  // namespace twofold
