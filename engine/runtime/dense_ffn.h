// The dense ends of the model: token embedding, the SiLU-gated feed-forward of layers without experts, and
// the LM head.
#pragma once
#include <cstdint>

#include "dense_linear.h"
#include "tensor_view.h"
#include "thread_team.h"

namespace twofold {

// out[t] = table[token_ids[t]], widened to f32. Throws KernelFailure for an id outside the table.
void embed(const kernels::KernelTable& kernels, const Weight& table, const int32_t* token_ids, float* out,
           int T);

class DenseFfn {
 public:
  // norm [hidden]; gate and up [intermediate, hidden], of one type; down [hidden, intermediate].
  DenseFfn(const kernels::KernelTable& table, ThreadTeam& team, const float* norm, const Weight& gate,
           const Weight& up, const Weight& down, float eps)
      : table_(table), team_(team), norm_(norm), gate_(gate), up_(up), down_(down), eps_(eps) {}

  // hidden [T, hidden_size] += down(silu(gate(normed)) * up(normed)).
  void forward(float* hidden, int T);

  int hidden_size() const { return static_cast<int>(gate_.cols); }

 private:
  const kernels::KernelTable& table_;
  ThreadTeam& team_;
  const float* norm_;
  Weight gate_, up_, down_;
  float eps_;
};

class LmHead {
 public:
  // norm [hidden]; weight [vocabulary, hidden].
  LmHead(const kernels::KernelTable& table, ThreadTeam& team, const float* norm, const Weight& weight,
         float eps)
      : table_(table), team_(team), norm_(norm), weight_(weight), eps_(eps) {}

  // logits[r] = weight . norm(hidden_rows[r]). The caller picks the rows it wants logits of.
  void forward(const float* hidden_rows, float* logits, int R);

  int hidden_size() const { return static_cast<int>(weight_.cols); }
  int vocabulary() const { return static_cast<int>(weight_.rows); }

 private:
  const kernels::KernelTable& table_;
  ThreadTeam& team_;
  const float* norm_;
  Weight weight_;
  float eps_;
};

}  // namespace twofold
