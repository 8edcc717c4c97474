#include "twofold/layer_scheduler.h"

#include <algorithm>
#include <array>
#include <stdexcept>
#include <utility>

namespace twofold {

namespace {

void expect_placements(std::span<const int32_t> ids, std::span<const Placement> where) {
  if (where.size() == ids.size()) return;
  throw std::invalid_argument("layer scheduler: " + std::to_string(where.size()) + " placements of " +
                              std::to_string(ids.size()) + " routed pairs given");
}

}  // namespace

LayerScheduler::LayerScheduler(CostModel cost, LayerSchedulerConfig config, Link& link)
    : LayerScheduler(std::move(cost), std::move(config), std::array<Link*, 1>{&link}) {}

LayerScheduler::LayerScheduler(CostModel cost, LayerSchedulerConfig config, std::span<Link* const> links)
    : cost_(std::move(cost)),
      config_(std::move(config)),
      devices_(devices_of(cost_, config_, links)),
      link_(*devices_.front().link),
      cache_(devices_.front().cache.get()),
      deferral_(config_.num_deferred, config_.num_layers),
      dynamic_update_(config_.replace_from, config_.num_experts),
      decode_planner_(cost_, config_.top_k),
      prefill_planner_(cost_),
      homes_(homes_of(cost_)) {
  if (num_devices() > 1) {
    copied_.resize(size_t(config_.num_layers) * size_t(config_.num_experts));
    use_rate_.resize(copied_.size());
    return;
  }
  if (config_.stream_ahead_from > 0 && config_.fetch_rule == FetchRule::kBestSplit && num_staging() > 0)
    ahead_.emplace(config_.num_layers, config_.num_experts, config_.top_k, config_.stream_ahead_from);
  if (config_.prefetch) prefetcher_.emplace(cost_, config_.num_layers, config_.num_experts, config_.top_k);
}

std::span<const Publication> LayerScheduler::begin_step(StepShape shape) {
  shape_ = std::move(shape);
  dynamic_update_.begin_step(shape_);
  cache_->boundary(shape_.num_new, shape_.num_running);
  if (prefetcher_) prefetcher_->begin_step();
  looks_ahead_ = false;
  cpu_free_us_ = 0;
  if (ahead_) ahead_->begin_step();
  publications_.clear();
  for (Device& device : devices_) device.knows_copy = false;
  for (int d = 0; d < num_devices(); ++d) {
    for (const Upload& upload : devices_[size_t(d)].link->take_landed()) {
      const bool staged = upload.what.slot >= num_slots(d);  // no layer waits for it
      if (upload.failed && !staged) {
        cache(d).cancel(upload.what.slot);
      } else if (!upload.failed) {
        link_us_ += upload.end_us - upload.begin_us;
        if (!staged) cache(d).publish(upload.what.slot);
      }
      publications_.push_back({upload.what.layer, upload.what.expert, upload.what.slot, upload, staged, d});
      if (num_devices() > 1) end_move(publications_.back());
    }
  }
  return publications_;
}

const LayerDecision& LayerScheduler::decide(int layer, std::span<const int32_t> ids,
                                            std::span<const float> weights, int num_tokens) {
  if (layer > 0) gap_us_ = std::max(0.0, link_.now_us() - layer_end_us_);
  begin_layer(layer, ids, weights, num_tokens);
  dynamic_update_.choose(layer, *cache_);
  if (plans_first_alone(num_tokens)) {
    for (Device& device : devices_) {
      device.fetch.clear();
      device.one_transfer = false;
    }
    plan(layer, ids, weights, num_tokens);
  } else {
    plan_machine(layer, num_tokens);
  }
  place_fetched(layer);
  for (Device& device : devices_) device.fetched_loads.clear();
  // In the link's order: uploads begun ahead come first.
  std::vector<int>& ahead_loads = devices_.front().fetched_loads;
  for (const ExpertDecision& e : decision_.experts) {
    if (ahead_ && e.where == Placement::kFetched && !e.landed && ahead_->find(e.expert) != nullptr)
      ahead_loads.push_back(e.tokens);
  }
  num_begun_ = static_cast<int>(ahead_loads.size());
  for (Device& device : devices_) {
    for (int i : device.fetch) device.fetched_loads.push_back(decision_.experts[size_t(i)].tokens);
  }
  return finish_layer(layer, ids, weights, num_tokens);
}

bool LayerScheduler::plans_first_alone(int num_tokens) const {
  if (num_devices() > 1 && num_tokens > 1) return false;
  for (int d = 1; d < num_devices(); ++d) {
    if (num_slots(d) > 0) return false;
  }
  return true;
}

const LayerDecision& LayerScheduler::follow(int layer, std::span<const int32_t> ids,
                                            std::span<const float> weights, std::span<const Placement> where,
                                            int num_tokens) {
  expect_placements(ids, where);
  begin_layer(layer, ids, weights, num_tokens);
  std::vector<int>& fetched_loads = devices_.front().fetched_loads;
  devices_.front().one_transfer = false;
  fetched_loads.clear();
  num_begun_ = 0;
  const auto active = cache_->active(layer);
  const auto loads = cache_->loads(layer);
  for (size_t i = 0; i < active.size(); ++i) decision_.experts.push_back({active[i], loads[i]});
  for (size_t pair = 0; pair < ids.size(); ++pair) {
    const auto at = std::lower_bound(active.begin(), active.end(), ids[pair]) - active.begin();
    decision_.experts[size_t(at)].where = where[pair];
  }
  for (const ExpertDecision& e : decision_.experts) {
    if (e.where == Placement::kFetched) fetched_loads.push_back(e.tokens);
  }
  cpu_free_us_ = 0;  // follow runs late: the previous layer's deferred experts have finished
  return finish_layer(layer, ids, weights, num_tokens);
}

void LayerScheduler::clear_decision(int layer) {
  decision_.layer = layer;
  decision_.experts.clear();
  decision_.deferred = {};
  decision_.moves.clear();
  decision_.rejection.reset();
  decision_.arrivals.clear();
  decision_.withdrawn.clear();
  decision_.start_us = link_.now_us();
}

void LayerScheduler::begin_layer(int layer, std::span<const int32_t> ids, std::span<const float> weights,
                                 int num_tokens) {
  clear_decision(layer);
  if (prefetcher_ && !looks_ahead_) take_prefetched(layer);
  if (ahead_) {
    ahead_arrivals_.clear();
    ahead_->begin_layer(layer, link_, ahead_arrivals_);
    for (const Upload& upload : ahead_arrivals_) {
      if (!upload.failed) link_us_ += upload.end_us - upload.begin_us;
      decision_.arrivals.push_back({upload.what.layer, upload.what.expert, upload.what.slot, upload, true});
    }
  }
  if (shape_.prefill_rows.empty()) {
    for (Device& device : devices_) device.cache->observe(layer, ids, weights, num_tokens);
  } else if (shape_.prefill_rows.size() == static_cast<size_t>(num_tokens)) {
    for (Device& device : devices_) device.cache->observe_mixed(layer, ids, weights, shape_.prefill_rows);
  } else {
    throw std::invalid_argument("layer scheduler: " + std::to_string(num_tokens) +
                                " tokens given, the step's " + std::to_string(shape_.prefill_rows.size()) +
                                " expected");
  }
  if (prefetcher_) prefetcher_->observe(layer, ids, num_tokens);
}

const LayerDecision& LayerScheduler::finish_layer(int layer, std::span<const int32_t> ids,
                                                  std::span<const float> weights, int num_tokens) {
  for (Device& device : devices_) device.hit_loads.clear();
  cpu_loads_.clear();
  deferred_loads_.clear();
  for (const ExpertDecision& e : decision_.experts) {
    if (e.where == Placement::kHit || e.landed) devices_[size_t(e.device)].hit_loads.push_back(e.tokens);
    if (e.where == Placement::kCpu) cpu_loads_.push_back(e.tokens);
  }
  if (deferral_.most() > 0) defer(layer, ids, weights, num_tokens);
  further_work_.clear();
  for (size_t d = 1; d < devices_.size(); ++d) {
    const Device& device = devices_[d];
    further_work_.push_back({device.hit_loads, device.fetched_loads, device.link->backlog_us(),
                             device.link->queued_us(), device.one_transfer});
  }
  const Device& first = devices_.front();
  // Uploads begun ahead that have not landed are in the backlog, and among the fetched ones.
  const double begun_us = num_begun_ * link_.upload_us();
  LayerWork work{first.hit_loads,
                 first.fetched_loads,
                 cpu_loads_,
                 std::max(0.0, link_.backlog_us() - begun_us),
                 std::max(0.0, link_.queued_us() - begun_us),
                 first.one_transfer,
                 deferred_loads_,
                 std::max(0.0, cpu_free_us_ - link_.now_us()),
                 further_work_};
  decision_.times = layer_cost(layer).layer(work);

  int last_device = -1;  // moves are in the order of devices
  for (Move& move : decision_.moves) {
    // One transfer pays the link's latency once; its later parts occupy the link for their bytes only.
    const CostModel& cost = cost_.device(move.device);
    const bool continues = devices_[size_t(move.device)].one_transfer && move.device == last_device;
    upload(move, continues ? cost.upload_us() - cost.profile().link_latency_us : cost.upload_us());
    last_device = move.device;
  }
  if (ahead_) stream_ahead(layer, work, num_tokens);
  cpu_free_us_ = link_.now_us() + decision_.times.cpu_end_us;
  dynamic_update_.admit_rest(layer, *cache_, [&](int expert, const Admission& admission) {
    upload_after_layer(layer, expert, admission, UploadReason::kAdmission);
  });
  if (plans_first_alone(num_tokens)) {
    admit_misses(layer);
  } else {
    admit_in_market(layer);
  }
  if (prefetcher_ && !looks_ahead_) issue_prefetches(layer, work);
  advance(decision_.times.layer_us);
  layer_end_us_ = link_.now_us();
  return decision_;
}

void LayerScheduler::recalibrate(CostModel cost) {
  cost_ = std::move(cost);
  decode_planner_ = DecodePlanner(cost_, cache_->config().top_k);
  prefill_planner_ = PrefillPlanner(cost_);
  homes_ = homes_of(cost_);
  if (prefetcher_) prefetcher_->recalibrate(cost_);
}

std::vector<uint8_t> LayerScheduler::split_table() const {
  const int top_k = cache_->config().top_k;
  std::vector<uint8_t> table;
  for (int hits = 0; hits <= top_k; ++hits) {
    for (int misses = 0; misses <= top_k; ++misses) {
      table.push_back(hits + misses > top_k ? uint8_t{0} : fetched_of(hits, misses));
    }
  }
  return table;
}

uint8_t LayerScheduler::fetched_of(int hits, int misses) const {
  if (config_.fetch_rule == FetchRule::kBestSplit) {
    return static_cast<uint8_t>(decode_planner_.split(hits, misses, 0));
  }
  std::vector<ExpertLoad> active;
  for (int i = 0; i < hits + misses; ++i) active.push_back({i, 1, i < hits});
  return static_cast<uint8_t>(peer_fetches(config_.fetch_rule, cost_, active, 0).size());
}

void LayerScheduler::stream_ahead(int layer, LayerWork& work, int num_tokens) {
  std::vector<int> free;  // staging slots that hold no expert of this layer
  if (num_tokens >= config_.stream_ahead_from) {
    staging_in_use_.assign(size_t(num_staging()), 0);
    for (const ExpertDecision& e : decision_.experts) {
      if (e.slot >= num_slots()) staging_in_use_[size_t(e.slot - num_slots())] = 1;
    }
    for (int staged = 0; staged < num_staging(); ++staged) {
      if (!staging_in_use_[size_t(staged)]) free.push_back(num_slots() + staged);
    }
  }
  const std::vector<int> experts =
      ahead_->choose(layer, num_tokens, work, decision_.times, cost_, prefill_planner_, *cache_, link_,
                     static_cast<int>(free.size()));
  for (size_t i = 0; i < experts.size(); ++i) {
    Move move;
    move.layer = layer + 1;
    move.expert = experts[i];
    move.slot = free[i];
    move.staged = true;
    upload(move);
    decision_.moves.push_back(move);
    ahead_->begun({move.layer, move.expert, move.slot});
  }
  if (!experts.empty()) {  // the CPU's experts may take longer, the layer does not
    work.queued_us =
        std::max(work.queued_us, work.backlog_us) + static_cast<double>(experts.size()) * link_.upload_us();
    decision_.times = cost_.layer(work);
  }
  ahead_->observe(layer, cache_->active(layer), cache_->loads(layer), num_tokens,
                  decision_.start_us + decision_.times.layer_us);
}

void LayerScheduler::admit_misses(int layer) {
  if (!config_.background_uploads || config_.fixed_placement) return;
  for (const ExpertDecision& e : decision_.experts) {
    // Experts that a device read directly from host memory (follow) are misses like the CPU's.
    const bool missed = e.where == Placement::kCpu || (e.where == Placement::kFetched && e.slot < 0);
    if (!missed || cache_->state(layer, e.expert) != ExpertState::kAbsent) continue;
    if (link_.num_waiting() >= config_.max_waiting_uploads) return;
    const auto admission = cache_->admit(layer, e.expert, false);
    if (!admission) {
      if (cache_->last_refusal() == AdmitRefusal::kPrice) {
        const double value = cache_->value(layer, e.expert);
        if (!decision_.rejection || value > decision_.rejection->value)
          decision_.rejection = {e.expert, value};
      }
      continue;
    }
    upload_after_layer(layer, e.expert, *admission, UploadReason::kAdmission);
  }
}

void LayerScheduler::drain() {
  double end_us = 0;
  for (Device& device : devices_) {
    device.link->drain();
    end_us = std::max(end_us, device.link->now_us());
  }
  for (Device& device : devices_) device.link->advance(std::max(0.0, end_us - device.link->now_us()));
}

void LayerScheduler::upload_after_layer(int layer, int expert, const Admission& admission,
                                        UploadReason reason, int device) {
  Move move;
  move.device = device;
  move.layer = layer;
  move.expert = expert;
  move.take(admission);
  move.reason = reason;
  upload(move);
  decision_.moves.push_back(move);
}

void LayerScheduler::upload(Move& move, double duration_us) {
  Link& link = *devices_[size_t(move.device)].link;
  const Upload upload = link.upload({move.layer, move.expert, move.slot}, lane_of(move.reason), duration_us);
  move.queued_us = upload.queued_us;
  move.begin_us = upload.begin_us;
  move.end_us = upload.end_us;
}

void LayerScheduler::predict(int layer, std::span<const float> logits, int num_tokens) {
  if (!prefetcher_) throw std::logic_error("layer scheduler: predict without LayerSchedulerConfig::prefetch");
  prefetcher_->predict(layer, logits, num_tokens, *cache_);
}

const LayerDecision& LayerScheduler::look_ahead(int layer, std::span<const int32_t> ids,
                                                std::span<const Placement> where) {
  expect_placements(ids, where);
  looks_ahead_ = true;
  clear_decision(layer);
  auto& hit_loads = devices_.front().hit_loads;
  auto& fetched_loads = devices_.front().fetched_loads;
  hit_loads.clear();
  fetched_loads.clear();
  cpu_loads_.clear();
  expert_loads_.assign(size_t(cache_->config().num_experts), 0);
  for (const int32_t id : ids) ++expert_loads_.at(size_t(id));
  for (size_t pair = 0; pair < ids.size(); ++pair) {
    const int load = std::exchange(expert_loads_[size_t(ids[pair])], 0);
    if (load == 0) continue;
    (where[pair] == Placement::kHit   ? hit_loads
     : where[pair] == Placement::kCpu ? cpu_loads_
                                      : fetched_loads)
        .push_back(load);
  }
  const LayerWork work{hit_loads, fetched_loads, cpu_loads_, link_.backlog_us(), link_.queued_us(), false};
  decision_.times = cost_.layer(work);
  issue_prefetches(layer, work);
  link_.advance(0);  // starts the uploads now: the layer has begun
  return decision_;
}

void LayerScheduler::take_prefetched(int layer) {
  const PrefetchArrivals& arrivals = prefetcher_->begin_layer(layer, *cache_, link_);
  for (const auto& [prefetch, upload] : arrivals.landed) {
    link_us_ += upload.end_us - upload.begin_us;
    decision_.arrivals.push_back({prefetch.layer, prefetch.expert, prefetch.admission.slot, upload, false});
  }
  for (const Prefetch& prefetch : arrivals.withdrawn) decision_.withdrawn.push_back(prefetch.expert);
}

// After everything else of the layer: a prefetch takes only idle link time.
void LayerScheduler::issue_prefetches(int layer, const LayerWork& work) {
  prefetcher_->issue(layer, work, decision_.times, *cache_, link_, [this](const Prefetch& prefetch) {
    upload_after_layer(prefetch.layer, prefetch.expert, prefetch.admission, UploadReason::kPrefetch);
  });
}

}  // namespace twofold
