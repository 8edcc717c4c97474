// Memory of a watched run, and the runs themselves: several schedules, each with its own memory, bits compared.
#pragma once
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "number_formats.h"
#include "simt/simt.h"

namespace test {

// All kernels that ran in this program, each with the least of its instances' launch bounds.
inline std::map<std::string, int>& kernels_run() {
  static std::map<std::string, int> bounds;
  return bounds;
}

// One schedule. What `keep` was given is compared with the other schedules'.
class WatchedRun {
 public:
  explicit WatchedRun(uint64_t seed) : session_(seed), watched_(&session_) {}
  ~WatchedRun() {
    for (const auto& [instance, size] : session_.launch_sizes()) {
      const auto [at, is_new] = kernels_run().try_emplace(instance.substr(0, instance.find(' ')), size.bound);
      at->second = std::min(at->second, size.bound);
    }
  }

  // `count` elements with a gap behind them, a region of the machine.
  template <class T>
  T* memory(const std::string& name, size_t count, simt::Memory kind = simt::Memory::kUninitialised) {
    const size_t bytes = count * sizeof(T);
    void* at = std::aligned_alloc(128, (bytes + 255) / 128 * 128);
    std::memset(at, 0xee, (bytes + 255) / 128 * 128);
    held_.emplace_back(at);
    session_.add(name, at, bytes, kind);
    if (kind == simt::Memory::kUninitialised) kept_.emplace_back(static_cast<uint8_t*>(at), bytes);
    return static_cast<T*>(at);
  }
  template <class T>
  T* copy(const std::string& name, const std::vector<T>& values) {
    T* at = memory<T>(name, values.size(), simt::Memory::kInitialised);
    std::memcpy(at, values.data(), values.size() * sizeof(T));
    return at;
  }
  // A launch; its report ends the test.
  void check(int error, const char* what) {
    if (error != 0) fail(what, error, session_.report().empty() ? simt::last_report() : session_.report());
  }
  simt::Session& session() { return session_; }

  // All that was not initialised, as the kernels left it.
  std::vector<uint8_t> bits() const {
    std::vector<uint8_t> all;
    for (const auto& [at, bytes] : kept_) all.insert(all.end(), at, at + bytes);
    return all;
  }

 private:
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  simt::Session session_;
  std::vector<std::unique_ptr<void, Free>> held_;
  std::vector<std::pair<const uint8_t*, size_t>> kept_;
  simt::Watched watched_;
};

// One schedule of every body: for a case that asks which kernels run, not what they compute.
inline bool& one_schedule() {
  static bool one = false;
  return one;
}

// Runs under two schedules, whose results have the same bits.
inline void under_schedules(const std::function<void(WatchedRun&)>& body) {
  std::vector<uint8_t> first;
  for (const uint64_t seed : {1u, 77u}) {
    WatchedRun run(seed);
    body(run);
    if (one_schedule()) return;
    if (seed == 1)
      first = run.bits();
    else
      CHECK(first == run.bits());
  }
}

inline float float_of_bf16(uint16_t bits) { return twofold::cuda::float_of_bits(uint32_t(bits) << 16); }
inline float rounded(float value) { return float_of_bf16(twofold::cuda::bf16_of_float(value)); }

inline std::vector<uint16_t> random_bf16(size_t count, uint32_t seed, float size = 1) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, size);
  std::vector<uint16_t> out(count);
  for (uint16_t& value : out) value = twofold::cuda::bf16_of_float(normal(random));
  return out;
}
inline std::vector<float> random_floats(size_t count, uint32_t seed, float size = 1) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, size);
  std::vector<float> out(count);
  for (float& value : out) value = normal(random);
  return out;
}

}  // namespace test
