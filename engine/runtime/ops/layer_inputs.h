// An input for every layer, from a token and its embedding (Gemma 4's per-layer embeddings).
#pragma once
#include <cstdint>
#include <vector>

#include "host/thread_pool.h"
#include "ops/linear.h"
#include "ops/packed_matrix.h"
#include "ops/row_table.h"

namespace twofold {

struct LayerInputShape {
  int size;           // elements of one layer's input
  float eps;          // epsilon of the norm of each layer's part of the projection
  float table_scale;  // factor of the table's rows
};

class LayerInputs {
 public:
  // table [vocabulary, layers * size]; projection [layers * size, hidden]; norm [size]. Nothing is owned.
  LayerInputs(const kernels::KernelTable& table, ThreadPool& pool, RowTable& rows,
              const PackedMatrix& projection, const float* norm, const LayerInputShape& shape)
      : table_(table), pool_(pool), rows_(rows), projection_(projection), norm_(norm), shape_(shape) {}

  // out[t, n] = (norm(projection_n . hidden[t]) + table_scale * table[tokens[t], n]) / sqrt(2) for layer n: out is
  // [T, width()], hidden [T, hidden_size()]. Throws KernelFailure for a token outside the table.
  void forward(const int64_t* tokens, const float* hidden, float* out, int T);

  int hidden_size() const { return static_cast<int>(projection_.columns()); }
  int64_t width() const { return projection_.rows(); }

 private:
  const kernels::KernelTable& table_;
  ThreadPool& pool_;
  RowTable& rows_;
  const PackedMatrix& projection_;
  const float* norm_;
  LayerInputShape shape_;
  std::vector<float> projected_;
};

}  // namespace twofold
