#include "twofold/dynamic_update.h"

#include <algorithm>
#include <iterator>
#include <numeric>

namespace twofold {

void DynamicUpdate::begin_step(const StepShape& shape) {
  counts_ = counts();
  chosen_.clear();  // an aborted step leaves some
  num_before_ = counts_.experts;
  const auto num_prompt = std::count_if(shape.prefill_rows.begin(), shape.prefill_rows.end(),
                                        [](uint8_t prompt) { return prompt != 0; });
  applies_ = threshold_ > 0 && num_prompt >= threshold_;
  counts_.too_short += threshold_ > 0 && num_prompt > 0 && !applies_;
}

DynamicUpdateCounts DynamicUpdate::counts() const {
  DynamicUpdateCounts counts = counts_;
  if (applies_) ++(counts.experts > num_before_ ? counts.updated : counts.unchanged);
  return counts;
}

void DynamicUpdate::choose(int layer, ExpertCache& cache) {
  chosen_.clear();
  if (!applies_ || cache.config().pin(layer) != LayerPin::kFree) return;
  const auto active = cache.active(layer);
  const auto loads = cache.loads(layer);
  std::fill(load_.begin(), load_.end(), 0);
  for (size_t i = 0; i < active.size(); ++i) load_[static_cast<size_t>(active[i])] = loads[i];
  const auto load = [this](int expert) { return load_[static_cast<size_t>(expert)]; };
  const auto is_present = [&](int expert) { return cache.state(layer, expert) != ExpertState::kAbsent; };

  order_.resize(load_.size());
  std::iota(order_.begin(), order_.end(), 0);
  std::stable_sort(order_.begin(), order_.end(), [&](int a, int b) {
    // Ties go to residents: nothing to copy.
    return load(a) != load(b) ? load(a) > load(b) : is_present(a) > is_present(b);
  });
  int num_free = cache.num_free(layer);
  const auto num_kept = std::min(static_cast<int>(order_.size()), cache.num_held(layer) + num_free);
  const auto kept_end = order_.begin() + num_kept;
  std::vector<int> victims;  // the least routed last
  std::copy_if(kept_end, order_.end(), std::back_inserter(victims),
               [&](int expert) { return cache.is_resident(layer, expert); });
  for (auto expert = order_.begin(); expert != kept_end && load(*expert) > 0; ++expert) {
    if (is_present(*expert)) continue;
    if (num_free > 0) {
      --num_free;
      chosen_.push_back({*expert, -1});
    } else if (!victims.empty()) {
      cache.evict(layer, victims.back());
      chosen_.push_back({*expert, victims.back()});
      victims.pop_back();
    }
  }
  counts_.experts += static_cast<int64_t>(chosen_.size());
}

Admission DynamicUpdate::admission_of(int layer, const Replacement& replacement, ExpertCache& cache) {
  Admission admission = *cache.admit(layer, replacement.expert, true);  // there is a free slot for each
  admission.evicted = replacement.victim;
  admission.evicted_layer = replacement.victim < 0 ? -1 : layer;
  return admission;
}

std::optional<Admission> DynamicUpdate::admit(int layer, int expert, ExpertCache& cache) {
  const auto found = std::find_if(chosen_.begin(), chosen_.end(),
                                  [expert](const Replacement& each) { return each.expert == expert; });
  if (found == chosen_.end()) return std::nullopt;
  const Replacement replacement = *found;
  chosen_.erase(found);
  return admission_of(layer, replacement, cache);
}

void DynamicUpdate::admit_rest(int layer, ExpertCache& cache,
                               const std::function<void(int expert, const Admission&)>& upload) {
  for (const Replacement& replacement : chosen_)
    upload(replacement.expert, admission_of(layer, replacement, cache));
  chosen_.clear();
}

}  // namespace twofold
