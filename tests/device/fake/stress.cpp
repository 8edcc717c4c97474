#include "stress.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <stdexcept>
#include <vector>

#include "device/slot_pool.h"
#include "device/slot_tables.h"
#include "device/upload_engine.h"
#include "fake_profile.h"
#include "twofold/layer_scheduler.h"

namespace twofold::fake {

namespace {

constexpr size_t kSmallBytes = 1000;
constexpr int kChunk = 40;

class Run {
 public:
  explicit Run(const StressShape& shape)
      : shape_(shape),
        random_(shape.seed),
        device_({.latency_us = 4,
                 .bandwidth_gbps = 0.1,
                 .most_delay_us = shape.most_delay_us,
                 .small_bytes = kSmallBytes,
                 .seed = shape.seed}),
        compute_(device_),
        sizes_(make_sizes()),
        store_(make_store()),
        slots_(device_, shape.num_slots, shape.num_staging, *std::max_element(sizes_.begin(), sizes_.end())),
        tables_(device_, shape.num_layers, shape.num_experts, shape.num_slots) {
    const CostModel cost(machine_profile(), 1500, 1e4);
    LayerSchedulerConfig config;
    config.num_layers = shape.num_layers;
    config.num_experts = shape.num_experts;
    config.top_k = shape.top_k;
    config.slots = {shape.num_slots};
    config.num_staging = shape.num_staging;
    config.policy = shape.policy;
    config.prefetch = shape.prefetch;
    config.stream_ahead_from = kChunk;
    engine_ = std::make_unique<UploadEngine>(
        device_, slots_, tables_,
        [this](int layer, int expert) { return std::span<const std::byte>(bytes(layer, expert)); },
        UploadSettings{.latency_us = 4,
                       .bandwidth_gbps = 0.1,
                       .upload_us = cost.home().upload_us(),
                       .source_pinned = shape.pinned,
                       .max_background_us = 60,
                       .max_batch = 3,
                       .small_bytes = kSmallBytes,
                       .chunk_bytes = 512,
                       .num_chunks = 3,
                       .max_failures = 1 << 30});
    Link* const links[] = {engine_.get()};
    scheduler_ = std::make_unique<LayerScheduler>(cost, std::move(config), links);
    device_.set_failures(shape.fail_issue, shape.fail_completion);
    device_.never_fails = tables_.device();
  }

  ~Run() { device_.run_all(); }

  StressCounts run() {
    for (step_ = 0; step_ < shape_.num_steps; ++step_) {
      num_tokens_ = below(5) == 0 ? 1 + below(3) : 1;
      const bool is_chunk = chance(shape_.chunks);
      if (is_chunk) num_tokens_ = kChunk;
      begin_step();
      if (!is_chunk && chance(shape_.table_steps)) {
        table_step();
      } else {
        host_step();
      }
      if (!shape_.ahead || below(4) == 0) device_.run_until(device_.now_us() + below(400));
      if (below(12) == 0) {
        scheduler_->devices().drain();
        begin_step();
      }
    }
    device_.set_failures(0, 0);
    device_.run_all();
    scheduler_->devices().drain();
    begin_step();
    for (int slot = 0; slot < shape_.num_slots; ++slot) {
      const int cell = scheduler_->devices().cache(0).occupant(slot);
      if (cell < 0) continue;
      if (!scheduler_->devices().cache(0).is_resident(cell / shape_.num_experts, cell % shape_.num_experts))
        fail("after everything has landed slot " + std::to_string(slot) + " is still in flight");
    }
    if (!in_flight_.empty()) fail("an upload was lost");
    if (!violation_.empty()) fail(violation_);
    if (!device_.complaints().empty()) fail(device_.complaints());
    counts_.landed = engine_->counts().landed;
    counts_.failed = engine_->counts().failed;
    counts_.held = engine_->counts().held;
    counts_.largest_batch = device_.largest_batch;
    counts_.mixed_batches = device_.num_mixed_batches;
    return counts_;
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw std::runtime_error("seed " + std::to_string(shape_.seed) + ", step " + std::to_string(step_) +
                             ": " + what);
  }
  int below(int n) { return int(random_() % uint64_t(n)); }
  bool chance(double p) { return std::uniform_real_distribution<>(0, 1)(random_) < p; }

