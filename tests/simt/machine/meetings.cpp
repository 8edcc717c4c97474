// Where threads meet: barriers, which order memory, and what lanes of a warp exchange, which does not.
#include <algorithm>
#include <bit>
#include <memory>

#include "machine/machine.h"

namespace simt {

void Machine::meet(const Waiting& waiting) {
  Fibre& fibre = self();
  const int first = running_ / kWarp * kWarp;
  if (waiting.how == Meeting::kBlockBarrier) {
    if (waiting.operand == 0 && num_done_ > 0) {
      for (int t = 0; t < num_threads_; ++t) {
        if (fibres_[size_t(t)]->state == Fibre::State::kDone)
          fail("waits at " + name_of(waiting.how, waiting.line) + ", but " + name_of_thread(t) +
               " has exited");
      }
    }
    fibre.at = waiting;
    fibre.state = Fibre::State::kWaiting;
    ++num_waiting_;
    complete_block_barrier(waiting);
  } else {
    if ((waiting.mask >> (running_ % kWarp) & 1) == 0)
      fail("calls " + name_of(waiting.how, waiting.line) + " with a mask that does not name its own lane");
    int& waiting_lanes = waiting_of_warp_[first / kWarp];
    for (int lane = 0; lane < kWarp && (num_done_ > 0 || first + kWarp > num_threads_); ++lane) {
      if ((waiting.mask >> lane & 1) == 0) continue;
      const int other = first + lane;
      if (other >= num_threads_ || fibres_[size_t(other)]->state == Fibre::State::kDone)
        fail("names lane " + std::to_string(lane) + " at " + name_of(waiting.how, waiting.line) +
             ", which has exited or never was");
    }
    fibre.at = waiting;
    fibre.state = Fibre::State::kWaiting;
    if (++waiting_lanes >= std::popcount(waiting.mask)) complete_warp(first, waiting);
  }
  leave();
}

void Machine::complete_block_barrier(const Waiting& waiting) {
  const int least = waiting.operand == 0 ? num_threads_ : waiting.operand;
  if (num_waiting_ < least) return;  // scanning all threads at every arrival costs more than kernels do
  int count = 0;
  for (int t = 0; t < num_threads_; ++t) {
    const Fibre& fibre = *fibres_[size_t(t)];
    count += fibre.state == Fibre::State::kWaiting && fibre.at.how == Meeting::kBlockBarrier &&
             fibre.at.id == waiting.id;
  }
  if (count < least) return;
  Clocks joined;
  if (shadow != nullptr) {
    auto clocks = std::make_shared<std::vector<uint32_t>>(size_t(num_threads_), 0u);
    for (int t = 0; t < num_threads_; ++t) {
      Fibre& fibre = *fibres_[size_t(t)];
      if (fibre.at.how != Meeting::kBlockBarrier || fibre.at.id != waiting.id) {
        if (fibre.known.block != nullptr) (*clocks)[size_t(t)] = 0;
        continue;
      }
      if (fibre.at.line != waiting.line) {
        const std::string where = name_of(fibre.at.how, fibre.at.line);
        fail("meets " + name_of_thread(t) + " at different barriers: " + name_of(waiting.how, waiting.line) +
             " and " + where);
      }
      (*clocks)[size_t(t)] = fibre.known.clock;
    }
    joined = clocks;
    if (least < num_threads_) {
      for (int t = 0; t < num_threads_; ++t) {
        const Fibre& fibre = *fibres_[size_t(t)];
        if (fibre.at.how == Meeting::kBlockBarrier && fibre.at.id == waiting.id)
          joined = later_of(joined, fibre.known.block);
      }
    }
  }
  for (int t = 0; t < num_threads_; ++t) {
    Fibre& fibre = *fibres_[size_t(t)];
    if (fibre.at.how != Meeting::kBlockBarrier || fibre.at.id != waiting.id) continue;
    fibre.at = {};
    fibre.state = Fibre::State::kReady;
    --num_waiting_;
    if (shadow != nullptr) {
      fibre.known.block = joined;
      ++fibre.known.clock;
    }
  }
  if (meter != nullptr) meter->flush();
}

void Machine::complete_warp(int first, const Waiting& waiting) {
  for (int lane = 0; lane < kWarp; ++lane) {
    if ((waiting.mask >> lane & 1) == 0) continue;
    const Waiting& its = fibres_[size_t(first + lane)]->at;
    if (its.how != waiting.how || its.mask != waiting.mask || its.line != waiting.line) return;
  }
  if (waiting.how == Meeting::kWarpBarrier) {
    if (shadow != nullptr) {
      Clocks joined;
      for (int lane = 0; lane < kWarp; ++lane) {
        if (waiting.mask >> lane & 1) joined = later_of(joined, fibres_[size_t(first + lane)]->known.block);
      }
      auto clocks = joined != nullptr ? std::make_shared<std::vector<uint32_t>>(*joined)
                                      : std::make_shared<std::vector<uint32_t>>(size_t(num_threads_), 0u);
      for (int lane = 0; lane < kWarp; ++lane) {
        if (waiting.mask >> lane & 1)
          (*clocks)[size_t(first + lane)] = fibres_[size_t(first + lane)]->known.clock;
      }
      for (int lane = 0; lane < kWarp; ++lane) {
        if ((waiting.mask >> lane & 1) == 0) continue;
        fibres_[size_t(first + lane)]->known.block = clocks;
        ++fibres_[size_t(first + lane)]->known.clock;
      }
    }
  } else {
    complete_exchange(first, waiting);
  }
  for (int lane = 0; lane < kWarp; ++lane) {
    if ((waiting.mask >> lane & 1) == 0) continue;
    fibres_[size_t(first + lane)]->at.how = Meeting::kNone;
    fibres_[size_t(first + lane)]->state = Fibre::State::kReady;
    --waiting_of_warp_[first / kWarp];
  }
}

namespace {

float float_of_bf16(uint32_t bits) { return __builtin_bit_cast(float, bits << 16); }

// PTX ISA, "Matrix Fragments for mma.m16n8k16" with .bf16: groupID = lane / 4, threadID_in_group = lane % 4.
//   A 16 x 16: a0,a1 in register 0, ...; row = groupID for a0,a1,a4,a5, else groupID + 8;
//              column = threadID_in_group * 2 + (i & 1), + 8 for i >= 4.
//   B 16 x 8:  row = threadID_in_group * 2 + (i & 1), + 8 for i >= 2; column = groupID.
//   C 16 x 8:  row = groupID for i < 2, else groupID + 8; column = threadID_in_group * 2 + (i & 1).
void multiply_matrices(const Waiting* (&lanes)[kWarp]) {
  float A[16][16], B[16][8];
  for (int lane = 0; lane < kWarp; ++lane) {
    const int group = lane / 4, in_group = lane % 4;
    for (int i = 0; i < 8; ++i) {
      const int row = i == 0 || i == 1 || i == 4 || i == 5 ? group : group + 8;
      const int column = in_group * 2 + (i & 1) + (i >= 4 ? 8 : 0);
      A[row][column] = float_of_bf16(lanes[lane]->a[i / 2] >> (i % 2 * 16) & 0xffffu);
    }
    for (int i = 0; i < 4; ++i) {
      const int row = in_group * 2 + (i & 1) + (i >= 2 ? 8 : 0);
      B[row][group] = float_of_bf16(lanes[lane]->b[i / 2] >> (i % 2 * 16) & 0xffffu);
    }
  }
  for (int lane = 0; lane < kWarp; ++lane) {
    const int group = lane / 4, in_group = lane % 4;
    for (int i = 0; i < 4; ++i) {
      const int row = i < 2 ? group : group + 8, column = in_group * 2 + (i & 1);
      float sum = lanes[lane]->c[i];
      for (int k = 0; k < 16; ++k) sum += A[row][k] * B[k][column];  // products are exact in f32
      lanes[lane]->c[i] = sum;
    }
  }
}

}  // namespace

void Machine::complete_exchange(int first, const Waiting& waiting) {
  Waiting* lanes[kWarp];
  for (int lane = 0; lane < kWarp; ++lane) {
    lanes[lane] = first + lane < int(fibres_.size()) ? &fibres_[size_t(first + lane)]->at : nullptr;
  }
  if (waiting.how == Meeting::kMultiply) {
    const Waiting* all[kWarp];
    std::copy(lanes, lanes + kWarp, all);
    multiply_matrices(all);
    return;
  }
  uint64_t results[kWarp] = {};
  uint32_t votes = 0;
  for (int lane = 0; lane < kWarp; ++lane) {
    if ((waiting.mask >> lane & 1) != 0 && lanes[lane]->value != 0) votes |= 1u << lane;
  }
  for (int lane = 0; lane < kWarp; ++lane) {
    if ((waiting.mask >> lane & 1) == 0) continue;
    const int operand = lanes[lane]->operand;
    int from = lane;
    if (waiting.how == Meeting::kBallot) {
      results[lane] = votes;
      continue;
    }
    if (waiting.how == Meeting::kShuffleIndex) from = operand & (kWarp - 1);
    if (waiting.how == Meeting::kShuffleXor) from = lane ^ (operand & (kWarp - 1));
    if (waiting.how == Meeting::kShuffleUp && lane >= operand) from = lane - operand;
    if (waiting.how == Meeting::kShuffleDown && lane + operand < kWarp) from = lane + operand;
    if ((waiting.mask >> from & 1) == 0) {
      running_ = first + lane;
      fail("reads lane " + std::to_string(from) + " at " + name_of(waiting.how, waiting.line) +
           ", which the mask does not name: what it gets is undefined");
    }
    results[lane] = lanes[from]->value;
  }
  for (int lane = 0; lane < kWarp; ++lane) {
    if (waiting.mask >> lane & 1) lanes[lane]->value = results[lane];
  }
}

}  // namespace simt
