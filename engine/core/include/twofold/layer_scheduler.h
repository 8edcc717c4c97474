// Decides one MoE layer of one step: where each routed expert runs, what is uploaded, what is evicted, and how
// long the layer takes on the link's clock. Combines cost model, planners, cache and link. The link is provided
// by the caller: a Timeline plays the uploads on a virtual clock, so the emulated accelerator and the lab's
// simulator give the same times; a real-time link carries out the same decisions on a GPU.
//
// A machine has one or more devices. Each has a link and a cache of its own, and slots numbered from 0. With several
// devices MachinePlanner plans the layer, and machine_market.cpp decides which device an expert is uploaded to.
//
// Fetched experts need a slot. An expert with a higher value than the cheapest victim takes that slot (the
// upload is paid anyway); any other passes through a staging slot, which the next layer may overwrite. Staging
// slots are numbered from num_slots() on. A large chunk uploads ahead for the next layer (StreamAhead), into
// staging slots that the current layer does not read.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "twofold/cost_model.h"
#include "twofold/decode_planner.h"
#include "twofold/deferral.h"
#include "twofold/dynamic_update.h"
#include "twofold/expert_cache.h"
#include "twofold/fetch_rules.h"
#include "twofold/machine_planner.h"
#include "twofold/prefetcher.h"
#include "twofold/prefill_planner.h"
#include "twofold/step_shape.h"
#include "twofold/stream_ahead.h"

namespace twofold {

// Where a routed expert runs. Telemetry stores the numbers, so they must not change; all other copies are
// checked against them (kernels/device/placement.h, twofold.telemetry.sink).
enum class Placement : uint8_t { kHit = 0, kCpu = 1, kFetched = 2 };
inline constexpr int kNumPlacements = 3;
enum class UploadReason : uint8_t { kDemand = 0, kAdmission = 1, kPrefetch = 2 };

constexpr UploadLane lane_of(UploadReason reason) {
  return reason == UploadReason::kDemand ? UploadLane::kDemand : UploadLane::kBackground;
}

// One active expert of the layer and where it runs. slot is -1 on the CPU.
struct ExpertDecision {
  int expert = 0;
  int tokens = 0;
  Placement where = Placement::kCpu;
  int slot = -1;
  bool landed = false;  // fetched ahead and already there
  int device = 0;       // that runs it; 0 on the CPU
};

// One upload that the layer began or queued, in link order; belongs to the next layer if it was begun ahead.
struct Move {
  int layer = 0;
  int expert = 0;
  int slot = 0;
  int evicted = -1;        // expert that lost the slot, -1 if it was free or staging
  int evicted_layer = -1;  // another layer's, in a shared pool
  bool staged = false;
  UploadReason reason = UploadReason::kDemand;
  double value = 0;
  double victim_value = 0;
  int device = 0;
  void take(const Admission& admission) {
    slot = admission.slot;
    evicted = admission.evicted;
    evicted_layer = admission.evicted_layer;
    value = admission.value;
    victim_value = admission.victim_value;
  }
  double queued_us = 0;
  double begin_us = -1;  // known at once for demand uploads on a virtual clock, else once it has landed
  double end_us = -1;
};

// A miss whose upload the cache rejected as not worth its price.
struct Rejection {
  int expert = 0;
  double value = 0;
  int device = 0;
};

// An upload that has ended. Its expert is usable from now on, unless it only passed through a staging slot or
// its copy failed.
struct Publication {
  int layer = 0;
  int expert = 0;
  int slot = 0;
  Upload upload;
  bool staged = false;
  int device = 0;
  int left_device = -1;  // whose copy it replaces, from this slot; -1: none
  int left_slot = -1;
};

struct LayerDecision {
  int layer = 0;
  std::vector<ExpertDecision> experts;  // ascending
  std::span<const uint8_t> deferred;    // per routed pair (Deferral); empty: none
  std::vector<Move> moves;
  std::optional<Rejection> rejection;  // the most valuable one: if its upload does not pay, none does
  std::vector<Publication> arrivals;   // uploads ahead and prefetches that ended in time for this layer
  std::vector<int> withdrawn;          // experts whose prefetch, a move of an earlier decision, never began
  LayerTimes times;
  double start_us = 0;
};

struct LayerSchedulerConfig {
  int num_layers = 0;
  int num_experts = 0;
  int top_k = 0;
  int num_slots = 0;               // slots of the first device
  std::vector<int> further_slots;  // slots of each device after the first
  std::string policy = "payback";
  int num_staging = -1;          // -1: num_experts, room to stream one whole layer
  double upload_price = -1;      // in misses; < 0: default_upload_price
  int max_waiting_uploads = 16;  // maximum queued background uploads; keeps slots from idling in flight
  int stream_ahead_from = 33;    // tokens of a step from which the next layer is uploaded ahead; 0: never
  // The remaining fields describe other engines for comparison; the defaults are Twofold's.
  FetchRule fetch_rule = FetchRule::kBestSplit;
  bool background_uploads = true;     // misses run by the CPU may be uploaded after the layer
  bool always_cache_fetched = false;  // a fetched expert always takes a slot, whatever its value
  std::optional<bool> shared_pool;    // unset: the policy's default (CacheConfig)
  bool prefetch = false;              // upload ahead the experts that `predict` predicts
  bool fixed_placement = false;       // slots keep their initial experts: misses never take one
  int replace_from = 0;               // prompt tokens of a step from which it replaces residents by its own
                                      // routing and in the same pass; 0: never
  int num_deferred = 0;               // maximum deferred experts per token and layer (Deferral)
  double cache_prior = 0;             // preference for residents when experts are chosen (ops/router.h)
  std::vector<double> prior_usage;    // [layers * experts]: for `static` and for preload_by_usage

