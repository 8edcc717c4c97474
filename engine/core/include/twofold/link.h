// The link between host and device as the decisions see it: a serial line with two lanes. Demand uploads (a
// layer waits for them) overtake background uploads (admissions, prefetches) that have not begun; a running
// copy is never interrupted. Two implementations: Timeline plays it on a virtual clock; the runtime's upload
// engine copies in real time, where an upload has landed when the device reports it.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace twofold {

enum class UploadLane : uint8_t { kDemand = 0, kBackground = 1 };

// One expert's upload into one slot.
struct Transfer {
  int layer = 0;
  int expert = 0;
  int slot = 0;

  bool operator==(const Transfer&) const = default;
};

struct Upload {
  Transfer what;
  UploadLane lane = UploadLane::kDemand;
  double queued_us = 0;
  double begin_us = -1;  // -1: not known yet
  double end_us = -1;
  bool failed = false;  // the copy failed; the slot's contents are undefined
};

class Link {
 public:
  virtual ~Link() = default;

  virtual double now_us() const = 0;
  // Link time of one expert.
  virtual double upload_us() const = 0;
  // Until a demand upload enqueued now would begin.
  virtual double backlog_us() const = 0;
  // Unfinished link work, including queued background uploads.
  virtual double queued_us() const = 0;
  virtual int num_waiting() const = 0;

  // Starts every upload. A demand upload begins as soon as the running copy and earlier demand uploads end; its
  // times are final on a virtual clock and unknown (-1) in real time. A background upload begins when the link
  // has nothing else to do; its times are known once it has landed. duration_us of a demand upload < 0:
  // upload_us.
  virtual Upload upload(const Transfer& what, UploadLane lane, double duration_us = -1) = 0;
  // Whether an upload into that slot could begin now if the link were idle.
  virtual bool may_begin(int /*slot*/) const { return true; }
  // Withdraws the background upload into that slot if it has not begun; false if it has begun or is unknown.
  virtual bool cancel_background(int slot) = 0;

  // Advances a virtual clock; no effect in real time.
  virtual void advance(double us) = 0;
  // Uploads that have ended by now, including failed ones, in order of their end; each is returned once.
  virtual std::vector<Upload> take_landed() = 0;
  // This upload alone, before the others are polled; empty if it has not landed or is unknown.
  virtual std::optional<Upload> take_if_landed(const Transfer& what) = 0;
  // Waits until every queued upload has landed.
  virtual void drain() = 0;
};

}  // namespace twofold
