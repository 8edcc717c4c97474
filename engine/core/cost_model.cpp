#include "twofold/cost_model.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <stdexcept>
#include <utility>

#include "twofold/reject.h"

namespace twofold {
namespace {

struct Field {
  const char* name;
  double MachineProfile::* member;
  bool positive;
};

constexpr std::array<Field, 11> kFields{{
    {"handshake_us", &MachineProfile::handshake_us, false},
    {"cpu_bandwidth_gbps", &MachineProfile::cpu_bandwidth_gbps, true},
    {"cpu_gflops", &MachineProfile::cpu_gflops, true},
    {"cpu_expert_overhead_us", &MachineProfile::cpu_expert_overhead_us, false},
    {"gpu_launch_us", &MachineProfile::gpu_launch_us, false},
    {"vram_bandwidth_gbps", &MachineProfile::vram_bandwidth_gbps, true},
    {"gpu_gflops", &MachineProfile::gpu_gflops, true},
    {"link_latency_us", &MachineProfile::link_latency_us, false},
    {"link_bandwidth_gbps", &MachineProfile::link_bandwidth_gbps, true},
    {"contention", &MachineProfile::contention, false},
    {"join_us", &MachineProfile::join_us, false},
}};

}  // namespace

void MachineProfile::validate() const {
  for (const Field& field : kFields) {
    const double value = this->*field.member;
    if (std::isfinite(value) && (field.positive ? value > 0 : value >= 0)) continue;
    reject("machine profile '" + name + "': " + field.name, value,
           field.positive ? "a finite number > 0" : "a finite number >= 0");
  }
  if (!(std::isfinite(exchange_us) && exchange_us >= 0)) {
    reject("machine profile '" + name + "': exchange_us", exchange_us, "a finite number >= 0");
  }
}

MachineProfile MachineProfile::from_fields(const std::string& name,
                                           const std::map<std::string, double>& fields) {
  MachineProfile profile;
  profile.name = name;
  for (const Field& field : kFields) {
    const auto found = fields.find(field.name);
    if (found == fields.end()) {
      throw std::invalid_argument("machine profile '" + name + "': " + field.name +
                                  " is missing, a finite number " + (field.positive ? "> 0" : ">= 0") +
                                  " expected");
    }
    profile.*field.member = found->second;
  }
  for (const auto& [key, value] : fields) {
    if (std::none_of(kFields.begin(), kFields.end(), [&](const Field& field) { return key == field.name; })) {
      throw std::invalid_argument("machine profile '" + name + "': unknown field " + key + " = " +
                                  std::to_string(value) + " given; remove it or correct its spelling");
    }
  }
  profile.validate();
  return profile;
}

std::map<std::string, double> MachineProfile::fields() const {
  std::map<std::string, double> out;
  for (const Field& field : kFields) out[field.name] = this->*field.member;
  return out;
}

MachineProfile MachineProfile::with_devices(std::span<const MachineProfile> others) const {
  MachineProfile machine = *this;
  for (const MachineProfile& other : others) {
    MachineProfile device = other;
    device.further.clear();
    device.cpu_bandwidth_gbps = cpu_bandwidth_gbps;
    device.cpu_gflops = cpu_gflops;
    device.cpu_expert_overhead_us = cpu_expert_overhead_us;
    device.exchange_us = handshake_us + other.handshake_us;
    machine.further.push_back(std::move(device));
  }
  return machine;
}

CostModel::CostModel(MachineProfile profile, double expert_bytes, double flops_per_token,
                     std::vector<CurvePoint> cpu_curve)
    : profile_(std::move(profile)),
      expert_bytes_(expert_bytes),
      flops_per_token_(flops_per_token),
      curve_(std::move(cpu_curve)) {
  profile_.validate();
  if (!(std::isfinite(expert_bytes) && expert_bytes > 0)) {
    reject("cost model: expert_bytes", expert_bytes, "a finite number > 0");
  }
  if (!(std::isfinite(flops_per_token) && flops_per_token > 0)) {
    reject("cost model: flops_per_token", flops_per_token, "a finite number > 0");
  }
  for (size_t i = 0; i < curve_.size(); ++i) {
    if (!(curve_[i].tokens > (i == 0 ? 0.0 : curve_[i - 1].tokens))) {
      reject("cost model: cpu_curve tokens", curve_[i].tokens, "positive, strictly increasing tokens");
    }
    if (!(std::isfinite(curve_[i].us) && curve_[i].us > 0)) {
      reject("cost model: cpu_curve us", curve_[i].us, "a finite time > 0");
    }
  }
  transfer_us_ = expert_bytes_ / (profile_.link_bandwidth_gbps * 1e3);
  if (profile_.further.size() >= kMostDevices) {
    reject("cost model: devices", std::to_string(profile_.further.size() + 1),
           "at most " + std::to_string(kMostDevices));
  }
  for (const MachineProfile& device : profile_.further)
    further_.emplace_back(device, expert_bytes_, flops_per_token_, curve_);
}

double CostModel::cpu_expert_us(int tokens) const {
  if (curve_.empty()) {
    return profile_.cpu_expert_overhead_us +
           std::max(expert_bytes_ / (profile_.cpu_bandwidth_gbps * 1e3),
                    flops_per_token_ * tokens / (profile_.cpu_gflops * 1e3));
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

double CostModel::gpu_expert_us(int tokens) const {
  return std::max(expert_bytes_ / (profile_.vram_bandwidth_gbps * 1e3),
                  flops_per_token_ * tokens / (profile_.gpu_gflops * 1e3));
}

double CostModel::cpu_us(std::span<const int> loads, double dma_busy) const {
  if (loads.empty()) return 0;
  double work = 0;
  for (int n : loads) work += cpu_expert_us(n);
  return profile_.handshake_us + work * (1 + profile_.contention * dma_busy);
}

double CostModel::gpu_us(std::span<const int> loads) const {
  if (loads.empty()) return 0;
  double work = profile_.gpu_launch_us;
  for (int n : loads) work += gpu_expert_us(n);
  return work;
}

namespace {

// Accelerator times of some experts, without allocating where they are few.
class GpuTimes {
 public:
  GpuTimes(const CostModel& cost, std::span<const int> loads) : used_(small_.data(), loads.size()) {
    if (loads.size() > small_.size()) {
      large_.resize(loads.size());
      used_ = large_;
    }
    for (size_t i = 0; i < loads.size(); ++i) used_[i] = cost.gpu_expert_us(loads[i]);
  }
  GpuTimes(const GpuTimes&) = delete;
  GpuTimes& operator=(const GpuTimes&) = delete;
  std::span<const double> each() const { return used_; }

 private:
  std::array<double, 64> small_;  // NOLINT: written before it is read
  std::vector<double> large_;
  std::span<double> used_;
};

}  // namespace

LayerTimes CostModel::layer(const LayerWork& work, std::span<double> landed_us) const {
  double hit_us = 0;
  for (int n : work.hits) hit_us += gpu_expert_us(n);
  double cpu_work_us = 0;
  for (int n : work.cpu) cpu_work_us += cpu_expert_us(n);
  const GpuTimes fetched(*this, work.fetched);
  LayerTimes times = layer_from_sums(static_cast<int>(work.hits.size()), hit_us, fetched.each(),
                                     static_cast<int>(work.cpu.size()), cpu_work_us, work.backlog_us,
                                     work.queued_us, work.one_transfer, landed_us);
  if (!work.further.empty()) add_devices(work, cpu_work_us, times);
  if (work.cpu_backlog_us > 0 || !work.deferred.empty()) add_deferred(work, times);
  return times;
}

void CostModel::add_devices(const LayerWork& work, double cpu_work_us, LayerTimes& times) const {
  if (work.further.size() != further_.size()) {
    throw std::invalid_argument("cost model: work of " + std::to_string(1 + work.further.size()) +
                                " devices given, the machine's " + std::to_string(num_devices()) +
                                " expected");
  }
  const double landed = work.fetched.empty() ? work.backlog_us : times.link_us;
  std::array<double, kMostDevices> copying{std::max(work.queued_us, work.backlog_us) +
                                           (landed - work.backlog_us)};
  for (size_t d = 0; d < further_.size(); ++d) {
    const DeviceWork& device = work.further[d];
    double hit_us = 0;
    for (int n : device.hits) hit_us += further_[d].gpu_expert_us(n);
    const GpuTimes fetched(further_[d], device.fetched);
    const DeviceTimes done =
        further_[d].device_from_sums(static_cast<int>(device.hits.size()), hit_us, fetched.each(),
                                     device.backlog_us, device.queued_us, device.one_transfer);
    copying[d + 1] = done.copying_us;
    times.gpu_us = std::max(times.gpu_us, done.gpu_us);
    if (!device.fetched.empty()) times.link_us = std::max(times.link_us, done.landed_us);
  }
  times.cpu_us = cpu_from_sums(static_cast<int>(work.cpu.size()), cpu_work_us,
                               std::span(copying).first(further_.size() + 1), times.dma_busy);
  times.layer_us = std::max(times.gpu_us, times.cpu_us) + profile_.join_us;
}

void CostModel::add_deferred(const LayerWork& work, LayerTimes& times) const {
  times.cpu_us += work.cpu_backlog_us;
  times.layer_us = std::max(times.gpu_us, times.cpu_us) + profile_.join_us;
  if (work.deferred.empty()) return;
  double deferred_us = 0;
  for (int n : work.deferred) deferred_us += cpu_expert_us(n);
  const double landed = work.fetched.empty() ? work.backlog_us : times.link_us;
  const double copying =
      std::max(work.queued_us, work.backlog_us) + (landed - work.backlog_us) - times.cpu_us;
  const double slowed = deferred_us * (1 + profile_.contention);
  const double busy = std::clamp(copying / slowed, 0.0, 1.0);
  times.cpu_end_us = times.cpu_us + (work.cpu.empty() ? profile_.handshake_us : 0.0) +
                     deferred_us * (1 + profile_.contention * busy);
}

DeviceTimes CostModel::device_from_sums(int num_hits, double hit_us, std::span<const double> fetched_us,
                                        double backlog_us, double queued_us, bool one_transfer,
                                        std::span<double> landed_us) const {
  // Hits first, during uploads; each fetched expert when both it and the device are ready.
  DeviceTimes times;
  if (num_hits > 0 || !fetched_us.empty()) {
    times.gpu_us = profile_.exchange_us + profile_.gpu_launch_us + hit_us;
  }
  times.landed_us = backlog_us;
  for (size_t i = 0; i < fetched_us.size(); ++i) {
    times.landed_us += (one_transfer && i > 0) ? transfer_us_ : upload_us();
    times.gpu_us = std::max(times.gpu_us, times.landed_us) + fetched_us[i];
    if (!landed_us.empty()) landed_us[i] = times.landed_us;
  }
  times.copying_us = std::max(queued_us, backlog_us) + (times.landed_us - backlog_us);
  return times;
}

double CostModel::cpu_from_sums(int num_cpu, double cpu_work_us, std::span<const double> copying_us,
                                double& dma_busy) const {
  dma_busy = 0;
  if (num_cpu == 0) return 0;
  if (copying_us.size() == 1) {  // the sum below for one link, bit for bit
    const double slowed = cpu_work_us * (1 + profile_.contention);
    dma_busy = slowed > 0 ? std::min(1.0, copying_us[0] / slowed) : 0.0;
    return profile_.handshake_us + cpu_work_us * (1 + profile_.contention * dma_busy);
  }
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
    const double slowed = cpu_work_us * (1 + chi);
    dma_busy = slowed > 0 ? std::min(1.0, dma_busy + (copying_us[d] - copied_us) / slowed) : 0.0;
    slowed_by += contention(d) * dma_busy;
    chi -= contention(d);
    copied_us = copying_us[d];
  }
  return profile_.handshake_us + cpu_work_us * (1 + slowed_by);
}

LayerTimes CostModel::layer_from_sums(int num_hits, double hit_us, std::span<const double> fetched_us,
                                      int num_cpu, double cpu_work_us, double backlog_us, double queued_us,
                                      bool one_transfer, std::span<double> landed_us) const {
  const DeviceTimes device =
      device_from_sums(num_hits, hit_us, fetched_us, backlog_us, queued_us, one_transfer, landed_us);
  LayerTimes times;
  times.gpu_us = device.gpu_us;
  if (!fetched_us.empty()) times.link_us = device.landed_us;
  times.cpu_us = cpu_from_sums(num_cpu, cpu_work_us, {&device.copying_us, 1}, times.dma_busy);
  times.layer_us = std::max(times.gpu_us, times.cpu_us) + profile_.join_us;
  return times;
}

double CostModel::layer_us(std::span<const int> hits, std::span<const int> fetched, std::span<const int> cpu,
                           double backlog_us) const {
  return layer(LayerWork{hits, fetched, cpu, backlog_us, 0, false}).layer_us;
}

CostModel CostModel::with_home(int d) const {
  if (d == 0) return *this;
  MachineProfile machine = profile_;
  machine.handshake_us = device(d).profile_.handshake_us;
  machine.join_us = device(d).profile_.join_us;
  machine.exchange_us = exchange_us(0, d);
  for (int other = 1; other < num_devices(); ++other)
    machine.further[size_t(other) - 1].exchange_us = exchange_us(other, d);
  return with_profile(std::move(machine));
}

double CostModel::miss_us() const {
  // A machine whose accelerator is no faster than its CPU gains nothing from a hit; the floor keeps the price
  // finite.
  return std::max(cpu_expert_us(1) - gpu_expert_us(1), 1e-3 * cpu_expert_us(1));
}

}  // namespace twofold