  std::vector<LayerPin> pins;  // one per layer, or none: all are free
  std::vector<int> homes;      // per layer, the device with its other weights; empty: the first one

  int num_devices() const { return 1 + static_cast<int>(further_slots.size()); }
  int slots_of(int device) const {
    return device == 0 ? num_slots : further_slots[static_cast<size_t>(device) - 1];
  }
  int home(int layer) const { return homes.empty() ? 0 : homes[static_cast<size_t>(layer)]; }
  // Sizes for memory allocation.
  int usable_slots(int device = 0) const {
    const auto never = static_cast<int>(std::count(pins.begin(), pins.end(), LayerPin::kNever));
    return std::min(slots_of(device), (num_layers - never) * num_experts);
  }
  int staging_slots() const { return num_staging < 0 ? num_experts : num_staging; }
};

// Cost of a background upload to the layers it overlaps, in misses: the contention it causes on the CPU.
double default_upload_price(const CostModel& cost);
std::unique_ptr<ExpertCache> make_cache(const CostModel& cost, const LayerSchedulerConfig& config,
                                        int device = 0);

class LayerScheduler {
 public:
  // The link must outlive it. Throws std::invalid_argument with field, value and expectation.
  LayerScheduler(CostModel cost, LayerSchedulerConfig config, Link& link);
  // links: one for each device of the cost model, all on one clock. With several devices, rules of other engines,
  // prefetching, deferral, dynamic update and offline policies are refused, and nothing is streamed ahead.
  LayerScheduler(CostModel cost, LayerSchedulerConfig config, std::span<Link* const> links);

