#include "device/mailbox_experts.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "twofold/kernels.h"

namespace twofold {

MailboxExperts::MailboxExperts(ThreadPool& pool, const ExpertStore& store, int num_deferred)
    : store_(store),
      compute_(pool, store, kernels::Rounding::kOfDevice),
      deferral_(num_deferred, store.num_layers()) {}

void MailboxExperts::begin_step(std::span<const uint8_t> generated) {
  generated_.assign(generated.begin(), generated.end());
  sums_.clear();
}

// ExpertGroups::assign for the pairs on the CPU only: a counting sort, stable.
void MailboxExperts::group(const PostedLayer& posted, int top_k, bool deferred) {
  const int num_pairs = posted.num_tokens * top_k;
  counts_.assign(size_t(store_.num_experts()), 0);
  for (int p = 0; p < num_pairs; ++p) {
    if (posted.where[p] != cuda::kCpu || is_deferred(size_t(p)) != deferred) continue;
    const int expert = posted.ids[p];
    if (expert < 0 || expert >= store_.num_experts()) {
      throw std::out_of_range("the device posted expert " + std::to_string(expert) + " of " +
                              std::to_string(store_.num_experts()));
    }
    ++counts_[size_t(expert)];
  }
  groups_.experts.clear();
  groups_.begin.assign(1, 0);
  for (int e = 0; e < store_.num_experts(); ++e) {
    if (counts_[size_t(e)] == 0) continue;
    groups_.experts.push_back(e);
    groups_.begin.push_back(groups_.begin.back() + counts_[size_t(e)]);
    counts_[size_t(e)] = groups_.begin[groups_.begin.size() - 2];  // from here on: where its next pair goes
  }
  groups_.pairs.resize(size_t(groups_.begin.back()));
  for (int p = 0; p < num_pairs; ++p) {
    if (posted.where[p] == cuda::kCpu && is_deferred(size_t(p)) == deferred)
      groups_.pairs[size_t(counts_[size_t(posted.ids[p])]++)] = p;
  }
}

void MailboxExperts::compute(int layer, const PostedLayer& posted, int top_k) {
  choose_deferred(layer, posted, top_k);
  group(posted, top_k, false);
  const size_t elements = size_t(posted.num_tokens) * size_t(store_.shape().hidden);
  std::fill_n(posted.results, elements, 0.0f);
  sums_.join(posted.results, store_.shape().hidden);
  if (posted.num_on_cpu == 0) return;  // no activations were posted
  normed_.resize(elements);
  kernels::kernel_table().bf16_to_f32(posted.activations, normed_.data(), int64_t(elements));
  run(layer, posted, top_k, posted.results);
}

void MailboxExperts::compute_deferred(int layer, const PostedLayer& posted, int top_k) {
  if (deferred_.empty()) return;
  group(posted, top_k, true);
  run(layer, posted, top_k, sums_.begin(posted.num_tokens, store_.shape().hidden, groups_, top_k));
}

void MailboxExperts::run(int layer, const PostedLayer& posted, int top_k, float* rows) {
  if (groups_.size() == 0) return;
  group_weights_.clear();
  for (const int expert : groups_.experts) group_weights_.push_back(store_.expert(layer, expert));
  const LayerRouting routing{posted.ids, posted.weights, posted.num_tokens, top_k};
  compute_.run(layer, routing, groups_, group_weights_, normed_.data(), rows);
}

void MailboxExperts::choose_deferred(int layer, const PostedLayer& posted, int top_k) {
  deferred_ = {};
  if (deferral_.most() == 0 || generated_.empty()) return;
  const size_t num_pairs = size_t(posted.num_tokens) * size_t(top_k);
  generated_.resize(size_t(posted.num_tokens), 0);  // padding after the step's rows
  on_cpu_.resize(num_pairs);
  for (size_t p = 0; p < num_pairs; ++p) on_cpu_[p] = posted.where[p] == cuda::kCpu;
  deferred_ = deferral_.choose(layer, {posted.weights, num_pairs}, top_k, generated_, on_cpu_);
}

}  // namespace twofold
