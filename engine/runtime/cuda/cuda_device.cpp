#include "cuda_device.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cctype>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "device/device_memory.h"

namespace twofold {

namespace {

DeviceResult result_of(cudaError_t error) {
  if (error == cudaSuccess) return {};
  (void)cudaGetLastError();  // clear errors that are not sticky, so that no later call reports them
  DeviceCode code = DeviceCode::kFailed;
  if (error == cudaErrorNotReady) code = DeviceCode::kNotReady;
  if (error == cudaErrorMemoryAllocation) code = DeviceCode::kOutOfMemory;
  if (error == cudaErrorNotSupported || error == cudaErrorNotPermitted ||
      error == cudaErrorHostMemoryAlreadyRegistered) {
    code = DeviceCode::kRefused;
  }
  return {code, cudaGetErrorString(error)};
}

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// "32.0 GT/s PCIe" and "16" as the kernel reports them; missing values stay empty.
void describe_link(int index, DeviceFacts& out) {
  char bus[32] = "";
  if (cudaDeviceGetPCIBusId(bus, sizeof(bus), index) != cudaSuccess) {
    (void)cudaGetLastError();
    return;
  }
  std::string folder(bus);
  std::transform(folder.begin(), folder.end(), folder.begin(),
                 [](unsigned char c) { return std::tolower(c); });
  folder = "/sys/bus/pci/devices/" + folder;
  const std::string speed = first_line(folder + "/max_link_speed");
  const std::string width = first_line(folder + "/current_link_width");
  if (speed.empty() || width.empty()) return;
  out.link = speed + " x" + width;
  const double transfers = std::strtod(speed.c_str(), nullptr);
  const double encoding = transfers >= 8 ? 128.0 / 130.0 : 0.8;
  out.link_gbps = transfers * std::strtod(width.c_str(), nullptr) / 8 * encoding;
}

// Ranges pinned by this process: several runtimes may share one store (measurements do), and CUDA pins a range
// once.
class PinnedRanges {
 public:
  DeviceResult pin(std::byte* range, size_t bytes, bool read_only) {
    const std::lock_guard lock(mutex_);
    const auto known = users_.find(range);
    if (known != users_.end() && known->second.bytes == bytes) {
      ++known->second.count;
      return {};
    }
    const unsigned flags = cudaHostRegisterPortable | cudaHostRegisterMapped;
    DeviceResult r =
        result_of(cudaHostRegister(range, bytes, read_only ? flags | cudaHostRegisterReadOnly : flags));
    if (r.ok()) users_[range] = {bytes, 1};
    return r;
  }
  void unpin(std::byte* range) {
    const std::lock_guard lock(mutex_);
    const auto known = users_.find(range);
    if (known == users_.end() || --known->second.count > 0) return;
    users_.erase(known);
    (void)cudaHostUnregister(range);
  }

 private:
  struct Use {
    size_t bytes = 0;
    int count = 0;
  };
  std::mutex mutex_;
  std::map<std::byte*, Use> users_;
};

PinnedRanges& pinned_ranges() {
  static PinnedRanges ranges;
  return ranges;
}

// Makes a device the thread's current one, and afterwards the one that was: kernels of other devices are launched on
// the same thread.
class OnDevice {
 public:
  explicit OnDevice(int index) : result_(result_of(cudaGetDevice(&before_))) {
    if (!result_.ok() || before_ == index) return;
    result_ = result_of(cudaSetDevice(index));
    changed_ = result_.ok();
  }
  ~OnDevice() {
    if (changed_) (void)cudaSetDevice(before_);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  const DeviceResult& result() const { return result_; }

 private:
  int before_ = 0;
  bool changed_ = false;
  DeviceResult result_;
};

class CudaDevice final : public DeviceApi {
 public:
  explicit CudaDevice(int index) : index_(index) {
    int count = 0;
    require(result_of(cudaGetDeviceCount(&count)), "be found");
    if (index < 0 || index >= count) {
      throw DeviceError("CUDA device " + std::to_string(index) + " was asked for; there are " +
                        std::to_string(count));
    }
    require(OnDevice(index_).result(), "be used");
  }

  DeviceResult facts(DeviceFacts& out) override {
    const OnDevice here(index_);
    if (!here.result().ok()) return here.result();
    cudaDeviceProp properties;
    if (DeviceResult r = result_of(cudaGetDeviceProperties(&properties, index_)); !r.ok()) return r;
    out.index = index_;
    out.name = properties.name;
    describe_link(index_, out);
    return result_of(cudaMemGetInfo(&out.free_bytes, &out.total_bytes));
  }

  double now_us() override {
    using Microseconds = std::chrono::duration<double, std::micro>;
    return Microseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
  }

  DeviceResult allocate(size_t bytes, std::byte*& out) override {
    const OnDevice here(index_);
    if (!here.result().ok()) return here.result();
    void* memory = nullptr;
    DeviceResult r = result_of(cudaMalloc(&memory, bytes));
    if (r.ok()) out = static_cast<std::byte*>(memory);
    return r;
  }
  void free(std::byte* memory) override {
    const OnDevice here(index_);
    if (here.result().ok()) (void)cudaFree(memory);
  }

