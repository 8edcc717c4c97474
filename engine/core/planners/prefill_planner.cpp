#include "twofold/prefill_planner.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace twofold {
namespace {

// One candidate split of the misses, by index into the load-sorted list; refined in place.
class Split {
 public:
  Split(const CostModel& cost, std::span<const ExpertLoad> misses, int num_hits, double hit_us,
        double backlog_us, double queued_us)
      : cost_(cost), num_hits_(num_hits), hit_us_(hit_us), backlog_us_(backlog_us), queued_us_(queued_us) {
    for (const ExpertLoad& miss : misses) {
      gpu_us_.push_back(cost.gpu_expert_us(miss.tokens));
      cpu_us_.push_back(cost.cpu_expert_us(miss.tokens));
    }
    fetch_.assign(misses.size(), 0);
  }

  LayerTimes times(bool one_transfer = false) {
    order_.clear();
    double cpu_work = 0;
    int num_cpu = 0;
    for (size_t i = 0; i < fetch_.size(); ++i) {  // descending load: the best order of the link
      if (fetch_[i]) {
        order_.push_back(gpu_us_[i]);
      } else {
        cpu_work += cpu_us_[i];
        ++num_cpu;
      }
    }
    return cost_.layer_from_sums(num_hits_, hit_us_, order_, num_cpu, cpu_work, backlog_us_, queued_us_,
                                 one_transfer);
  }

  void take_heaviest(size_t count) {
    for (size_t i = 0; i < fetch_.size(); ++i) fetch_[i] = i < count;
  }

  // Single moves, then swaps of a fetched with a CPU expert, first improvement, until neither helps.
  void refine(LayerTimes& best, int max_fetch) {
    for (int round = 0; round < kMaxRounds; ++round) {
      if (!improve_by_move(best, max_fetch) && !improve_by_swap(best)) return;
    }
  }

  std::vector<char>& fetch() { return fetch_; }

 private:
  static constexpr int kMaxRounds = 64;
  static constexpr size_t kMaxSwapSide = 48;  // bounds the work of one swap pass on very wide layers

  bool better(const LayerTimes& candidate, const LayerTimes& best) const {
    return candidate.layer_us < best.layer_us * (1 - 1e-12);
  }

  bool improve_by_move(LayerTimes& best, int max_fetch) {
    const auto fetched = std::count(fetch_.begin(), fetch_.end(), char{1});
    for (size_t i = 0; i < fetch_.size(); ++i) {
      if (!fetch_[i] && max_fetch >= 0 && fetched >= max_fetch) continue;
      fetch_[i] = !fetch_[i];
      const LayerTimes candidate = times();
      if (better(candidate, best)) {
        best = candidate;
        return true;
      }
      fetch_[i] = !fetch_[i];
    }
    return false;
  }

  bool improve_by_swap(LayerTimes& best) {
    size_t tried_i = 0;
    for (size_t i = 0; i < fetch_.size() && tried_i < kMaxSwapSide; ++i) {
      if (!fetch_[i]) continue;
      ++tried_i;
      size_t tried_j = 0;
      for (size_t j = 0; j < fetch_.size() && tried_j < kMaxSwapSide; ++j) {
        if (fetch_[j] || (gpu_us_[i] == gpu_us_[j] && cpu_us_[i] == cpu_us_[j])) continue;
        ++tried_j;
        std::swap(fetch_[i], fetch_[j]);
        const LayerTimes candidate = times();
        if (better(candidate, best)) {
          best = candidate;
          return true;
        }
        std::swap(fetch_[i], fetch_[j]);
      }
    }
    return false;
  }

  const CostModel& cost_;
  int num_hits_;
  double hit_us_;
  double backlog_us_;
  double queued_us_;
  std::vector<double> gpu_us_, cpu_us_, order_;
  std::vector<char> fetch_;
};

}  // namespace

PrefillPlan PrefillPlanner::plan(std::span<const ExpertLoad> loads, double backlog_us, double queued_us,
                                 int max_fetch) const {
  PrefillPlan plan;
  std::vector<ExpertLoad> misses;
  double hit_us = 0;
  for (const ExpertLoad& load : loads) {
    if (load.tokens < 1) {
      throw std::invalid_argument("PrefillPlanner: expert " + std::to_string(load.expert) + " has " +
                                  std::to_string(load.tokens) +
                                  " tokens, >= 1 expected (active experts only)");
    }
    if (load.resident) {
      plan.resident.push_back(load.expert);
      hit_us += cost_.gpu_expert_us(load.tokens);
    } else {
      misses.push_back(load);
    }
  }
  std::stable_sort(misses.begin(), misses.end(),
                   [](const ExpertLoad& a, const ExpertLoad& b) { return a.tokens > b.tokens; });
  const int num_misses = static_cast<int>(misses.size());
  const int most = max_fetch < 0 ? num_misses : std::min(max_fetch, num_misses);

  Split split(cost_, misses, static_cast<int>(plan.resident.size()), hit_us, backlog_us, queued_us);
  int best_count = 0;
  LayerTimes best = split.times();
  for (int count = 1; count <= most; ++count) {
    split.take_heaviest(static_cast<size_t>(count));
    const LayerTimes candidate = split.times();
    if (candidate.layer_us < best.layer_us) {
      best = candidate;
      best_count = count;
    }
  }
  split.take_heaviest(static_cast<size_t>(best_count));
  split.refine(best, most);

  // Streaming: all misses in one transfer, the link's latency paid once.
  if (num_misses > 1 && most == num_misses) {
    const std::vector<char> kept = split.fetch();
    split.take_heaviest(misses.size());
    const LayerTimes streamed = split.times(true);
    if (streamed.layer_us < best.layer_us) {
      best = streamed;
      plan.streamed = true;
    } else {
      split.fetch() = kept;
    }
  }
  for (size_t i = 0; i < misses.size(); ++i) {
    (split.fetch()[i] ? plan.fetch : plan.cpu).push_back(misses[i].expert);
  }
  plan.times = best;
  return plan;
}

}  // namespace twofold
