#include "ops/dense_router.h"

#include <algorithm>
#include <cstring>

#include "host/work_clock.h"

namespace twofold {

// Selection by k passes: k is small, and a pass over some hundred floats is cheaper than any structure. Taken
// entries become -1, below every probability; a NaN is never greater than anything, so ids stay valid
// whatever the logits are.
void Router::pick(float* probabilities, int32_t* ids, float* weights) const {
  float sum = 0;
  for (int k = 0; k < top_k_; ++k) {
    int best = -1;
    float highest = -1.0f;
    for (int e = 0; e < num_experts(); ++e) {
      if (probabilities[e] > highest) {
        highest = probabilities[e];
        best = e;
      }
    }
    if (best < 0) best = k;  // only NaN left: any expert is as good, and the NaN must show in the output
    ids[k] = best;
    weights[k] = probabilities[best];
    sum += weights[k];
    probabilities[best] = -1.0f;
  }
  if (!normalise_) return;
  for (int k = 0; k < top_k_; ++k) weights[k] /= sum;
}

void Router::forward(const float* hidden, float* normed, int32_t* ids, float* weights, float* logits, int T) {
  if (T == 0) return;
  const WorkTimer timer(Work::kRouter);
  const auto lock = team_.lock_scratch();
  const int64_t experts = num_experts();
  norm_rows(table_, team_, hidden, norm_, eps_, normed, T, hidden_size());
  float* scores = team_.scratch_floats(0, T * experts);
  const double elements = static_cast<double>(experts) * hidden_size();
  const double us =
      work_us(elements * static_cast<double>(kernels::element_bytes(gate_.dtype)), 2.0 * elements * T);
  for_ranges(team_, experts, 16, us, [&](int64_t first, int64_t count) {
    matmul_rows(table_, normed, gate_, first, static_cast<int>(count), scores + first, experts, T);
  });
  if (logits != nullptr) std::memcpy(logits, scores, static_cast<size_t>(T * experts) * sizeof(float));
  const double operations = static_cast<double>(T) * static_cast<double>(experts) * (20.0 + 16.0 * top_k_);
  for_ranges(team_, T, 1, work_us(0, operations), [&](int64_t first, int64_t count) {
    for (int64_t t = first; t < first + count; ++t) {
      float* row = scores + t * experts;
      const float total = table_.softmax_exp(row, num_experts(), 1.0f);
      for (int64_t e = 0; e < experts; ++e) row[e] /= total;
      pick(row, ids + t * top_k_, weights + t * top_k_);
    }
  });
}

}  // namespace twofold
