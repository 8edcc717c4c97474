// The mailbox between the server and a fake device by a thread: it posts, waits and checks what it
// is given as the graph's kernels do, with the same layout. Built with the thread sanitizer.
#include "device/mailbox.h"

#include <atomic>
#include <chrono>
#include <memory>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include "check.h"

using namespace twofold;
using namespace std::chrono_literals;

namespace {

struct Free {
  void operator()(void* p) const { std::free(p); }
};

// The device: one step's kernels in order. `wait` is how it waits for an answer.
enum class Waiting { kKernel, kStream, kHostFunction };

class PlayedDevice {
 public:
  PlayedDevice(const Mailbox& host, uint32_t seed)
      : host_(&host), memory_(host.memory()), layout_{host.shape()}, random_(seed) {}

  // false: given up.
  bool run_step(Waiting waiting, std::chrono::nanoseconds limit = 60s) {
    step_ = cuda::next_step(step_);
    for (int layer = 0; layer < layout_.shape.num_layers; ++layer) {
      const int on_cpu = post(layer);
      if (waiting == Waiting::kKernel && on_cpu > 0 && !wait(layer, limit)) return false;
      if (waiting == Waiting::kStream && !wait_for_flag(layer)) return false;
      if (waiting == Waiting::kHostFunction) {
        host_->wait_for_answer(layer);
        if (host_->aborted()) return false;
      }
      if (on_cpu > 0) check_results();
    }
    return true;
  }

  uint32_t step() const { return step_; }
  void set_step(uint32_t step) { step_ = step; }
  int64_t handshakes() const { return handshakes_; }

 private:
  uint32_t& word(int64_t offset) { return *reinterpret_cast<uint32_t*>(memory_ + offset); }

  int post(int layer) {
    const int tokens = 1 + int(random_() % uint32_t(layout_.shape.max_tokens));
    const int pairs = tokens * layout_.shape.top_k;
    auto* ids = reinterpret_cast<int32_t*>(memory_ + layout_.ids(layer));
    auto* where = reinterpret_cast<uint8_t*>(memory_ + layout_.where(layer));
    auto* weights = reinterpret_cast<float*>(memory_ + layout_.weights(layer));
    int on_cpu = 0;
    const uint32_t bits = uint32_t(random_());
    for (int p = 0; p < pairs; ++p) {
      ids[p] = int32_t(step_ % 1000 + uint32_t(p));
      weights[p] = float(layer);
      where[p] = uint8_t((bits >> (p % 32)) & 1);
      on_cpu += where[p];
    }
    if (on_cpu > 0) {
      key_ = uint16_t(random_());
      tokens_ = tokens;
      auto* activations = reinterpret_cast<uint16_t*>(memory_ + layout_.activations());
      for (int i = 0; i < tokens * layout_.shape.hidden; ++i) activations[i] = uint16_t(key_ + i);
    }
    word(layout_.post(layer) + 4) = uint32_t(tokens);
    word(layout_.post(layer) + 8) = uint32_t(on_cpu);
    std::atomic_ref(word(layout_.post(layer))).store(step_, std::memory_order_release);
    ++handshakes_;
    return on_cpu;
  }

  bool over(std::chrono::steady_clock::time_point deadline, int layer) {
    if (std::atomic_ref(word(layout_.control())).load(std::memory_order_acquire) != 0) return true;
    if (std::chrono::steady_clock::now() < deadline) return false;
    std::atomic_ref(word(layout_.report())).store(uint32_t(layer) + 1, std::memory_order_release);
    return true;
  }

  bool wait(int layer, std::chrono::nanoseconds limit) {
    const auto deadline = std::chrono::steady_clock::now() + limit;
    for (int turn = 0; std::atomic_ref(word(layout_.answer(layer))).load(std::memory_order_acquire) != step_;
         ++turn) {
      if (turn % 64 == 63 && over(deadline, layer)) return false;
      if (turn > 200) std::this_thread::yield();
    }
    return true;
  }

  // What a stream does: wait until the word is at least 1, then write 0. It has no clock; abort raises the
  // flag.
  bool wait_for_flag(int layer) {
    auto flag = std::atomic_ref(word(layout_.answer(layer) + 4));
    for (int turn = 0; flag.load(std::memory_order_acquire) < 1; ++turn) {
      if (turn > 200) std::this_thread::yield();
    }
    flag.store(0, std::memory_order_relaxed);
    return std::atomic_ref(word(layout_.control())).load(std::memory_order_acquire) == 0;
  }

  void check_results() {
    const auto* results = reinterpret_cast<const float*>(memory_ + layout_.results());
    for (int i = 0; i < tokens_ * layout_.shape.hidden; ++i)
      CHECK_EQUAL(results[i], float(uint16_t(key_ + i)));
  }

