// A decode step's bookkeeping on the SIMT machine: steps, placing, posting, waiting for a host that answers, combining.
#include <algorithm>
#include <atomic>
#include <limits>
#include <thread>

#include "step_control.h"
#include "watched_run.h"

using namespace twofold::cuda;
using test::WatchedRun;

namespace {

struct PlaceCase {
  int tokens, experts, top_k, hidden;
  bool posts, reads_host;
  bool looks = false;          // routers look a layer ahead: experts arrive after the table was published
  bool has_ahead = false;      // and say what they see
  bool padding_alone = false;  // no token at all
  int kinds = 1;               // layouts of the layer's experts
};

// Some misses are worth reading and some are not, by the tokens of an expert.
ReadPrices make_prices() {
  ReadPrices prices{};
  prices.reads = 1;
  prices.launch_ns = 3000;
  prices.handshake_ns = 5000;
  for (uint32_t t = 1; t <= kMostReadTokens; ++t) {
    prices.gpu_ns[t] = 900 + 20 * t;
    prices.link_ns[t] = 9000 * ((t + kDecodeTokens - 1) / kDecodeTokens);
    prices.cpu_ns[t] = 2500 + 1800 * t;
    prices.slowed_ns[t] = prices.cpu_ns[t] / 5;
    prices.drag_ns[t] = 700;
  }
  return prices;
}

struct Routing {
  std::vector<int32_t> ids, slots;
  std::vector<int64_t> offsets;  // in the host's store
  std::vector<uint8_t> kinds;
  std::vector<uint32_t> arrived;  // slot + 1 of what came since; 0: nothing
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
      const bool padding = c.padding_alone || t % 5 == 4;
      for (int k = 0; k < c.top_k; ++k) ids.push_back(padding ? -1 : all[size_t(k)]);
    }
    for (int e = 0; e < c.experts; ++e) slots.push_back(random() % 2 ? e : -1);
    for (int e = 0; e < c.experts; ++e)
      arrived.push_back(random() % 4 == 0 ? uint32_t(c.experts + e + 1) : 0);
    for (int e = 0; e < c.experts; ++e) kinds.push_back(uint8_t(random() % uint32_t(c.kinds)));
    for (int e = 0; e < c.experts; ++e)
      offsets.push_back(e == 0 ? 4096 : offsets.back() + 512 * (1 + kinds[size_t(e) - 1]));
  }
  // Where expert e lies when the layer is placed.
  int slot(const PlaceCase& c, int e) const {
    return slots[size_t(e)] < 0 && c.looks ? int(arrived[size_t(e)]) - 1 : slots[size_t(e)];
  }
};

// Experts that several tokens read: the most tokens first, as many as make the layer shortest, of equals the fewest.
std::vector<int> expected_reads(const PlaceCase& c, const Routing& r, const ReadPrices& prices) {
  std::vector<int64_t> tokens(static_cast<size_t>(c.experts));
  for (const int32_t id : r.ids) {
    if (id >= 0) ++tokens[size_t(id)];
  }
  std::vector<int> misses;
  int64_t hits_ns = 0;
  for (int e = 0; e < c.experts; ++e) {
    if (tokens[size_t(e)] == 0) continue;
    if (r.slot(c, e) < 0)
      misses.push_back(e);
    else
      hits_ns += prices.gpu_ns[tokens[size_t(e)]];
  }
  std::stable_sort(misses.begin(), misses.end(),
                   [&](int a, int b) { return tokens[size_t(a)] > tokens[size_t(b)]; });
  int64_t shortest = std::numeric_limits<int64_t>::max();
  size_t best = 0;
  for (size_t reads = 0; reads <= misses.size(); ++reads) {
    int64_t gpu = prices.launch_ns + hits_ns, link = 0, cpu = 0, slowed = 0, drag = 0;
    if (reads == 0 && hits_ns == 0) gpu = 0;
    for (size_t i = 0; i < misses.size(); ++i) {
      const auto t = size_t(tokens[size_t(misses[i])]);
      if (i < reads) {
        link += prices.link_ns[t];
        drag += prices.drag_ns[t];
        gpu = std::max(gpu, link) + prices.gpu_ns[t];
      } else {
        cpu += prices.cpu_ns[t];
        slowed += prices.slowed_ns[t];
      }
    }
    if (reads < misses.size()) cpu += prices.handshake_ns + std::min(slowed, drag);
    if (std::max(gpu, cpu) >= shortest) continue;
    shortest = std::max(gpu, cpu);
    best = reads;
  }
  misses.resize(best);
  return misses;
}

