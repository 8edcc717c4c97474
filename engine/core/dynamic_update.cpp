#include "twofold/dynamic_update.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace twofold {

void DynamicUpdate::begin_step(const StepShape& shape) {
  counts_ = counts();
  chosen_.clear();  // an aborted step leaves some
  has_moved_ = false;
  const auto num_prompt = std::count_if(shape.prefill_rows.begin(), shape.prefill_rows.end(),
                                        [](uint8_t prompt) { return prompt != 0; });
  applies_ = threshold_ > 0 && num_prompt >= threshold_;
  counts_.too_few_tokens += threshold_ > 0 && num_prompt > 0 && !applies_;
}

DynamicUpdateCounts DynamicUpdate::counts() const {
  DynamicUpdateCounts counts = counts_;
  if (applies_) ++(has_moved_ ? counts.updated : counts.unchanged);
  return counts;
}

void DynamicUpdate::choose(int layer, Devices& devices) {
  chosen_.clear();
  if (!applies_ || devices.cache(0).config().pin(layer) != LayerPin::kFree) return;
  const auto active = devices.active(layer);
  const auto loads = devices.loads(layer);
  std::fill(load_.begin(), load_.end(), 0);
  for (size_t i = 0; i < active.size(); ++i) load_[static_cast<size_t>(active[i])] = loads[i];
  const auto load = [this](int expert) { return load_[static_cast<size_t>(expert)]; };
  const auto is_present = [&](int expert) { return devices.holds(layer, expert); };

  order_.resize(load_.size());
  std::iota(order_.begin(), order_.end(), 0);
  std::stable_sort(order_.begin(), order_.end(), [&](int a, int b) {
    // Ties go to residents: nothing to copy.
    return load(a) != load(b) ? load(a) > load(b) : is_present(a) > is_present(b);
  });
  int num_usable = 0;
  std::vector<Replacement> places;  // in the order of their use: free slots, then the least routed residents
  for (int d = 0; d < devices.count(); ++d) {
    const ExpertCache& cache = devices.cache(d);
    const int num_free = static_cast<int>(cache.free_slots(layer).size());
    num_usable += cache.num_held(layer) + num_free;
    for (int n = 0; n < num_free; ++n) places.push_back({-1, d, -1});
  }
  const auto num_kept = std::min(static_cast<int>(order_.size()), num_usable);
  const auto kept_end = order_.begin() + num_kept;
  for (auto expert = order_.end(); expert != kept_end; --expert) {
    for (int d = 0; d < devices.count(); ++d) {
      if (devices.cache(d).is_resident(layer, expert[-1])) places.push_back({-1, d, expert[-1]});
    }
  }
  auto place = places.begin();
  for (auto expert = order_.begin(); expert != kept_end && load(*expert) > 0; ++expert) {
    if (is_present(*expert)) continue;
    if (place == places.end()) break;
    if (place->victim >= 0) devices.cache(place->device).evict(layer, place->victim);
    chosen_.push_back({*expert, place->device, place->victim});
    ++place;
  }
  has_moved_ |= !chosen_.empty();
}

Admission DynamicUpdate::admission_of(int layer, const Replacement& replacement, Devices& devices) {
  // There is a free slot for each.
  Admission admission = *devices.cache(replacement.device).admit(layer, replacement.expert, true);
  admission.evicted = replacement.victim;
  admission.evicted_layer = replacement.victim < 0 ? -1 : layer;
  return admission;
}

std::optional<Admission> DynamicUpdate::admit(int layer, int expert, int device, Devices& devices) {
  const auto found = std::find_if(chosen_.begin(), chosen_.end(),
                                  [expert](const Replacement& each) { return each.expert == expert; });
  if (found == chosen_.end()) return std::nullopt;
  // The layer's plan says which device fetches it: its place there may have been meant for another.
  const auto there =
      found->device == device ? found : std::find_if(chosen_.begin(), chosen_.end(), [&](const auto& each) {
        return each.device == device;
      });
  if (there == chosen_.end()) return std::nullopt;
  std::swap(found->expert, there->expert);
  const Replacement replacement = *there;
  chosen_.erase(there);
  return admission_of(layer, replacement, devices);
}

void DynamicUpdate::admit_rest(Devices& devices, LayerDecision& decision) {
  for (const Replacement& replacement : chosen_) {
    const Admission admission = admission_of(decision.layer, replacement, devices);
    devices.upload(decision.add_move(decision.layer, replacement.expert, replacement.device, admission,
                                     UploadReason::kAdmission));
  }
  chosen_.clear();
}

}  // namespace twofold
