#include "twofold/layer_scheduler.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

namespace twofold {

namespace {

void expect_placements(std::span<const int32_t> ids, std::span<const Placement> where) {
  if (where.size() == ids.size()) return;
  throw std::invalid_argument("layer scheduler: " + std::to_string(where.size()) + " placements of " +
                              std::to_string(ids.size()) + " routed pairs given");
}

}  // namespace

LayerScheduler::LayerScheduler(CostModel cost, LayerSchedulerConfig config, std::span<Link* const> links)
    : cost_(std::move(cost)),
      config_(std::move(config)),
      devices_(cost_, config_, links),
      planner_(cost_, config_),
      placer_(config_),
      pricer_(devices_.count()),
      market_(cost_, config_),
      dynamic_update_(config_.replace_from, config_.num_experts),
      ahead_(config_),
      shares_(links.size()) {
  if (config_.prefetch) prefetcher_.emplace(cost_, config_.num_layers, config_.num_experts, config_.top_k);
}

std::span<const Publication> LayerScheduler::begin_step(StepShape shape) {
  shape_ = std::move(shape);
  dynamic_update_.begin_step(shape_);
  if (prefetcher_) prefetcher_->begin_step();
  looks_ahead_ = false;
  cpu_free_us_ = 0;
  ahead_.begin_step();
  market_.begin_step();
  publications_.clear();
  for (int d = 0; d < devices_.count(); ++d) {
    ExpertCache& cache = devices_.cache(d);
    cache.boundary(shape_.num_new, shape_.num_running);
    for (const Upload& upload : devices_.link(d).take_landed()) {
      const bool staged = upload.what.slot >= cache.num_slots();  // no layer waits for it
      devices_.count_copied(upload);
      if (!staged && upload.failed) cache.cancel(upload.what.slot);
      if (!staged && !upload.failed) cache.publish(upload.what.slot);
      publications_.push_back({upload.what.layer, upload.what.expert, upload.what.slot, upload, staged, d});
      market_.landed(publications_.back(), devices_);
    }
  }
  return publications_;
}

const LayerDecision& LayerScheduler::decide(const RoutedLayer& routed) {
  if (routed.layer > 0) gap_us_ = std::max(0.0, now_us() - layer_end_us_);
  observe(routed);
  dynamic_update_.choose(routed.layer, devices_);
  planner_.plan(routed, {{}, std::max(0.0, cpu_free_us_ - now_us()), gap_us_}, shape_.generated_rows,
                devices_, ahead_, decision_, shares_);
  market_.learn(routed.layer, planner_, routed.num_tokens > 1, devices_);
  placer_.place(shares_, devices_, dynamic_update_, decision_);
  return play(routed);
}

const LayerDecision& LayerScheduler::follow(const RoutedLayer& routed, std::span<const Placement> where) {
  expect_placements(routed.ids, where);
  observe(routed);
  const int home = config_.home(routed.layer);
  const auto active = devices_.active(routed.layer), loads = devices_.loads(routed.layer);
  for (size_t i = 0; i < active.size(); ++i) decision_.experts.push_back({active[i], loads[i]});
  for (size_t pair = 0; pair < where.size(); ++pair) {
    ExpertDecision& e = *decision_.find(routed.ids[pair]);
    e.where = where[pair];
    e.device = e.where == Placement::kCpu ? 0 : home;
  }
  for (DeviceShare& share : shares_) share = {};
  for (size_t i = 0; i < active.size(); ++i) {
    if (decision_.experts[i].where == Placement::kFetched) shares_[size_t(home)].fetch.push_back(int(i));
  }
  cpu_free_us_ = 0;  // follow runs late: the previous layer's deferred experts have finished
  return play(routed);
}

void LayerScheduler::observe(const RoutedLayer& routed) {
  decision_.begin(routed.layer, now_us());
  if (prefetcher_ && !looks_ahead_) take_prefetched(routed.layer);
  ahead_.begin_layer(routed.layer, devices_, decision_.arrivals);
  devices_.observe(routed, shape_);
  if (prefetcher_) prefetcher_->observe(routed.layer, routed.ids, routed.num_tokens);
}

const LayerDecision& LayerScheduler::play(const RoutedLayer& routed) {
  const int layer = routed.layer;
  const LayerWork& work =
      pricer_.work_of(decision_, shares_, defer(routed), devices_, std::max(0.0, cpu_free_us_ - now_us()));
  decision_.times = planner_.cost(layer).layer(work);
  move_fetched();
  stream_ahead(routed);
  cpu_free_us_ = now_us() + decision_.times.cpu_end_us;
  dynamic_update_.admit_rest(layer, devices_, [&](int expert, int device, const Admission& admission) {
    upload_after_layer(layer, expert, admission, UploadReason::kAdmission, device);
  });
  market_.admit(devices_, decision_);
  if (prefetcher_ && !looks_ahead_) issue_prefetches(layer, work);
  advance(decision_.times.layer_us);
  layer_end_us_ = now_us();
  return decision_;
}

std::span<const int> LayerScheduler::defer(const RoutedLayer& routed) {
  if (config_.num_deferred == 0) return {};
  by_expert_.assign(size_t(config_.num_experts), 0);
  for (const ExpertDecision& e : decision_.experts) by_expert_[size_t(e.expert)] = e.where == Placement::kCpu;
  on_cpu_.clear();
  for (const int32_t id : routed.ids) on_cpu_.push_back(uint8_t(by_expert_[size_t(id)]));
  decision_.deferred = planner_.deferred(routed, shape_.generated_rows, on_cpu_);
  if (decision_.deferred.empty()) return {};
  by_expert_.assign(by_expert_.size(), 0);
  for (size_t pair = 0; pair < routed.ids.size(); ++pair)
    by_expert_[size_t(routed.ids[pair])] += decision_.deferred[pair];
  deferred_tokens_.clear();
  for (const ExpertDecision& e : decision_.experts) deferred_tokens_.push_back(by_expert_[size_t(e.expert)]);
  return deferred_tokens_;
}

void LayerScheduler::move_fetched() {
  int last_device = -1;  // moves are in the order of devices
  for (Move& move : decision_.moves) {
    // One transfer pays the link's latency once; its later parts occupy the link for their bytes only.
    const DeviceCost& cost = cost_.device(move.device);
    const bool continues = shares_[size_t(move.device)].one_transfer && move.device == last_device;
    devices_.upload(move, continues ? cost.upload_us() - cost.profile().link_latency_us : cost.upload_us());
    last_device = move.device;
  }
}

void LayerScheduler::stream_ahead(const RoutedLayer& routed) {
  const int layer = routed.layer;
  const auto chosen = ahead_.choose(routed, planner_, pricer_, decision_, devices_);
  for (const StreamAhead::Choice& choice : chosen) {
    Move& move = decision_.moves.emplace_back();
    move.layer = layer + 1;
    move.expert = choice.expert;
    move.slot = choice.slot;
    move.device = choice.device;
    move.staged = true;
    devices_.upload(move);
  }
  // The CPU's experts may take longer, the layer does not.
  if (!chosen.empty()) decision_.times = planner_.cost(layer).layer(pricer_.work());
  ahead_.observe(routed, devices_, decision_.start_us + decision_.times.layer_us);
}

void LayerScheduler::recalibrate(CostModel cost) {
  cost_ = std::move(cost);
  planner_.recalibrate(cost_);
  market_.recalibrate(cost_);
  if (prefetcher_) prefetcher_->recalibrate(cost_);
}

void LayerScheduler::upload_after_layer(int layer, int expert, const Admission& admission,
                                        UploadReason reason, int device) {
  Move& move = decision_.moves.emplace_back();
  move.device = device;
  move.layer = layer;
  move.expert = expert;
  move.take(admission);
  move.reason = reason;
  devices_.upload(move);
}

void LayerScheduler::predict(int layer, std::span<const float> logits, int num_tokens) {
  if (!prefetcher_) throw std::logic_error("layer scheduler: predict without LayerSchedulerConfig::prefetch");
  prefetcher_->predict(layer, logits, num_tokens, devices_);
}

const LayerDecision& LayerScheduler::look_ahead(int layer, std::span<const int32_t> ids,
                                                std::span<const Placement> where) {
  expect_placements(ids, where);
  looks_ahead_ = true;
  decision_.begin(layer, now_us());
  const int home = config_.home(layer);
  by_expert_.assign(size_t(config_.num_experts), 0);
  for (const int32_t id : ids) ++by_expert_.at(size_t(id));
  for (DeviceShare& share : shares_) share = {};
  for (size_t pair = 0; pair < ids.size(); ++pair) {
    const int load = std::exchange(by_expert_[size_t(ids[pair])], 0);
    if (load == 0) continue;
    if (where[pair] == Placement::kFetched)
      shares_[size_t(home)].fetch.push_back(int(decision_.experts.size()));
    decision_.experts.push_back({ids[pair], load, where[pair], -1, false, home});
  }
  const LayerWork& work = pricer_.work_of(decision_, shares_, {}, devices_, 0);
  decision_.times = planner_.cost(layer).layer(work);
  issue_prefetches(layer, work);
  devices_.advance(0);  // starts the uploads now: the layer has begun
  return decision_;
}

const LayerDecision& LayerScheduler::settle_ahead(int layer) {
  decision_.begin(layer, now_us());
  take_prefetched(layer);
  return decision_;
}

void LayerScheduler::take_prefetched(int layer) {
  const PrefetchArrivals& arrivals = prefetcher_->begin_layer(layer, devices_);
  for (const auto& [prefetch, upload] : arrivals.landed) {
    devices_.count_copied(upload);
    decision_.arrivals.push_back(
        {prefetch.layer, prefetch.expert, prefetch.admission.slot, upload, false, prefetch.device});
  }
  for (const Prefetch& prefetch : arrivals.withdrawn) decision_.withdrawn.push_back(prefetch.expert);
}

// After everything else of the layer: a prefetch takes only idle link time.
void LayerScheduler::issue_prefetches(int layer, const LayerWork& work) {
  prefetcher_->issue(layer, work, decision_.times, devices_, [this](const Prefetch& prefetch) {
    upload_after_layer(prefetch.layer, prefetch.expert, prefetch.admission, UploadReason::kPrefetch,
                       prefetch.device);
  });
}

}  // namespace twofold
