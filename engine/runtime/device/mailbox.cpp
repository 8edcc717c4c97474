#include "device/mailbox.h"

#include <sched.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <stdexcept>

namespace twofold {

namespace {

// Spins before each yield, some tens of microseconds. On a machine with a spare core yielding costs nothing, on
// a busy one it lets the rest of the pool work.
constexpr int kSpinsBeforeYield = 1 << 10;
constexpr int kSpinsPerCheck = 256;  // of clock, abort and report

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

uint32_t load(uint32_t& word, std::memory_order order) { return std::atomic_ref(word).load(order); }
void store(uint32_t& word, uint32_t value) { std::atomic_ref(word).store(value, std::memory_order_release); }

}  // namespace

size_t Mailbox::bytes_for(const MailboxShape& shape) { return size_t(cuda::MailboxLayout{shape}.bytes()); }

Mailbox::Mailbox(void* memory, size_t num_bytes, const MailboxShape& shape)
    : memory_(static_cast<std::byte*>(memory)), layout_{shape} {
  if (shape.num_layers < 0 || shape.max_tokens < 1 || shape.top_k < 1 || shape.hidden < 1) {
    throw std::invalid_argument(
        "a mailbox needs at least one token, rank and hidden unit; given (layers first) " +
        std::to_string(shape.num_layers) + ", " + std::to_string(shape.max_tokens) + ", " +
        std::to_string(shape.top_k) + ", " + std::to_string(shape.hidden));
  }
  if (memory == nullptr || reinterpret_cast<uintptr_t>(memory) % cuda::kMailboxLine != 0 ||
      num_bytes < bytes_for(shape)) {
    throw std::invalid_argument("a mailbox of " + std::to_string(bytes_for(shape)) +
                                " bytes, aligned to 128, was expected; given " + std::to_string(num_bytes));
  }
  std::memset(memory_, 0, bytes_for(shape));
}

uint32_t& Mailbox::word(int64_t offset) const { return *reinterpret_cast<uint32_t*>(memory_ + offset); }

PostState Mailbox::wait_for_post(int layer, uint32_t step, std::chrono::nanoseconds limit) const {
  uint32_t& posted = word(layout_.post(layer));
  const auto begin = std::chrono::steady_clock::now();
  for (int64_t spins = 1; load(posted, std::memory_order_acquire) != step; ++spins) {
    if (spins % kSpinsPerCheck == 0) {
      if (aborted()) return PostState::kAborted;
      if (device_gave_up_at() >= 0) return PostState::kDeviceGaveUp;
      if (std::chrono::steady_clock::now() - begin > limit) return PostState::kTimedOut;
    }
    if (spins > kSpinsBeforeYield) {
      sched_yield();
    } else {
      pause();
    }
  }
  return PostState::kPosted;
}

PostedLayer Mailbox::posted(int layer) const {
  cuda::MailboxPost post;
  // Not the layer's times: the device may be writing them.
  std::memcpy(&post, memory_ + layout_.post(layer), offsetof(cuda::MailboxPost, placed_ns));
  const uint32_t pairs = post.num_tokens * uint32_t(layout_.shape.top_k);
  if (post.num_tokens < 1 || post.num_tokens > uint32_t(layout_.shape.max_tokens) ||
      post.num_on_cpu > pairs) {
    throw std::runtime_error("the device posted " + std::to_string(post.num_tokens) + " tokens with " +
                             std::to_string(post.num_on_cpu) + " pairs on the CPU for layer " +
                             std::to_string(layer) + "; at most " + std::to_string(layout_.shape.max_tokens) +
                             " tokens were expected");
  }
  return {int(post.num_tokens),
          int(post.num_on_cpu),
          reinterpret_cast<const int32_t*>(memory_ + layout_.ids(layer)),
          reinterpret_cast<const float*>(memory_ + layout_.weights(layer)),
          reinterpret_cast<const uint8_t*>(memory_ + layout_.where(layer)),
          reinterpret_cast<const uint16_t*>(memory_ + layout_.activations()),
          reinterpret_cast<float*>(memory_ + layout_.results()),
          post.has_ahead != 0 ? reinterpret_cast<const float*>(memory_ + layout_.ahead(layer)) : nullptr};
}

LayerSpan Mailbox::span(int layer) const {
  cuda::MailboxPost post;
  std::memcpy(&post, memory_ + layout_.post(layer), sizeof post);
  const auto until = [&post](int64_t ns) {
    return ns > post.placed_ns ? double(ns - post.placed_ns) / 1e3 : -1.0;
  };
  double dense_us = -1;
  if (layer > 0) {
    cuda::MailboxPost before;
    std::memcpy(&before, memory_ + layout_.post(layer - 1), sizeof before);
    if (post.placed_ns > before.joined_ns && before.joined_ns > before.placed_ns)
      dense_us = double(post.placed_ns - before.joined_ns) / 1e3;
  }
  return {until(post.joined_ns), until(post.computed_ns), dense_us};
}

void Mailbox::answer(int layer, uint32_t step) {
  // A kernel looks at the step, a stream at the flag; both are released after the results.
  const int64_t at = layout_.answer(layer);
  store(word(at + int64_t(offsetof(cuda::MailboxAnswer, answered))), step);
  store(word(at + int64_t(offsetof(cuda::MailboxAnswer, flag))), 1);
}

void Mailbox::wait_for_answer(int layer) const {
  const uint32_t posted = load(word(layout_.post(layer)), std::memory_order_acquire);
  for (int64_t spins = 1; load(word(layout_.answer(layer)), std::memory_order_acquire) != posted; ++spins) {
    if (spins % kSpinsPerCheck == 0 && aborted()) return;
    if (spins > kSpinsBeforeYield) {
      sched_yield();
    } else {
      pause();
    }
  }
}

void Mailbox::abort() {
  store(word(layout_.control()), 1);
  for (int layer = 0; layer < layout_.shape.num_layers; ++layer)
    store(word(layout_.answer(layer) + int64_t(offsetof(cuda::MailboxAnswer, flag))), 1);
}

bool Mailbox::aborted() const { return load(word(layout_.control()), std::memory_order_acquire) != 0; }

int Mailbox::device_gave_up_at() const {
  return int(load(word(layout_.report()), std::memory_order_acquire)) - 1;
}

void Mailbox::arrive(int layer, int expert, int slot) {
  arrived_.push_back(layout_.arrived(layer) + 4 * int64_t(expert));
  store(word(arrived_.back()), uint32_t(slot) + 1);
}

void Mailbox::forget_arrivals() {
  for (const int64_t offset : arrived_) store(word(offset), 0);
  arrived_.clear();
}

void Mailbox::reset() {
  for (int layer = 0; layer < layout_.shape.num_layers; ++layer)
    store(word(layout_.answer(layer) + int64_t(offsetof(cuda::MailboxAnswer, flag))), 0);
  store(word(layout_.report()), 0);
  store(word(layout_.control()), 0);
}

std::string ServedStep::text() const {
  const std::string where = layer < 0 ? "" : " at MoE layer " + std::to_string(layer);
  switch (state) {
    case PostState::kPosted:
      return "";
    case PostState::kTimedOut:
      return "the GPU posted nothing" + where + " within the watchdog's limit";
    case PostState::kDeviceGaveUp:
      return "the GPU waited for the CPU's experts" + where + " for longer than the watchdog's limit";
    case PostState::kAborted:
      return "the step was aborted" + where;
  }
  return "";
}

ServedStep verdict(Mailbox& mailbox) {
  ServedStep step;
  if (const int layer = mailbox.device_gave_up_at(); layer >= 0) {
    step = {PostState::kDeviceGaveUp, layer};
  } else if (mailbox.aborted()) {
    step = {PostState::kAborted, mailbox.shape().num_layers - 1};
  }
  if (step.state != PostState::kPosted) mailbox.abort();
  return step;
}

ServedStep serve_step(Mailbox& mailbox, uint32_t step, std::chrono::nanoseconds limit,
                      FunctionRef<void(int layer, const PostedLayer&)> compute,
                      FunctionRef<void(int layer, const PostedLayer&)> observe, bool every_layer) {
  for (int layer = 0; layer < mailbox.shape().num_layers; ++layer) {
    const PostState state = mailbox.wait_for_post(layer, step, limit);
    if (state != PostState::kPosted) {
      ServedStep lost{state, layer};
      if (state == PostState::kDeviceGaveUp) lost.layer = mailbox.device_gave_up_at();
      mailbox.abort();
      return lost;
    }
    try {
      const PostedLayer posted = mailbox.posted(layer);
      if (posted.num_on_cpu > 0 || every_layer) compute(layer, posted);
      mailbox.answer(layer, step);
      observe(layer, posted);
    } catch (...) {
      mailbox.abort();
      throw;
    }
  }
  return {};
}

const char* name_of(Handshake kind) {
  switch (kind) {
    case Handshake::kKernels:
      return "kernels";
    case Handshake::kStreamMemory:
      return "stream-memory";
    case Handshake::kHostFunction:
      return "host-function";
  }
  return "";
}

HandshakeChoice choose_handshake(const HandshakeProbe* probes, size_t num_probes) {
  constexpr double kTie = 1.1;
  HandshakeChoice choice;
  double best = 0;
  std::string all;
  for (size_t i = 0; i < num_probes; ++i) {
    const HandshakeProbe& probe = probes[i];
    all += std::string(all.empty() ? "" : ", ") + name_of(probe.kind) + " ";
    if (!probe.works) {
      all += "does not work (" + probe.why + ")";
      continue;
    }
    char us[32];
    std::snprintf(us, sizeof us, "%.1f us", probe.us);
    all += us;
    const double weighed = probe.kind == Handshake::kKernels ? probe.us : probe.us * kTie;
    if (choice.found && weighed >= best) continue;
    choice.found = true;
    choice.kind = probe.kind;
    best = weighed;
  }
  choice.reason = (choice.found ? "least per layer: " : "no way to hand over works: ") + all;
  return choice;
}

}  // namespace twofold
