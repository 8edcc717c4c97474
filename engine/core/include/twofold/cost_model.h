// The cost model: how long one MoE layer takes for a given placement. Pure arithmetic on a machine profile;
// knows neither devices nor clocks. Every predicted time (planner and its memo, emulated accelerator, lab
// simulator) comes from `CostModel::layer`, so all predictions agree by construction.
//
// With W = bytes of one expert, A = bytes that adapters add to those read, F = its flops for one token, n = tokens
// routed to it:
//   t_cpu(S) = h + sum(o + max(W/B_cpu, F n/P_cpu) + A/B_cpu) * (1 + sum_d chi_d * dma_busy_d)    0 if S is empty
//   t_d(S)   = x_d + g_d + sum(max(W/B_vram_d, F n/P_d) + A/B_vram_d)                             0 if S is empty
//   upload j to device d lands at q_d + sum_{i<=j}(a_d + W/B_link_d)                    q_d = backlog of its link
//   T_layer  = max(max_d t_d(hits, then each fetched expert not before it landed), t_cpu(rest)) + join
// A machine is a host and devices d = 0, 1, ...; each has its own memory and link. One device, the layer's home,
// computes everything outside the experts, so h and join are its figures. Another device gets its activations
// from there and sends its result back, at x_d per layer that uses it (x = 0 at home).
// The CPU works in order. With b = time until it finishes the previous layer's deferred experts, t_cpu begins
// at b. If S is empty, the layer still waits for b, because that result joins here. The layer's own deferred
// experts run after S and delay nothing before the next layer.
// A (LoRA) is a mean over the step's rows of what each one's adapter has in an expert; 0 where no row uses one. A device
// has the adapters' factors in its memory, so uploads are of W.
// h is paid once per layer that uses the CPU. dma_busy_d is the share of the CPU's work during which link d
// copies.
#pragma once

#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace twofold {

inline constexpr size_t kMostDevices = 8;

// One measured point of "tokens of one expert -> microseconds".
struct CurvePoint {
  double tokens = 0;
  double us = 0;
};

// Calibrated figures of a host. Units are in the names; GB/s are 1e9 bytes, GFLOP/s 1e9 operations per second.
struct HostProfile {
  double cpu_bandwidth_gbps = 0;      // B_cpu: expert weights read from host memory by the thread pool
  double cpu_gflops = 0;              // P_cpu
  double cpu_expert_overhead_us = 0;  // o: fixed cost per expert on the CPU
};

// Calibrated figures of a device and of its link to the host.
struct DeviceProfile {
  double handshake_us = 0;         // h: CPU <-> device, once per layer that uses the CPU
  double gpu_launch_us = 0;        // g: fixed cost per layer on the device
  double vram_bandwidth_gbps = 0;  // B_vram
  double gpu_gflops = 0;           // P
  double link_latency_us = 0;      // a: fixed cost per upload
  double link_bandwidth_gbps = 0;  // B_link: host to device
  double contention = 0;           // chi: CPU slow-down while the link copies (0.22: 22 % slower)
  double join_us = 0;              // adding the partial results
};

struct MachineProfile {
  std::string name;
  HostProfile host;
  std::vector<DeviceProfile> devices;

  // Throws std::invalid_argument naming the field, its value and what is expected: rates must be positive and
  // finite, everything else finite and not negative; 1 to kMostDevices devices.
  void validate() const;

  // A machine of one device from all eleven fields by name, none missing, none unknown; validated.
  static MachineProfile from_fields(const std::string& name, const std::map<std::string, double>& fields);

  // This host with the devices of other machines beside its own.
  MachineProfile with_devices(std::span<const MachineProfile> others) const;
};

// What a layer asks of one device. Loads are tokens per expert.
struct DeviceWork {
  std::span<const int> hits;     // resident experts
  std::span<const int> fetched;  // uploaded now, in this order, then run
  double backlog_us = 0;         // until a demand upload may begin (Link::backlog_us)
  double queued_us = 0;  // all copying already queued, background too (Link::queued_us); >= backlog_us or 0
  bool one_transfer = false;  // fetched experts travel as one copy: the link latency is paid once
};

// The work of one layer in one step.
struct LayerWork {
  std::span<const DeviceWork> devices;  // one for each device of the machine
  std::span<const int> cpu;
  std::span<const int> deferred = {};  // run by the CPU after its share, overlapping the work after the layer
  double cpu_backlog_us = 0;           // until the CPU finishes the previous layer's deferred experts
};

struct LayerTimes {
  double layer_us = 0;  // from the router's output to the joined result
  double gpu_us = 0;    // all devices are done, waiting for uploads included
  double cpu_us = 0;    // the CPU is done, handshake included
  double link_us = 0;   // the last fetched expert has landed; 0 if none is fetched
  double dma_busy = 0;  // share of the CPU's time during which the link copied; the longest of several links
  double cpu_end_us = 0;  // the CPU has finished the deferred experts too; 0: nothing is deferred
};

