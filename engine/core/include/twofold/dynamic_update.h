// Replaces resident experts by a long prompt's own routing, layer by layer, during its prefill: a layer's slots
// go to the experts that most of its tokens are routed to. Keeps no history and computes no prices: the caller
// decides when to use it. Only absent experts are uploaded.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "twofold/counters.h"
#include "twofold/devices.h"
#include "twofold/step_shape.h"

namespace twofold {

class DynamicUpdate {
 public:
  // threshold: prompt tokens of a step from which it is active; 0: never.
  DynamicUpdate(int threshold, int num_experts)
      : threshold_(threshold), load_(static_cast<size_t>(num_experts)) {}

  void begin_step(const StepShape& shape);
  // Called after the layer is observed and before any decision. Victims are evicted at once, so that no kernel
  // reads their slots in this layer.
  void choose(int layer, Devices& devices);
  // The slot for an expert that the layer fetches to that device anyway; none if it gets no slot there.
  std::optional<Admission> admit(int layer, int expert, int device, Devices& devices);
  // Queues the uploads of those that the layer did not fetch.
  void admit_rest(Devices& devices, LayerDecision& decision);

  // Between steps.
  DynamicUpdateCounts counts() const;

 private:
  struct Replacement {
    int expert = 0;
    int device = 0;   // whose slot
    int victim = -1;  // -1: the slot was free
  };
  Admission admission_of(int layer, const Replacement& replacement, Devices& devices);

  int threshold_;
  bool applies_ = false, has_moved_ = false;  // in this step
  DynamicUpdateCounts counts_;
  std::vector<Replacement> chosen_;
  std::vector<int> load_, order_;
};

}  // namespace twofold
