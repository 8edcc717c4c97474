// Configuration of the expert cache: its checks, the slots of each layer, the price of an upload.
#include <algorithm>
#include <cmath>
#include <sstream>
#include <string>
#include <type_traits>
#include <utility>

#include "twofold/reject.h"
#include "twofold/scheduler_config.h"

namespace twofold {

namespace {

// An upload slows the CPU's experts only while there are any: between a third and two thirds of decode on the
// machines described, and simulated speed is flat around it (docs/explanation/scheduling.md).
constexpr double kCpuBusyShare = 0.5;

template <typename Value>
void check_range(const char* name, const Value& value, const OptionRange& range) {
  if constexpr (std::is_arithmetic_v<Value>) {
    if (double(value) >= range.low && double(value) <= range.high) return;
    std::ostringstream expected;
    expected << "a number of at least " << range.low;
    if (std::isfinite(range.high)) expected << " and at most " << range.high;
    reject(std::string("layer scheduler: ") + name, value, expected.str());
  }
}

}  // namespace

void CacheConfig::validate() const {
  if (num_layers < 0) reject("expert cache: num_layers", num_layers, ">= 0");
  if (num_experts < 1 || num_experts > 65535) reject("expert cache: num_experts", num_experts, "1 ... 65535");
  if (top_k < 1 || top_k > num_experts) reject("expert cache: top_k", top_k, "1 ... num_experts");
  if (!pins.empty() && pins.size() != static_cast<size_t>(num_layers)) {
    reject("expert cache: pins", std::to_string(pins.size()) + " entries",
           "none or " + std::to_string(num_layers) + " (one per layer)");
  }
  if (slots_per_layer.size() != static_cast<size_t>(num_layers)) {
    reject("expert cache: slots_per_layer", std::to_string(slots_per_layer.size()) + " entries",
           std::to_string(num_layers) + " (one per layer)");
  }
  for (int slots : slots_per_layer) {
    if (slots < 0 || (slots > num_experts && !pooled())) {
      reject("expert cache: slots_per_layer", slots, "0 ... num_experts");
    }
  }
  if (!(std::isfinite(upload_price) && upload_price >= 0)) {
    reject("expert cache: upload_price", upload_price, "a finite number >= 0 (in misses)");
  }
  if (!prior_usage.empty() &&
      prior_usage.size() != static_cast<size_t>(num_layers) * static_cast<size_t>(num_experts)) {
    reject("expert cache: prior_usage", std::to_string(prior_usage.size()) + " entries",
           "none or num_layers * num_experts");
  }
}

std::vector<int> spread_slots(int num_slots, int num_layers, int num_experts,
                              std::span<const LayerPin> pins) {
  if (num_slots < 0 || num_layers < 0 || num_experts < 1) {
    reject("expert cache: num_slots, num_layers, num_experts",
           std::to_string(num_slots) + ", " + std::to_string(num_layers) + ", " + std::to_string(num_experts),
           ">= 0, >= 0, >= 1");
  }
  std::vector<LayerPin> of(pins.begin(), pins.end());
  of.resize(static_cast<size_t>(num_layers), LayerPin::kFree);
  const int num_free = static_cast<int>(std::count(of.begin(), of.end(), LayerPin::kFree));
  const int pinned = num_experts * static_cast<int>(std::count(of.begin(), of.end(), LayerPin::kResident));
  if (num_slots < pinned) {
    reject("expert cache: num_slots", num_slots,
           "at least " + std::to_string(pinned) + ", all experts of the layers that are pinned,");
  }
  const int slots = std::min(num_slots - pinned, num_free * num_experts);
  std::vector<int> of_layer;
  int nth = 0;  // among the free ones
  for (const LayerPin pin : of) {
    if (pin != LayerPin::kFree) {
      of_layer.push_back(pin == LayerPin::kResident ? num_experts : 0);
      continue;
    }
    of_layer.push_back(slots / num_free + (nth < slots % num_free));
    ++nth;
  }
  return of_layer;
}

double default_upload_price(const DeviceCost& cost) {
  return kCpuBusyShare * cost.profile().contention * cost.upload_us() / cost.miss_us();
}

void LayerSchedulerConfig::validate(int devices, size_t num_links) const {
#define TWOFOLD_OPTION_CHECK(type, name, otherwise, range, help) check_range(#name, name, range);
  TWOFOLD_SCHEDULER_OPTIONS(TWOFOLD_OPTION_CHECK)
#undef TWOFOLD_OPTION_CHECK
  if (num_links != static_cast<size_t>(devices) || num_devices() != devices) {
    throw std::invalid_argument("layer scheduler: slots for " + std::to_string(num_devices()) +
                                " devices and " + std::to_string(num_links) + " links given, " +
                                std::to_string(devices) + " of each expected, one per device of the machine");
  }
  const auto is_known = [devices](int home) { return home >= 0 && home < devices; };
  if (!homes.empty() && (homes.size() != static_cast<size_t>(num_layers) ||
                         !std::all_of(homes.begin(), homes.end(), is_known))) {
    throw std::invalid_argument("layer scheduler: homes of " + std::to_string(homes.size()) +
                                " layers given, a device for each of " + std::to_string(num_layers) +
                                " expected");
  }
}

std::unique_ptr<ExpertCache> make_cache(const CostModel& cost, const LayerSchedulerConfig& config,
                                        int device) {
  CacheConfig cache;
  cache.num_layers = config.num_layers;
  cache.num_experts = config.num_experts;
  cache.top_k = config.top_k;
  cache.pins = config.pins;
  for (int layer = 0; layer < static_cast<int>(cache.pins.size()); ++layer) {
    LayerPin& pin = cache.pins[static_cast<size_t>(layer)];
    if (pin == LayerPin::kResident && config.home(layer) != device) pin = LayerPin::kNever;
  }
  cache.slots_per_layer = spread_slots(config.slots[static_cast<size_t>(device)], config.num_layers,
                                       config.num_experts, cache.pins);
  cache.policy = config.policy;
  cache.upload_price =
      config.upload_price < 0 ? default_upload_price(cost.device(device)) : config.upload_price;
  cache.shared_pool = config.shared_pool;
  cache.prior_usage = config.prior_usage;
  return std::make_unique<ExpertCache>(std::move(cache));
}

}  // namespace twofold
