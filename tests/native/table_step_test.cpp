// Table steps with a device that is a thread: it places and posts as the kernels do, waits for the CPU's
// experts and looks at every byte of the given slots, while the host serves, decides and uploads. Built
// with the thread sanitizer, which sees a copy into a slot that is being read even when the bytes happen to
// be right.
#include "device/table_step.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include "check.h"
#include "f32_experts.h"
#include "fake_device.h"
#include "fake_profile.h"
#include "handshake.h"
#include "step_control.h"

using namespace twofold;
using namespace std::chrono_literals;

namespace {

constexpr int kLayers = 5, kExperts = 8, kTopK = 2, kHidden = 16, kIntermediate = 32, kMaxTokens = 4;

const std::vector<LayerFormats>& formats() {
  using enum kernels::WeightFormat;
  static const std::vector<LayerFormats> all(kLayers, {{kF32, kF32, kF32}});
  return all;
}

struct Options {
  int num_slots = 11;
  const char* policy = "lru";
  uint32_t seed = 1;
  bool look_ahead = false;
};

struct Fixture {
  ThreadPool pool{1};
  std::mt19937 random;
  std::vector<float> weights;
  ExpertStore store{kExperts, {kHidden, kIntermediate}, formats()};
  std::shared_ptr<fake::Device> device;
  std::shared_ptr<DeviceAccelerator> accelerator;
  MoeExecutor executor;
  bool look_ahead;
  DeviceMailbox mailbox{{kLayers, kMaxTokens, kTopK, kHidden, look_ahead ? kExperts : 0}};
  TableStep table;
  uint32_t number = 0;                        // the device's
  int64_t read = 0, missed = 0, arrived = 0;  // came: reads of what the step's table does not name
  // What the device does before it places a layer.
  std::function<void(int layer)> before_layer = [](int) {};
  // What the host does before it serves a step that the device has begun.
  std::function<void()> before_serve = [] {};

  explicit Fixture(const Options& options = {})
      : random(options.seed),
        device(make_device(options)),
        accelerator(make_accelerator(options)),
        executor(pool, filled(), accelerator, false),
        look_ahead(options.look_ahead),
        table(mailbox.host(), executor, *accelerator, pool) {
    executor.events().enabled = true;
  }

  static std::shared_ptr<fake::Device> make_device(const Options& options) {
    fake::DeviceShape shape;
    shape.total_bytes = size_t{1} << 24;
    shape.tick_us = options.look_ahead ? 25 : 3;  // a copy is under way for a while
    shape.bandwidth_gbps = 0.5;
    shape.most_delay_us = 40;
    shape.seed = options.seed;
    return std::make_shared<fake::Device>(shape);
  }
  std::shared_ptr<DeviceAccelerator> make_accelerator(const Options& options) {
    LayerSchedulerConfig config;
    config.num_layers = kLayers;
    config.num_experts = kExperts;
    config.top_k = kTopK;
    config.slots = {options.num_slots};
    config.policy = options.policy;
    config.prefetch = options.look_ahead;
    return std::make_shared<DeviceAccelerator>(
        std::vector<std::shared_ptr<DeviceApi>>{device}, store,
        CostModel(fake::machine_profile(), double(store.expert_bytes()), store.shape().flops_per_token()),
        std::move(config));
  }
  const ExpertStore& filled() {
    weights.resize(size_t(3 * kExperts * kHidden * kIntermediate));
    std::normal_distribution<float> normal;
    for (int layer = 0; layer < kLayers; ++layer) {
      for (float& w : weights) w = normal(random);
      store.put(pool, layer, 0, test::f32_experts(weights, kExperts, kHidden, kIntermediate));
    }
    return store;
  }

