#include "moe/decoder.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "host/thread_pool.h"
#include "moe/blocks.h"
#include "ops/attention/attention_batch.h"

namespace twofold {

namespace {

// Limits the pool to `count` threads (0: all) during its lifetime.
class Limit {
 public:
  Limit(ThreadPool& pool, int count) : pool_(pool) { pool_.limit(count); }
  ~Limit() { pool_.limit(0); }
  Limit(const Limit&) = delete;
  Limit& operator=(const Limit&) = delete;

 private:
  ThreadPool& pool_;
};

}  // namespace

Decoder::Decoder(std::vector<Block*> blocks, ThreadPool* pool, std::vector<int> threads)
    : blocks_(std::move(blocks)), pool_(pool), threads_(std::move(threads)) {
  if (blocks_.empty()) throw std::invalid_argument("Decoder: no blocks were given; expected at least one");
  if (!threads_.empty() && (pool_ == nullptr || threads_.size() != blocks_.size())) {
    throw std::invalid_argument("Decoder: threads of " + std::to_string(threads_.size()) +
                                " blocks were given; expected a pool, and those of " +
                                std::to_string(blocks_.size()));
  }
  for (const int count : threads_) Limit(*pool_, count);  // throws for an impossible limit
  for (const Block* block : blocks_) {
    if (block == nullptr) throw std::invalid_argument("Decoder: None was given for a block");
    if (block->hidden_size() != hidden_size()) {
      throw std::invalid_argument("Decoder: a block has hidden size " + std::to_string(block->hidden_size()) +
                                  "; the first has " + std::to_string(hidden_size()));
    }
  }
  places_.resize(blocks_.size());
  for (size_t i = 0; i < blocks_.size(); ++i) {
    const PostNorm* norm = dynamic_cast<const PostNorm*>(blocks_[i]);
    if (norm == nullptr) continue;
    const int first = static_cast<int>(i) - norm->over();
    if (norm->over() < 1 || first < 0) {
      throw std::invalid_argument("Decoder: a PostNorm is over " + std::to_string(norm->over()) +
                                  " blocks; expected 1 to the " + std::to_string(i) + " before it");
    }
    places_[i].closes = true;
    ++places_[static_cast<size_t>(first)].opens;
  }
  std::vector<size_t> open;  // where the sums began
  size_t deepest = 0;
  for (size_t i = 0; i < blocks_.size(); ++i) {
    open.insert(open.end(), static_cast<size_t>(places_[i].opens), i);
    deepest = std::max(deepest, open.size());
    if (!places_[i].closes) continue;
    const size_t over = static_cast<size_t>(static_cast<const PostNorm*>(blocks_[i])->over());
    if (open.back() + over != i)
      throw std::invalid_argument(
          "Decoder: a PostNorm takes a part of another's blocks; expected all or none");
    open.pop_back();
  }
  sums_.resize(deepest);
}

void Decoder::forward(float* hidden, AttentionBatch& batch, StateCache& cache, MoeExecutor* experts,
                      const float* previous, const LayerInputRows& layer_inputs) {
  if (batch.num_tokens() == 0) return;
  routed_.num_tokens = 0;  // those of the previous step
  StepState step{batch, cache, experts, routed_, blocks_, previous, layer_inputs};
  const size_t num_values = static_cast<size_t>(batch.num_tokens()) * static_cast<size_t>(hidden_size());
  size_t depth = 0;
  const auto sum = [&] { return depth == 0 ? hidden : sums_[depth - 1].data(); };
  for (size_t i = 0; i < blocks_.size(); ++i) {
    step.ahead = step.ahead.subspan(1);
    for (int n = 0; n < places_[i].opens; ++n) sums_[depth++].assign(num_values, 0.0f);
    const float* read = hidden;
    if (places_[i].closes) read = sums_[--depth].data();
    if (threads_.empty() || threads_[i] == 0) {
      blocks_[i]->forward(read, sum(), step);
    } else {
      const Limit limit(*pool_, threads_[i]);
      blocks_[i]->forward(read, sum(), step);
    }
  }
}

}  // namespace twofold
