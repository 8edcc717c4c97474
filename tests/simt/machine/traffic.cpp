#include "traffic.h"

#include <algorithm>
#include <set>

namespace simt {

namespace {

constexpr int kBanks = 32, kSector = 32;

// Wavefronts: lanes go in groups of 128 bytes; of each, as many as the fullest bank has different words.
int64_t wavefronts(const std::vector<uint64_t>& addresses, int width) {
  const size_t lanes = size_t(std::max(1, 128 / std::max(width, 4)));
  int64_t passes = 0;
  for (size_t first = 0; first < addresses.size(); first += lanes) {
    std::set<uint64_t> words;
    for (size_t i = first; i < std::min(first + lanes, addresses.size()); ++i) {
      for (int byte = 0; byte < width; byte += 4) words.insert((addresses[i] + uint64_t(byte)) / 4);
    }
    int64_t of_bank[kBanks] = {};
    for (const uint64_t word : words) ++of_bank[word % kBanks];
    passes += *std::max_element(of_bank, of_bank + kBanks);
  }
  return passes;
}

int64_t sectors(const std::vector<uint64_t>& addresses, int width) {
  std::set<uint64_t> found;
  for (const uint64_t address : addresses) {
    for (uint64_t at = address / kSector; at <= (address + uint64_t(width) - 1) / kSector; ++at)
      found.insert(at);
  }
  return int64_t(found.size());
}

}  // namespace

void TrafficMeter::note(int thread, const void* instruction, const void* address, int bytes, bool is_shared,
                        bool write) {
  const uint64_t key = reinterpret_cast<uint64_t>(instruction) * 32 + uint64_t(thread / 32);
  Site& site = sites_[key];
  site.key = {is_shared, write, bytes};
  const uint32_t visit = site.visits[thread % 32]++;
  if (site.requests.size() <= visit) site.requests.resize(visit + 1);
  const auto* at = static_cast<const uint8_t*>(address);
  site.requests[visit].addresses.push_back(is_shared ? uint64_t(at - shared_)
                                                     : reinterpret_cast<uint64_t>(at));
}

void TrafficMeter::flush() {
  for (auto& [key, site] : sites_) {
    Traffic& sum = sums_[site.key];
    for (Request& request : site.requests) {
      auto& addresses = request.addresses;
      const int width = site.key.width;
      std::set<uint64_t> distinct(addresses.begin(), addresses.end());
      const int64_t bytes = int64_t(distinct.size()) * width;
      sum.requests += 1;
      sum.bytes += bytes;
      sum.passes += site.key.shared ? wavefronts(addresses, width) : sectors(addresses, width);
      const int64_t unit = site.key.shared ? 128 : kSector;
      sum.least += (bytes + unit - 1) / unit;
    }
  }
  sites_.clear();
}

}  // namespace simt