  // One step's kernels in order, with `rows` tokens and padding up to `tokens`; `limit_ns` is the last layer's, so
  // that no other wait depends on how fast this machine is.
  void run_device(int rows, int tokens, std::mt19937& routing, int64_t limit_ns) {
    int32_t routed[kLayers][kMaxTokens * kTopK], num_groups, begin[kExperts + 1], pairs[kMaxTokens * kTopK];
    float gates[kMaxTokens * kTopK] = {}, hidden[kMaxTokens * kHidden] = {};
    float outputs[kMaxTokens * kTopK * kHidden] = {};
    uint16_t normed[kMaxTokens * kHidden] = {};
    uint64_t experts[kExperts];
    uint8_t where[kMaxTokens * kTopK];
    uint32_t on_cpu = 0;
    float ahead[kMaxTokens * kExperts];
    for (auto& ids : routed) {
      for (int t = 0; t < tokens; ++t) {
        // Some experts are liked, so that others are evicted.
        const int first = int(std::min(routing() % kExperts, routing() % kExperts));
        for (int k = 0; k < kTopK; ++k) ids[t * kTopK + k] = t < rows ? (first + k) % kExperts : -1;
      }
    }
    cuda::launch_begin_step(&number, nullptr);
    for (int layer = 0; layer < kLayers; ++layer) {
      before_layer(layer);
      const int32_t* ids = routed[layer];
      const bool looks = look_ahead && layer + 1 < kLayers;
      if (looks) {  // the next layer's routing, wrong one time in four
        std::fill_n(ahead, kMaxTokens * kExperts, -4.0f);
        for (int pair = 0; pair < tokens * kTopK; ++pair) {
          const int expert =
              routing() % 4 != 0 ? std::max(routed[layer + 1][pair], 0) : int(routing() % kExperts);
          ahead[pair / kTopK * kExperts + expert] = 4.0f;
        }
      }
      const auto* slots = reinterpret_cast<const int32_t*>(accelerator->tables().device()) + layer * kExperts;
      const cuda::PlacementTables tables{slots,
                                         nullptr,
                                         reinterpret_cast<uint64_t>(accelerator->slots().slot(0)),
                                         int64_t(accelerator->slots().stride()),
                                         0,
                                         nullptr,
                                         kExperts};
      cuda::launch_place({ids, gates, normed, tokens, layer, looks ? ahead : nullptr}, tables,
                         {{&num_groups, experts, begin, pairs, kExperts}, where, &on_cpu},
                         mailbox.host().shape(), mailbox.device_address(), &number, nullptr);
      for (int turn = 0; turn < 2; ++turn) {  // when the kernel begins, and when it ends
        for (int g = 0; g < num_groups; ++g) {
          const int expert = ids[pairs[begin[g]]];
          CHECK(std::memcmp(reinterpret_cast<const void*>(experts[g]), store.expert(layer, expert),
                            store.layout(layer, expert).bytes) == 0);
          ++read;
          arrived += slots[expert] < 0;
        }
        std::this_thread::yield();
      }
      missed += on_cpu;
      const int64_t layer_limit_ns = layer == kLayers - 1 ? limit_ns : (60s / 1ns);
      mailbox.enqueue_wait(Handshake::kKernels, layer, &number, &on_cpu, layer_limit_ns, nullptr);
      // A GPU goes on with what it finds there; the result is discarded.
      if (mailbox.host().aborted() || mailbox.host().device_gave_up_at() >= 0) return;
      cuda::launch_combine({outputs, gates, where, mailbox.device_results(), tokens, kTopK, kHidden, hidden,
                            mailbox.device_joined_ns(layer)},
                           nullptr);
    }
  }

  // As the engine runs one. What became of it.
  ServedStep step(int64_t index, int rows, int tokens, std::chrono::nanoseconds limit = 60s) {
    std::vector<int64_t> requests;
    std::vector<int32_t> positions;
    for (int t = 0; t < rows; ++t) {
      requests.push_back(t);
      positions.push_back(int32_t(index) + 1);
    }
    std::mt19937 routing(uint32_t(index) + 1);
    table.begin({index, requests, positions}, {});
    const uint32_t expected = cuda::next_step(number);
    std::thread gpu([&] { run_device(rows, tokens, routing, limit.count()); });
    before_serve();
    ServedStep served = table.serve(expected, limit);
    gpu.join();
    if (served.state == PostState::kPosted) {
      table.end({});
      served = table.confirm();
    }
    if (served.state != PostState::kPosted) table.give_up({});
    return served;
  }

