#include "device/expert_stream.h"

#include <stdexcept>
#include <utility>

namespace twofold {

namespace {

UploadSettings settings_of(const ExpertStore& store, double latency_us, double bandwidth_gbps, bool pinned) {
  UploadSettings settings;
  settings.latency_us = latency_us;
  settings.bandwidth_gbps = bandwidth_gbps;
  settings.upload_us = latency_us + double(store.expert_bytes()) / (bandwidth_gbps * 1e3);
  settings.source_pinned = pinned;
  return settings;
}

}  // namespace

ExpertStream::ExpertStream(std::shared_ptr<DeviceApi> api, const ExpertStore& store, double link_latency_us,
                           double link_bandwidth_gbps)
    : api_(std::move(api)),
      store_(store),
      range_(*api_, store.base(), store.allocated_bytes(), store.mapped(), "the experts in host memory"),
      slots_(*api_, 0, kSlots, store.expert_bytes()),
      tables_(*api_, store.num_layers(), store.num_experts(), kSlots),
      uploads_(
          *api_, slots_, tables_,
          [&store](int layer, int expert) {
            return std::span<const std::byte>(store.expert(layer, expert), store.layout(layer, expert).bytes);
          },
          settings_of(store, link_latency_us, link_bandwidth_gbps, range_.pinned())) {}

void ExpertStream::begin(int layer, int expert) {
  if (begun_.size() == kSlots) throw std::logic_error("both staging slots of an expert stream are taken");
  const Transfer what{layer, expert, next_slot_};
  next_slot_ = (next_slot_ + 1) % kSlots;
  begun_.push_back(what);
  (void)uploads_.upload(what, UploadLane::kDemand);
  (void)uploads_.take_landed();  // begins it
}

FfnPanels ExpertStream::enter(StreamHandle compute) {
  if (begun_.empty() || std::exchange(entered_, true))
    throw std::logic_error("an expert stream is entered once for each upload");
  if (!uploads_.take_refused().empty())
    throw DeviceError("an expert could not be uploaded: " + uploads_.last_failure());
  uploads_.compute_waits(compute, begun_.front().layer);
  return layout().panels(slots_.slot(begun_.front().slot));
}

void ExpertStream::leave(StreamHandle compute) {
  if (!std::exchange(entered_, false)) throw std::logic_error("an expert that was not entered was left");
  uploads_.follow_compute(compute);
  begun_.pop_front();
}

const ExpertLayout& ExpertStream::layout() const {
  if (!entered_) throw std::logic_error("no expert was entered");
  return store_.layout(begun_.front().layer, begun_.front().expert);
}

}  // namespace twofold
