// The memory that a decode step's graph and the CPU pool share: mapped, pinned host memory.
//
// For each layer the device posts the routing and, if some pairs are on the CPU, the activations.
// The host answers with the outputs of these experts. The rules, which engine/runtime/device/mailbox.h keeps on the
// host's side:
//
//   layer l of step s
//            waits for (acquire)   does                           then writes (release, system scope)
//   device                         write routing and activations  posted[l] = s
//   host     posted[l] == s        compute, write results         answered[l] = s
//   device   answered[l] == s      read results                   (only if a pair is on the CPU)
//
// Steps are numbered from 1 and never repeat while the numbers last, so a late answer (after a
// watchdog aborted its step) does not match any later step. Where streams wait for a word instead of a
// kernel, the value they wait for is baked into the graph: they wait for flag[l] >= 1 and then write 0.
// Activations and results are shared by all layers: the device writes a layer's only after it has read the
// answer of the last layer that had any.
//
// Where routers look a layer ahead, the post also holds the next layer's routing of this layer's tokens, and
// the host may name slots in which experts of a layer have landed since the step's table was published: arrived[l][e] =
// slot + 1 (release) once the copy has ended, zero at the start of every step. The device reads them when it places the
// layer; it may miss one, never see one early. Plain C++, no atomics here: each side brings its own.
#pragma once
#include <cstdint>

#include "twofold/host_device.h"

namespace twofold::cuda {

struct MailboxShape {
  int num_layers;
  int max_tokens;
  int top_k;
  int hidden;
  int num_ahead = 0;  // experts of a layer, where routers look a layer ahead; 0: none does
};

inline constexpr int64_t kMailboxLine = 128;  // no two sides write to one line

// Written by the host, read by the device; zero at rest.
struct MailboxControl {
  uint32_t abort;  // nonzero: the host has aborted the step; waiting ends immediately
};
// Written by the device.
struct MailboxReport {
  uint32_t timed_out;  // layer + 1 where the device waited for longer than its limit; 0 otherwise
};
struct MailboxPost {
  uint32_t posted;      // step
  uint32_t num_tokens;  // in the step
  uint32_t num_on_cpu;  // pairs that the host is to compute
  uint32_t has_ahead;   // nonzero: the next layer's routing is present
  // When, on the device's clock: the layer's routing was there; the device had computed its own experts
  // (where a kernel waits for the answer); both shares were there. All of this step once a later layer is
  // posted or the step has ended.
  int64_t placed_ns;
  int64_t computed_ns;
  int64_t joined_ns;
};
struct MailboxAnswer {
  uint32_t answered;  // step
  uint32_t flag;      // 1 with every answer; reset by the waiting stream
};

TWOFOLD_HD constexpr int64_t whole_lines(int64_t bytes) {
  return (bytes + kMailboxLine - 1) / kMailboxLine * kMailboxLine;
}

// The number of the step after `step`. 0 is reserved: the memory's content before the first step.
TWOFOLD_HD constexpr uint32_t next_step(uint32_t step) { return step == 0xffffffffu ? 1 : step + 1; }

// Byte offsets from the start of the memory.
struct MailboxLayout {
  MailboxShape shape;

  TWOFOLD_HD constexpr int64_t pairs() const { return int64_t(shape.max_tokens) * shape.top_k; }
  TWOFOLD_HD constexpr int64_t ahead_floats() const { return int64_t(shape.max_tokens) * shape.num_ahead; }
  TWOFOLD_HD constexpr int64_t layer_bytes() const {
    return 2 * kMailboxLine + 2 * whole_lines(4 * pairs()) + whole_lines(pairs()) +
           whole_lines(4 * ahead_floats()) + whole_lines(4 * int64_t(shape.num_ahead));
  }
  TWOFOLD_HD constexpr int64_t control() const { return 0; }
  TWOFOLD_HD constexpr int64_t report() const { return kMailboxLine; }
  TWOFOLD_HD constexpr int64_t post(int layer) const { return 2 * kMailboxLine + layer * layer_bytes(); }
  TWOFOLD_HD constexpr int64_t answer(int layer) const { return post(layer) + kMailboxLine; }
  TWOFOLD_HD constexpr int64_t ids(int layer) const { return post(layer) + 2 * kMailboxLine; }
  TWOFOLD_HD constexpr int64_t weights(int layer) const { return ids(layer) + whole_lines(4 * pairs()); }
  // u8 [pairs], see placement.h
  TWOFOLD_HD constexpr int64_t where(int layer) const { return weights(layer) + whole_lines(4 * pairs()); }
  // f32 [tokens][num_ahead]
  TWOFOLD_HD constexpr int64_t ahead(int layer) const { return where(layer) + whole_lines(pairs()); }
  // u32 [num_ahead]
  TWOFOLD_HD constexpr int64_t arrived(int layer) const {
    return ahead(layer) + whole_lines(4 * ahead_floats());
  }
  // bf16 [tokens][hidden]
  TWOFOLD_HD constexpr int64_t activations() const { return post(shape.num_layers); }
  // f32 [tokens][hidden]
  TWOFOLD_HD constexpr int64_t results() const {
    return activations() + whole_lines(2 * int64_t(shape.max_tokens) * shape.hidden);
  }
  TWOFOLD_HD constexpr int64_t bytes() const {
    return results() + whole_lines(4 * int64_t(shape.max_tokens) * shape.hidden);
  }
};

}  // namespace twofold::cuda
