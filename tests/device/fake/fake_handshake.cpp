// DeviceMailbox on host memory. A wait returns when it is over, so a step with misses needs a thread of its own beside
// the server.
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <thread>
#include <vector>

#include "handshake.h"
#include "ops/tensor_view.h"
#include "step_control.h"

namespace twofold {

namespace {

std::atomic_ref<uint32_t> word(uint8_t* mailbox, int64_t at) {
  return std::atomic_ref<uint32_t>(*reinterpret_cast<uint32_t*>(mailbox + at));
}

}  // namespace

DeviceMailbox::DeviceMailbox(const MailboxShape& shape) : layout_{shape} {
  const size_t bytes = (Mailbox::bytes_for(shape) + 4095) / 4096 * 4096;
  memory_ = device_address_ = std::aligned_alloc(4096, bytes);
  mailbox_ = std::make_unique<Mailbox>(memory_, bytes, shape);
}

DeviceMailbox::~DeviceMailbox() { std::free(memory_); }

void DeviceMailbox::enqueue_wait(Handshake kind, int layer, const uint32_t* step, const uint32_t* num_on_cpu,
                                 int64_t limit_ns, cuda::Stream stream) {
  check_layer(layer);
  switch (kind) {
    case Handshake::kKernels:
      if (cuda::launch_wait(layout_.shape, memory_, layer, step, num_on_cpu, limit_ns, stream) != 0)
        throw KernelFailure("mailbox: a wait that no kernel takes");
      return;
    case Handshake::kHostFunction:
      mailbox_->wait_for_answer(layer);
      return;
    case Handshake::kStreamMemory: {
      const auto flag = word(static_cast<uint8_t*>(memory_),
                             layout_.answer(layer) + int64_t(offsetof(cuda::MailboxAnswer, flag)));
      while (flag.load(std::memory_order_acquire) < 1) sched_yield();
      flag.store(0, std::memory_order_relaxed);
    }
  }
}

// Two threads for a device and its host: what is measured is this machine's threads, over few of the steps that a card is
// asked for.
std::vector<HandshakeProbe> probe_handshakes(int hidden, int num_layers, int num_steps) {
  std::vector<HandshakeProbe> probes;
  for (const Handshake kind : {Handshake::kKernels, Handshake::kStreamMemory, Handshake::kHostFunction}) {
    DeviceMailbox mailbox({num_layers, 1, 1, hidden});
    uint32_t step = 0, on_cpu = 0;
    int32_t id = 0, slot = -1, num_groups = 0, begin[2] = {}, pair = 0;
    float weight = 1;
    uint8_t where = 0;
    uint64_t expert = 0;
    std::vector<uint16_t> normed(size_t(hidden), 0);
    const cuda::PlacementTables tables{&slot, nullptr, 0, 0, 0, 0, 1};
    const cuda::PlacedLayer placed{{&num_groups, &expert, begin, &pair, 1}, &where, &on_cpu};
    const auto started = std::chrono::steady_clock::now();
    bool served = true;
    num_steps = std::min(num_steps, 3);
    for (int n = 0; n < num_steps && served; ++n) {
      std::thread device([&] {
        cuda::launch_begin_step(&step, nullptr);
        for (int layer = 0; layer < num_layers; ++layer) {
          cuda::launch_place({&id, &weight, normed.data(), 1, layer}, tables, placed, mailbox.host().shape(),
                             mailbox.device_address(), &step, nullptr);
          mailbox.enqueue_wait(kind, layer, &step, &on_cpu, 1'000'000'000, nullptr);
        }
      });
      served = serve_step(
                   mailbox.host(), uint32_t(n + 1), std::chrono::seconds(2), [](int, const PostedLayer&) {},
                   [](int, const PostedLayer&) {})
                   .state == PostState::kPosted;
      device.join();
    }
    const std::chrono::duration<double, std::micro> us = std::chrono::steady_clock::now() - started;
    probes.push_back({kind, served, us.count() / num_steps / num_layers, served ? "" : "a step was lost"});
  }
  return probes;
}

}  // namespace twofold
