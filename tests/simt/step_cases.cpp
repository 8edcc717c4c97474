// A decode step's bookkeeping on the SIMT machine: steps, placing, posting, waiting for a host that answers, combining.
#include <algorithm>
#include <atomic>
#include <thread>

#include "step_control.h"
#include "watched_run.h"

using namespace twofold::cuda;
using test::WatchedRun;

namespace {

struct PlaceCase {
  int tokens, experts, top_k, hidden;
  bool posts, reads_host;
};

struct Routing {
  std::vector<int32_t> ids, slots;
  std::vector<float> weights;
  std::vector<uint16_t> normed;

  explicit Routing(const PlaceCase& c)
      : weights(test::random_floats(size_t(c.tokens * c.top_k), 5)),
        normed(test::random_bf16(size_t(c.tokens * c.hidden), 6)) {
    std::mt19937 random(11);
    for (int t = 0; t < c.tokens; ++t) {
      std::vector<int32_t> all(static_cast<size_t>(c.experts));
      for (int e = 0; e < c.experts; ++e) all[size_t(e)] = e;
      std::shuffle(all.begin(), all.end(), random);
      for (int k = 0; k < c.top_k; ++k) ids.push_back(t > 0 && t % 5 == 4 ? -1 : all[size_t(k)]);
    }
    for (int e = 0; e < c.experts; ++e) slots.push_back(random() % 2 ? e : -1);
  }
};

// What a pair becomes, by the rules of placement.h alone.
std::vector<uint8_t> expected_places(const PlaceCase& c, const Routing& r,
                                     const std::vector<uint8_t>& split) {
  std::vector<uint8_t> where;
  int hits = 0;
  for (const int32_t id : r.ids) {
    where.push_back(id < 0 ? kNobody : r.slots[size_t(id)] >= 0 ? kHit : kCpu);
    hits += where.back() == kHit;
  }
  if (c.tokens == 1 && c.reads_host) {
    int reads = split[size_t(hits * (c.top_k + 1) + c.top_k - hits)];
    for (uint8_t& place : where) {
      if (place == kCpu && reads-- > 0) place = kFetched;
    }
  }
  return where;
}

void check_place(const PlaceCase& c) {
  const Routing r(c);
  const int pairs = c.tokens * c.top_k;
  std::vector<uint8_t> split(size_t((c.top_k + 1) * (c.top_k + 1)));
  for (int hits = 0; hits <= c.top_k; ++hits) {
    for (int misses = 0; misses <= c.top_k; ++misses)
      split[size_t(hits * (c.top_k + 1) + misses)] = uint8_t((misses + 1) / 2);
  }
  const std::vector<uint8_t> where = expected_places(c, r, split);
  const uint32_t on_cpu = uint32_t(std::count(where.begin(), where.end(), kCpu));
  const MailboxShape shape{3, c.tokens + 1, c.top_k, c.hidden};
  const MailboxLayout layout{shape};
  constexpr int kLayer = 1;
  test::under_schedules([&](WatchedRun& run) {
    const int capacity = max_groups(pairs, c.experts);
    auto* step = run.copy("step", std::vector<uint32_t>{6});
    run.check(launch_begin_step(step, nullptr), "begin_step");
    CHECK_EQUAL(*step, 7u);
    uint8_t* mailbox = run.memory<uint8_t>("mailbox", size_t(layout.bytes()), simt::Memory::kMapped);
    std::memset(mailbox, 0, size_t(layout.bytes()));
    run.session().host_answers(mailbox + layout.results(), size_t(layout.bytes() - layout.results()));
    auto* num_groups = run.memory<int32_t>("num_groups", 1);
    auto* weights = run.memory<uint64_t>("group weights", size_t(capacity));
    auto* begin = run.memory<int32_t>("begin", size_t(capacity) + 1);
    auto* pairs_of = run.memory<int32_t>("pairs", size_t(pairs));
    auto* placed_where = run.memory<uint8_t>("where", size_t(pairs));
    auto* num_on_cpu = run.memory<uint32_t>("num_on_cpu", 1);
    const PlacementTables tables{run.copy("slots", r.slots),
                                 c.reads_host ? run.copy("split", split) : nullptr,
                                 0x100000,
                                 4096,
                                 c.reads_host ? uint64_t{0x900000} : 0,
                                 512,
                                 c.experts};
    run.check(
        launch_place({run.copy("ids", r.ids), run.copy("routing weights", r.weights),
                      run.copy("normed", r.normed), c.tokens, kLayer},
                     tables, {{num_groups, weights, begin, pairs_of, capacity}, placed_where, num_on_cpu},
                     shape, c.posts ? mailbox : nullptr, step, nullptr),
        "place");
    CHECK(std::equal(where.begin(), where.end(), placed_where));
    CHECK_EQUAL(*num_on_cpu, on_cpu);
    // Groups: experts in order, each with its pairs in order.
    int group = 0;
    for (int e = 0; e < c.experts; ++e) {
      std::vector<int32_t> own;
      for (int p = 0; p < pairs; ++p) {
        if (r.ids[size_t(p)] == e && (where[size_t(p)] == kHit || where[size_t(p)] == kFetched))
          own.push_back(p);
      }
      if (own.empty()) continue;
      CHECK(group < *num_groups);
      const bool hit = where[size_t(own[0])] == kHit;
      CHECK_EQUAL(weights[group],
                  hit ? 0x100000u + uint64_t(r.slots[size_t(e)]) * 4096 : 0x900000u + uint64_t(e) * 512);
      CHECK_EQUAL(size_t(begin[group + 1] - begin[group]), own.size());
      CHECK(std::equal(own.begin(), own.end(), pairs_of + begin[group]));
      ++group;
    }
    CHECK_EQUAL(group, *num_groups);
    if (!c.posts) return;
    const auto* post = reinterpret_cast<const MailboxPost*>(mailbox + layout.post(kLayer));
    CHECK_EQUAL(post->posted, 7u);
    CHECK_EQUAL(post->num_on_cpu, on_cpu);
    CHECK_EQUAL(post->num_tokens, uint32_t(c.tokens));
    CHECK(std::memcmp(mailbox + layout.ids(kLayer), r.ids.data(), size_t(pairs) * 4) == 0);
    CHECK(std::memcmp(mailbox + layout.weights(kLayer), r.weights.data(), size_t(pairs) * 4) == 0);
    CHECK(std::memcmp(mailbox + layout.where(kLayer), where.data(), size_t(pairs)) == 0);
    if (on_cpu > 0)
      CHECK(std::memcmp(mailbox + layout.activations(), r.normed.data(), r.normed.size() * 2) == 0);

    // A host that answers while the device waits; then both shares are added.
    const auto from_cpu = test::random_floats(size_t(c.tokens * c.hidden), 8);
    std::thread host([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      std::memcpy(mailbox + layout.results(), from_cpu.data(), from_cpu.size() * 4);
      auto* answer = reinterpret_cast<MailboxAnswer*>(mailbox + layout.answer(kLayer));
      std::atomic_ref<uint32_t>(answer->answered).store(7, std::memory_order_release);
    });
    const int waited = launch_wait(shape, mailbox, kLayer, step, num_on_cpu, 20'000'000'000, nullptr);
    host.join();
    run.check(waited, "wait");
    CHECK(post->computed_ns > 0);
    CHECK_EQUAL(reinterpret_cast<const MailboxReport*>(mailbox + layout.report())->timed_out, 0u);
    const auto outputs = test::random_floats(size_t(pairs * c.hidden), 9);
    const auto hidden_before = test::random_floats(size_t(c.tokens * c.hidden), 10);
    auto* hidden = run.copy("hidden", hidden_before);
    const int64_t joined = layout.post(kLayer) + int64_t(offsetof(MailboxPost, joined_ns));
    run.check(launch_combine({run.copy("outputs", outputs), run.copy("weights", r.weights), placed_where,
                              reinterpret_cast<const float*>(mailbox + layout.results()), c.tokens, c.top_k,
                              c.hidden, hidden, reinterpret_cast<int64_t*>(mailbox + joined)},
                             nullptr),
              "combine");
    CHECK(post->joined_ns > 0);
    for (int t = 0; t < c.tokens; ++t) {
      for (int column = 0; column < c.hidden; ++column) {
        float sum = hidden_before[size_t(t * c.hidden + column)];
        bool of_cpu = false;
        for (int p = t * c.top_k; p < (t + 1) * c.top_k; ++p) {
          of_cpu |= where[size_t(p)] == kCpu;
          if (where[size_t(p)] == kHit || where[size_t(p)] == kFetched)
            sum = fused(r.weights[size_t(p)], outputs[size_t(p * c.hidden + column)], sum);
        }
        if (of_cpu) sum += from_cpu[size_t(t * c.hidden + column)];
        CHECK_EQUAL(hidden[t * c.hidden + column], sum);
      }
    }
  });
}

}  // namespace

CASE(a_step_places_posts_waits_and_combines) {
  check_place({1, 8, 2, 64, true, true});
  check_place({1, 67, 8, 8, true, false});
  check_place({7, 33, 4, 40, true, false});
  check_place({32, 128, 8, 16, true, false});
  check_place({3, 8, 2, 16, false, false});
}

CASE(a_wait_ends_when_nobody_answers_or_the_host_aborts) {
  const MailboxShape shape{1, 1, 1, 8};
  const MailboxLayout layout{shape};
  for (const bool aborts : {false, true}) {
    WatchedRun run(3);
    uint8_t* mailbox = run.memory<uint8_t>("mailbox", size_t(layout.bytes()), simt::Memory::kMapped);
    std::memset(mailbox, 0, size_t(layout.bytes()));
    reinterpret_cast<MailboxControl*>(mailbox + layout.control())->abort = aborts;
    const int64_t limit = aborts ? 20'000'000'000 : 2'000'000;
    run.check(launch_wait(shape, mailbox, 0, run.copy("step", std::vector<uint32_t>{1}),
                          run.copy("num_on_cpu", std::vector<uint32_t>{1}), limit, nullptr),
              "wait");
    CHECK_EQUAL(reinterpret_cast<const MailboxReport*>(mailbox + layout.report())->timed_out,
                aborts ? 0u : 1u);
  }
}

CASE(host_memory_is_read_whole) {
  for (const size_t words : {1u, 255u, 256u, 1000u}) {
    test::under_schedules([&](WatchedRun& run) {
      const auto values = test::random_floats(4 * words, 1);
      auto* to = run.memory<float>("to", 4 * words);
      run.check(launch_read_host(run.copy("from", values), to, int64_t(16 * words), nullptr), "read_host");
      CHECK(std::equal(values.begin(), values.end(), to));
    });
  }
}

CASE(what_launchers_do_not_take_is_refused) {
  WatchedRun run(1);
  float x = 0;
  int32_t id = 0;
  CHECK_EQUAL(launch_begin_step(nullptr, nullptr), 1);
  CHECK_EQUAL(launch_read_host(&x, &x, 8, nullptr), 1);
  CHECK_EQUAL(launch_combine({}, nullptr), 1);
  CHECK_EQUAL(launch_decode_experts({}, {}, {}, {}, nullptr), 1);
  CHECK_EQUAL(launch_prefill_experts({}, {}, {}, {}, {}, nullptr), 1);
  CHECK_EQUAL(launch_place({&id, &x, &x, 0, 0}, {}, {}, {}, nullptr, nullptr, nullptr), 1);
  CHECK_EQUAL(launch_wait({}, nullptr, 0, nullptr, nullptr, 1, nullptr), 1);
  CHECK_EQUAL(launch_encode({}, nullptr), 1);
}
