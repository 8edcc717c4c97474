// Which bytes a warp asks for at once: bank conflicts and sectors by a model over the addresses.
#pragma once
#include <cstdint>
#include <map>
#include <unordered_map>
#include <vector>

#include "simt.h"

namespace simt {

// Traffic of one launch. Lanes run one after the other, so what they ask for at once is put together by instruction and by how
// often each lane has come there since the block's last barrier.
class TrafficMeter {
 public:
  TrafficMeter(std::map<TrafficKey, Traffic>& sums, const uint8_t* shared) : sums_(sums), shared_(shared) {}
  void note(int thread, const void* instruction, const void* address, int bytes, bool is_shared, bool write);
  void flush();

 private:
  struct Request {
    std::vector<uint64_t> addresses;
  };
  struct Site {
    TrafficKey key;
    uint32_t visits[32] = {};
    std::vector<Request> requests;
  };
  std::map<TrafficKey, Traffic>& sums_;
  const uint8_t* shared_;
  std::unordered_map<uint64_t, Site> sites_;  // by instruction and warp
};

}  // namespace simt
