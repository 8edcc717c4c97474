// A layer's handshake between a stream and the CPU: the mailbox's memory on this device, the three ways to wait
// for an answer within a graph, and the probe that reports which ways work and how long they take.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "device/mailbox.h"
#include "ops/tensor_view.h"
#include "step_control.h"

namespace twofold {

// A mailbox in mapped, pinned memory of the current device. Throws KernelFailure.
class DeviceMailbox {
 public:
  explicit DeviceMailbox(const MailboxShape& shape);
  ~DeviceMailbox();
  DeviceMailbox(const DeviceMailbox&) = delete;
  DeviceMailbox& operator=(const DeviceMailbox&) = delete;

  Mailbox& host() { return *mailbox_; }
  void* device_address() const { return device_address_; }
  // The results carried by answers, as kernels read them: f32 [tokens][hidden].
  const float* device_results() const {
    return reinterpret_cast<const float*>(device_bytes(layout_.results()));
  }
  // MailboxPost::joined_ns of a layer, as kernels write it.
  int64_t* device_joined_ns(int layer) const {
    check_layer(layer);
    return reinterpret_cast<int64_t*>(
        device_bytes(layout_.post(layer) + int64_t(offsetof(cuda::MailboxPost, joined_ns))));
  }

  // Makes `stream` wait for the layer's answer, in the given way. Works with and without graph capture.
  void enqueue_wait(Handshake kind, int layer, const uint32_t* step, const uint32_t* num_on_cpu,
                    int64_t limit_ns, cuda::Stream stream);

 private:
  struct Callback {
    DeviceMailbox* mailbox;
    int layer;
  };
  static void wait_on_host(void* callback);
  void check_layer(int layer) const {
    if (layer >= 0 && layer < layout_.shape.num_layers) return;
    throw KernelFailure("mailbox: layer " + std::to_string(layer) + " of " +
                        std::to_string(layout_.shape.num_layers));
  }
  std::byte* device_bytes(int64_t at) const { return static_cast<std::byte*>(device_address_) + at; }

  cuda::MailboxLayout layout_;
  void* memory_ = nullptr;
  void* device_address_ = nullptr;
  std::unique_ptr<Mailbox> mailbox_;
  std::vector<Callback> callbacks_;
};

// Measures each way on the current device: graphs of num_layers handshakes of one token of `hidden` elements,
// replayed num_steps times; the median step over its layers.
std::vector<HandshakeProbe> probe_handshakes(int hidden, int num_layers = 32, int num_steps = 50);

}  // namespace twofold