  std::vector<size_t> make_sizes() {
    std::vector<size_t> sizes;
    for (int layer = 0; layer < shape_.num_layers; ++layer) sizes.push_back(size_t(400 + below(1800)));
    return sizes;
  }
  std::vector<std::vector<std::byte>> make_store() {
    std::vector<std::vector<std::byte>> store;
    for (int layer = 0; layer < shape_.num_layers; ++layer) {
      for (int expert = 0; expert < shape_.num_experts; ++expert) {
        std::vector<std::byte> expert_bytes(sizes_[size_t(layer)]);
        for (std::byte& b : expert_bytes) b = std::byte(random_());
        store.push_back(std::move(expert_bytes));
      }
    }
    return store;
  }
  const std::vector<std::byte>& bytes(int layer, int expert) const {
    return store_[size_t(layer) * size_t(shape_.num_experts) + size_t(expert)];
  }

  // Some experts are liked, and tastes change.
  std::vector<int32_t> routing() {
    std::vector<int32_t> ids;
    for (int t = 0; t < num_tokens_; ++t) {
      std::set<int> chosen;
      while (int(chosen.size()) < shape_.top_k) {
        const int e = chance(0.7) ? (step_ / 10 + below(shape_.top_k + 1)) % shape_.num_experts
                                  : below(shape_.num_experts);
        if (chosen.insert(e).second) ids.push_back(e);
      }
    }
    return ids;
  }

  void begin_step() {
    for (const Publication& landed :
         scheduler_->begin_step({std::vector<uint8_t>(), below(20) == 0 ? 1 : 0, 1})) {
      if (!landed.staged) in_flight_.erase(landed.slot);
    }
    const ExpertCache& cache = scheduler_->devices().cache(0);
    for (int slot = 0; slot < shape_.num_slots; ++slot) {
      const int cell = cache.occupant(slot);
      if (cell < 0 || !cache.is_resident(cell / shape_.num_experts, cell % shape_.num_experts)) continue;
      read(cell / shape_.num_experts, cell % shape_.num_experts, slot, "at the step's beginning");
    }
  }

  void note(const LayerDecision& decision) {
    for (const Publication& landed : decision.arrivals) in_flight_.erase(landed.slot);
    std::set<int> occupied;  // prefetches that were withdrawn left their slots
    std::erase_if(in_flight_, [this](int slot) {
      const int cell = scheduler_->devices().cache(0).occupant(slot);
      return cell < 0;
    });
    for (const Move& move : decision.moves) {
      if (move.staged) continue;
      // A slot given up by a withdrawn prefetch may be taken again in the same layer.
      if (!in_flight_.insert(move.slot).second && decision.withdrawn.empty())
        fail("slot " + std::to_string(move.slot) + " was given away with an upload in flight");
    }
    for (const Move& move : decision.moves) counts_.begun_ahead += move.staged && move.layer > decision.layer;
    std::set<int> slots;
    for (const ExpertDecision& e : decision.experts) {
      if (e.slot >= 0 && !slots.insert(e.slot).second)
        fail("slot " + std::to_string(e.slot) + " was given to two experts of a layer");
      const bool moved = std::any_of(decision.moves.begin(), decision.moves.end(), [&](const Move& move) {
        return move.layer == decision.layer && move.expert == e.expert;
      });
      counts_.used_ahead += e.where == Placement::kFetched && !moved;
      ++(e.where == Placement::kHit   ? counts_.hits
         : e.where == Placement::kCpu ? counts_.cpu
                                      : counts_.fetched);
    }
  }

  void read(int layer, int expert, int slot, const char* when) {
    ++counts_.reads;
    const auto& expected = bytes(layer, expert);
    if (std::memcmp(slots_.slot(slot), expected.data(), expected.size()) == 0 || !violation_.empty()) return;
    violation_ = "layer " + std::to_string(layer) + " read slot " + std::to_string(slot) + " " + when +
                 " and did not find expert " + std::to_string(expert) + " at " +
                 std::to_string(device_.now_us()) + " us";
  }

  void check() const {
    if (!violation_.empty()) fail(violation_);
  }

  using Reads = std::vector<std::pair<int, int>>;  // expert, slot

  void compute(int layer, Reads reads) {
    device_.launch(
        compute_.get(), 1 + below(150),
        [this, layer, reads] {
          for (const auto& [expert, slot] : reads) read(layer, expert, slot, "when its kernel began");
        },
        [this, layer, reads] {
          for (const auto& [expert, slot] : reads) read(layer, expert, slot, "when its kernel ended");
        });
  }

