// The CPU's part of a decode graph's step: computes the experts that the device posted to the host on the pool,
// into the mailbox's results.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "device/mailbox.h"
#include "moe/deferred_sums.h"
#include "moe/expert_compute.h"
#include "moe/expert_store.h"
#include "twofold/deferral.h"

namespace twofold {

class MailboxExperts {
 public:
  // num_deferred: maximum per token and layer (Deferral).
  MailboxExperts(ThreadPool& pool, const ExpertStore& store, int num_deferred = 0);

  // Sets the step's rows, before its first layer: which are generated tokens (empty: none).
  void begin_step(std::span<const uint8_t> generated);
  // results[t] = sum over token t's pairs on the CPU of weight * expert(activations[t]), in rank order; added
  // after the previous layer's deferred output, without this layer's deferred pairs.
  // Throws std::out_of_range on an expert that the layer does not have.
  void compute(int layer, const PostedLayer& posted, int top_k);
  // Computes the layer's deferred pairs and keeps them for the next layer's results. After compute, which has
  // copied what it needs of the post.
  void compute_deferred(int layer, const PostedLayer& posted, int top_k);

 private:
  // Selects the CPU's pairs that are deferred, or those that are not.
  void group(const PostedLayer& posted, int top_k, bool deferred);
  void run(int layer, const PostedLayer& posted, int top_k, float* rows);
  void choose_deferred(int layer, const PostedLayer& posted, int top_k);
  bool is_deferred(size_t pair) const { return !deferred_.empty() && deferred_[pair] != 0; }

  const ExpertStore& store_;
  ExpertCompute compute_;
  ExpertGroups groups_;
  std::vector<int> counts_;
  Deferral deferral_;
  DeferredSums sums_;
  std::vector<uint8_t> generated_, on_cpu_;
  std::span<const uint8_t> deferred_;  // pairs of the layer just computed
  std::vector<float> normed_;
  std::vector<const std::byte*> group_weights_;
};

}  // namespace twofold
