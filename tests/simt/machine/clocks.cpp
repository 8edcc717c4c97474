#include "machine/clocks.h"

#include <algorithm>

namespace simt {

Clocks later_of(const Clocks& a, const Clocks& b) {
  if (a == nullptr || a == b) return b;
  if (b == nullptr) return a;
  auto out = std::make_shared<std::vector<uint32_t>>(*a);
  for (size_t i = 0; i < out->size(); ++i) (*out)[i] = std::max((*out)[i], (*b)[i]);
  return out;
}

Released released_by(const Known& known, int64_t number, int self, int num_threads) {
  auto mine = known.block != nullptr ? std::make_shared<std::vector<uint32_t>>(*known.block)
                                     : std::make_shared<std::vector<uint32_t>>(size_t(num_threads), 0);
  (*mine)[size_t(self)] = known.clock;
  Released out = known.others;
  out.emplace_back(number, std::move(mine));
  return out;
}

void acquire(Known& known, int64_t number, const Released& released) {
  for (const auto& [block, clocks] : released) {
    if (block == number)
      known.block = later_of(known.block, clocks);
    else
      known.others.emplace_back(block, clocks);
  }
}

}  // namespace simt
