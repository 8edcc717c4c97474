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
  if (routed.layer > 0) gap_us_ = std::max(0.0, devices_.now_us() - layer_end_us_);
  observe(routed);
  dynamic_update_.choose(routed.layer, devices_);
  const double cpu_backlog_us = std::max(0.0, cpu_free_us_ - devices_.now_us());
  planner_.plan(routed, {{}, cpu_backlog_us, gap_us_}, shape_.generated_rows, devices_, ahead_, decision_,
                shares_);
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
  decision_.begin(routed.layer, devices_.now_us());
  if (prefetcher_ && !looks_ahead_) prefetcher_->begin_layer(devices_, decision_);
  ahead_.begin_layer(routed.layer, devices_, decision_.arrivals);
  devices_.observe(routed, shape_);
  if (prefetcher_) prefetcher_->observe(routed.layer, routed.ids, routed.num_tokens);
}

const LayerDecision& LayerScheduler::play(const RoutedLayer& routed) {
  const auto deferred = planner_.defer(routed, shape_.generated_rows, decision_);
  const LayerWork& work = pricer_.work_of(decision_, shares_, deferred, devices_,
                                          std::max(0.0, cpu_free_us_ - devices_.now_us()));
  decision_.times = planner_.cost(routed.layer).layer(work);
  placer_.upload(shares_, cost_, devices_, decision_);
  ahead_.upload(routed, planner_, pricer_, devices_, decision_);
  cpu_free_us_ = devices_.now_us() + decision_.times.cpu_end_us;
  dynamic_update_.admit_rest(devices_, decision_);
  market_.admit(devices_, decision_);
  if (prefetcher_ && !looks_ahead_) prefetcher_->issue(work, devices_, decision_);
  devices_.advance(decision_.times.layer_us);
  layer_end_us_ = devices_.now_us();
  return decision_;
}

void LayerScheduler::set_adapter_bytes(double bytes) {
  if (bytes != cost_.adapter_bytes()) recalibrate(cost_.with_adapters(bytes));
}

void LayerScheduler::recalibrate(CostModel cost) {
  cost_ = std::move(cost);
  planner_.recalibrate(cost_);
  market_.recalibrate(cost_);
  if (prefetcher_) prefetcher_->recalibrate(cost_);
}

void LayerScheduler::predict(int layer, std::span<const float> logits, int num_tokens) {
  if (!prefetcher_) throw std::logic_error("layer scheduler: predict without LayerSchedulerConfig::prefetch");
  prefetcher_->predict(layer, logits, num_tokens, devices_);
}

const LayerDecision& LayerScheduler::look_ahead(int layer, std::span<const int32_t> ids,
                                                std::span<const Placement> where) {
  expect_placements(ids, where);
  looks_ahead_ = true;
  decision_.begin(layer, devices_.now_us());
  const int home = config_.home(layer);
  tokens_.assign(size_t(config_.num_experts), 0);
  for (const int32_t id : ids) ++tokens_.at(size_t(id));
  for (DeviceShare& share : shares_) share = {};
  for (size_t pair = 0; pair < ids.size(); ++pair) {
    const int load = std::exchange(tokens_[size_t(ids[pair])], 0);
    if (load == 0) continue;
    if (where[pair] == Placement::kFetched)
      shares_[size_t(home)].fetch.push_back(int(decision_.experts.size()));
    decision_.experts.push_back({ids[pair], load, where[pair], -1, false, home});
  }
  const LayerWork& work = pricer_.work_of(decision_, shares_, {}, devices_, 0);
  decision_.times = planner_.cost(layer).layer(work);
  prefetcher_->issue(work, devices_, decision_);
  devices_.advance(0);  // starts the uploads now: the layer has begun
  return decision_;
}

const LayerDecision& LayerScheduler::settle_ahead(int layer) {
  decision_.begin(layer, devices_.now_us());
  prefetcher_->begin_layer(devices_, decision_);
  return decision_;
}

}  // namespace twofold