  // Step boundary: landed uploads become usable, failed ones are forgotten. The span and the shape are valid
  // until the next call; the shape's rows are the tokens of every decide.
  std::span<const Publication> begin_step(StepShape shape = {});
  // Decides and plays the layer; on return the clock is at its end. ids[num_tokens * top_k]; weights the same
  // shape or empty.
  const LayerDecision& decide(int layer, std::span<const int32_t> ids, std::span<const float> weights,
                              int num_tokens);
  // Records a layer that the device placed itself, from what was published at the step's beginning:
  // where[num_tokens * top_k]. Learns from its routing and decides only what to upload after it; nothing is
  // fetched, and the returned experts have slot -1.
  const LayerDecision& follow(int layer, std::span<const int32_t> ids, std::span<const float> weights,
                              std::span<const Placement> where, int num_tokens);
  // Takes the logits that a later layer's router computes from the current residual: logits[num_tokens *
  // num_experts]. Only with config.prefetch; uploads are decided in the decide of the layer before.
  void predict(int layer, std::span<const float> logits, int num_tokens);
  // For a step that the device places with one layer of lookahead. Called once the layer is placed and the next
  // one predicted, long before follow: returns what is uploaded ahead during the layer's work (moves).
  const LayerDecision& look_ahead(int layer, std::span<const int32_t> ids, std::span<const Placement> where);
  // Called as late as the layer can still use it: returns what has landed for it (arrivals) and withdraws what
  // has not begun.
  const LayerDecision& settle_ahead(int layer) {
    clear_decision(layer);
    take_prefetched(layer);
    return decision_;
  }
  bool prefetches() const { return prefetcher_.has_value(); }
  PrefetchCounts prefetch_counts() const { return prefetcher_ ? prefetcher_->counts() : PrefetchCounts{}; }
  DynamicUpdateCounts dynamic_update_counts() const { return dynamic_update_.counts(); }
  // Reports that the device refused to begin an upload ahead into that slot.
  void ahead_refused(int slot) {
    if (ahead_) ahead_->refused(slot);
  }
  // Advances a virtual clock by work outside the experts (attention, head).
  void advance(double us) {
    for (Device& device : devices_) device.link->advance(us);
  }
  // Waits until every queued upload has landed; for an idle machine.
  void drain();
  // Fills free slots at start from prior_usage (ExpertCache::preload_by_usage). Of several devices, each layer's
  // experts go to the one that its use keeps busy least.
  void preload_by_usage();
  double now_us() const { return link_.now_us(); }
  // Replaces the machine's figures: plans and prices follow them from now on, except an upload price that the
  // configuration set.
  void recalibrate(CostModel cost);
  // How many misses of a one-token layer to fetch by the fetch rule, [hits][misses] with side top_k + 1, for an
  // idle link.
  std::vector<uint8_t> split_table() const;

  // Total copy time of the links so far.
  double link_us() const { return link_us_; }

  int num_devices() const { return static_cast<int>(devices_.size()); }
  int num_slots(int device = 0) const { return cache(device).num_slots(); }
  int num_staging() const { return config_.staging_slots(); }
  FetchRule fetch_rule() const { return config_.fetch_rule; }
  int num_deferred() const { return deferral_.most(); }
  double upload_price() const { return cache_->config().upload_price; }
  const CostModel& cost() const { return cost_; }
  int home(int layer) const { return config_.home(layer); }
  ExpertCache& cache(int device = 0) { return *devices_[static_cast<size_t>(device)].cache; }
  const ExpertCache& cache(int device = 0) const { return *devices_[static_cast<size_t>(device)].cache; }