  DeviceResult allocate_pinned(size_t bytes, std::byte*& out, std::byte*& device_address) override {
    const OnDevice here(index_);
    if (!here.result().ok()) return here.result();
    void* memory = nullptr;
    DeviceResult r = result_of(cudaHostAlloc(&memory, bytes, cudaHostAllocPortable | cudaHostAllocMapped));
    if (!r.ok()) return r;
    void* seen = nullptr;
    r = result_of(cudaHostGetDevicePointer(&seen, memory, 0));
    if (!r.ok()) {
      (void)cudaFreeHost(memory);
      return r;
    }
    out = static_cast<std::byte*>(memory);
    device_address = static_cast<std::byte*>(seen);
    return {};
  }
  void free_pinned(std::byte* memory) override {
    const OnDevice here(index_);
    if (here.result().ok()) (void)cudaFreeHost(memory);
  }

  DeviceResult pin(const std::byte* memory, size_t bytes, bool read_only,
                   std::byte*& device_address) override {
    const OnDevice here(index_);
    if (!here.result().ok()) return here.result();
    void* range = const_cast<std::byte*>(memory);
    DeviceResult r = pinned_ranges().pin(static_cast<std::byte*>(range), bytes, read_only);
    if (!r.ok()) return r;
    void* seen = nullptr;
    r = result_of(cudaHostGetDevicePointer(&seen, range, 0));
    if (!r.ok()) {
      pinned_ranges().unpin(static_cast<std::byte*>(range));
      return r;
    }
    device_address = static_cast<std::byte*>(seen);
    return {};
  }
  void unpin(const std::byte* memory) override {
    const OnDevice here(index_);
    if (here.result().ok()) pinned_ranges().unpin(const_cast<std::byte*>(memory));
  }

  DeviceResult make_stream(StreamHandle& out) override {
    const OnDevice here(index_);
    if (!here.result().ok()) return here.result();
    cudaStream_t stream = nullptr;
    DeviceResult r = result_of(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    if (r.ok()) out.raw = stream;
    return r;
  }
  void destroy(StreamHandle stream) override { (void)cudaStreamDestroy(stream_of(stream)); }

  DeviceResult make_event(EventHandle& out) override {
    const OnDevice here(index_);
    if (!here.result().ok()) return here.result();
    cudaEvent_t event = nullptr;
    DeviceResult r = result_of(cudaEventCreateWithFlags(&event, cudaEventDefault));
    if (r.ok()) out.raw = event;
    return r;
  }
  void destroy(EventHandle event) override { (void)cudaEventDestroy(event_of(event)); }

  DeviceResult record(EventHandle event, StreamHandle stream) override {
    return result_of(cudaEventRecord(event_of(event), stream_of(stream)));
  }
  DeviceResult wait(StreamHandle stream, EventHandle event) override {
    return result_of(cudaStreamWaitEvent(stream_of(stream), event_of(event), 0));
  }
  DeviceResult query(EventHandle event) override { return result_of(cudaEventQuery(event_of(event))); }
  DeviceResult synchronise(EventHandle event) override {
    return result_of(cudaEventSynchronize(event_of(event)));
  }
  DeviceResult elapsed_us(EventHandle from, EventHandle to, double& out) override {
    float ms = 0;
    DeviceResult r = result_of(cudaEventElapsedTime(&ms, event_of(from), event_of(to)));
    if (r.ok()) out = double(ms) * 1e3;
    return r;
  }

  DeviceResult copy(std::span<const HostToDevice> copies, StreamHandle stream) override {
    const OnDevice here(index_);
    if (!here.result().ok()) return here.result();
#if CUDART_VERSION >= 13000
    if (copies.size() > 1 && batches_) {
      std::vector<void*> to;
      std::vector<const void*> from;
      std::vector<size_t> sizes;
      for (const HostToDevice& one : copies) {
        to.push_back(one.to);
        from.push_back(one.from);
        sizes.push_back(one.bytes);
      }
      cudaMemcpyAttributes attributes = {};
      attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
      attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;
      size_t first = 0;
      const cudaError_t error = cudaMemcpyBatchAsync(to.data(), from.data(), sizes.data(), copies.size(),
                                                     &attributes, &first, 1, stream_of(stream));
      // A driver older than the runtime does not have it; checked once.
      if (error != cudaErrorNotSupported && error != cudaErrorCallRequiresNewerDriver)
        return result_of(error);
      (void)cudaGetLastError();
      batches_ = false;
    }
#endif
    for (const HostToDevice& one : copies) {
      DeviceResult r =
          result_of(cudaMemcpyAsync(one.to, one.from, one.bytes, cudaMemcpyHostToDevice, stream_of(stream)));
      if (!r.ok()) return r;
    }
    return {};
  }

 private:
  static cudaStream_t stream_of(StreamHandle stream) { return static_cast<cudaStream_t>(stream.raw); }
  static cudaEvent_t event_of(EventHandle event) { return static_cast<cudaEvent_t>(event.raw); }

  int index_;
  [[maybe_unused]] bool batches_ = true;
};

}  // namespace

std::shared_ptr<DeviceApi> open_cuda_device(int index) { return std::make_shared<CudaDevice>(index); }

}  // namespace twofold
