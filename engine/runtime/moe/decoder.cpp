#include "moe/decoder.h"

#include <stdexcept>
#include <string>
#include <utility>

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
}

void Decoder::forward(float* hidden, AttentionBatch& batch, StateCache& cache, MoeExecutor* experts) {
  if (batch.num_tokens() == 0) return;
  routed_.num_tokens = 0;  // of the step before
  StepState step{batch, cache, experts, routed_, blocks_};
  for (Block* block : blocks_) {
    step.ahead = step.ahead.subspan(1);
    block->forward(hidden, step);
  }
}

}  // namespace twofold