// One device's part of a layer.
struct DeviceTimes {
  double gpu_us = 0;      // its experts are done; 0 if it has none
  double landed_us = 0;   // its last fetched expert has landed; the backlog if none is fetched
  double copying_us = 0;  // its link copies so long from the layer's start
};

// A device's share of a layer as sums, for planners that try many placements.
struct DeviceSums {
  int num_hits = 0;
  double hit_us = 0;                   // gpu_expert_us over the hits
  std::span<const double> fetched_us;  // gpu_expert_us of each fetched expert, in order
  double backlog_us = 0;
  double queued_us = 0;
  bool one_transfer = false;
};

// The prices of one device for experts of one size.
class DeviceCost {
 public:
  // exchange_us: x, to the layer's home and back. cpu_expert_us: one expert of one token on the host. adapter_bytes: A.
  DeviceCost(const DeviceProfile& profile, double expert_bytes, double flops_per_token, double exchange_us,
             double cpu_expert_us, double adapter_bytes);

  const DeviceProfile& profile() const { return profile_; }
  double exchange_us() const { return exchange_us_; }
  double gpu_expert_us(int tokens) const;  // one expert, without launch
  double upload_us() const { return profile_.link_latency_us + transfer_us_; }
  // Cost of one more miss when the CPU is the slower side: its time minus the device's time for the same expert.
  double miss_us() const { return miss_us_; }
  // landed_us, if not empty, must hold one entry per fetched expert and receives its landing time, counted from
  // the start of the layer.
  DeviceTimes times(const DeviceSums& sums, std::span<double> landed_us = {}) const;
  DeviceTimes times(const DeviceWork& work, std::span<double> landed_us = {}) const;

 private:
  DeviceProfile profile_;
  double exchange_us_;
  double expert_bytes_, flops_per_token_;
  double transfer_us_;
  double adapter_us_;
  double miss_us_;
};

class CostModel {
 public:
  // expert_bytes: W, as uploaded and as read. flops_per_token: F (a gated FFN: 6 * hidden * intermediate).
  // cpu_curve, if given, replaces o + max(W/B_cpu, F n/P_cpu): linear between its points, proportional to the
  // last segment beyond; tokens strictly increasing, times positive. home: of the layers that are priced. adapter_bytes: A.
  CostModel(MachineProfile profile, double expert_bytes, double flops_per_token,
            std::vector<CurvePoint> cpu_curve = {}, int home = 0, double adapter_bytes = 0);

  const MachineProfile& profile() const { return profile_; }
  double expert_bytes() const { return expert_bytes_; }
  int num_devices() const { return static_cast<int>(devices_.size()); }
  const DeviceCost& device(int d) const { return devices_[static_cast<size_t>(d)]; }
  const DeviceCost& home() const { return device(home_); }
  // The same machine for layers whose home is device d.
  CostModel with_home(int d) const {
    return {profile_, expert_bytes_, flops_per_token_, curve_, d, adapter_bytes_};
  }
  // The same experts on a machine with other figures.
  CostModel with_profile(MachineProfile profile) const {
    return {std::move(profile), expert_bytes_, flops_per_token_, curve_, home_, adapter_bytes_};
  }
  // The same for steps whose adapters add so many bytes to each expert.
  CostModel with_adapters(double bytes) const {
    return {profile_, expert_bytes_, flops_per_token_, curve_, home_, bytes};
  }
  double adapter_bytes() const { return adapter_bytes_; }
  // Activations from one device to another, through the host.
  double exchange_us(int from, int to) const;

  double cpu_expert_us(int tokens) const;  // one expert, without handshake and contention
  double cpu_us(std::span<const int> loads, double dma_busy) const;

  // The only place that computes a layer's time.
  LayerTimes layer(const LayerWork& work) const;
  // The CPU's part while links copy: copying_us has one entry for each device. dma_busy receives the longest share.
  double cpu_from_sums(int num_cpu, double cpu_work_us, std::span<const double> copying_us,
                       double& dma_busy) const;
  // Adds experts deferred by the previous layer (until cpu_backlog_us) and by this one to times that have none.
  // num_cpu: experts that are not deferred; deferred_us: sum of cpu_expert_us.
  void add_deferred(LayerTimes& times, int num_cpu, double cpu_backlog_us, double deferred_us,
                    std::span<const double> copying_us) const;

 private:
  // Without adapters.
  double cpu_weights_us(int tokens) const;
  // How much longer `work_us` of the CPU takes while links copy, as a factor less 1.
  double slowed_by(double work_us, std::span<const double> copying_us, double& dma_busy) const;
  double contention(size_t d) const { return profile_.devices[d].contention; }

  MachineProfile profile_;
  double expert_bytes_;
  double flops_per_token_;
  std::vector<CurvePoint> curve_;
  int home_;
  double adapter_bytes_;
  std::vector<DeviceCost> devices_;
};

}  // namespace twofold
