// The virtual clock of emulated and simulated runs, with a serial link that has two lanes: demand uploads (a
// layer waits for them) overtake background uploads (admissions, prefetches) that have not begun; a copy
// under way is never interrupted. No threads, no wall clock.
//
// How a layer is played (executor and simulator alike):
//   LayerWork work{hits, fetched, cpu, timeline.backlog_us(), timeline.queued_us()};
//   LayerTimes t = cost.layer(work);                       // price it
//   for each fetched: timeline.enqueue_demand(tag);        // occupy the link; lands exactly as `cost.layer`
//   said for each admitted: timeline.enqueue_background(tag);   // after this layer's demand uploads
//   timeline.advance(t.layer_us);
//   at a step boundary: for (const Upload& u : timeline.take_landed()) cache.publish(u.tag);
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <vector>

namespace twofold {

enum class UploadLane : uint8_t { kDemand = 0, kBackground = 1 };

struct Upload {
  int64_t tag = 0;  // the caller's, e.g. a slot
  UploadLane lane = UploadLane::kDemand;
  double queued_us = 0;
  double begin_us = 0;
  double end_us = 0;
};

class Timeline {
 public:
  // upload_us: how long the link is busy with one expert (CostModel::upload_us).
  explicit Timeline(double upload_us);

  double now_us() const { return now_us_; }
  double upload_us() const { return upload_us_; }
  // Until a demand upload enqueued now would begin.
  double backlog_us() const;
  // Link work not yet done, background uploads that wait included.
  double queued_us() const;
  int num_waiting() const { return static_cast<int>(waiting_.size()); }

  // Begins as soon as the copy under way and earlier demand uploads end. Its times are final. duration_us <
  // 0: upload_us.
  Upload enqueue_demand(int64_t tag, double duration_us = -1);
  // Begins when nothing else is left to do. Its times are known once it has landed.
  void enqueue_background(int64_t tag);
  // Withdraws background uploads that have not begun; false if it has begun or is unknown.
  bool cancel_background(int64_t tag);

  // Moves the clock; background uploads begin in the link's idle time.
  void advance(double us);
  // Uploads that have ended by now, in order of their end; each is returned once.
  std::vector<Upload> take_landed();
  // One of them alone, before the others are asked for; empty if it has not landed or is unknown.
  std::optional<Upload> take_if_landed(int64_t tag);
  // Moves the clock until every queued upload has landed.
  void drain();

 private:
  void start_waiting(double until_us);

  double upload_us_;
  double now_us_ = 0;
  double link_free_us_ = 0;
  std::deque<Upload> waiting_;  // background, not begun
  std::deque<Upload> begun_;    // in order of begin; not yet taken
};

}  // namespace twofold