  // By the tables that the device read last.
  bool has_all_in_slots() {
    const auto* slots = reinterpret_cast<const int32_t*>(accelerator->tables().device());
    return std::all_of(slots, slots + kLayers * kExperts, [](int32_t slot) { return slot >= 0; });
  }

  std::vector<TokenLayerEvent> drain() {
    std::vector<TokenLayerEvent> rows(executor.events().token_layers.size());
    rows.resize(executor.events().token_layers.drain(rows));
    return rows;
  }
};

void run_steps(const Options& options, int num_steps) {
  Fixture f(options);
  for (int step = 0; step < num_steps; ++step) {
    const int tokens = 1 << (step % 3);
    const int rows = std::max(1, tokens - int(f.random() % 2));
    CHECK(f.step(step, rows, tokens).state == PostState::kPosted);
    const std::vector<TokenLayerEvent> events = f.drain();
    CHECK_EQUAL(int(events.size()), rows * kLayers);  // padding has no event
    for (const TokenLayerEvent& event : events) {
      CHECK(event.layer_us > 0 && event.gpu_us > 0 && event.gpu_us <= event.layer_us);
      CHECK(event.num_cpu == 0 || event.cpu_us > 0);
    }
  }
  const PlacementCounts& counts = f.executor.events().counts;
  CHECK(options.num_slots == 0 || (f.read > 0 && counts.evictions > 0));
  CHECK(options.num_slots == kLayers * kExperts || f.missed > 0);
  CHECK_EQUAL(counts.cpu_misses, f.missed);
  CHECK(f.device->complaints().empty());
}

}  // namespace

CASE(layers_find_their_experts_while_others_are_uploaded) {
  for (const uint32_t seed : {1u, 2u}) run_steps({.num_slots = 11, .policy = "lru", .seed = seed}, 60);
}
CASE(layers_find_their_experts_under_payback) { run_steps({.num_slots = 9, .policy = "payback"}, 120); }
CASE(layers_find_experts_that_came_after_the_table) {
  int64_t used = 0, arrived = 0;
  for (const uint32_t seed : {1u, 2u}) {
    Fixture f({.num_slots = 16, .policy = seed == 1 ? "payback" : "lru", .seed = seed, .look_ahead = true});
    // As long as attention takes on a card: the host tells what has landed once it has answered.
    f.before_layer = [](int) { std::this_thread::sleep_for(100us); };
    for (int step = 0; step < 150; ++step) {
      const int tokens = step % 4 == 0 ? 2 : 1;
      CHECK(f.step(step, tokens, tokens).state == PostState::kPosted);
      f.drain();
    }
    CHECK_EQUAL(f.executor.events().counts.cpu_misses, f.missed);
    const PrefetchCounts counts = f.accelerator->scheduler_counts().prefetch;
    CHECK(counts.foreseen > counts.misses / 2);
    used += counts.used;
    arrived += f.arrived;
    std::vector<UploadEvent> uploads(f.executor.events().uploads.size());
    uploads.resize(f.executor.events().uploads.drain(uploads));
    CHECK(std::any_of(uploads.begin(), uploads.end(), [](const UploadEvent& upload) {
      return upload.reason == uint8_t(UploadReason::kPrefetch);
    }));
    CHECK(f.device->complaints().empty());
  }
  CHECK(used > 0 && arrived > 0);
}
CASE(without_slots_everything_is_missed) { run_steps({.num_slots = 0, .policy = "lru"}, 10); }
CASE(many_steps_of_many_uploads) {
  for (uint32_t seed = 10; seed < 20; ++seed) {
    run_steps({.num_slots = 4 + int(seed), .policy = seed % 2 ? "lru" : "payback", .seed = seed}, 2000);
  }
}

