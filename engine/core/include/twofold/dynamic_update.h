// Places experts anew by a long prompt's own routing, layer after layer, while the prompt is computed: a layer's
// slots go to those that most of its tokens were routed to. Keeps no history, and prices nothing: who asks for
// it has decided. Only what is not there yet is uploaded.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "twofold/expert_cache.h"
#include "twofold/step_shape.h"

namespace twofold {

// What steps with prompt tokens came to.
struct DynamicUpdateCounts {
  int64_t updated = 0;    // experts were moved
  int64_t unchanged = 0;  // what they route most was there already
  int64_t too_short = 0;  // fewer prompt tokens than the threshold
  int64_t experts = 0;    // moved, in all
};

class DynamicUpdate {
 public:
  // threshold: prompt tokens of a step from which it acts; 0: never.
  DynamicUpdate(int threshold, int num_experts)
      : threshold_(threshold), load_(static_cast<size_t>(num_experts)) {}

  void begin_step(const StepShape& shape);
  // The layer has been observed and nothing is decided yet. Those that have to go are evicted at once, so that
  // nobody reads their slots in this layer.
  void choose(int layer, ExpertCache& cache);
  // The slot of an expert that the layer fetches anyway; none if it is not to have one.
  std::optional<Admission> admit(int layer, int expert, ExpertCache& cache);
  // Those that the layer did not fetch: to be uploaded behind it.
  void admit_rest(int layer, ExpertCache& cache,
                  const std::function<void(int expert, const Admission&)>& upload);

  // Between steps.
  DynamicUpdateCounts counts() const;

 private:
  struct Replacement {
    int expert = 0;
    int victim = -1;  // the slot was free
  };
  Admission admission_of(int layer, const Replacement& replacement, ExpertCache& cache);

  int threshold_;
  bool applies_ = false;    // to the step
  int64_t num_before_ = 0;  // experts moved before the step
  DynamicUpdateCounts counts_;
  std::vector<Replacement> chosen_;
  std::vector<int> load_, order_;
};

}  // namespace twofold
