// Pages and records of a StateCache: where they lie, and the verbs on them.
#include "ops/state_cache.h"

#include <cstring>
#include <limits>
#include <stdexcept>

#include "check.h"

namespace {

using twofold::LayerState;
using twofold::StateCache;
using twofold::StatePlane;
using twofold::kernels::DType;

// Layers of all kinds: keys and values, a wide latent row beside a narrow one, records alone, nothing.
std::vector<LayerState> mixed() {
  return {{{{4, 8, DType::kF32}}, 0},
          {{{1, 24, DType::kBF16}, {2, 3, DType::kI8}, {1, 5, DType::kFP8}}, 40},
          {{}, 100},
          {{}, 0}};
}

void fill(char* at, int64_t bytes, int value) { std::memset(at, value, static_cast<size_t>(bytes)); }

bool all(const char* at, int64_t bytes, int value) {
  for (int64_t i = 0; i < bytes; ++i) {
    if (at[i] != static_cast<char>(value)) return false;
  }
  return true;
}

}  // namespace

CASE(planes_follow_one_another_without_gaps) {
  const std::vector<LayerState> layers(2, LayerState{{{4, 8, DType::kF32}}, 0});
  const StateCache cache(layers, 3, 16);
  CHECK_EQUAL(cache.bytes(), int64_t{2} * 4 * 3 * 16 * 8 * 4);
  const char* expected = cache.planes(0).front().page(0);
  for (int layer = 0; layer < 2; ++layer) {
    for (const StatePlane& plane : cache.planes(layer)) {
      for (int page = 0; page < 3; ++page, expected += 16 * 8 * 4) CHECK(plane.page(page) == expected);
    }
  }
}

static void copy_a_page(bool through_bytes) {
  StateCache cache(mixed(), 5, 4);
  for (int layer = 0; layer < cache.num_layers(); ++layer) {
    for (const StatePlane& plane : cache.planes(layer)) {
      for (int page = 0; page < 5; ++page) {
        fill(plane.page(page), plane.page_bytes, 10 * layer + page);
        for (int i = 0; plane.scales != nullptr && i < 4; ++i)
          plane.scales[4 * page + i] = static_cast<float>(page);
      }
    }
  }
  if (through_bytes) {
    const std::vector<std::byte> kept = cache.page_snapshot(3);
    // Per position: 4 · 8 · 4 + 24 · 2 + 2 · (3 + 4) + 5 bytes.
    CHECK_EQUAL(kept.size(), size_t{4 * 195});
    cache.restore_page(1, kept);
  } else {
    cache.fork_page(3, 1);
    cache.fork_page(2, 2);
  }
  for (int layer = 0; layer < cache.num_layers(); ++layer) {
    for (const StatePlane& plane : cache.planes(layer)) {
      for (const int page : {0, 2, 3, 4}) CHECK(all(plane.page(page), plane.page_bytes, 10 * layer + page));
      CHECK(all(plane.page(1), plane.page_bytes, 10 * layer + 3));
      for (int i = 0; plane.scales != nullptr && i < 20; ++i)
        CHECK_EQUAL(plane.scales[i], static_cast<float>(i / 4 == 1 ? 3 : i / 4));
      fill(plane.page(1), plane.page_bytes, 99);
      CHECK(all(plane.page(3), plane.page_bytes, 10 * layer + 3));
    }
  }
}

CASE(a_forked_page_is_equal_in_every_layer_and_apart_afterwards) { copy_a_page(false); }

CASE(a_restored_page_is_equal_in_every_layer_and_apart_afterwards) { copy_a_page(true); }

CASE(records_are_restored_and_forked) {
  StateCache cache(mixed(), 1, 4, 3);
  const auto set = [&](int layer, int record, int value) {
    std::memset(cache.record(layer, record).data(), value, cache.record(layer, record).size());
  };
  const auto has = [&](int layer, int record, int value) {
    const auto bytes = cache.record(layer, record);
    return all(reinterpret_cast<const char*>(bytes.data()), static_cast<int64_t>(bytes.size()), value);
  };
  CHECK_EQUAL(cache.record(0, 2).size(), size_t{0});
  CHECK_EQUAL(cache.record(1, 2).size(), size_t{40});
  CHECK(has(2, 1, 0));  // untouched memory is zero
  for (int record = 0; record < 3; ++record) {
    set(1, record, 20 + record);
    set(2, record, 30 + record);
  }
  const std::vector<std::byte> kept = cache.snapshot(1);
  CHECK_EQUAL(kept.size(), size_t{140});
  set(1, 1, 77);
  cache.fork_record(1, 2);
  CHECK(has(1, 2, 77) && has(2, 2, 31) && has(1, 0, 20) && has(2, 0, 30));
  cache.restore(1, kept);
  CHECK(has(1, 1, 21) && has(2, 1, 31) && has(1, 2, 77));
  cache.restore(0, kept);  // into another record: a roll-forward of another sequence
  CHECK(has(1, 0, 21) && has(2, 0, 31));
}

CASE(what_is_not_there_is_refused) {
  StateCache cache(mixed(), 2, 4, 1);
  const auto refused = [](auto call) {
    try {
      call();
    } catch (const std::exception&) {
      return true;
    }
    return false;
  };
  CHECK(refused([&] { cache.fork_page(0, 2); }));
  CHECK(refused([&] { cache.fork_page(-1, 0); }));
  CHECK(refused([&] { cache.fork_record(0, 1); }));
  CHECK(refused([&] { cache.snapshot(1); }));
  CHECK(refused([&] { cache.page_snapshot(2); }));
  CHECK(refused([&] { cache.restore_page(0, std::vector<std::byte>(4 * 195 + 1)); }));
  CHECK(refused([&] { cache.restore(0, std::vector<std::byte>(139)); }));
  CHECK(refused([&] { StateCache(mixed(), 0, 4); }));
  CHECK(refused([&] { StateCache({}, 1, 4); }));
  CHECK(refused([&] { StateCache(mixed(), std::numeric_limits<int>::max(), 1 << 30); }));
}

int main(int argc, char** argv) { return test::main(argc, argv); }