CASE(a_lost_step_is_given_up_and_the_next_is_whole) {
  // A slot for every expert: once all are there the device waits for no answer. So it is in layer 2, and stays there
  // until the host has given up, before the host's limit begins.
  Fixture f({.num_slots = kLayers * kExperts});
  int step = 0;
  while (!f.has_all_in_slots() && step < 5000) CHECK(f.step(step++, 4, 4).state == PostState::kPosted);
  CHECK(f.has_all_in_slots());
  std::atomic<bool> held = false;
  f.before_layer = [&](int layer) {
    if (layer != 2) return;
    held = true;
    while (!f.mailbox.host().aborted()) std::this_thread::yield();
  };
  f.before_serve = [&] {
    while (!held) std::this_thread::yield();
  };
  const ServedStep lost = f.step(step++, 1, 1, 1ms);
  CHECK(lost.state == PostState::kTimedOut);
  CHECK_EQUAL(lost.layer, 2);
  f.before_layer = [](int) {};
  f.before_serve = [] {};
  for (const int end = step + 9; step < end; ++step) CHECK(f.step(step, 2, 2).state == PostState::kPosted);
}

CASE(an_abort_that_the_server_did_not_see_makes_the_step_void) {
  Fixture f;
  // In the last layer: all that is left for the server is to answer it.
  f.before_layer = [&](int layer) {
    if (layer == kLayers - 1) f.mailbox.host().abort();
  };
  for (int step = 0; step < 20; ++step) CHECK(f.step(step, 1, 1).state == PostState::kAborted);
  f.before_layer = [](int) {};
  CHECK(f.step(20, 1, 1).state == PostState::kPosted);
}

CASE(a_device_that_gave_up_makes_the_step_void) {
  Fixture f({.num_slots = 0});
  std::mt19937 routing(1);
  f.table.begin({0, {0}, {1}}, {});
  const auto serve_late = [&](int layer, const PostedLayer& posted) {
    while (layer == kLayers - 1 && f.mailbox.host().device_gave_up_at() < 0) std::this_thread::yield();
    std::fill_n(posted.results, kHidden, 0.0f);
  };
  std::thread gpu([&] { f.run_device(1, 1, routing, (1ms / 1ns)); });
  const ServedStep served = serve_step(f.mailbox.host(), 1, 60s, serve_late, [](int, const PostedLayer&) {});
  gpu.join();
  CHECK(served.state == PostState::kPosted);  // it never knew
  const ServedStep found = verdict(f.mailbox.host());
  CHECK(found.state == PostState::kDeviceGaveUp);
  CHECK_EQUAL(found.layer, kLayers - 1);
  f.table.give_up({});
  CHECK(f.step(1, 1, 1).state == PostState::kPosted);
}

CASE(what_cannot_be_a_step_is_refused) {
  const auto refuses = [](const std::function<void()>& call) {
    try {
      call();
    } catch (const std::logic_error&) {
      return true;
    }
    return false;
  };
  Fixture f;
  CHECK(refuses([&] { (void)f.table.serve(1, 1s); }));
  CHECK(refuses([&] { f.table.end({}); }));
  CHECK(refuses([&] { (void)f.table.confirm(); }));
  CHECK(refuses([&] { f.table.begin({0, {}, {}}, {}); }));
  CHECK(refuses([&] { f.table.begin({0, {1, 2, 3, 4, 5}, {1, 1, 1, 1, 1}}, {}); }));
  DeviceMailbox other({kLayers + 1, kMaxTokens, kTopK, kHidden});
  CHECK(refuses([&] { TableStep(other.host(), f.executor, *f.accelerator, f.pool); }));
  CHECK(f.step(0, 1, 1).state == PostState::kPosted);
}

int main(int argc, char** argv) { return test::main(argc, argv); }