  const Mailbox* host_;
  std::byte* memory_;
  cuda::MailboxLayout layout_;
  std::mt19937 random_;
  uint32_t step_ = 0;
  uint16_t key_ = 0;
  int tokens_ = 0;
  int64_t handshakes_ = 0;
};

struct Fixture {
  MailboxShape shape;
  std::unique_ptr<void, Free> memory;
  Mailbox mailbox;
  PlayedDevice device;

  explicit Fixture(MailboxShape of = {4, 2, 2, 8})
      : shape(of),
        memory(std::aligned_alloc(4096, (Mailbox::bytes_for(of) + 4095) / 4096 * 4096)),
        mailbox(memory.get(), Mailbox::bytes_for(of), of),
        device(mailbox, 1) {}

  void compute(int, const PostedLayer& posted) const {
    for (int i = 0; i < posted.num_tokens * shape.hidden; ++i)
      posted.results[i] = float(posted.activations[i]);
  }
  // The routing must stay readable after the answer, while the device goes on.
  void observe(int layer, const PostedLayer& posted, uint32_t step) const {
    for (int p = 0; p < posted.num_tokens * shape.top_k; ++p) {
      CHECK_EQUAL(posted.ids[p], int32_t(step % 1000 + uint32_t(p)));
      CHECK_EQUAL(posted.weights[p], float(layer));
    }
  }
  ServedStep serve(uint32_t step, std::chrono::nanoseconds limit = 60s) {
    return serve_step(
        mailbox, step, limit, [&](int layer, const PostedLayer& posted) { compute(layer, posted); },
        [&](int layer, const PostedLayer& posted) { observe(layer, posted, step); });
  }
};

// Steps as the engine runs them: launched one by one, the next only after the last has ended.
void handshake(int64_t at_least, Waiting waiting, MailboxShape shape, uint32_t first_step = 0) {
  Fixture f(shape);
  f.device.set_step(first_step);
  std::atomic<uint32_t> launched{0}, ended{0};
  const int64_t steps = (at_least + shape.num_layers - 1) / shape.num_layers;
  std::thread gpu([&] {
    for (uint32_t n = 1; n <= uint32_t(steps); ++n) {
      while (launched.load(std::memory_order_acquire) != n) std::this_thread::yield();
      CHECK(f.device.run_step(waiting));
      ended.store(n, std::memory_order_release);
    }
  });
  uint32_t step = first_step;
  for (uint32_t n = 1; n <= uint32_t(steps); ++n) {
    step = cuda::next_step(step);
    launched.store(n, std::memory_order_release);
    CHECK(f.serve(step).state == PostState::kPosted);
    while (ended.load(std::memory_order_acquire) != n) std::this_thread::yield();
  }
  gpu.join();
  CHECK(f.device.handshakes() >= at_least);
}

}  // namespace

