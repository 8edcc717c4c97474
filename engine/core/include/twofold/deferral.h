// Selects the routed pairs of a layer that are deferred: their experts' output joins the residual at the next
// MoE layer, so the CPU computes them while the work in between runs (KTransformers, SOSP'25). Changes outputs.
//
// In each row of a generated token, the candidates are its min(most, top_k - 2) lowest-weighted experts (equal
// weights: the later rank); those that run on the CPU are deferred. Routing selects the candidates, placement
// selects among them; at least two experts of a token are always immediate. Nothing is deferred in the last MoE
// layer or in prompt rows.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace twofold {

class Deferral {
 public:
  // most: maximum deferred experts per token and layer; 0: none.
  Deferral(int most, int num_layers) : most_(most), num_layers_(num_layers) {}

  int most() const { return most_; }
  // Per routed pair: whether it is deferred; empty if no pair of the layer is. on_cpu[num_tokens * top_k];
  // weights likewise, or empty if pairs are in descending order; generated[num_tokens], or empty if no row is a
  // generated token. Valid until the next call.
  std::span<const uint8_t> choose(int layer, std::span<const float> weights, int top_k,
                                  std::span<const uint8_t> generated, std::span<const uint8_t> on_cpu);

 private:
  int most_;
  int num_layers_;
  std::vector<uint8_t> deferred_;
  std::vector<int> ranks_;
};

}  // namespace twofold
