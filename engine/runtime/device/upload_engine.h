// The link in real time: copies experts into slots on a stream of its own, demand lane before background lane,
// and learns from events what has landed. The host decides the order, not the stream: background uploads wait
// on the host, and only so many are begun that a demand upload queued after them waits at most
// max_background_us.
//
// An upload into a slot that the current step may still read waits (SlotTables). Copies begun together travel
// as one batch, never large and small ones mixed. Only the whole batch is timed; its uploads get their share by
// bytes. The beginning is the host's time (issued, and not before the previous copy has ended), the duration
// the device's.
//
// Where the store is not pinned, experts pass through a ring of pinned chunks.
#pragma once
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "device/device_memory.h"
#include "device/slot_pool.h"
#include "device/slot_tables.h"
#include "moe/correction/online_correction.h"
#include "twofold/link.h"

namespace twofold {

struct UploadSettings {
  double latency_us = 0;      // latency of one copy, by the machine's profile
  double bandwidth_gbps = 1;  // link bandwidth, by the machine's profile
  double upload_us = 0;       // one typical expert, by the cost model
  double start_us = -1;       // where the link's clock begins, on the device's; -1: now
  bool source_pinned = true;
  double max_background_us = 500;
  int max_batch = 16;            // uploads
  size_t small_bytes = 250'000;  // smaller copies would make a batch with larger ones synchronous
  size_t chunk_bytes = size_t{4} << 20;
  int num_chunks = 4;
  int max_failures = 8;  // in a row, before the device counts as broken
};

struct UploadCounts {
  int64_t landed = 0;
  int64_t failed = 0;
  int64_t batches = 0;
  int64_t bytes = 0;
  double busy_us = 0;  // time the link was busy
  int64_t held = 0;    // uploads that waited for a reader of the slot
};

class UploadEngine final : public Link {
 public:
  // Bytes of an expert in the host's store.
  using Source = std::function<std::span<const std::byte>(int layer, int expert)>;

  UploadEngine(DeviceApi& api, const SlotPool& slots, const SlotTables& tables, Source source,
               const UploadSettings& settings);
  ~UploadEngine() override;

  double now_us() const override { return api_.now_us() - start_us_; }
  double upload_us() const override { return settings_.upload_us * correction(); }
  double backlog_us() const override;
  double queued_us() const override;
  int num_waiting() const override { return int(waiting_.size()); }

  Upload upload(const Transfer& what, UploadLane lane, double duration_us = -1) override;
  bool may_begin(int slot) const override { return !tables_.awaits_reader(slot); }
  bool cancel_background(int slot) override;
  // Begins queued uploads as far as the lanes allow. Throws DeviceError when the device is broken.
  void advance(double us) override;
  std::vector<Upload> take_landed() override;
  std::optional<Upload> take_if_landed(const Transfer& what) override;
  void drain() override;

  // Uploads an expert at once, before the first step: no events, no lanes. Waits for it.
  void fill(const Transfer& what);

  // Work given to `compute` from now on runs after the layer's demand uploads begun so far have landed; the
  // next layer's, begun ahead, continue.
  void compute_waits(StreamHandle compute, int layer);
  // The host waits for all of them. Throws DeviceError if one of them, or an earlier one whose failure was not
  // reported yet, failed during its copy.
  void host_waits();
  // Copies begun from now on run after what `compute` was given so far: that work may read slots.
  void follow_compute(StreamHandle compute);
  // Slots of demand uploads that could not even begin since the last call; their experts must run elsewhere.
  std::vector<int> take_refused();

  // Ratio of measured to predicted link time, so far.
  double correction() const { return correction_.factor(); }
  const UploadCounts& counts() const { return counts_; }
  const std::string& last_failure() const { return last_failure_; }

 private:
  struct Job {
    Upload upload;
    std::span<const std::byte> bytes;
    bool held = false;
  };
  // Copies between two events on the stream.
  struct Batch {
    EventHandle begin, end;
    std::vector<Job> jobs;
    size_t done = 0;  // bytes of its one job that have passed through chunks
    double issued_us = 0;
    double predicted_us = 0;
    int64_t number = 0;
    bool refused = false;  // could not be begun, as far as is known

    UploadLane lane() const { return jobs.front().upload.lane; }
  };
  struct Chunk {
    std::byte* memory = nullptr;
    EventHandle passed;
    bool busy = false;
    int64_t batch = -1;  // the last batch whose bytes it held
  };

  double predicted_us(std::span<const Job> jobs) const;
  double background_in_flight_us() const;
  void begin_demand();
  void begin_waiting();
  // Begins uploads that may travel together from the front of the queue, in at most room_us but at least one;
  // held uploads keep their place. False if nothing is ready.
  bool begin_from(std::deque<Job>& queue, double room_us);
  // Copies the rest of its bytes; false if it would have to wait for a chunk and may not.
  bool pass_through_chunks(Batch& batch, bool may_wait);
  void end_batch(Batch batch, const DeviceResult& result);
  // Frees a chunk whose copy has completed; an error is passed to its batch.
  void free_chunk(Chunk& chunk, const DeviceResult& passed);
  void poll();
  void land(const Batch& batch, const DeviceResult& result);
  void fail(const DeviceResult& result);

  DeviceApi& api_;
  const SlotPool& slots_;
  const SlotTables& tables_;
  Source source_;
  UploadSettings settings_;
  double start_us_;
  EventPool events_;
  Stream stream_;
  EventHandle compute_passed_;
  std::deque<Job> demand_, waiting_;
  std::optional<Batch> passing_;  // a background upload of which some chunks are being copied
  std::deque<Batch> in_flight_;
  std::vector<Upload> landed_;
  std::vector<int> refused_;
  PinnedMemory ring_memory_;
  std::vector<Chunk> ring_;
  size_t next_chunk_ = 0;
  std::vector<std::pair<int64_t, DeviceResult>> lost_;  // batches of which a chunk failed
  double free_at_us_ = 0;   // when the link is expected to finish the begun copies
  double last_end_us_ = 0;  // end of the copy that landed last
  int failures_in_a_row_ = 0;
  int64_t num_demand_lost_ = 0, num_loss_reported_ = 0;
  std::string last_failure_;
  OnlineCorrection correction_;
  UploadCounts counts_;
};

}  // namespace twofold
