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
  place_residuals();
  check_streams();
}

void Decoder::place_residuals() {
  places_.resize(blocks_.size());
  head_ = dynamic_cast<StreamHead*>(blocks_.back());
  if (head_ != nullptr) num_streams_ = head_->num_streams();
  for (size_t i = 0; i < blocks_.size(); ++i) {
    Residual* const residual = dynamic_cast<Residual*>(blocks_[i]);
    if (residual == nullptr) {
      num_streams_ = std::max(num_streams_, blocks_[i]->num_streams());
      continue;
    }
    const int first = static_cast<int>(i) - residual->over();
    if (residual->over() < 1 || first < 0) {
      throw std::invalid_argument("Decoder: a Residual is over " + std::to_string(residual->over()) +
                                  " blocks; expected 1 to the " + std::to_string(i) + " before it");
    }
    places_[i].closes = true;
    Place& begin = places_[static_cast<size_t>(first)];
    ++begin.opens;
    num_streams_ = std::max(num_streams_, residual->num_streams());
    if (!residual->reads()) continue;
    has_input_ = true;
    begin.reads = residual;
    for (size_t block = static_cast<size_t>(first); block < i; ++block) {
      if (std::exchange(places_[block].in_residual, true))
        throw std::invalid_argument("Decoder: two Residuals make the input of block " +
                                    std::to_string(block) + "; expected one");
    }
  }
  std::vector<size_t> open;  // where the sums began
  size_t deepest = 0;
  for (size_t i = 0; i < blocks_.size(); ++i) {
    open.insert(open.end(), static_cast<size_t>(places_[i].opens), i);
    deepest = std::max(deepest, open.size());
    if (!places_[i].closes) continue;
    const size_t over = static_cast<size_t>(static_cast<const Residual*>(blocks_[i])->over());
    if (open.back() + over != i)
      throw std::invalid_argument(
          "Decoder: a Residual takes a part of another's blocks; expected all or none");
    open.pop_back();
  }
  sums_.resize(deepest);
}

// With several streams, every block reads and adds to all of them, or belongs to one Residual that does.
void Decoder::check_streams() const {
  for (size_t i = 0; i < blocks_.size(); ++i) {
    if (!reads_streams(i) || blocks_[i]->num_streams() == num_streams_) continue;
    throw std::invalid_argument("Decoder: block " + std::to_string(i) + " reads " +
                                std::to_string(blocks_[i]->num_streams()) + " streams; the model has " +
                                std::to_string(num_streams_));
  }
  if (num_streams_ == 1) return;
  const size_t last = blocks_.size() - (head_ == nullptr ? 0 : 1);
  for (size_t i = 0; i < last;) {
    if (reads_streams(i)) {
      ++i;
      continue;
    }
    const Residual* const residual = places_[i].reads;
    const size_t over = residual == nullptr ? 0 : static_cast<size_t>(residual->over());
    if (residual == nullptr || residual->num_streams() != num_streams_ || blocks_[i + over] != residual) {
      throw std::invalid_argument("Decoder: block " + std::to_string(i) +
                                  " is not one that a Residual of its own joins with " +
                                  std::to_string(num_streams_) + " streams, as the others");
    }
    i += over + 1;
  }
}

bool Decoder::reads_streams(size_t block) const {
  return blocks_[block]->num_streams() > 1 && !places_[block].closes && blocks_[block] != head_;
}

void Decoder::run(size_t block, const float* stream, const float* input, float* sum, StepState& step) {
  Residual* const reads = places_[block].reads;
  if (reads != nullptr) reads->read(stream, input_.data(), step.batch.num_tokens());
  blocks_[block]->forward(input, sum, step);
}

void Decoder::join_streams(float* hidden, StepState& step) {
  if (head_ != nullptr) return head_->forward(streams_.data(), hidden, step);
  const int64_t H = hidden_size(), S = num_streams_;
  for (int64_t t = 0; t < step.batch.num_tokens(); ++t) {
    const float* const rows = streams_.data() + t * S * H;
    for (int64_t i = 0; i < H; ++i) {
      float total = 0;
      for (int64_t s = 0; s < S; ++s) total += rows[s * H + i];
      hidden[t * H + i] = total / static_cast<float>(S);
    }
  }
}

void Decoder::forward(float* hidden, AttentionBatch& batch, StateCache& cache, MoeExecutor* experts,
                      const float* previous, const LayerInputRows& layer_inputs) {
  if (batch.num_tokens() == 0) return;
  routed_.num_tokens = 0;  // those of the previous step
  StepState step{batch, cache, experts, routed_, blocks_, previous, layer_inputs};
  const size_t width = static_cast<size_t>(hidden_size());
  const size_t num_values = static_cast<size_t>(batch.num_tokens()) * width;
  float* residual = hidden;
  if (num_streams_ > 1) {
    const size_t count = static_cast<size_t>(num_streams_);
    streams_.resize(num_values * count);
    for (size_t row = 0; row < num_values * count; row += width)
      std::copy_n(hidden + row / width / count * width, width, streams_.data() + row);
    residual = streams_.data();
  }
  if (has_input_) input_.resize(num_values);
  size_t depth = 0;
  const auto sum = [&] { return depth == 0 ? residual : sums_[depth - 1].data(); };
  for (size_t i = 0; i < blocks_.size(); ++i) {
    step.ahead = step.ahead.subspan(1);
    if (blocks_[i] == head_) break;
    for (int n = 0; n < places_[i].opens; ++n) sums_[depth++].assign(num_values, 0.0f);
    const float* const input = places_[i].in_residual ? input_.data() : residual;
    const float* const read = places_[i].closes ? sums_[--depth].data() : input;
    if (threads_.empty() || threads_[i] == 0) {
      run(i, residual, read, sum(), step);
    } else {
      const Limit limit(*pool_, threads_[i]);
      run(i, residual, read, sum(), step);
    }
  }
  if (num_streams_ > 1) join_streams(hidden, step);
}

}  // namespace twofold
