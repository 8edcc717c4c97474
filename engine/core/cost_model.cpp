#include "twofold/cost_model.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <stdexcept>
#include <utility>

#include "twofold/reject.h"

namespace twofold {
namespace {

// A figure by its name in a profile's file.
template <class Part>
struct Field {
  const char* name;
  double Part::* member;
  bool positive;

  const char* expected() const { return positive ? "a finite number > 0" : "a finite number >= 0"; }
  void check(const std::string& machine, const Part& part) const {
    const double value = part.*member;
    if (std::isfinite(value) && (positive ? value > 0 : value >= 0)) return;
    reject("machine profile '" + machine + "': " + name, value, expected());
  }
};

constexpr std::array<Field<HostProfile>, 3> kHostFields{{
    {"cpu_bandwidth_gbps", &HostProfile::cpu_bandwidth_gbps, true},
    {"cpu_gflops", &HostProfile::cpu_gflops, true},
    {"cpu_expert_overhead_us", &HostProfile::cpu_expert_overhead_us, false},
}};
constexpr std::array<Field<DeviceProfile>, 8> kDeviceFields{{
    {"handshake_us", &DeviceProfile::handshake_us, false},
    {"gpu_launch_us", &DeviceProfile::gpu_launch_us, false},
    {"vram_bandwidth_gbps", &DeviceProfile::vram_bandwidth_gbps, true},
    {"gpu_gflops", &DeviceProfile::gpu_gflops, true},
    {"link_latency_us", &DeviceProfile::link_latency_us, false},
    {"link_bandwidth_gbps", &DeviceProfile::link_bandwidth_gbps, true},
    {"contention", &DeviceProfile::contention, false},
    {"join_us", &DeviceProfile::join_us, false},
}};

}  // namespace

void MachineProfile::validate() const {
  for (const auto& field : kHostFields) field.check(name, host);
  for (const DeviceProfile& device : devices) {
    for (const auto& field : kDeviceFields) field.check(name, device);
  }
  if (devices.empty() || devices.size() > kMostDevices) {
    reject("machine profile '" + name + "': devices", std::to_string(devices.size()),
           "1 to " + std::to_string(kMostDevices));
  }
}

MachineProfile MachineProfile::from_fields(const std::string& name,
                                           const std::map<std::string, double>& fields) {
  MachineProfile profile{.name = name, .host = {}, .devices = {{}}};
  std::map<std::string, double> unread = fields;
  const auto read = [&](const auto& field, auto& part) {
    const auto found = unread.extract(field.name);
    if (found.empty()) {
      throw std::invalid_argument("machine profile '" + name + "': " + field.name + " is missing, " +
                                  field.expected() + " expected");
    }
    part.*field.member = found.mapped();
  };
  for (const auto& field : kHostFields) read(field, profile.host);
  for (const auto& field : kDeviceFields) read(field, profile.devices.front());
  if (!unread.empty()) {
    throw std::invalid_argument("machine profile '" + name + "': unknown field " + unread.begin()->first +
                                " = " + std::to_string(unread.begin()->second) +
                                " given; remove it or correct its spelling");
  }
  profile.validate();
  return profile;
}

MachineProfile MachineProfile::with_devices(std::span<const MachineProfile> others) const {
  MachineProfile machine = *this;
  for (const MachineProfile& other : others)
    machine.devices.insert(machine.devices.end(), other.devices.begin(), other.devices.end());
  return machine;
}

CostModel::CostModel(MachineProfile profile, double expert_bytes, double flops_per_token,
                     std::vector<CurvePoint> cpu_curve, int home, double adapter_bytes)
    : profile_(std::move(profile)),
      expert_bytes_(expert_bytes),
      flops_per_token_(flops_per_token),
      curve_(std::move(cpu_curve)),
      home_(home),
      adapter_bytes_(adapter_bytes) {
  profile_.validate();
  if (!(std::isfinite(expert_bytes) && expert_bytes > 0)) {
    reject("cost model: expert_bytes", expert_bytes, "a finite number > 0");
  }
  if (!(std::isfinite(flops_per_token) && flops_per_token > 0)) {
    reject("cost model: flops_per_token", flops_per_token, "a finite number > 0");
  }
  if (!(std::isfinite(adapter_bytes) && adapter_bytes >= 0)) {
    reject("cost model: adapter_bytes", adapter_bytes, "a finite number >= 0");
  }
  for (size_t i = 0; i < curve_.size(); ++i) {
    if (!(curve_[i].tokens > (i == 0 ? 0.0 : curve_[i - 1].tokens))) {
      reject("cost model: cpu_curve tokens", curve_[i].tokens, "positive, strictly increasing tokens");
    }
    if (!(std::isfinite(curve_[i].us) && curve_[i].us > 0)) {
      reject("cost model: cpu_curve us", curve_[i].us, "a finite time > 0");
    }
  }
  const int count = static_cast<int>(profile_.devices.size());
  if (home < 0 || home >= count) reject("cost model: home", home, "0 to " + std::to_string(count - 1));
  for (int d = 0; d < count; ++d) {
    devices_.emplace_back(profile_.devices[static_cast<size_t>(d)], expert_bytes_, flops_per_token_,
                          exchange_us(d, home), cpu_expert_us(1), adapter_bytes_);
  }
}

double CostModel::exchange_us(int from, int to) const {
  const auto& devices = profile_.devices;
  return from == to ? 0.0
                    : devices.at(static_cast<size_t>(from)).handshake_us +
                          devices.at(static_cast<size_t>(to)).handshake_us;
}

double CostModel::cpu_expert_us(int tokens) const {
  return cpu_weights_us(tokens) + adapter_bytes_ / (profile_.host.cpu_bandwidth_gbps * 1e3);
}

double CostModel::cpu_weights_us(int tokens) const {
  if (curve_.empty()) {
    return profile_.host.cpu_expert_overhead_us +
           std::max(expert_bytes_ / (profile_.host.cpu_bandwidth_gbps * 1e3),
                    flops_per_token_ * tokens / (profile_.host.cpu_gflops * 1e3));
  }
  const double n = tokens;
  if (curve_.size() == 1) return curve_[0].us * std::max(1.0, n / curve_[0].tokens);
  if (n <= curve_[0].tokens) return curve_[0].us;
  size_t right = 1;
  while (right + 1 < curve_.size() && curve_[right].tokens < n) ++right;
  const CurvePoint& a = curve_[right - 1];
  const CurvePoint& b = curve_[right];
  return std::max(a.us + (b.us - a.us) * (n - a.tokens) / (b.tokens - a.tokens), curve_[0].us);
}

double CostModel::cpu_us(std::span<const int> loads, double dma_busy) const {
  if (loads.empty()) return 0;
  double work = 0;
  for (int n : loads) work += cpu_expert_us(n);
  return home().profile().handshake_us + work * (1 + home().profile().contention * dma_busy);
}

DeviceCost::DeviceCost(const DeviceProfile& profile, double expert_bytes, double flops_per_token,
                       double exchange_us, double cpu_expert_us, double adapter_bytes)
    : profile_(profile),
      exchange_us_(exchange_us),
      expert_bytes_(expert_bytes),
      flops_per_token_(flops_per_token),
      transfer_us_(expert_bytes / (profile.link_bandwidth_gbps * 1e3)),
      adapter_us_(adapter_bytes / (profile.vram_bandwidth_gbps * 1e3)),
      // A machine whose device is no faster than its CPU gains nothing from a hit; the floor keeps the price finite.
      miss_us_(std::max(cpu_expert_us - gpu_expert_us(1), 1e-3 * cpu_expert_us)) {}

double DeviceCost::gpu_expert_us(int tokens) const {
  return std::max(expert_bytes_ / (profile_.vram_bandwidth_gbps * 1e3),
                  flops_per_token_ * tokens / (profile_.gpu_gflops * 1e3)) +
         adapter_us_;
}

DeviceTimes DeviceCost::times(const DeviceSums& sums, std::span<double> landed_us) const {
  // Hits first, during uploads; each fetched expert when both it and the device are ready.
  DeviceTimes times;
  if (sums.num_hits > 0 || !sums.fetched_us.empty()) {
    times.gpu_us = exchange_us_ + profile_.gpu_launch_us + sums.hit_us;
  }
  times.landed_us = sums.backlog_us;
  for (size_t i = 0; i < sums.fetched_us.size(); ++i) {
    times.landed_us += (sums.one_transfer && i > 0) ? transfer_us_ : upload_us();
    times.gpu_us = std::max(times.gpu_us, times.landed_us) + sums.fetched_us[i];
    if (!landed_us.empty()) landed_us[i] = times.landed_us;
  }
  times.copying_us = std::max(sums.queued_us, sums.backlog_us) + (times.landed_us - sums.backlog_us);
  return times;
}

DeviceTimes DeviceCost::times(const DeviceWork& work, std::span<double> landed_us) const {
  // Without allocating where experts are few.
  std::array<double, 64> small;  // NOLINT: written before it is read
  std::vector<double> large(work.fetched.size() > small.size() ? work.fetched.size() : 0);
  const std::span<double> each(large.empty() ? small.data() : large.data(), work.fetched.size());
  DeviceSums sums{.num_hits = static_cast<int>(work.hits.size()),
                  .hit_us = 0,
                  .fetched_us = each,
                  .backlog_us = work.backlog_us,
                  .queued_us = work.queued_us,
                  .one_transfer = work.one_transfer};
  for (int n : work.hits) sums.hit_us += gpu_expert_us(n);
  for (size_t i = 0; i < each.size(); ++i) each[i] = gpu_expert_us(work.fetched[i]);
  return times(sums, landed_us);
}

LayerTimes CostModel::layer(const LayerWork& work) const {
  if (work.devices.size() != devices_.size()) {
    throw std::invalid_argument("cost model: work of " + std::to_string(work.devices.size()) +
                                " devices given, the machine's " + std::to_string(num_devices()) +
                                " expected");
  }
  LayerTimes times;
  std::array<double, kMostDevices> copying{};
  for (size_t d = 0; d < devices_.size(); ++d) {
    const DeviceTimes done = devices_[d].times(work.devices[d]);
    copying[d] = done.copying_us;
    times.gpu_us = std::max(times.gpu_us, done.gpu_us);
    if (!work.devices[d].fetched.empty()) times.link_us = std::max(times.link_us, done.landed_us);
  }
  const auto copying_us = std::span<const double>(copying).first(devices_.size());
  double cpu_work_us = 0, deferred_us = 0;
  for (int n : work.cpu) cpu_work_us += cpu_expert_us(n);
  for (int n : work.deferred) deferred_us += cpu_expert_us(n);
  const int num_cpu = static_cast<int>(work.cpu.size());
  times.cpu_us = cpu_from_sums(num_cpu, cpu_work_us, copying_us, times.dma_busy);
  times.layer_us = std::max(times.gpu_us, times.cpu_us) + home().profile().join_us;
  if (work.cpu_backlog_us > 0 || !work.deferred.empty())
    add_deferred(times, num_cpu, work.cpu_backlog_us, deferred_us, copying_us);
  return times;
}

void CostModel::add_deferred(LayerTimes& times, int num_cpu, double cpu_backlog_us, double deferred_us,
                             std::span<const double> copying_us) const {
  times.cpu_us += cpu_backlog_us;
  times.layer_us = std::max(times.gpu_us, times.cpu_us) + home().profile().join_us;
  if (deferred_us == 0) return;
  std::array<double, kMostDevices> left{};
  for (size_t d = 0; d < copying_us.size(); ++d) left[d] = std::max(0.0, copying_us[d] - times.cpu_us);
  double busy = 0;
  times.cpu_end_us =
      times.cpu_us + (num_cpu == 0 ? home().profile().handshake_us : 0.0) +
      deferred_us * (1 + slowed_by(deferred_us, std::span(left).first(copying_us.size()), busy));
}

double CostModel::cpu_from_sums(int num_cpu, double cpu_work_us, std::span<const double> copying_us,
                                double& dma_busy) const {
  dma_busy = 0;
  if (num_cpu == 0) return 0;
  return home().profile().handshake_us + cpu_work_us * (1 + slowed_by(cpu_work_us, copying_us, dma_busy));
}

double CostModel::slowed_by(double work_us, std::span<const double> copying_us, double& dma_busy) const {
  // With C work left and L of copying, progress during L is L / (1 + the sum of the copying links' chi). The links
  // end in the order of their copying.
  std::array<size_t, kMostDevices> order;  // NOLINT: written before it is read
  double chi = 0;
  for (size_t d = 0; d < copying_us.size(); ++d) {
    chi += contention(d);
    size_t at = d;
    for (; at > 0 && copying_us[order[at - 1]] > copying_us[d]; --at) order[at] = order[at - 1];
    order[at] = d;
  }
  double slowed_by = 0, copied_us = 0;
  for (size_t i = 0; i < copying_us.size(); ++i) {
    const size_t d = order[i];
    const double slowed = work_us * (1 + chi);
    dma_busy = slowed > 0 ? std::min(1.0, dma_busy + (copying_us[d] - copied_us) / slowed) : 0.0;
    slowed_by += contention(d) * dma_busy;
    chi -= contention(d);
    copied_us = copying_us[d];
  }
  return slowed_by;
}

}  // namespace twofold
