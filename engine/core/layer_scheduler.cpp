#include "twofold/layer_scheduler.h"

#include <algorithm>
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
    : cost_(std::move(cost)),
      config_(std::move(config)),
      link_(link),
      deferral_(config_.num_deferred, config_.num_layers),
      cache_(make_cache(cost_, config_)),
      dynamic_update_(config_.replace_from, config_.num_experts),
      decode_planner_(cost_, config_.top_k),
      prefill_planner_(cost_) {
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
  for (const Upload& upload : link_.take_landed()) {
    const bool staged = upload.what.slot >= num_slots();  // no layer waits for it
    if (upload.failed && !staged) {
      cache_->cancel(upload.what.slot);
    } else if (!upload.failed) {
      link_us_ += upload.end_us - upload.begin_us;
      if (!staged) cache_->publish(upload.what.slot);
    }
    publications_.push_back({upload.what.layer, upload.what.expert, upload.what.slot, upload, staged});
  }
  return publications_;
}

const LayerDecision& LayerScheduler::decide(int layer, std::span<const int32_t> ids,
                                            std::span<const float> weights, int num_tokens) {
  if (layer > 0) gap_us_ = std::max(0.0, link_.now_us() - layer_end_us_);
  begin_layer(layer, ids, weights, num_tokens);
  dynamic_update_.choose(layer, *cache_);
  plan(layer, ids, weights, num_tokens);
  place_fetched(layer);
  fetched_loads_.clear();
  // In the link's order: uploads begun ahead come first.
  for (const ExpertDecision& e : decision_.experts) {
    if (ahead_ && e.where == Placement::kFetched && !e.landed && ahead_->find(e.expert) != nullptr)
      fetched_loads_.push_back(e.tokens);
  }
  num_begun_ = static_cast<int>(fetched_loads_.size());
  for (int i : fetch_) fetched_loads_.push_back(decision_.experts[size_t(i)].tokens);
  return finish_layer(layer, ids, weights, num_tokens);
}

const LayerDecision& LayerScheduler::follow(int layer, std::span<const int32_t> ids,
                                            std::span<const float> weights, std::span<const Placement> where,
                                            int num_tokens) {
  expect_placements(ids, where);
  begin_layer(layer, ids, weights, num_tokens);
  one_transfer_ = false;
  fetched_loads_.clear();
  num_begun_ = 0;
  const auto active = cache_->active(layer);
  const auto loads = cache_->loads(layer);
  for (size_t i = 0; i < active.size(); ++i) decision_.experts.push_back({active[i], loads[i]});
  for (size_t pair = 0; pair < ids.size(); ++pair) {
    const auto at = std::lower_bound(active.begin(), active.end(), ids[pair]) - active.begin();
    decision_.experts[size_t(at)].where = where[pair];
  }
  for (const ExpertDecision& e : decision_.experts) {
    if (e.where == Placement::kFetched) fetched_loads_.push_back(e.tokens);
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
  decision_.num_withdrawn = 0;
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
    cache_->observe(layer, ids, weights, num_tokens);
  } else if (shape_.prefill_rows.size() == static_cast<size_t>(num_tokens)) {
    cache_->observe_mixed(layer, ids, weights, shape_.prefill_rows);
  } else {
    throw std::invalid_argument("layer scheduler: " + std::to_string(num_tokens) +
                                " tokens given, the step's " + std::to_string(shape_.prefill_rows.size()) +
                                " expected");
  }
  if (prefetcher_) prefetcher_->observe(layer, ids, num_tokens);
}

const LayerDecision& LayerScheduler::finish_layer(int layer, std::span<const int32_t> ids,
                                                  std::span<const float> weights, int num_tokens) {
  hit_loads_.clear();
  cpu_loads_.clear();
  deferred_loads_.clear();
  for (const ExpertDecision& e : decision_.experts) {
    if (e.where == Placement::kHit || e.landed) hit_loads_.push_back(e.tokens);
    if (e.where == Placement::kCpu) cpu_loads_.push_back(e.tokens);
  }
  if (deferral_.most() > 0) defer(layer, ids, weights, num_tokens);
  // Uploads begun ahead that have not landed are in the backlog, and among the fetched ones.
  const double begun_us = num_begun_ * link_.upload_us();
  LayerWork work{hit_loads_,
                 fetched_loads_,
                 cpu_loads_,
                 std::max(0.0, link_.backlog_us() - begun_us),
                 std::max(0.0, link_.queued_us() - begun_us),
                 one_transfer_,
                 deferred_loads_,
                 std::max(0.0, cpu_free_us_ - link_.now_us())};
  decision_.times = cost_.layer(work);

  bool first = true;
  for (Move& move : decision_.moves) {
    // One transfer pays the link's latency once; its later parts occupy the link for their bytes only.
    const double latency = cost_.profile().link_latency_us;
    const double duration = one_transfer_ && !first ? cost_.upload_us() - latency : cost_.upload_us();
    upload(move, duration);
    first = false;
  }
  if (ahead_) stream_ahead(layer, work, num_tokens);
  cpu_free_us_ = link_.now_us() + decision_.times.cpu_end_us;
  dynamic_update_.admit_rest(layer, *cache_, [&](int expert, const Admission& admission) {
    upload_after_layer(layer, expert, admission, UploadReason::kAdmission);
  });
  admit_misses(layer);
  if (prefetcher_ && !looks_ahead_) issue_prefetches(layer, work);
  link_.advance(decision_.times.layer_us);
  layer_end_us_ = link_.now_us();
  return decision_;
}

void LayerScheduler::recalibrate(CostModel cost) {
  cost_ = std::move(cost);
  decode_planner_ = DecodePlanner(cost_, cache_->config().top_k);
  prefill_planner_ = PrefillPlanner(cost_);
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
  std::vector<int> free;
  for (int staged = 0; staged < num_staging(); ++staged) {
    if (!stages(staged)) free.push_back(num_slots() + staged);
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

void LayerScheduler::upload_after_layer(int layer, int expert, const Admission& admission,
                                        UploadReason reason) {
  Move move;
  move.layer = layer;
  move.expert = expert;
  move.take(admission);
  move.reason = reason;
  upload(move);
  decision_.moves.push_back(move);
}

void LayerScheduler::upload(Move& move, double duration_us) {
  const Upload upload = link_.upload({move.layer, move.expert, move.slot}, lane_of(move.reason), duration_us);
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
  hit_loads_.clear();
  fetched_loads_.clear();
  cpu_loads_.clear();
  expert_loads_.assign(size_t(cache_->config().num_experts), 0);
  for (const int32_t id : ids) ++expert_loads_.at(size_t(id));
  for (size_t pair = 0; pair < ids.size(); ++pair) {
    const int load = std::exchange(expert_loads_[size_t(ids[pair])], 0);
    if (load == 0) continue;
    (where[pair] == Placement::kHit   ? hit_loads_
     : where[pair] == Placement::kCpu ? cpu_loads_
                                      : fetched_loads_)
        .push_back(load);
  }
  const LayerWork work{hit_loads_, fetched_loads_, cpu_loads_, link_.backlog_us(), link_.queued_us(), false};
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
  decision_.num_withdrawn = static_cast<int>(arrivals.withdrawn.size());
}

// After everything else of the layer: a prefetch takes only idle link time.
void LayerScheduler::issue_prefetches(int layer, const LayerWork& work) {
  prefetcher_->issue(layer, work, decision_.times, *cache_, link_, [this](const Prefetch& prefetch) {
    upload_after_layer(prefetch.layer, prefetch.expert, prefetch.admission, UploadReason::kPrefetch);
  });
}

}  // namespace twofold