  // The host places every layer, as in prefill and in eager decode.
  void host_step() {
    for (int layer = 0; layer < shape_.num_layers; ++layer) {
      if (shape_.prefetch && layer + 1 < shape_.num_layers && num_tokens_ == 1) {
        std::vector<float> logits;
        for (int e = 0; e < shape_.num_experts; ++e) logits.push_back(float(below(1000)) / 100);
        scheduler_->predict(layer + 1, logits, 1);
      }
      const std::vector<int32_t> ids = routing();
      const LayerDecision& decision = scheduler_->decide({layer, ids, {}, num_tokens_});
      note(decision);
      const std::vector<int> refused = engine_->take_refused();
      counts_.refused += int64_t(refused.size());
      for (int slot : refused) scheduler_->ahead_refused(0, slot);
      Reads reads;
      for (const ExpertDecision& e : decision.experts) {
        if (e.where != Placement::kCpu && std::count(refused.begin(), refused.end(), e.slot) == 0)
          reads.emplace_back(e.expert, e.slot);
      }
      try {
        if (shape_.fail_completion > 0) engine_->host_waits();
      } catch (const DeviceError&) {
        ++counts_.lost_steps;  // the engine gives the step's requests up
        return;
      }
      if (!shape_.ignore_uploads) engine_->compute_waits(compute_.get(), layer);
      compute(layer, std::move(reads));
      engine_->follow_compute(compute_.get());
      if (!shape_.ahead) device_.run_until(device_.now_us() + 50);
      if (below(3) == 0) device_.run_until(device_.now_us() + below(300));
      check();
    }
  }

  // The device places every layer from the published table and waits for the CPU where experts are missing.
  struct Graph {
    std::vector<std::vector<int32_t>> ids;
    std::vector<std::vector<Placement>> where;
    std::vector<Reads> reads;
    std::vector<uint8_t> posted, answered;
  };

  void table_step() {
    auto graph = std::make_shared<Graph>();
    const size_t layers = size_t(shape_.num_layers);
    graph->where.resize(layers);
    graph->reads.resize(layers);
    graph->posted.resize(layers);
    graph->answered.resize(layers);
    tables_.begin_step(scheduler_->devices().cache(0), compute_.get());
    if (shape_.ignore_readers) tables_.end_step();
    for (int layer = 0; layer < shape_.num_layers; ++layer) {
      graph->ids.push_back(routing());
      launch_layer(graph, layer);
    }
    for (int layer = 0; layer < shape_.num_layers; ++layer) {
      const size_t l = size_t(layer);
      while (!graph->posted[l]) {
        const double before = device_.now_us();
        device_.run_until(before + 1 + below(40));
        if (device_.now_us() > before + 1e7) fail("the device hangs");
      }
      if (!shape_.ignore_readers) tables_.reached(layer);
      if (below(2) == 0) device_.run_until(device_.now_us() + below(200));
      note(scheduler_->follow({layer, graph->ids[l], {}, num_tokens_}, graph->where[l]));
      if (below(2) == 0) device_.run_until(device_.now_us() + below(200));
      graph->answered[l] = 1;
      check();
    }
    engine_->follow_compute(compute_.get());
    tables_.end_step();
  }

  void launch_layer(const std::shared_ptr<Graph>& graph, int layer) {
    const size_t l = size_t(layer);
    device_.launch(compute_.get(), 1 + below(30), nullptr, [this, graph, l] {
      const auto* row = reinterpret_cast<const int32_t*>(tables_.device()) + l * size_t(shape_.num_experts);
      std::set<std::pair<int, int>> reads;
      for (int32_t id : graph->ids[l]) {
        graph->where[l].push_back(row[id] >= 0 ? Placement::kHit : Placement::kCpu);
        if (row[id] >= 0) reads.emplace(id, row[id]);
      }
      graph->reads[l].assign(reads.begin(), reads.end());
      graph->posted[l] = 1;
    });
    const auto all = [this, graph, l](const char* when) {
      for (const auto& [expert, slot] : graph->reads[l]) read(int(l), expert, slot, when);
    };
    device_.launch(
        compute_.get(), 1 + below(150), [all] { all("when the step's kernel began"); },
        [all] { all("when the step's kernel ended"); });
    // The join: the CPU's answer is waited for, if there is one to come.
    device_.launch(compute_.get(), 1, nullptr, nullptr, [graph, l] {
      return graph->answered[l] != 0 ||
             std::count(graph->where[l].begin(), graph->where[l].end(), Placement::kCpu) == 0;
    });
  }

  StressShape shape_;
  std::mt19937_64 random_;
  Device device_;
  Stream compute_;
  std::vector<size_t> sizes_;  // bytes of one expert, per layer
  std::vector<std::vector<std::byte>> store_;
  SlotPool slots_;
  SlotTables tables_;
  std::unique_ptr<UploadEngine> engine_;
  std::unique_ptr<LayerScheduler> scheduler_;
  std::set<int> in_flight_;
  std::string violation_;
  StressCounts counts_;
  int step_ = 0;
  int num_tokens_ = 1;
};

}  // namespace

StressCounts stress(const StressShape& shape) { return Run(shape).run(); }

}  // namespace twofold::fake