CASE(every_answer_is_its_posts_with_polling_kernels) { handshake(10'000, Waiting::kKernel, {48, 2, 2, 8}); }
CASE(every_answer_is_its_posts_with_waiting_streams) { handshake(5'000, Waiting::kStream, {48, 2, 2, 8}); }
CASE(every_answer_is_its_posts_with_host_functions) {
  handshake(5'000, Waiting::kHostFunction, {48, 2, 2, 8});
}
CASE(steps_are_numbered_past_the_largest_number) {
  handshake(400, Waiting::kKernel, {4, 1, 2, 8}, 0xffffffffu - 50);
}
CASE(ten_million_handshakes) {
  handshake(8'000'000, Waiting::kKernel, {48, 1, 4, 8});
  handshake(2'000'000, Waiting::kStream, {48, 1, 4, 8});
}

CASE(a_device_that_posts_nothing_is_given_up_in_time) {
  Fixture f;
  const auto begin = std::chrono::steady_clock::now();
  const ServedStep served = f.serve(1, 20ms);
  CHECK(served.state == PostState::kTimedOut);
  CHECK_EQUAL(served.layer, 0);
  CHECK(std::chrono::steady_clock::now() - begin >= 20ms);
  CHECK(served.text().find("MoE layer 0") != std::string::npos);
  CHECK(f.mailbox.aborted());
}

CASE(an_aborted_step_ends_on_both_sides_and_later_ones_work) {
  for (const Waiting waiting : {Waiting::kKernel, Waiting::kStream, Waiting::kHostFunction}) {
    Fixture f({6, 2, 8, 8});
    std::atomic<bool> in_compute{false}, resume{false};
    std::thread gpu([&] { CHECK(!f.device.run_step(waiting)); });
    std::thread other([&] {
      while (!in_compute) std::this_thread::yield();
      f.mailbox.abort();
      gpu.join();  // the device ends though its layer was never answered
      resume = true;
    });
    const ServedStep served = serve_step(
        f.mailbox, 1, 60s,
        [&](int layer, const PostedLayer& posted) {
          if (layer == 0) f.compute(layer, posted);
          in_compute = true;
          while (!resume) std::this_thread::yield();
        },
        [](int, const PostedLayer&) {});
    other.join();
    // The server answered the lost step late and then met the abort.
    CHECK(served.state == PostState::kAborted);
    f.mailbox.reset();
    std::thread again([&] { CHECK(f.device.run_step(waiting)); });
    CHECK(f.serve(2).state == PostState::kPosted);
    again.join();
  }
}

CASE(a_late_answer_is_no_answer_to_a_later_step) {
  Fixture f({1, 2, 8, 8});
  std::thread gpu([&] { CHECK(!f.device.run_step(Waiting::kKernel, 10ms)); });
  gpu.join();
  CHECK(f.mailbox.wait_for_post(0, 1, 60s) == PostState::kPosted);
  CHECK_EQUAL(f.mailbox.device_gave_up_at(), 0);
  f.mailbox.abort();
  f.mailbox.reset();
  f.mailbox.answer(0, 1);                                                        // far too late
  std::thread next([&] { CHECK(!f.device.run_step(Waiting::kKernel, 10ms)); });  // step 2 has no server
  next.join();
  CHECK_EQUAL(f.mailbox.device_gave_up_at(), 0);
}

CASE(a_device_that_gave_up_is_noticed) {
  Fixture f({3, 2, 8, 8});
  std::atomic<bool> ended{false};
  std::thread gpu([&] {
    CHECK(!f.device.run_step(Waiting::kKernel, 5ms));
    ended = true;
  });
  const ServedStep served = serve_step(
      f.mailbox, 1, 60s,
      [&](int, const PostedLayer&) {
        while (!ended) std::this_thread::yield();
      },
      [](int, const PostedLayer&) {});
  gpu.join();
  CHECK(served.state == PostState::kDeviceGaveUp);
  CHECK_EQUAL(served.layer, f.mailbox.device_gave_up_at());
  CHECK(f.mailbox.aborted());
}

CASE(an_error_in_the_cpus_experts_frees_the_device) {
  Fixture f({3, 2, 8, 8});
  std::thread gpu([&] { CHECK(!f.device.run_step(Waiting::kKernel)); });
  bool thrown = false;
  try {
    serve_step(
        f.mailbox, 1, 60s, [](int, const PostedLayer&) { throw std::runtime_error("broken"); },
        [](int, const PostedLayer&) {});
  } catch (const std::runtime_error&) {
    thrown = true;
  }
  gpu.join();
  CHECK(thrown && f.mailbox.aborted());
}

CASE(what_cannot_be_a_post_is_refused) {
  Fixture f;
  for (const uint32_t tokens : {0u, 3u, 0xffffffffu}) {
    const cuda::MailboxPost post{1, tokens, 0, 0, 0, 0, 0};
    std::memcpy(f.mailbox.memory() + cuda::MailboxLayout{f.shape}.post(1), &post, sizeof post);
    bool refused = false;
    try {
      (void)f.mailbox.posted(1);
    } catch (const std::runtime_error&) {
      refused = true;
    }
    CHECK(refused);
  }
  for (const MailboxShape wrong : {MailboxShape{-1, 1, 1, 8}, {1, 0, 1, 8}, {1, 1, 0, 8}, {1, 1, 1, 0}}) {
    bool refused = false;
    try {
      Mailbox mailbox(f.memory.get(), 1 << 20, wrong);
    } catch (const std::invalid_argument&) {
      refused = true;
    }
    CHECK(refused);
  }
}

CASE(the_fastest_handshake_that_works_is_chosen) {
  const HandshakeProbe kernels{Handshake::kKernels, true, 6.0, ""};
  const HandshakeProbe streams{Handshake::kStreamMemory, true, 5.8, ""};
  const HandshakeProbe quick{Handshake::kStreamMemory, true, 4.0, ""};
  const HandshakeProbe absent{Handshake::kStreamMemory, false, 0, "the driver does not export it"};
  const HandshakeProbe callback{Handshake::kHostFunction, true, 30, ""};
  const HandshakeProbe near_tie[] = {streams, kernels, callback}, faster[] = {kernels, quick, callback},
                       alone[] = {absent, callback}, none[] = {absent};
  CHECK(choose_handshake(near_tie, 3).kind == Handshake::kKernels);
  CHECK(choose_handshake(faster, 3).kind == Handshake::kStreamMemory);
  CHECK(choose_handshake(alone, 2).kind == Handshake::kHostFunction);
  CHECK(choose_handshake(alone, 2).reason.find("does not export") != std::string::npos);
  CHECK(!choose_handshake(none, 1).found && !choose_handshake(none, 0).found);
}

int main(int argc, char** argv) { return test::main(argc, argv); }
