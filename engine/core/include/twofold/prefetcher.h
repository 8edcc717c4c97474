// Which predicted experts to upload before their layer asks: earliest deadline first, priced, and never in
// the way of a demand upload. The prediction itself (the target layer's router applied to the current
// residual) is the caller's; this class queues, drops what would come too late, and keeps count of how right
// the predictions were.
//
// A deadline is the time at which the layer is expected to start. A prefetch is worth it iff p * lambda >
// price: the probability that the expert is needed times what a hit saves there.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace twofold {

struct PrefetchRequest {
  int layer = 0;
  int expert = 0;
  double probability = 0;  // 0 ... 1
  double deadline_us = 0;  // of the caller's clock
};

struct PrefetchCounts {
  int64_t num_offered = 0;
  int64_t num_refused = 0;  // not worth the price
  int64_t num_late = 0;     // dropped: could not land before its deadline
  int64_t num_issued = 0;
  int64_t num_used = 0;      // issued and routed by its layer: precision = used / issued
  int64_t num_needed = 0;    // misses of layers that predictions were made for: recall = foreseen / needed
  int64_t num_foreseen = 0;  // of those, offered by a prediction
  double precision() const;  // 0 where nothing was issued
  double recall() const;     // 0 where nothing was needed
};

class Prefetcher {
 public:
  // price: of an upload, in misses. layer_weight (lambda): what a hit saves per layer; empty: 1 everywhere.
  Prefetcher(int num_layers, int num_experts, double price, std::vector<double> layer_weight = {});

  // Queues predictions; what is not worth its price is refused. An expert already queued keeps its earlier
  // deadline and its higher probability.
  void offer(std::span<const PrefetchRequest> requests);

  // The next upload to begin at now_us on a link that is free at that moment, or nothing: earliest deadline
  // first, the more probable first among equals; dropped if it cannot land in time. Call only when no demand
  // upload waits.
  std::optional<PrefetchRequest> next(double now_us, double upload_us);

  // The layer's routing is known: misses (experts that were not resident when the layer began, prefetched
  // ones included) settle the counts, and what is still queued for the layer is dropped as late.
  void settle(int layer, std::span<const int> routed, std::span<const int> misses);

  // Nobody waits any more (request cancelled, context gone).
  void clear();

  int num_queued() const { return static_cast<int>(heap_.size()); }
  const PrefetchCounts& counts() const { return counts_; }

 private:
  enum class Mark : uint8_t { kNone, kOffered, kIssued };
  size_t index(int layer, int expert, const char* who) const;
  static bool later(const PrefetchRequest& a, const PrefetchRequest& b);

  int num_layers_;
  int num_experts_;
  double price_;
  std::vector<double> layer_weight_;
  std::vector<PrefetchRequest> heap_;  // earliest deadline in front
  std::vector<Mark> marks_;            // [layers * experts], until the layer settles
  std::vector<uint8_t> predicted_;     // [layers]: was anything offered since it last settled?
  PrefetchCounts counts_;
};

}  // namespace twofold
