// What a layer costs as it was placed: collects each lane's loads and asks the cost model.
#pragma once

#include <span>
#include <vector>

#include "twofold/devices.h"

namespace twofold {

class LayerPricer {
 public:
  explicit LayerPricer(int num_devices) : devices_(static_cast<size_t>(num_devices)) {}

  // The work of the decision's lanes; valid until the next call. Uploads of `shares` are not yet with the links,
  // except those begun ahead. deferred_loads: tokens per expert that the CPU runs after the layer, in experts'
  // order; empty: none.
  const LayerWork& work_of(const LayerDecision& decision, std::span<const DeviceShare> shares,
                           std::span<const int> deferred_tokens, const Devices& devices,
                           double cpu_backlog_us);
  // The same for later changes of the links' queues.
  std::span<DeviceWork> of_devices() { return work_of_devices_; }
  const LayerWork& work() const { return work_; }

 private:
  struct Loads {
    std::vector<int> hits, fetched;
  };
  std::vector<Loads> devices_;
  std::vector<int> cpu_, deferred_;
  std::vector<DeviceWork> work_of_devices_;
  LayerWork work_;
};

}  // namespace twofold