// What a pair becomes, by the rules of placement.h alone.
std::vector<uint8_t> expected_places(const PlaceCase& c, const Routing& r, const std::vector<uint8_t>& split,
                                     const ReadPrices& prices) {
  std::vector<uint8_t> where;
  int hits = 0;
  for (const int32_t id : r.ids) {
    where.push_back(id < 0 ? kPadding : r.slot(c, id) >= 0 ? kHit : kCpu);
    hits += where.back() == kHit;
  }
  if (c.tokens > 1 && c.reads_host && prices.reads != 0) {
    const std::vector<int> read = expected_reads(c, r, prices);
    for (size_t p = 0; p < where.size(); ++p) {
      if (std::count(read.begin(), read.end(), r.ids[p]) > 0) where[p] = kFetched;
    }
  }
  if (c.tokens == 1 && c.reads_host && !c.padding_alone) {
    int reads = split[size_t(hits * (c.top_k + 1) + c.top_k - hits)];
    for (uint8_t& place : where) {
      if (place == kCpu && reads-- > 0) place = kFetched;
    }
  }
  return where;
}

// The words of a layer that host and device release and acquire.
void hand_over(WatchedRun& run, const MailboxLayout& layout, const uint8_t* mailbox, int layer) {
  run.session().hands_over(mailbox + layout.control() + offsetof(MailboxControl, abort));
  run.session().hands_over(mailbox + layout.report() + offsetof(MailboxReport, timed_out));
  run.session().hands_over(mailbox + layout.post(layer) + offsetof(MailboxPost, posted));
  run.session().hands_over(mailbox + layout.answer(layer) + offsetof(MailboxAnswer, answered));
  for (int e = 0; e < layout.shape.num_ahead; ++e)
    run.session().hands_over(mailbox + layout.arrived(layer) + 4 * e);
}

