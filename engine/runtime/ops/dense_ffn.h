// The dense ends of the model: token embedding, the SiLU-gated feed-forward of layers without experts, and
// the LM head.
#pragma once
#include <cstdint>

#include "host/thread_team.h"
#include "ops/dense_linear.h"
#include "ops/packed_ffn.h"
#include "ops/packed_matrix.h"

namespace twofold {

// out[t] = table[token_ids[t]] as f32, exactly. Throws KernelFailure for an id outside the table.
void embed(ThreadTeam& team, const SourceMatrix& table, const int32_t* token_ids, float* out, int T);

class DenseFfn {
 public:
  // norm [hidden]; gate and up [intermediate, hidden], down [hidden, intermediate], each of one segment.
  DenseFfn(const kernels::KernelTable& table, ThreadTeam& team, const float* norm, const PackedMatrix& gate,
           const PackedMatrix& up, const PackedMatrix& down, float eps);

  // hidden [T, hidden_size] += down(silu(gate(normed)) * up(normed)).
  void forward(float* hidden, int T);

  int hidden_size() const { return ffn_.hidden(); }

 private:
  PackedFfn ffn_;
  const float* norm_;
  FfnPanels panels_;
  FfnFormats formats_;
  float eps_;
  std::vector<int> rows_;  // 0, 1, 2, ...
};

class LmHead {
 public:
  // norm [hidden]; weight [vocabulary, hidden].
  LmHead(const kernels::KernelTable& table, ThreadTeam& team, const float* norm, const PackedMatrix& weight,
         float eps)
      : table_(table), team_(team), norm_(norm), weight_(weight), eps_(eps) {}

  // logits[r] = weight . norm(hidden_rows[r]). The caller picks the rows it wants logits of.
  void forward(const float* hidden_rows, float* logits, int R);

  int hidden_size() const { return static_cast<int>(weight_.columns()); }
  int vocabulary() const { return static_cast<int>(weight_.rows()); }

 private:
  const kernels::KernelTable& table_;
  ThreadTeam& team_;
  const float* norm_;
  const PackedMatrix& weight_;
  float eps_;
};

}  // namespace twofold
