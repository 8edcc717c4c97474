// Payback's table: the worth of residency by an expert's history (definitions in policy_payback.cpp).
//
// A cell is one cache line: one lane per rent of the ladder, then the number of updates of the cell. Learning
// updates the nearest cell; reading interpolates between the bucket centres of the three usages, 8 cells.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace twofold::payback {

constexpr size_t kLanes = 12;
// Approximately the usage per event of the expert that one more slot would hold: 0.1 % where slots are many, up
// to 95 % where a batch uses nearly every expert and slots are few.
constexpr std::array<float, kLanes> kRents{0.001F, 0.004F, 0.01F, 0.02F, 0.04F, 0.08F,
                                           0.16F,  0.27F,  0.4F,  0.55F, 0.75F, 0.95F};
constexpr float kDiscount = 0.998F;      // per event; rent and cap bound D, this only damps errors
constexpr double kBelievedHorizon = 50;  // events for which an untrained usage is trusted
constexpr float kMinStep = 0.01F;
constexpr float kStepVisits = 20;  // step = 1 / (1 + visits / this), not below kMinStep
constexpr int kAgeBuckets = 16;
constexpr std::array<int, kAgeBuckets> kAgeFrom{0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256, 512};
constexpr int kMaxAge = kAgeFrom.back();
constexpr int kRequestBuckets = 12;
constexpr int kFastBuckets = 8;
constexpr int kLongBuckets = 8;
// From a cell to its neighbours; the fast usage is the innermost.
constexpr int kNextRequest = kFastBuckets;
constexpr int kNextAge = kNextRequest * kRequestBuckets;
constexpr int kNextLong = kNextAge * kAgeBuckets;
constexpr int kGrown = kNextLong * kLongBuckets;  // from a young request to one that is not
constexpr size_t kCells = 2 * static_cast<size_t>(kGrown);

// Maps usage 0 ... 1 to a position on an axis of buckets, by square root: resolution where most experts are.
// The integer part is the bucket.
template <int kBuckets>
float place(float usage, float stretch = 1) {
  const float at = std::sqrt(usage) * (stretch * kBuckets);
  constexpr float kEnd = kBuckets - 1.0F / 1024;
  return at < kEnd ? at : kEnd;
}

// A position relative to the bucket centres: the bucket below, and the fraction to the next one.
template <int kBuckets>
struct Between {
  explicit Between(float place) {
    const float at = std::max(place - 0.5F, 0.0F);
    below = std::min(static_cast<int>(at), kBuckets - 2);
    past = std::min(at - static_cast<float>(below), 1.0F);
  }
  int below;
  float past;
};

// Position of a rent between two lanes of the ladder.
struct SlotsAtRent {
  explicit SlotsAtRent(double rent) {
    while (lane + 2 < kLanes && rent > static_cast<double>(kRents[lane + 1])) ++lane;
    const double low = static_cast<double>(kRents[lane]);
    const double high = static_cast<double>(kRents[lane + 1]);
    past = static_cast<float>((rent - low) / (high - low));
    value = static_cast<float>(rent);
  }
  size_t lane = 0;
  float past;  // fraction of the way to the next lane
  float value;
};

class Table {
 public:
  struct alignas(64) Cell {
    std::array<float, kLanes> worth{};
    float visits = 0;
  };

  // From the closed form for a constant usage.
  explicit Table(double price) : price_(static_cast<float>(price)), cells_(kCells) {
    for (int at = 0; at < kNextLong; ++at) {
      const double a = std::pow((at / kNextRequest % kRequestBuckets + 0.5) / kRequestBuckets, 2);
      const double b = std::pow((at % kFastBuckets + 0.5) / kFastBuckets, 2);
      double usage = (a + b) / 2;
      usage *= 2 / (2 + usage * kAgeFrom[static_cast<size_t>(at / kNextAge)]);  // no use for so many events
      Cell cell;
      for (size_t lane = 0; lane < kLanes; ++lane) {
        const double rent = static_cast<double>(kRents[lane]);
        // Bought back at the next use, or, where the price is never worth it, all uses of the horizon.
        const double bought = 1 + price - rent / usage;
        cell.worth[lane] = static_cast<float>(
            usage > rent ? std::min(bought, (usage - rent) * kBelievedHorizon) : usage - rent);
      }
      for (size_t outer = 0; outer < kCells; outer += kNextLong)
        cells_[outer + static_cast<size_t>(at)] = cell;
    }
  }

  std::vector<Cell>& cells() { return cells_; }
  const std::vector<Cell>& cells() const { return cells_; }

  // One event led from one history to the next: TD(0).
  void learn(int before, int after, bool used) {
    Cell& cell = cells_[static_cast<size_t>(before)];
    const Cell& next = cells_[static_cast<size_t>(after)];
    cell.visits += 1;
    const float step = std::max(kMinStep, 1 / (1 + cell.visits / kStepVisits));
    // A use saves one miss and caps what lies ahead at the price. Without a branch, and four lanes at once: left
    // to itself the compiler takes them one by one, at twice the time of an event.
    const float saved = used ? 1.0F : 0.0F;
    const float cap = used ? price_ : std::numeric_limits<float>::max();
    for (size_t lane = 0; lane < kLanes; lane += 4) {
      Four ahead = load<Four>(next, lane);
      ahead = ahead > 0 ? ahead : Four{};
      ahead = ahead < cap ? ahead : Four{} + cap;
      Four worth = load<Four>(cell, lane);
      worth += step * (kDiscount * (saved + ahead) - load<Four>(kRents.data() + lane) - worth);
      std::memcpy(cell.worth.data() + lane, &worth, sizeof(worth));
    }
  }

  // Worth of an event at this rent minus the table's belief; correction: of the future part.
  float surprise(int before, int after, float used, float correction, const SlotsAtRent& rent) const {
    const float cap = used > 0 ? price_ : std::numeric_limits<float>::max();
    const float ahead = between(cells_[static_cast<size_t>(after)], rent) + correction;
    const float believed = between(cells_[static_cast<size_t>(before)], rent);
    return kDiscount * (used + std::min(std::max(ahead, 0.0F), cap)) - rent.value - believed;
  }

  // Worths at the two rents of the ladder around one that is between them.
  using Pair = float __attribute__((vector_size(8)));

  Pair read(int corner, float past_request, float past_fast, float past_long, size_t lane) const {
    const Cell* at = cells_.data() + corner;
    const auto along_fast = [&](int offset) {
      const Pair here = load<Pair>(at[offset], lane);
      return here + past_fast * (load<Pair>(at[offset + 1], lane) - here);
    };
    const auto along_request = [&](int offset) {
      const Pair here = along_fast(offset);
      return here + past_request * (along_fast(offset + kNextRequest) - here);
    };
    const Pair here = along_request(0);
    return here + past_long * (along_request(kNextLong) - here);
  }

 private:
  using Four = float __attribute__((vector_size(16)));
  template <class Vector>
  static Vector load(const float* from) {
    Vector out;
    std::memcpy(&out, from, sizeof(out));
    return out;
  }
  template <class Vector>
  static Vector load(const Cell& cell, size_t lane) {
    return load<Vector>(cell.worth.data() + lane);
  }
  static float between(const Cell& cell, const SlotsAtRent& rent) {
    const float here = cell.worth[rent.lane];
    return here + rent.past * (cell.worth[rent.lane + 1] - here);
  }

  float price_;
  std::vector<Cell> cells_;
};

}  // namespace twofold::payback
