#include "twofold/prefetcher.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

namespace twofold {
namespace {

constexpr int kSpareCandidates = 4;  // beyond the top-k: the border is where predictions err
// Upper borders of the margin's buckets, in logits; the last bucket has none.
constexpr std::array<double, 11> kMarginBelow{-2, -1, -0.5, -0.25, -0.1, 0, 0.1, 0.25, 0.5, 1, 2};
constexpr double kPriorTries = 8;    // weight of chance (top-k / experts) before anything is learned
constexpr double kMaxTries = 2048;   // beyond it older tries fade
constexpr double kSlackUs = 1e-3;    // rounding makes nothing late
constexpr double kRelax = 1.0 / 64;  // relaxation rate of a shortest time

// Down at once, up slowly: a wrong deadline should be too early.
void shorten(double& shortest_us, double us) {
  shortest_us = shortest_us < 0 || us < shortest_us ? us : shortest_us + kRelax * (us - shortest_us);
}

}  // namespace

Prefetcher::Prefetcher(const CostModel& cost, int num_layers, int num_experts, int top_k)
    : cost_(cost), num_experts_(num_experts), top_k_(top_k) {
  const auto layers = static_cast<size_t>(num_layers);
  tallies_.resize(layers * kMarginBuckets);
  gap_us_.assign(layers, -1);
  layer_us_.assign(layers, -1);
  predictions_.resize(layers);
  marks_.assign(static_cast<size_t>(num_experts), 0);
  absent_probability_.assign(static_cast<size_t>(num_experts), 1);
  recalibrate(cost);
}

void Prefetcher::recalibrate(const CostModel& cost) {
  cost_ = cost;
  const auto side = static_cast<size_t>(top_k_) + 1;
  stall_us_.assign(side * side, 0);
  const double hit_us = cost_.gpu_expert_us(1);
  const double cpu_us = cost_.cpu_expert_us(1);
  for (int hits = 0; hits <= top_k_; ++hits) {
    for (int misses = 0; hits + misses <= top_k_; ++misses) {
      double best = -1;
      for (int fetched = 0; fetched <= misses; ++fetched) {
        const std::vector<double> fetched_us(static_cast<size_t>(fetched), hit_us);
        const int on_cpu = misses - fetched;
        const double us =
            cost_.layer_from_sums(hits, hits * hit_us, fetched_us, on_cpu, on_cpu * cpu_us, 0, 0, false)
                .layer_us;
        if (best < 0 || us < best) best = us;
      }
      stall_us_[static_cast<size_t>(hits) * side + static_cast<size_t>(misses)] = best;
    }
  }
}

int Prefetcher::margin_bucket(double margin) {
  return static_cast<int>(std::upper_bound(kMarginBelow.begin(), kMarginBelow.end(), margin) -
                          kMarginBelow.begin());
}

double Prefetcher::probability(int layer, double margin) const {
  const Tally& t =
      tallies_[static_cast<size_t>(layer) * kMarginBuckets + static_cast<size_t>(margin_bucket(margin))];
  return (t.routed + kPriorTries * top_k_ / num_experts_) / (t.tried + kPriorTries);
}

void Prefetcher::predict(int layer, std::span<const float> logits, int num_tokens, ExpertCache& cache) {
  if (layer < 0 || layer >= static_cast<int>(predictions_.size()) || num_tokens < 1 ||
      logits.size() != static_cast<size_t>(num_tokens) * static_cast<size_t>(num_experts_)) {
    throw std::invalid_argument("prefetcher: " + std::to_string(logits.size()) + " logits of " +
                                std::to_string(num_tokens) + " tokens for layer " + std::to_string(layer) +
                                " given, tokens * " + std::to_string(num_experts_) + " of layers 0 ... " +
                                std::to_string(predictions_.size() - 1) + " expected");
  }
  Prediction& prediction = predictions_[static_cast<size_t>(layer)];
  prediction.valid = true;
  prediction.candidates.clear();
  prediction.proposals.clear();
  prediction.num_hits = prediction.num_misses = 0;
  prediction.absent.resize(static_cast<size_t>(num_experts_));
  for (int e = 0; e < num_experts_; ++e) {
    prediction.absent[static_cast<size_t>(e)] = cache.state(layer, e) == ExpertState::kAbsent;
  }
  const int considered = std::min(num_experts_, top_k_ + kSpareCandidates);
  order_.resize(static_cast<size_t>(num_experts_));
  expected_.clear();
  std::vector<int> seen;
  for (int row = 0; row < num_tokens; ++row) {
    const float* logit = logits.data() + static_cast<size_t>(row) * static_cast<size_t>(num_experts_);
    std::iota(order_.begin(), order_.end(), 0);
    std::partial_sort(order_.begin(), order_.begin() + considered, order_.end(), [logit](int a, int b) {
      return logit[a] > logit[b] || (!(logit[b] > logit[a]) && a < b);
    });
    const int last = order_[static_cast<size_t>(top_k_) - 1];
    const int next = top_k_ < num_experts_ ? order_[static_cast<size_t>(top_k_)] : last;
    const double border = (static_cast<double>(logit[last]) + static_cast<double>(logit[next])) / 2;
    for (int rank = 0; rank < considered; ++rank) {
      const int expert = order_[static_cast<size_t>(rank)];
      const double margin = static_cast<double>(logit[expert]) - border;
      const Candidate candidate{row, expert, margin_bucket(margin), rank < top_k_};
      prediction.candidates.push_back(candidate);
      if (absent_probability_[static_cast<size_t>(expert)] == 1) seen.push_back(expert);
      // Rows are taken as independent; never exactly 1, which marks an expert that is not proposed.
      absent_probability_[static_cast<size_t>(expert)] *= std::min(1 - probability(layer, margin), 1 - 1e-9);
      if (candidate.top && !marks_[static_cast<size_t>(expert)]) {
        marks_[static_cast<size_t>(expert)] = 1;
        expected_.push_back(expert);
      }
    }
  }
  for (int expert : expected_) {
    marks_[static_cast<size_t>(expert)] = 0;
    ++(prediction.absent[static_cast<size_t>(expert)] ? prediction.num_misses : prediction.num_hits);
  }
  for (int expert : seen) {
    const double p = 1 - std::exchange(absent_probability_[static_cast<size_t>(expert)], 1.0);
    if (prediction.absent[static_cast<size_t>(expert)]) prediction.proposals.push_back({layer, expert, p});
  }
  std::sort(prediction.proposals.begin(), prediction.proposals.end(),
            [](const Proposal& a, const Proposal& b) {
              return a.probability > b.probability || (a.probability == b.probability && a.expert < b.expert);
            });
  cache.expect(layer, expected_);
}

const PrefetchArrivals& Prefetcher::begin_layer(int layer, ExpertCache& cache, Link& link) {
  if (layer > 0 && last_end_us_ >= 0) {
    shorten(gap_us_[static_cast<size_t>(layer)], link.now_us() - last_end_us_);
  }
  arrivals_.landed.clear();
  arrivals_.withdrawn.clear();
  for (const Prefetch& prefetch : in_flight_) {
    if (prefetch.layer != layer) continue;
    const int slot = prefetch.admission.slot;
    const auto upload = link.take_if_landed({prefetch.layer, prefetch.expert, slot});
    if (upload && !upload->failed) {
      cache.publish(slot);
      arrivals_.landed.emplace_back(prefetch, *upload);
      due_.push_back({layer, prefetch.expert, true});
    } else if (upload || link.cancel_background(slot)) {
      cache.cancel(slot);
      arrivals_.withdrawn.push_back(prefetch);
      --counts_.issued;
      ++counts_.dropped;
    } else {
      due_.push_back({layer, prefetch.expert, false});
    }
  }
  std::erase_if(in_flight_, [layer](const Prefetch& prefetch) { return prefetch.layer == layer; });
  return arrivals_;
}

void Prefetcher::observe(int layer, std::span<const int32_t> ids, int num_tokens) {
  Prediction& prediction = predictions_[static_cast<size_t>(layer)];
  if (!std::exchange(prediction.valid, false)) return;
  const auto k = static_cast<size_t>(top_k_);
  for (const Candidate& candidate : prediction.candidates) {
    if (candidate.row >= num_tokens) continue;
    const auto row = ids.subspan(static_cast<size_t>(candidate.row) * k, k);
    const bool routed = std::find(row.begin(), row.end(), candidate.expert) != row.end();
    Tally& t = tally(layer, candidate.bucket);
    t.tried += 1;
    t.routed += routed;
    if (t.tried > kMaxTries) {
      t.tried /= 2;
      t.routed /= 2;
    }
  }
  // Measured per expert, as uploads are: 2 predicted, 1 routed.
  for (int32_t id : ids) marks_[static_cast<size_t>(id)] |= 1;
  for (const Due& due : due_) {
    if (due.layer != layer) continue;
    const bool routed = (marks_[static_cast<size_t>(due.expert)] & 1) != 0;
    ++(!routed ? counts_.wasted : due.landed ? counts_.used : counts_.late);
  }
  std::erase_if(due_, [layer](const Due& due) { return due.layer == layer; });
  for (const Candidate& candidate : prediction.candidates) {
    uint8_t& mark = marks_[static_cast<size_t>(candidate.expert)];
    if (!candidate.top || (mark & 2) != 0) continue;
    ++counts_.predicted;
    counts_.correct += mark & 1;
    mark |= 2;
  }
  for (int32_t id : ids) {
    uint8_t& mark = marks_[static_cast<size_t>(id)];
    if ((mark & 1) != 0 && prediction.absent[static_cast<size_t>(id)]) {
      ++counts_.misses;
      counts_.foreseen += (mark & 2) != 0;
    }
    mark = 0;
  }
  for (const Candidate& candidate : prediction.candidates) marks_[static_cast<size_t>(candidate.expert)] = 0;
  prediction.proposals.clear();
}

double Prefetcher::begin_of(int target, int layer, double end_us) const {
  for (int l = layer + 1; l <= target; ++l) {
    end_us += std::max(gap_us_[static_cast<size_t>(l)], 0.0);
    if (l < target) end_us += std::max(layer_us_[static_cast<size_t>(l)], 0.0);
  }
  return end_us;
}

double Prefetcher::stall_saved_us(int num_hits, int num_misses) const {
  const int side = top_k_ + 1;
  if (num_misses < 1) return cost_.miss_us();
  if (num_hits + num_misses > top_k_) return cost_.miss_us();
  return stall_us_[static_cast<size_t>(num_hits * side + num_misses)] -
         stall_us_[static_cast<size_t>((num_hits + 1) * side + num_misses - 1)];
}

double Prefetcher::gain_us(const Proposal& proposal, const Admission& admission, double saved_us,
                           const ExpertCache& cache) const {
  const double p = proposal.probability;
  const double miss_us = cost_.miss_us();
  if (cache.policy().prefetches != Prefetching::kAuto) {
    // The policy's values have no unit: a victim is worth an average expert's next use.
    const double victim = admission.evicted < 0 ? 0 : static_cast<double>(top_k_) / num_experts_;
    return p * saved_us - victim * miss_us;
  }
  // Used now, it is worth at most the price of buying it later; not used, its usual value.
  const double later = std::max(admission.value, 0.0);
  const double used_later = std::min(later, cache.config().upload_price);
  const double victim = admission.evicted < 0 ? 0 : std::max(admission.victim_value, 0.0);
  return p * (saved_us + miss_us * used_later) + miss_us * ((1 - p) * later - victim);
}

void Prefetcher::issue(int layer, const LayerWork& work, LayerTimes& times, ExpertCache& cache,
                       const Link& link, const std::function<void(const Prefetch&)>& upload) {
  int num_issued = 0;
  const double end_us = link.now_us() + times.layer_us;
  LayerWork shared = work;
  // Earliest deadline first; within a layer the likeliest.
  for (int target = layer + 1; target < static_cast<int>(predictions_.size()); ++target) {
    Prediction& prediction = predictions_[static_cast<size_t>(target)];
    if (!prediction.valid || prediction.proposals.empty()) continue;
    const double deadline_us = begin_of(target, layer, end_us);
    int num_hits = prediction.num_hits;
    int num_misses = prediction.num_misses;
    for (const Proposal& proposal : prediction.proposals) {
      const auto possible = cache.can_admit(target, proposal.expert, true);
      if (!possible || !link.may_begin(possible->slot)) continue;
      const double saved_us = stall_saved_us(num_hits, num_misses);
      shared.queued_us =
          std::max(work.queued_us, work.backlog_us) + static_cast<double>(num_issued + 1) * link.upload_us();
      const LayerTimes slowed = cost_.layer(shared);
      const double price_us = slowed.layer_us - times.layer_us;
      if (gain_us(proposal, *possible, saved_us, cache) <= price_us) continue;
      if (link.now_us() + link.queued_us() + link.upload_us() + kSlackUs > deadline_us) {
        ++counts_.dropped;
        continue;
      }
      const auto admission = cache.reserve(target, proposal.expert);
      if (!admission) continue;
      in_flight_.push_back({target, proposal.expert, *admission});
      upload(in_flight_.back());
      ++num_issued;
      ++counts_.issued;
      ++num_hits;
      --num_misses;
      times = slowed;
    }
    prediction.proposals.clear();  // decided; later layers use their own predictions
  }
  shorten(layer_us_[static_cast<size_t>(layer)], times.layer_us);
  last_end_us_ = link.now_us() + times.layer_us;
}

void Prefetcher::begin_step() {
  counts_.wasted += static_cast<int64_t>(in_flight_.size() + due_.size());
  in_flight_.clear();
  due_.clear();
  last_end_us_ = -1;
  for (Prediction& prediction : predictions_) prediction.valid = false;
}

}  // namespace twofold
