#include "device/slot_tables.h"

#include <algorithm>
#include <cstring>

namespace twofold {

SlotTables::SlotTables(DeviceApi& api, int num_layers, int num_experts, int num_slots)
    : api_(api),
      num_experts_(num_experts),
      published_(size_t(num_layers) * size_t(num_experts), -1),
      reader_(size_t(num_slots), -1),
      device_(api, std::max<size_t>(published_.size(), 1) * sizeof(int32_t), "the slot table",
              "lower --gpu-memory-utilization"),
      host_(api, 2 * std::max<size_t>(published_.size(), 1) * sizeof(int32_t), "the slot table"),
      events_(api),
      copied_{events_.take(), events_.take()} {}

SlotTables::~SlotTables() {
  for (int turn : {0, 1}) {
    if (copying_[turn]) (void)api_.synchronise(copied_[turn]);
  }
}

void SlotTables::begin_step(const ExpertCache& cache, StreamHandle compute) {
  const int num_layers = int(published_.size()) / num_experts_;
  bool changed = !any_published_ && !published_.empty();
  std::fill(reader_.begin(), reader_.end(), -1);
  size_t cell = 0;
  for (int layer = 0; layer < num_layers; ++layer) {
    for (int expert = 0; expert < num_experts_; ++expert, ++cell) {
      const int slot = cache.is_resident(layer, expert) ? cache.slot_of(layer, expert) : -1;
      changed |= published_[cell] != slot;
      published_[cell] = slot;
      if (slot >= 0) reader_[size_t(slot)] = layer;
    }
  }
  if (changed) {
    const size_t bytes = published_.size() * sizeof(int32_t);
    std::byte* copy = host_.data() + size_t(next_copy_) * bytes;
    if (copying_[next_copy_])
      require(api_.synchronise(copied_[next_copy_]), "read the slot table of two steps ago");
    std::memcpy(copy, published_.data(), bytes);
    const HostToDevice transfer{device_.data(), copy, bytes};
    any_published_ = false;  // until it is known to be on its way
    require(api_.copy({&transfer, 1}, compute), "publish the slot table");
    require(api_.record(copied_[next_copy_], compute), "publish the slot table");
    copying_[next_copy_] = true;
    any_published_ = true;
    next_copy_ ^= 1;
  }
  in_step_ = true;
  reached_ = -1;
}

void SlotTables::reached(int layer) { reached_ = std::max(reached_, layer); }

void SlotTables::end_step() { in_step_ = false; }

}  // namespace twofold
