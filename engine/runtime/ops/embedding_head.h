// The ends of a model: token embedding and LM head.
#pragma once
#include <cstdint>

#include "host/thread_pool.h"
#include "ops/linear.h"
#include "ops/packed_matrix.h"

namespace twofold {

// out[t] = table[token_ids[t]] as f32, exactly. Throws KernelFailure for an id outside the table.
void embed(ThreadPool& pool, const SourceMatrix& table, const int32_t* token_ids, float* out, int T);

class LmHead {
 public:
  // norm [hidden], null: hidden states are read as they are; weight [vocabulary, hidden]. softcap: logits become softcap * tanh(logits / softcap); 0: they stay.
  LmHead(const kernels::KernelTable& table, ThreadPool& pool, const float* norm, const PackedMatrix& weight,
         float eps, float softcap = 0)
      : table_(table), pool_(pool), norm_(norm), weight_(weight), eps_(eps), softcap_(softcap) {}

  // logits[r] = weight . norm(hidden_rows[r]), capped. The caller picks the rows it wants logits of.
  void forward(const float* hidden_rows, float* logits, int R);

  // out[r] = norm(hidden_rows[r]), what the matrix is multiplied with; out may be hidden_rows.
  void norm(const float* hidden_rows, float* out, int R);

  int hidden_size() const { return static_cast<int>(weight_.columns()); }
  int vocabulary() const { return static_cast<int>(weight_.rows()); }

 private:
  const kernels::KernelTable& table_;
  ThreadPool& pool_;
  const float* norm_;
  const PackedMatrix& weight_;
  float eps_, softcap_;
};

}  // namespace twofold
