#include "moe/decoder.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "moe/blocks.h"
#include "ops/attention_batch.h"

namespace twofold {

Decoder::Decoder(std::vector<Block*> blocks) : blocks_(std::move(blocks)) {
  if (blocks_.empty()) throw std::invalid_argument("Decoder: no blocks were given; expected at least one");
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

void Decoder::forward(float* hidden, AttentionBatch& batch, StateCache& cache, MoeExecutor* experts) {
  if (batch.num_tokens() == 0) return;
  routed_.num_tokens = 0;  // of the step before
  StepState step{batch, cache, experts, routed_, blocks_};
  const size_t num_values = static_cast<size_t>(batch.num_tokens()) * static_cast<size_t>(hidden_size());
  size_t depth = 0;
  const auto sum = [&] { return depth == 0 ? hidden : sums_[depth - 1].data(); };
  for (size_t i = 0; i < blocks_.size(); ++i) {
    step.ahead = step.ahead.subspan(1);
    for (int n = 0; n < places_[i].opens; ++n) sums_[depth++].assign(num_values, 0.0f);
    const float* read = hidden;
    if (places_[i].closes) read = sums_[--depth].data();
    blocks_[i]->forward(read, sum(), step);
  }
}

}  // namespace twofold
