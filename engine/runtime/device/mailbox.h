// The host's side of the memory that a decode step's graph shares with the CPU pool (mailbox_layout.h): waits
// for the device's posts, passes them on, answers. Framework-free: the memory may be a device's mapped memory
// or, in tests, any. One thread serves; abort() may be called from any thread.
//
// Every wait has a limit. The host stops waiting when a post does not arrive in time, when the device reports
// that its own wait timed out, or when abort() is called. Then the device's waits end too, and the step is
// lost, not the process.
#pragma once
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "host/function_ref.h"
#include "mailbox_layout.h"
#include "placement.h"

namespace twofold {

using cuda::MailboxShape;

enum class PostState : uint8_t {
  kPosted,
  kTimedOut,      // nothing came within the limit
  kDeviceGaveUp,  // the device waited for an answer for longer than its own limit
  kAborted,
};

// One layer's post by the device. `activations` and `results` belong to the host until it answers, and are only
// there when num_on_cpu > 0; the routing stays until the step ends.
struct PostedLayer {
  int num_tokens;
  int num_on_cpu;               // pairs for the host to compute
  const int32_t* ids;           // [tokens][top_k]
  const float* weights;         // [tokens][top_k]
  const uint8_t* where;         // [tokens][top_k], see placement.h
  const uint16_t* activations;  // bf16 [tokens][hidden]
  float* results;               // [tokens][hidden]
  const float* ahead;           // [tokens][num_ahead] by the next layer's router; null: not requested
};

// How long a layer took on the device; negative if not reported.
struct LayerSpan {
  double layer_us;   // from its routing until both shares were joined
  double device_us;  // from its routing until the device had computed its own experts
  double dense_us;   // from the end of the layer before until its routing
};

class Mailbox {
 public:
  // The memory is zeroed; it must be 128-byte aligned and outlive this. Throws std::invalid_argument.
  Mailbox(void* memory, size_t num_bytes, const MailboxShape& shape);
  static size_t bytes_for(const MailboxShape& shape);

  const MailboxShape& shape() const { return layout_.shape; }
  std::byte* memory() const { return memory_; }

  // Waits for the layer's post of this step.
  PostState wait_for_post(int layer, uint32_t step, std::chrono::nanoseconds limit) const;
  // After kPosted. Throws std::runtime_error when the memory does not hold a valid post.
  PostedLayer posted(int layer) const;
  // Timing of a layer before one that is posted, or of any layer after the step has ended on the device.
  LayerSpan span(int layer) const;
  void answer(int layer, uint32_t step);
  // Reports an expert that has landed in a slot since the step's table was published. The layer, possibly not
  // placed yet, may read it there.
  void arrive(int layer, int expert, int slot);
  // Clears the arrivals of the previous step. Only while the device is idle.
  void forget_arrivals();
  // The body of a host function in the device's order: waits until the layer's post is answered or the step
  // aborted.
  void wait_for_answer(int layer) const;

  // Aborts the step: all waits end, including the device's. Stays aborted until reset.
  void abort();
  bool aborted() const;
  // The layer at which the device's wait timed out, -1 if none did.
  int device_gave_up_at() const;
  // Resets for the steps after an abort. Only while the device is idle. An answer to a lost step may still be
  // in memory: its number matches no later step.
  void reset();

 private:
  uint32_t& word(int64_t offset) const;

  std::byte* memory_;
  cuda::MailboxLayout layout_;
  std::vector<int64_t> arrived_;  // words that are not zero
};

struct ServedStep {
  PostState state = PostState::kPosted;  // kPosted: all layers were served
  int layer = -1;                        // where it ended otherwise
  std::string text() const;              // what happened and what to do, for a message
};

// Final state of a step that was served, read once the device has ended it: only then is an answer visible that
// came just after the device's wait timed out, or an abort. On anything but kPosted its results are void.
ServedStep verdict(Mailbox& mailbox);

// Serves all layers of one step. compute fills `results` of the CPU's experts before the answer (with
// every_layer also in layers without any: the previous layer's deferred output joins there); then observe sees
// the routing while the device continues. An exception aborts the step first. On anything but kPosted the
// mailbox is aborted: wait until the device is idle, then reset.
//
// kPosted means that all layers were posted and answered, not yet that the device took every answer: see
// verdict.
ServedStep serve_step(Mailbox& mailbox, uint32_t step, std::chrono::nanoseconds limit,
                      FunctionRef<void(int layer, const PostedLayer&)> compute,
                      FunctionRef<void(int layer, const PostedLayer&)> observe, bool every_layer = false);

// How a layer's handshake is done in the graph.
enum class Handshake : uint8_t {
  kKernels,       // tiny kernels write and poll mapped memory
  kStreamMemory,  // the stream itself waits for a word
  kHostFunction,  // the driver calls back
};
const char* name_of(Handshake kind);

// Result of the startup probe for one way.
struct HandshakeProbe {
  Handshake kind;
  bool works;
  double us;        // per layer, post to answer seen; where it works
  std::string why;  // it does not
};

struct HandshakeChoice {
  bool found = false;
  Handshake kind = Handshake::kKernels;
  std::string reason;
};

// The fastest way that works; kernels win ties within a tenth, because they need no round trip where all
// experts are resident.
HandshakeChoice choose_handshake(const HandshakeProbe* probes, size_t num_probes);

}  // namespace twofold
