// Routed experts of a layer in training: forward and backward in float32 over the packed weights, which are unpacked
// panel by panel in the cache and never change. What is trained are low-rank factors beside them (LoRA, arXiv
// 2106.09685): y = W x + scale * B (A x). The product B A is never built.
//
// A chunk is some rows of one expert, so that a row's bits depend neither on threads nor on other rows; sums over rows
// go in ascending order.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "host/thread_pool.h"
#include "moe/expert_groups.h"
#include "moe/expert_store.h"

namespace twofold {

// Factors of one matrix of all experts of a layer, float32: a [experts, rank, columns], b [experts, rows, rank]. Null:
// the matrix is not trained.
struct TrainedFactors {
  const float* a = nullptr;
  const float* b = nullptr;
  int rank = 0;
  float scale = 1;
};

// Where the gradients of the same factors are added.
struct FactorGradients {
  float* a = nullptr;
  float* b = nullptr;
};

// What a layer computes: routing of its tokens, their inputs [tokens, hidden], and the factors of gate, up and down.
struct TrainedLayer {
  int layer;
  LayerRouting routing;
  const float* x;
  TrainedFactors factors[3];
  std::span<const uint8_t> elsewhere = {};  // by expert: 1 where another lane computes it; empty: none
};

// Results of forward that backward reads: gate and up before their activation, [pairs, intermediate] in group order.
struct KeptRows {
  std::vector<float> gate, up;
};

class ExpertTraining {
 public:
  ExpertTraining(ThreadPool& pool, const ExpertStore& store) : pool_(pool), store_(store) {}

  // y[t] = sum over rank k of weights[t, k] * expert(x[t]), in rank order, over the experts here; y is [tokens, hidden].
  // keep may be null.
  void forward(const TrainedLayer& of, float* y, KeptRows* keep);

  // Where backward's results go. dx [tokens, hidden] and dweights [tokens, top_k] are set (0 for experts elsewhere),
  // factors' are added to.
  struct Gradients {
    float* dx;
    float* dweights;
    FactorGradients factors[3];
  };
  // For dy [tokens, hidden], the gradient of y. kept: of forward for the same layer; empty: computed again.
  void backward(const TrainedLayer& of, const float* dy, const KeptRows& kept, const Gradients& gradients);

 private:
  static constexpr int kNowhere = -1;
  struct Chunk {
    int group, first, count;  // rows [first, first + count) in group order
  };
  // Rows of a step in group order that several phases share.
  struct Rows {
    std::vector<float> gate, up;  // before the activation, then their gradients
    std::vector<float> inner;     // activation times the token's weight: down's input
    std::vector<float> dx;        // [pairs, hidden]; in forward the experts' outputs
  };

  void open(const TrainedLayer& of);
  void leave_out(std::span<const uint8_t> elsewhere);
  // to[t] = the sum, in rank order, of a token's rows of rows_.dx; weights null: each counts once.
  void sum_rows(const LayerRouting& routing, const float* weights, float* to);
  int token(const TrainedLayer& of, int row) const { return groups_.pairs[size_t(row)] / of.routing.top_k; }
  void gate_and_up(const TrainedLayer& of, const Chunk& chunk, float* panel, float* gate, float* up) const;
  void backward_rows(const TrainedLayer& of, const Chunk& chunk, const float* dy, float* panel,
                     const Gradients& gradients);
  void factor_gradients(const TrainedLayer& of, int group, int matrix, const float* dy,
                        const Gradients& gradients) const;

  ThreadPool& pool_;
  const ExpertStore& store_;
  ExpertGroups groups_;
  std::vector<Chunk> chunks_;
  std::vector<int> row_of_;  // by pair; kNowhere: its expert is elsewhere
  Rows rows_;
  std::vector<std::vector<float>> panels_;  // by thread: an unpacked panel
};

}  // namespace twofold