// Where the pairs went.
std::vector<uint8_t> check_place(const PlaceCase& c, const ReadPrices& prices = make_prices()) {
  const Routing r(c);
  const int pairs = c.tokens * c.top_k;
  std::vector<uint8_t> split(size_t((c.top_k + 1) * (c.top_k + 1)));
  for (int hits = 0; hits <= c.top_k; ++hits) {
    for (int misses = 0; misses <= c.top_k; ++misses)
      split[size_t(hits * (c.top_k + 1) + misses)] = uint8_t((misses + 1) / 2);
  }
  const std::vector<uint8_t> where = expected_places(c, r, split, prices);
  const uint32_t on_cpu = uint32_t(std::count(where.begin(), where.end(), kCpu));
  const MailboxShape shape{3, c.tokens + 1, c.top_k, c.hidden, c.looks ? c.experts : 0};
  const MailboxLayout layout{shape};
  const auto ahead = test::random_floats(size_t(c.tokens * c.experts), 12);
  constexpr int kLayer = 1;
  test::under_schedules([&](WatchedRun& run) {
    const int capacity = max_groups(pairs, c.experts);
    auto* step = run.copy("step", std::vector<uint32_t>{6});
    run.check(launch_begin_step(step, nullptr), "begin_step");
    CHECK_EQUAL(*step, 7u);
    uint8_t* mailbox = run.memory<uint8_t>("mailbox", size_t(layout.bytes()), simt::Memory::kMapped);
    std::memset(mailbox, 0, size_t(layout.bytes()));
    hand_over(run, layout, mailbox, kLayer);
    run.session().host_answers(mailbox + layout.results(), size_t(layout.bytes() - layout.results()));
    if (c.looks) std::memcpy(mailbox + layout.arrived(kLayer), r.arrived.data(), r.arrived.size() * 4);
    auto* num_groups = run.memory<int32_t>("num_groups", size_t(c.kinds));
    auto* weights = run.memory<uint64_t>("group weights", size_t(c.kinds * capacity));
    auto* begin = run.memory<int32_t>("begin", size_t(c.kinds * (capacity + 1)));
    auto* pairs_of = run.memory<int32_t>("pairs", size_t(pairs));
    auto* placed_where = run.memory<uint8_t>("where", size_t(pairs));
    auto* num_on_cpu = run.memory<uint32_t>("num_on_cpu", 1);
    const PlacementTables tables{run.copy("slots", r.slots),
                                 c.reads_host ? run.copy("split", split) : nullptr,
                                 0x100000,
                                 4096,
                                 c.reads_host ? uint64_t{0x900000} : 0,
                                 c.reads_host ? run.copy("offsets", r.offsets) : nullptr,
                                 c.experts,
                                 c.reads_host ? run.copy("prices", std::vector<ReadPrices>{prices}) : nullptr,
                                 c.kinds > 1 ? run.copy("kinds", r.kinds) : nullptr,
                                 c.kinds};
    run.check(
        launch_place(
            {run.copy("ids", r.ids), run.copy("routing weights", r.weights), run.copy("normed", r.normed),
             c.tokens, kLayer, c.has_ahead ? run.copy("ahead", ahead) : nullptr},
            tables, {{num_groups, weights, begin, pairs_of, capacity}, placed_where, num_on_cpu}, shape,
            c.posts ? mailbox : nullptr, step, nullptr),
        "place");
    CHECK(std::equal(where.begin(), where.end(), placed_where));
    CHECK_EQUAL(*num_on_cpu, on_cpu);
    // Groups of each kind: experts in order, each with its pairs in order.
    for (int kind = 0; kind < c.kinds; ++kind) {
      const int32_t* const begins = begin + kind * (capacity + 1);
      int group = 0;
      for (int e = 0; e < c.experts; ++e) {
        std::vector<int32_t> own;
        for (int p = 0; p < pairs && r.kinds[size_t(e)] == kind; ++p) {
          if (r.ids[size_t(p)] == e && (where[size_t(p)] == kHit || where[size_t(p)] == kFetched))
            own.push_back(p);
        }
        if (own.empty()) continue;
        CHECK(group < num_groups[kind]);
        const bool hit = where[size_t(own[0])] == kHit;
        CHECK_EQUAL(weights[kind * capacity + group], hit ? 0x100000u + uint64_t(r.slot(c, e)) * 4096
                                                          : 0x900000u + uint64_t(r.offsets[size_t(e)]));
        CHECK_EQUAL(size_t(begins[group + 1] - begins[group]), own.size());
        CHECK(std::equal(own.begin(), own.end(), pairs_of + begins[group]));
        ++group;
      }
      CHECK_EQUAL(group, num_groups[kind]);
    }
    if (!c.posts) return;
    const auto* post = reinterpret_cast<const MailboxPost*>(mailbox + layout.post(kLayer));
    CHECK_EQUAL(post->posted, 7u);
    CHECK_EQUAL(post->num_on_cpu, on_cpu);
    CHECK_EQUAL(post->num_tokens, uint32_t(c.tokens));
    CHECK_EQUAL(post->has_ahead, uint32_t(c.has_ahead));
    if (c.has_ahead) CHECK(std::memcmp(mailbox + layout.ahead(kLayer), ahead.data(), ahead.size() * 4) == 0);
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
  return where;
}

}  // namespace

CASE(a_step_places_posts_waits_and_combines) {
  check_place({1, 8, 2, 64, true, true});
  check_place({1, 67, 8, 8, true, false});
  check_place({7, 33, 4, 40, true, false});
  check_place({32, 128, 8, 16, true, false});
  check_place({3, 8, 2, 16, false, false});
  check_place({.tokens = 1,
               .experts = 8,
               .top_k = 2,
               .hidden = 8,
               .posts = true,
               .reads_host = true,
               .padding_alone = true});
}

CASE(a_step_groups_experts_by_their_layout) {
  for (const int kinds : {2, 3}) {
    check_place({.tokens = 1, .experts = 67, .top_k = 8, .hidden = 8, .reads_host = true, .kinds = kinds});
    check_place({.tokens = 12, .experts = 20, .top_k = 4, .hidden = 8, .reads_host = true, .kinds = kinds});
    check_place(
        {.tokens = 3, .experts = 8, .top_k = 2, .hidden = 16, .posts = true, .looks = true, .kinds = kinds});
  }
}

CASE(a_step_of_several_tokens_reads_the_misses_that_are_worth_it) {
  ReadPrices prices = make_prices();
  for (const auto& [tokens, experts] : {std::pair{12, 20}, {32, 600}, {2, 9}}) {
    const std::vector<uint8_t> where = check_place({tokens, experts, 4, 8, true, true}, prices);
    if (tokens > 2) CHECK(std::count(where.begin(), where.end(), kFetched) > 0);
    CHECK(std::count(where.begin(), where.end(), kCpu) > 0);
  }
  prices.handshake_ns = 10'000'000;  // so all of them
  const std::vector<uint8_t> all = check_place({6, 20, 4, 8, true, true}, prices);
  CHECK(std::count(all.begin(), all.end(), kFetched) > 0 && std::count(all.begin(), all.end(), kCpu) == 0);
  prices.reads = 0;
  check_place({6, 20, 4, 8, true, true}, prices);
}

CASE(a_step_finds_what_arrived_and_posts_what_the_next_router_says) {
  for (const bool has_ahead : {false, true}) {
    check_place({7, 33, 4, 40, true, false, true, has_ahead});
    check_place({1, 67, 8, 8, true, true, true, has_ahead});
    check_place({12, 20, 4, 8, true, true, true, has_ahead});
  }
}

CASE(a_wait_ends_on_a_timeout_or_an_abort_of_the_host) {
  const MailboxShape shape{1, 1, 1, 8};
  const MailboxLayout layout{shape};
  for (const bool aborts : {false, true}) {
    WatchedRun run(3);
    uint8_t* mailbox = run.memory<uint8_t>("mailbox", size_t(layout.bytes()), simt::Memory::kMapped);
    std::memset(mailbox, 0, size_t(layout.bytes()));
    hand_over(run, layout, mailbox, 0);
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
