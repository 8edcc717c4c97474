#include "device/link_probe.h"

#include <algorithm>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "device/slot_pool.h"
#include "device/slot_tables.h"
#include "device/upload_engine.h"

namespace twofold {

LinkProbe::LinkProbe(std::shared_ptr<DeviceApi> api, size_t most_bytes)
    : api_(std::move(api)),
      most_bytes_(most_bytes),
      target_(*api_, kParts * most_bytes, gib_text(kParts * most_bytes) + " to time copies into",
              "end other programs on the GPU"),
      source_(*api_, kParts * most_bytes, gib_text(kParts * most_bytes) + " to time copies from"),
      stream_(*api_),
      events_(*api_),
      begin_(events_.take()),
      end_(events_.take()) {}

double LinkProbe::copies_us(size_t bytes, int count, bool asleep) {
  if (bytes < 1 || bytes > most_bytes_ || count < 1) {
    throw std::invalid_argument("copies of " + std::to_string(bytes) + " bytes, " + std::to_string(count) +
                                " at once given; 1 to " + std::to_string(most_bytes_) +
                                " bytes and at least one copy expected");
  }
  std::vector<HostToDevice> copies;
  for (int i = 0; i < count; ++i) {
    if (next_ + bytes > kParts * most_bytes_) next_ = 0;
    copies.push_back({target_.data() + next_, source_.data() + next_, bytes});
    next_ += bytes;
  }
  require(api_->record(begin_, stream_.get()), "time copies");
  require(api_->copy(copies, stream_.get()), "time copies");
  require(api_->record(end_, stream_.get()), "time copies");
  while (asleep && api_->query(end_).code == DeviceCode::kNotReady) api_->sleep_us(100);
  require(api_->synchronise(end_), "time copies");
  double us = 0;
  require(api_->elapsed_us(begin_, end_, us), "time copies");
  return us;
}

UploadProbe probe_uploads(DeviceApi& api, const ExpertStore& store, int num_uploads, bool demand) {
  if (num_uploads < 1) {
    throw std::invalid_argument(std::to_string(num_uploads) + " uploads given, at least one expected");
  }
  // At most as many slots as uploads in flight: a slot is written again only after its upload has landed.
  const int num_slots = std::min(num_uploads, 64);
  const SlotPool slots(api, num_slots, 0, store.expert_bytes());
  const SlotTables tables(api, store.num_layers(), store.num_experts(), num_slots);
  const PinnedRange pinned(api, store.base(), store.allocated_bytes(), store.mapped(),
                           "the experts in host memory");
  UploadSettings settings;
  // Uncalibrated: the correction learns the link's real rate within the first uploads.
  settings.latency_us = 10;
  settings.bandwidth_gbps = 25;
  settings.upload_us = settings.latency_us + double(store.expert_bytes()) / (settings.bandwidth_gbps * 1e3);
  settings.source_pinned = pinned.pinned();
  const auto source = [&store](int layer, int expert) {
    return std::span<const std::byte>(store.expert(layer, expert), store.layout(layer, expert).bytes);
  };
  UploadEngine engine(api, slots, tables, source, settings);
  UploadProbe probe;
  probe.pinned = pinned.pinned();
  const int num_experts = store.num_layers() * store.num_experts();
  const auto carry = [&](int first, int count) {
    for (int i = first; i < first + count; ++i) {
      const int number = i % num_experts;
      const Transfer what{number / store.num_experts(), number % store.num_experts(), i % num_slots};
      (void)engine.upload(what, demand ? UploadLane::kDemand : UploadLane::kBackground);
    }
    engine.drain();
    (void)engine.take_landed();
  };
  carry(0, num_slots);  // first touches, and the correction's beginning
  const UploadCounts before = engine.counts();
  const double began = engine.now_us();
  for (int done = 0; done < num_uploads; done += num_slots) {
    carry(done, std::min(num_slots, num_uploads - done));
  }
  probe.us = engine.now_us() - began;
  probe.bytes = size_t(engine.counts().bytes - before.bytes);
  probe.busy_us = engine.counts().busy_us - before.busy_us;
  probe.batches = int(engine.counts().batches - before.batches);
  if (!engine.last_failure().empty()) throw DeviceError("an upload failed: " + engine.last_failure());
  return probe;
}

}  // namespace twofold
