// A gated delta net (Yang, Kautz, Hatamizadeh, arXiv 2412.06464) as in Qwen3-Next: hidden += out(gated norm(S^T
// q)). Each token updates the state S of every head: S decays, and its output for the token's key moves towards
// the token's value. Queries, keys and values pass a short causal convolution first.
//
// Each sequence has a record: the last inputs of the convolution, that of position p in slot p % (taps - 1),
// then the states in blocks of columns (delta_kernels.h). A sequence's first position treats both as empty,
// whatever the record holds.
#pragma once
#include <vector>

#include "host/thread_pool.h"
#include "ops/attention/attention_batch.h"
#include "ops/attention/parts/norms.h"
#include "ops/attention/parts/output_gate.h"
#include "ops/attention/parts/projection.h"
#include "ops/recurrent/tail_convolution.h"

namespace twofold {

// Nothing is owned: the creator of the block keeps the arrays.
struct GatedDeltaParts {
  Projection project;  // [inputs(), hidden]: queries, keys, values, gates of the output z, then b and a
  const float* conv;   // [taps, channels()]: of all queries, all keys, all values
  const float*
      decay_rate;  // [value heads], negative: a state is multiplied by exp(rate * softplus(a + bias))
  const float* decay_bias;  // [value heads]
  Norm head_norm;           // [value_dim]
  OutputGate gate;          // by z
  Projection out;           // [hidden, value heads * value_dim]
};

struct GatedDeltaShape {
  int num_k_heads, num_v_heads, key_dim, value_dim, taps;
  bool tiled =
      false;  // the key head of value head h is h % num_k_heads; else h / (value heads of a key head)
  bool grouped = false;  // rows of `in` come by key head: its query, key, values, z; else all queries, ...
  bool grouped_gates = false;  // b and a too: those of a key head's values; else all b, all a
  int64_t record_at = 0;       // byte of a layer's record where the block's begins

  int of_key_head() const { return num_v_heads / num_k_heads; }
  int keys() const { return num_k_heads * key_dim; }
  int values() const { return num_v_heads * value_dim; }
  int channels() const { return 2 * keys() + values(); }
  int inputs() const { return channels() + values() + 2 * num_v_heads; }
  int blocks() const;  // column blocks of a head's state
  int64_t tail_floats() const;
  int64_t record_bytes() const;
};

class GatedDeltaNet {
 public:
  GatedDeltaNet(const kernels::KernelTable& table, ThreadPool& pool, const GatedDeltaParts& parts,
                const GatedDeltaShape& shape);

  // sum += the block's output for hidden, both [T, hidden_size]; they may alias. Updates the records of the
  // batch's sequences in `layer` of the cache. Throws KernelFailure when batch or cache do not fit.
  void forward(const float* hidden, float* sum, AttentionBatch& batch, const StateCache& cache, int layer);

  int hidden_size() const { return static_cast<int>(parts_.out.rows()); }
  const GatedDeltaShape& shape() const { return shape_; }

 private:
  struct Buffers;

  void convolve(const Buffers& at, const AttentionTile& run, const float* tail, int first, int count,
                int k_head) const;
  void recur(const Buffers& at, const AttentionTile& run, float* states, int v_head, int block) const;
  void gate_output(const Buffers& at, int token, float* normed) const;
  void keep_tails(const Buffers& at, const AttentionTile& run, float* tail) const;
  // Copies the convolution's inputs of tokens [first, end), the last ones, to a record's tail.
  void write_tail(const Buffers& at, int first, int end, float* tail) const;

  // Offset of a head's part in a row of projections.
  int query_at(int k_head) const;
  int key_at(int k_head) const;
  int value_at(int v_head) const;
  int z_at(int v_head) const;
  int b_at(int v_head) const;
  int a_at(int v_head) const;
  int group_rows() const { return 2 * shape_.key_dim + 2 * shape_.of_key_head() * shape_.value_dim; }
  // Per value head, in the order of their rows: key head and index among its values.
  int key_head(int v_head) const;
  int within(int v_head) const;
  int value_head(int k_head, int number) const;

  const kernels::KernelTable& table_;
  ThreadPool& pool_;
  GatedDeltaParts parts_;
  GatedDeltaShape shape_;
  std::vector<float> query_scale_, key_scale_, zeros_;
};

}  // namespace twofold
