// Which of a layer's routed pairs are deferred: their experts' output joins the residual where the next MoE layer's
// does, so that the CPU may compute them beside what comes between (KTransformers, SOSP'25). Changes outputs.
//
// Of a row that is a generated token: those of its min(most, top_k - 2) least weighted experts (of equal weights the
// later rank) that run on the CPU. So routing says what may be deferred, and placement which of it is; two of a token's
// experts are immediate always. Nothing is deferred in the last MoE layer, and nothing of a prompt's rows.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace twofold {

class Deferral {
 public:
  // most: deferred experts of one token and layer; 0: none.
  Deferral(int most, int num_layers) : most_(most), num_layers_(num_layers) {}

  int most() const { return most_; }
  // Per routed pair whether it is deferred; empty: none of the layer is. on_cpu[num_tokens * top_k]; weights likewise,
  // or empty where pairs are in descending order; generated[num_tokens], or empty where no row is. Valid until the next
  // call.
  std::span<const uint8_t> choose(int layer, std::span<const float> weights, int top_k,
                                  std::span<const uint8_t> generated, std::span<const uint8_t> on_cpu);

 private:
  int most_;
  int num_layers_;
  std::vector<uint8_t> deferred_;
  std::vector<int> ranks_;
};

}  // namespace twofold
