// A recorded routing trace whose arrays belong to Python.
#pragma once
#include <optional>
#include <string>
#include <utility>

#include "array_view.h"
#include "twofold/replay.h"

namespace twofold::bindings {

// Owns the arrays that the views of RoutingTrace point into.
class TraceHolder {
 public:
  TraceHolder(Array<uint16_t> ids, std::optional<Array<float>> weights, Array<int64_t> offsets,
              int num_experts)
      : ids_(std::move(ids)), weights_(std::move(weights)), offsets_(std::move(offsets)) {
    if (ids_.ndim() != 3) {
      throw pybind11::value_error("routing trace: ids of " + std::to_string(ids_.ndim()) +
                                  " dimensions given, [tokens, layers, top_k] expected");
    }
    trace_.num_tokens = ids_.shape(0);
    trace_.num_layers = static_cast<int>(ids_.shape(1));
    trace_.top_k = static_cast<int>(ids_.shape(2));
    trace_.num_experts = num_experts;
    trace_.ids = {ids_.data(), static_cast<size_t>(ids_.size())};
    if (weights_) trace_.weights = {weights_->data(), static_cast<size_t>(weights_->size())};
    trace_.offsets = {offsets_.data(), static_cast<size_t>(offsets_.size())};
    trace_.validate();
  }
  const RoutingTrace& trace() const { return trace_; }

 private:
  Array<uint16_t> ids_;
  std::optional<Array<float>> weights_;
  Array<int64_t> offsets_;
  RoutingTrace trace_;
};

}  // namespace twofold::bindings
