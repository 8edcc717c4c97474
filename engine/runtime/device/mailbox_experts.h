// The CPU's part of a decode graph's step: the experts that the device posted as the host's, computed on the
// pool into the mailbox's results.
#pragma once
#include <cstdint>
#include <vector>

#include "device/mailbox.h"
#include "moe/expert_compute.h"
#include "moe/expert_store.h"

namespace twofold {

class MailboxExperts {
 public:
  MailboxExperts(ThreadPool& pool, const ExpertStore& store);

  // results[t] = sum over token t's pairs on the CPU of weight * expert(activations[t]), in rank order.
  // Throws std::out_of_range on an expert that the layer does not have.
  void compute(int layer, const PostedLayer& posted, int top_k);

 private:
  void group(const PostedLayer& posted, int top_k);

  const ExpertStore& store_;
  ExpertCompute compute_;
  ExpertGroups groups_;
  std::vector<int> counts_;
  std::vector<float> normed_;
  std::vector<const std::byte*> group_weights_;
};

}  // namespace twofold
