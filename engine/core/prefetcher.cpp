#include "twofold/prefetcher.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

namespace twofold {
namespace {

constexpr int kExtraCandidates = 4;  // beyond the top-k: the border is where predictions err
// Upper borders of the margin's buckets, in logits; the last bucket has none.
constexpr std::array<double, 11> kMarginBelow{-2, -1, -0.5, -0.25, -0.1, 0, 0.1, 0.25, 0.5, 1, 2};
constexpr double kPriorTries = 8;    // weight of chance (top-k / experts) before anything is learned
constexpr double kMaxTries = 2048;   // beyond it older tries fade
constexpr double kSlackUs = 1e-3;    // rounding makes nothing late
constexpr double kRelax = 1.0 / 64;  // relaxation rate of a shortest time

// The deadline falls at once and rises slowly, so that an error makes it early, not late.
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
  look_aheads_.resize(layers);
  marks_.assign(static_cast<size_t>(num_experts), 0);
  absent_probability_.assign(static_cast<size_t>(num_experts), 1);
  recalibrate(cost);
}

void Prefetcher::recalibrate(const CostModel& cost) {
  cost_ = cost;
  stall_us_.clear();
  for (int d = 0; d < cost_.num_devices(); ++d) stall_us_.push_back(stalls_of(cost_.device(d)));
}

std::vector<double> Prefetcher::stalls_of(const DeviceCost& device) const {
  const auto side = static_cast<size_t>(top_k_) + 1;
  std::vector<double> stalls(side * side, 0);
  const double hit_us = device.gpu_expert_us(1);
  const double cpu_us = cost_.cpu_expert_us(1);
  const std::vector<double> fetched_us(side, hit_us);
  for (int hits = 0; hits <= top_k_; ++hits) {
    for (int misses = 0; hits + misses <= top_k_; ++misses) {
      double best = -1;
      for (int fetched = 0; fetched <= misses; ++fetched) {
        const int on_cpu = misses - fetched;
        const DeviceTimes times =
            device.times(DeviceSums{.num_hits = hits,
                                    .hit_us = hits * hit_us,
                                    .fetched_us = std::span(fetched_us).first(static_cast<size_t>(fetched))});
        double busy = 0;
        const double of_cpu = cost_.cpu_from_sums(on_cpu, on_cpu * cpu_us, {&times.copying_us, 1}, busy);
        const double us = std::max(times.gpu_us, of_cpu) + cost_.home().profile().join_us;
        if (best < 0 || us < best) best = us;
      }
      stalls[static_cast<size_t>(hits) * side + static_cast<size_t>(misses)] = best;
    }
  }
  return stalls;
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

void Prefetcher::predict(int layer, std::span<const float> logits, int num_tokens, Devices& devices) {
  if (layer < 0 || layer >= static_cast<int>(look_aheads_.size()) || num_tokens < 1 ||
      logits.size() != static_cast<size_t>(num_tokens) * static_cast<size_t>(num_experts_)) {
    throw std::invalid_argument("prefetcher: " + std::to_string(logits.size()) + " logits of " +
                                std::to_string(num_tokens) + " tokens for layer " + std::to_string(layer) +
                                " given, tokens * " + std::to_string(num_experts_) + " of layers 0 ... " +
                                std::to_string(look_aheads_.size() - 1) + " expected");
  }
  LookAhead& look_ahead = look_aheads_[static_cast<size_t>(layer)];
  look_ahead.valid = true;
  look_ahead.candidates.clear();
  look_ahead.proposals.clear();
  look_ahead.num_hits = look_ahead.num_misses = 0;
  look_ahead.absent.resize(static_cast<size_t>(num_experts_));
  for (int e = 0; e < num_experts_; ++e) {
    look_ahead.absent[static_cast<size_t>(e)] = !devices.holds(layer, e);
  }
  const int considered = std::min(num_experts_, top_k_ + kExtraCandidates);
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
      look_ahead.candidates.push_back(candidate);
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
    ++(look_ahead.absent[static_cast<size_t>(expert)] ? look_ahead.num_misses : look_ahead.num_hits);
  }
  for (int expert : seen) {
    const double p = 1 - std::exchange(absent_probability_[static_cast<size_t>(expert)], 1.0);
    if (look_ahead.absent[static_cast<size_t>(expert)]) look_ahead.proposals.push_back({layer, expert, p});
  }
  std::sort(look_ahead.proposals.begin(), look_ahead.proposals.end(),
            [](const Proposal& a, const Proposal& b) {
              return a.probability > b.probability || (a.probability == b.probability && a.expert < b.expert);
            });
  for (int d = 0; d < devices.count(); ++d) devices.cache(d).expect(layer, expected_);
}

void Prefetcher::begin_layer(Devices& devices, LayerDecision& decision) {
  const int layer = decision.layer;
  if (layer > 0 && last_end_us_ >= 0) {
    shorten(gap_us_[static_cast<size_t>(layer)], devices.now_us() - last_end_us_);
  }
  for (const Prefetch& prefetch : in_flight_) {
    if (prefetch.layer != layer) continue;
    const int slot = prefetch.slot;
    ExpertCache& cache = devices.cache(prefetch.device);
    Link& link = devices.link(prefetch.device);
    const auto upload = link.take_if_landed({layer, prefetch.expert, slot});
    if (upload && !upload->failed) {
      cache.publish(slot);
      devices.count_copied(*upload);
      decision.arrivals.push_back({layer, prefetch.expert, slot, *upload, false, prefetch.device});
      due_.push_back({layer, prefetch.expert, true});
    } else if (upload || link.cancel_background(slot)) {
      cache.cancel(slot);
      decision.withdrawn.push_back(prefetch.expert);
      --counts_.issued;
      ++counts_.dropped;
    } else {
      due_.push_back({layer, prefetch.expert, false});
    }
  }
  std::erase_if(in_flight_, [layer](const Prefetch& prefetch) { return prefetch.layer == layer; });
}

void Prefetcher::observe(int layer, std::span<const int32_t> ids, int num_tokens) {
  LookAhead& look_ahead = look_aheads_[static_cast<size_t>(layer)];
  if (!std::exchange(look_ahead.valid, false)) return;
  const auto k = static_cast<size_t>(top_k_);
  for (const Candidate& candidate : look_ahead.candidates) {
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
  for (const Candidate& candidate : look_ahead.candidates) {
    uint8_t& mark = marks_[static_cast<size_t>(candidate.expert)];
    if (!candidate.top || (mark & 2) != 0) continue;
    ++counts_.predicted;
    counts_.correct += mark & 1;
    mark |= 2;
  }
  for (int32_t id : ids) {
    uint8_t& mark = marks_[static_cast<size_t>(id)];
    if ((mark & 1) != 0 && look_ahead.absent[static_cast<size_t>(id)]) {
      ++counts_.misses;
      counts_.foreseen += (mark & 2) != 0;
    }
    mark = 0;
  }
  for (const Candidate& candidate : look_ahead.candidates) marks_[static_cast<size_t>(candidate.expert)] = 0;
  look_ahead.proposals.clear();
}

double Prefetcher::begin_of(int target, int layer, double end_us) const {
  for (int l = layer + 1; l <= target; ++l) {
    end_us += std::max(gap_us_[static_cast<size_t>(l)], 0.0);
    if (l < target) end_us += std::max(layer_us_[static_cast<size_t>(l)], 0.0);
  }
  return end_us;
}

double Prefetcher::stall_saved_us(int device, const LookAhead& look_ahead) const {
  const int hits = look_ahead.num_hits, misses = look_ahead.num_misses, side = top_k_ + 1;
  if (misses < 1 || hits + misses > top_k_) return cost_.device(device).miss_us();
  const std::vector<double>& stalls = stall_us_[static_cast<size_t>(device)];
  return stalls[static_cast<size_t>(hits * side + misses)] -
         stalls[static_cast<size_t>((hits + 1) * side + misses - 1)];
}

double Prefetcher::gain_us(const Proposal& proposal, const Admission& admission, double saved_us, int device,
                           const ExpertCache& cache) const {
  const double p = proposal.probability;
  const double miss_us = cost_.device(device).miss_us();
  if (cache.policy().prefetches != Prefetching::kAuto) {
    // The policy's values have no unit: a victim is worth an average expert's next use.
    const double victim = admission.evicted < 0 ? 0 : static_cast<double>(top_k_) / num_experts_;
    return p * saved_us - victim * miss_us;
  }
  // An expert used now is worth at most the price of a later upload; an unused one has its usual value.
  const double later = std::max(admission.value, 0.0);
  const double used_later = std::min(later, cache.config().upload_price);
  const double victim = admission.evicted < 0 ? 0 : std::max(admission.victim_value, 0.0);
  return p * (saved_us + miss_us * used_later) + miss_us * ((1 - p) * later - victim);
}

Prefetcher::Offer Prefetcher::best_offer(const Proposal& proposal, const LookAhead& look_ahead,
                                         double deadline_us, const LayerTimes& times, Devices& devices) {
  Offer best;
  if (devices.holds(proposal.layer, proposal.expert)) return best;
  for (int d = 0; d < devices.count(); ++d) {
    ExpertCache& cache = devices.cache(d);
    const Link& link = devices.link(d);
    const auto possible = cache.can_admit(proposal.layer, proposal.expert, true);
    if (!possible || !link.may_begin(possible->slot)) continue;
    DeviceWork& work = shared_[static_cast<size_t>(d)];
    const double queued_us = work.queued_us;
    work.queued_us = std::max(queued_us, work.backlog_us) + link.upload_us();
    const LayerTimes slowed = cost_.layer(shared_work_);
    work.queued_us = queued_us;
    const double gain = gain_us(proposal, *possible, stall_saved_us(d, look_ahead), d, cache) -
                        (slowed.layer_us - times.layer_us);
    if (gain <= 0 || gain <= best.gain_us) continue;
    if (link.now_us() + link.queued_us() + link.upload_us() + kSlackUs > deadline_us) {
      best.is_late = true;
      continue;
    }
    best = {d, false, gain, slowed};
  }
  return best;
}

void Prefetcher::issue(const LayerWork& work, Devices& devices, LayerDecision& decision) {
  const int layer = decision.layer;
  LayerTimes& times = decision.times;
  const double end_us = devices.now_us() + times.layer_us;
  shared_.assign(work.devices.begin(), work.devices.end());
  shared_work_ = work;
  shared_work_.devices = shared_;
  // Earliest deadline first; within a layer the likeliest.
  for (int target = layer + 1; target < static_cast<int>(look_aheads_.size()); ++target) {
    LookAhead& look_ahead = look_aheads_[static_cast<size_t>(target)];
    if (!look_ahead.valid || look_ahead.proposals.empty()) continue;
    const double deadline_us = begin_of(target, layer, end_us);
    for (const Proposal& proposal : look_ahead.proposals) {
      const Offer offer = best_offer(proposal, look_ahead, deadline_us, times, devices);
      if (offer.device < 0) {
        counts_.dropped += offer.is_late;
        continue;
      }
      const auto admission = devices.cache(offer.device).admit(target, proposal.expert, true, false);
      if (!admission) continue;
      in_flight_.push_back({target, proposal.expert, offer.device, admission->slot});
      devices.upload(
          decision.add_move(target, proposal.expert, offer.device, *admission, UploadReason::kPrefetch));
      ++counts_.issued;
      ++look_ahead.num_hits;
      --look_ahead.num_misses;
      DeviceWork& device = shared_[static_cast<size_t>(offer.device)];
      device.queued_us =
          std::max(device.queued_us, device.backlog_us) + devices.link(offer.device).upload_us();
      times = offer.times;
    }
    look_ahead.proposals.clear();  // decided; later layers use their own predictions
  }
  shorten(layer_us_[static_cast<size_t>(layer)], times.layer_us);
  last_end_us_ = devices.now_us() + times.layer_us;
}

void Prefetcher::begin_step() {
  counts_.wasted += static_cast<int64_t>(in_flight_.size() + due_.size());
  in_flight_.clear();
  due_.clear();
  last_end_us_ = -1;
  for (LookAhead& look_ahead : look_aheads_) look_ahead.valid = false;
}

}  // namespace twofold
