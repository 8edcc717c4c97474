// The link of emulated and simulated runs, on a virtual clock. No threads, no wall clock.
//
// How a layer is played (executor and simulator alike):
//   LayerWork work{hits, fetched, cpu, timeline.backlog_us(), timeline.queued_us()};
//   LayerTimes t = cost.layer(work);                        // price it
//   for each fetched: timeline.upload(transfer, UploadLane::kDemand);        // lands when `t` says
//   for each admitted: timeline.upload(transfer, UploadLane::kBackground);   // after the demand uploads
//   timeline.advance(t.layer_us);
//   at a step boundary: for (const Upload& u : timeline.take_landed()) cache.publish(u.what.slot);
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "twofold/link.h"

namespace twofold {

class Timeline : public Link {
 public:
  // upload_us: link time of one expert (CostModel::upload_us).
  explicit Timeline(double upload_us);

  double now_us() const override { return now_us_; }
  double upload_us() const override { return upload_us_; }
  double backlog_us() const override;
  double queued_us() const override;
  int num_waiting() const override { return static_cast<int>(waiting_.size()); }

  Upload upload(const Transfer& what, UploadLane lane, double duration_us = -1) override;
  bool cancel_background(int slot) override;

  // Background uploads begin in the link's idle time.
  void advance(double us) override;
  std::vector<Upload> take_landed() override;
  std::optional<Upload> take_if_landed(const Transfer& what) override;
  void drain() override;

 private:
  void start_waiting(double until_us);

  double upload_us_;
  double now_us_ = 0;
  double link_free_us_ = 0;
  std::deque<Upload> waiting_;  // background, not begun
  std::deque<Upload> begun_;    // in order of their beginning; not yet taken
};

}  // namespace twofold