 private:
  // A device with its slots and link, and its part of the layer being decided.
  struct Device {
    Link* link = nullptr;
    std::unique_ptr<ExpertCache> cache;
    double balance_us = 0;    // what one use of an expert here saves that another device has too
    int cheapest_copy = -1;   // cell of such an expert, the least worth its slot here; -1: none
    bool knows_copy = false;  // cheapest_copy is this step's
    std::vector<int> fetch;   // indices into decision_.experts, in upload order
    bool one_transfer = false;
    std::vector<int> hit_loads, fetched_loads;
  };
  void clear_decision(int layer);
  void begin_layer(int layer, std::span<const int32_t> ids, std::span<const float> weights, int num_tokens);
  // Prices what was placed, queues the layer's moves, and advances the clock past the layer.
  const LayerDecision& finish_layer(int layer, std::span<const int32_t> ids, std::span<const float> weights,
                                    int num_tokens);
  void defer(int layer, std::span<const int32_t> ids, std::span<const float> weights, int num_tokens);
  uint8_t fetched_of(int hits, int misses) const;
  // Number of misses (indices into decision_.experts, the first ones first) to fetch in a one-token layer when
  // some CPU experts are deferred or the previous layer's deferred experts may still run. Minimizes the time
  // until the layer is done and the CPU has finished what exceeds the gap to the next layer.
  int split_deferring(int layer, std::span<const int32_t> ids, std::span<const float> weights,
                      std::span<const int> misses);
  void plan(int layer, std::span<const int32_t> ids, std::span<const float> weights, int num_tokens);
  void plan_as_peer(int layer, std::span<const ExpertLoad> plannable, int room);
  void plan_many(int layer, std::span<const ExpertLoad> plannable, int room);
  void place_fetched(int layer);
  bool keeps_fetched(int layer, int expert, int device, const std::optional<Admission>& possible) const;
  bool stages(int device, int staging_slot) const;
  void plan_machine(int layer, int num_tokens);
  // Prices and plans of the layers of one home.
  struct Home {
    CostModel cost;
    MachinePlanner planner;
  };
  static std::vector<Home> homes_of(const CostModel& cost);
  const Home& home_of(int layer) const { return homes_[static_cast<size_t>(config_.home(layer))]; }
  // Whether only the first device's slots count: it is alone, or no other one has slots and a token decodes. Planned
  // for both, such a pair was 0.05 to 0.16 % slower than its first device alone.
  bool plans_first_alone(int num_tokens) const;
  const CostModel& layer_cost(int layer) const { return num_devices() == 1 ? cost_ : home_of(layer).cost; }
  // An expert's best offer: its upload to this device is worth `gain_us` beyond its price.
  struct Offer {
    int device = -1;
    double gain_us = 0;
    bool is_copy = false;  // other devices keep it
    int dropped = -1;      // cell of a copy that leaves its slot for it; -1: none
  };
  static std::vector<Device> devices_of(const CostModel& cost, const LayerSchedulerConfig& config,
                                        std::span<Link* const> links);
  Offer best_offer(int layer, int expert, int tokens);
  void take_offer(int layer, int expert, const Offer& offer);
  // Replans the layer as if a device had one more of its experts, and learns from the difference.
  void learn_balance(const MachinePlan& plan, bool may_stream);
  int cheapest_copy(int device, int layer);
  void count_uses(int layer);
  // What an expert in a slot of this device saves in the layer's next events: misses, or as a copy the balance.
  double saved_us(int device, int layer, int expert, bool is_copy) const;
  // Whether a device other than the given one (-1: any) has it in a slot, or on its way there.
  bool is_held_elsewhere(int layer, int expert, int device) const;
  void admit_in_market(int layer);
  double worth_us(int device, double value) const;
  void end_move(Publication& landed);
  void stream_ahead(int layer, LayerWork& work, int num_tokens);
  void admit_misses(int layer);
  void take_prefetched(int layer);
  void issue_prefetches(int layer, const LayerWork& work);
  // Passes the move to the link and records the times it reports.
  void upload(Move& move, double duration_us = -1);
  void upload_after_layer(int layer, int expert, const Admission& admission, UploadReason reason,
                          int device = 0);

  CostModel cost_;
  LayerSchedulerConfig config_;
  std::vector<Device> devices_;
  Link& link_;  // the first device's
  ExpertCache* cache_;
  Deferral deferral_;
  double layer_end_us_ = 0, gap_us_ = 0;  // end of the last layer, and time from there to the next one
  std::vector<int> ones_;
  double cpu_free_us_ = 0;  // when the CPU finishes the deferred experts, on the link's clock
  StepShape shape_;
  bool looks_ahead_ = false;  // this step calls look_ahead and settle_ahead, so follow does not prefetch
  double link_us_ = 0;
  DynamicUpdate dynamic_update_;
  DecodePlanner decode_planner_;
  PrefillPlanner prefill_planner_;
  std::vector<Home> homes_;      // by device; none if there is one
  std::vector<uint8_t> copied_;  // [layers * experts]: several devices may have it; none with one device
  std::vector<float> use_rate_;  // [layers * experts]: moving average of uses per event of the layer
  int64_t num_planned_ = 0;      // layers planned over several devices
  std::optional<Prefetcher> prefetcher_;
  std::optional<StreamAhead> ahead_;
  LayerDecision decision_;
  int num_begun_ = 0;  // fetched experts whose upload ahead has begun and not landed
  std::vector<Upload> ahead_arrivals_;
  std::vector<Publication> publications_;
  std::vector<int> cpu_loads_, deferred_loads_, expert_loads_;
  std::vector<DeviceWork> further_work_;
  std::vector<MachineLoad> machine_loads_;
  std::vector<DeviceState> device_states_;
  std::vector<uint8_t> on_cpu_, staging_in_use_;
};

}  // namespace twofold
