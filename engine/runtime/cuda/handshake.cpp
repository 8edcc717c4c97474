#include "handshake.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <string>

#include "cuda_error.h"
#include "ops/tensor_view.h"

namespace twofold {

namespace {

using WaitValue = CUresult (*)(CUstream, CUdeviceptr, cuuint32_t, unsigned int);

// Stream memory operations are the driver's; a library that links cudart statically asks for them by name.
WaitValue driver_function(const char* symbol) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  if (cudaGetDriverEntryPointByVersion(symbol, &function, 12000, cudaEnableDefault, &found) != cudaSuccess) {
    (void)cudaGetLastError();
    return nullptr;
  }
  return found == cudaDriverEntryPointSuccess ? reinterpret_cast<WaitValue>(function) : nullptr;
}

// Device memory of the probe.
template <typename T>
class Memory {
 public:
  explicit Memory(size_t count) {
    check_cuda(cudaMalloc(reinterpret_cast<void**>(&data_), count * sizeof(T)), "allocating for the probe");
    check_cuda(cudaMemset(data_, 0, count * sizeof(T)), "clearing for the probe");
  }
  ~Memory() { (void)cudaFree(data_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  T* get() const { return data_; }

 private:
  T* data_ = nullptr;
};

struct ProbeStream {
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;

  ProbeStream() {
    check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "making the probe's stream");
  }
  ~ProbeStream() {
    if (exec != nullptr) (void)cudaGraphExecDestroy(exec);
    if (graph != nullptr) (void)cudaGraphDestroy(graph);
    (void)cudaStreamDestroy(stream);
  }
  ProbeStream(const ProbeStream&) = delete;
  ProbeStream& operator=(const ProbeStream&) = delete;
};

HandshakeProbe probe(Handshake kind, int hidden, int num_layers, int num_steps) {
  using Clock = std::chrono::steady_clock;
  constexpr int64_t kLimitNs = 1'000'000'000;
  const MailboxShape shape{num_layers, 1, 1, hidden};
  DeviceMailbox mailbox(shape);
  Memory<uint32_t> step(1), num_on_cpu(1);
  Memory<int32_t> ids(1), slots(1), num_groups(1), begin(2), pairs(1);
  Memory<float> weights(1);
  Memory<uint16_t> normed(static_cast<size_t>(hidden));
  Memory<uint64_t> experts(1);
  Memory<uint8_t> where(1);
  check_cuda(cudaMemset(slots.get(), 0xff, 4), "marking the probe's expert absent");
  const cuda::PlacementTables tables{slots.get(), nullptr, 0, 0, 0, nullptr, 1};
  const cuda::PlacedLayer placed{
      {num_groups.get(), experts.get(), begin.get(), pairs.get(), 1}, where.get(), num_on_cpu.get()};
  ProbeStream on;
  check_cuda(cudaStreamBeginCapture(on.stream, cudaStreamCaptureModeThreadLocal), "capturing the probe");
  check_cuda(cuda::launch_begin_step(step.get(), on.stream), "counting the probe's steps");
  for (int layer = 0; layer < num_layers; ++layer) {
    const cuda::RoutedLayer routed{ids.get(), weights.get(), normed.get(), 1, layer};
    check_cuda(
        cuda::launch_place(routed, tables, placed, shape, mailbox.device_address(), step.get(), on.stream),
        "posting the probe's layer");
    mailbox.enqueue_wait(kind, layer, step.get(), num_on_cpu.get(), kLimitNs, on.stream);
  }
  check_cuda(cudaStreamEndCapture(on.stream, &on.graph), "ending the probe's capture");
  check_cuda(cudaGraphInstantiate(&on.exec, on.graph, 0), "instantiating the probe");

  std::vector<double> us;
  uint32_t number = 0;
  for (int n = 0; n < num_steps; ++n) {
    const auto start = Clock::now();
    check_cuda(cudaGraphLaunch(on.exec, on.stream), "launching the probe");
    number = cuda::next_step(number);
    const ServedStep served = serve_step(
        mailbox.host(), number, std::chrono::seconds(2), [](int, const PostedLayer&) {},
        [](int, const PostedLayer&) {});
    const cudaError_t ended = cudaStreamSynchronize(on.stream);
    if (served.state != PostState::kPosted) return {kind, false, 0, served.text()};
    check_cuda(ended, "running the probe");
    us.push_back(std::chrono::duration<double, std::micro>(Clock::now() - start).count() / num_layers);
  }
  std::nth_element(us.begin(), us.begin() + us.size() / 2, us.end());
  return {kind, true, us[us.size() / 2], ""};
}

}  // namespace

DeviceMailbox::DeviceMailbox(const MailboxShape& shape) : layout_{shape} {
  const size_t bytes = Mailbox::bytes_for(shape);
  check_cuda(cudaHostAlloc(&memory_, bytes, cudaHostAllocMapped | cudaHostAllocPortable),
             "allocating " + std::to_string(bytes) + " bytes of mapped memory for the mailbox");
  const cudaError_t error = cudaHostGetDevicePointer(&device_address_, memory_, 0);
  if (error != cudaSuccess) {
    (void)cudaFreeHost(memory_);
    check_cuda(error, "mapping the mailbox");
  }
  mailbox_ = std::make_unique<Mailbox>(memory_, bytes, shape);
  for (int layer = 0; layer < shape.num_layers; ++layer) callbacks_.push_back({this, layer});
}

DeviceMailbox::~DeviceMailbox() { (void)cudaFreeHost(memory_); }

// Called by the driver between two kernels; no CUDA calls in here.
void DeviceMailbox::wait_on_host(void* callback) {
  const Callback& which = *static_cast<const Callback*>(callback);
  which.mailbox->host().wait_for_answer(which.layer);
}

void DeviceMailbox::enqueue_wait(Handshake kind, int layer, const uint32_t* step, const uint32_t* num_on_cpu,
                                 int64_t limit_ns, cuda::Stream stream) {
  check_layer(layer);
  if (kind == Handshake::kKernels) {
    check_cuda(cuda::launch_wait(layout_.shape, device_address_, layer, step, num_on_cpu, limit_ns, stream),
               "waiting for the CPU's experts");
    return;
  }
  if (kind == Handshake::kHostFunction) {
    check_cuda(cudaLaunchHostFunc(stream, &DeviceMailbox::wait_on_host, &callbacks_[size_t(layer)]),
               "enqueueing a host function");
    return;
  }
  const WaitValue wait = driver_function("cuStreamWaitValue32");
  const WaitValue write = driver_function("cuStreamWriteValue32");
  if (wait == nullptr || write == nullptr)
    throw KernelFailure("the driver does not export stream memory operations");
  const auto flag = reinterpret_cast<CUdeviceptr>(
      device_bytes(layout_.answer(layer) + int64_t(offsetof(cuda::MailboxAnswer, flag))));
  for (const auto& [function, value, flags] :
       {std::tuple{wait, 1u, unsigned(CU_STREAM_WAIT_VALUE_GEQ)}, std::tuple{write, 0u, 0u}}) {
    const CUresult result = function(stream, flag, value, flags);
    if (result != CUDA_SUCCESS)
      throw KernelFailure("stream memory operations are refused (CUresult " + std::to_string(int(result)) +
                          ")");
  }
}

std::vector<HandshakeProbe> probe_handshakes(int hidden, int num_layers, int num_steps) {
  std::vector<HandshakeProbe> probes;
  for (const Handshake kind : {Handshake::kKernels, Handshake::kStreamMemory, Handshake::kHostFunction}) {
    try {
      probes.push_back(probe(kind, hidden, num_layers, num_steps));
    } catch (const KernelFailure& failure) {
      probes.push_back({kind, false, 0, failure.what()});
    }
  }
  return probes;
}

}  // namespace twofold
