#include "assignment.h"

#include <algorithm>

namespace twofold {

LaneProblem::LaneProblem(const CostModel& cost, std::span<const ExpertLoad> loads, const LaneStates& lanes)
    : cost_(cost), states_(lanes) {
  items_.reserve(loads.size());
  for (const ExpertLoad& load : loads) {
    Item item;
    item.load = &load;
    item.open = load.resident | (~load.barred & ((1U << num_devices()) - 1));
    item.cpu_us = cost.cpu_expert_us(load.tokens);
    for (size_t d = 0; d < num_devices(); ++d) item.gpu_us[d] = device(d).gpu_expert_us(load.tokens);
    items_.push_back(item);
  }
  std::stable_sort(items_.begin(), items_.end(),
                   [](const Item& a, const Item& b) { return a.load->tokens > b.load->tokens; });
  for (size_t i = 0; i < size(); ++i) items_[i].kind = kind_of(i);
}

size_t LaneProblem::kind_of(size_t i) {
  const ExpertLoad& load = *items_[i].load;
  for (size_t j = i; j-- > 0 && items_[j].load->tokens == load.tokens;) {
    const ExpertLoad& other = *items_[j].load;
    if (load.resident == other.resident && load.barred == other.barred && load.deferrable == other.deferrable)
      return items_[j].kind;
  }
  return num_kinds_++;
}

bool Assignment::equally_dear(size_t i, size_t j) const {
  const size_t a = lane_[i], b = lane_[j];
  const LaneProblem::Item &one = problem_.item(i), &other = problem_.item(j);
  for (const size_t lane : {a, b}) {
    if (problem_.fetches(i, lane) != problem_.fetches(j, lane)) return false;
    if (lane < problem_.num_devices() && one.gpu_us[lane] != other.gpu_us[lane]) return false;
  }
  return one.cpu_us == other.cpu_us && one.load->deferrable == other.load->deferrable;
}

bool Assignment::has_room(size_t device) const {
  const int most = problem_.state(device).max_fetch;
  return most < 0 || sums_[device].num_fetched < most;
}

LayerTimes Assignment::times() {
  for (size_t d = 0; d < problem_.num_devices(); ++d) lane_times_[d] = device_times(d);
  sums_ = {};
  for (size_t i = 0; i < problem_.size(); ++i) add(i, lane_[i], 1);
  return join();
}

void Assignment::add(size_t i, size_t lane, int sign) {
  Sums& sums = sums_[lane];
  const LaneProblem::Item& item = problem_.item(i);
  if (lane == problem_.cpu()) {
    if (item.load->deferrable) return;  // after the layer
    sums.work_us += sign * item.cpu_us;
    sums.count += sign;
    return;
  }
  sums.work_us += sign * item.gpu_us[lane];
  sums.count += sign;
  if (!problem_.fetches(i, lane)) return;
  sums.fetched_us += sign * item.gpu_us[lane];
  sums.num_fetched += sign;
}

double Assignment::bound_of_sums() const {
  double end_us = 0;
  std::array<double, kMostDevices> copying{};
  for (size_t d = 0; d < problem_.num_devices(); ++d) {
    const DeviceCost& device = problem_.device(d);
    const DeviceState& state = problem_.state(d);
    const Sums& sums = sums_[d];
    double upload_us = sums.num_fetched * device.upload_us();
    if (streams_ && sums.num_fetched > 1)
      upload_us -= (sums.num_fetched - 1) * device.profile().link_latency_us;
    copying[d] = std::max(state.queued_us, state.backlog_us) + upload_us;
    if (sums.count == 0) continue;
    end_us = std::max(end_us, device.exchange_us() + device.profile().gpu_launch_us + sums.work_us);
    if (sums.num_fetched == 0) continue;
    // The last one has landed; or the first one has, and then all of them run.
    end_us = std::max(
        {end_us, state.backlog_us + upload_us, state.backlog_us + device.upload_us() + sums.fetched_us});
  }
  double busy = 0;
  const Sums& cpu = sums_[problem_.cpu()];
  end_us = std::max(end_us, problem_.states().cpu_backlog_us +
                                problem_.cost().cpu_from_sums(
                                    cpu.count, cpu.work_us,
                                    std::span<const double>(copying).first(problem_.num_devices()), busy));
  return end_us + problem_.cost().home().profile().join_us;
}

double Assignment::bound_us(size_t i, size_t to) {
  const size_t from = lane_[i];
  const Sums of_from = sums_[from], of_to = sums_[to];
  add(i, from, -1);
  add(i, to, 1);
  const double us = bound_of_sums();
  sums_[from] = of_from;
  sums_[to] = of_to;
  return us;
}

double Assignment::bound_us_of_swap(size_t i, size_t j) {
  const size_t a = lane_[i], b = lane_[j];
  const Sums of_a = sums_[a], of_b = sums_[b];
  add(i, a, -1);
  add(j, b, -1);
  add(i, b, 1);
  add(j, a, 1);
  const double us = bound_of_sums();
  sums_[a] = of_a;
  sums_[b] = of_b;
  return us;
}

Score Assignment::score() { return score_of(times()); }

void Assignment::sort_interchangeable() {
  for (size_t begin = 0; begin < problem_.size();) {
    size_t end = begin + 1;
    while (end < problem_.size() && problem_.interchangeable(begin, end)) ++end;
    std::sort(lane_.begin() + static_cast<std::ptrdiff_t>(begin),
              lane_.begin() + static_cast<std::ptrdiff_t>(end));
    begin = end;
  }
}

DeviceTimes Assignment::device_times(size_t d) {
  DeviceSums sums{.num_hits = 0,
                  .hit_us = 0,
                  .fetched_us = {},
                  .backlog_us = problem_.state(d).backlog_us,
                  .queued_us = problem_.state(d).queued_us,
                  .one_transfer = streams_};
  size_t num_fetched = 0;
  for (size_t i = 0; i < problem_.size(); ++i) {
    if (lane_[i] != d) continue;
    if (problem_.resident(i, d)) {
      sums.hit_us += problem_.item(i).gpu_us[d];
      ++sums.num_hits;
    } else {
      fetched_us_[num_fetched++] = problem_.item(i).gpu_us[d];
    }
  }
  sums.fetched_us = std::span<const double>(fetched_us_).first(num_fetched);
  return problem_.device(d).times(sums);
}

LayerTimes Assignment::join() const {
  LayerTimes all;
  std::array<double, kMostDevices> copying{};
  for (size_t d = 0; d < problem_.num_devices(); ++d) {
    copying[d] = lane_times_[d].copying_us;
    all.gpu_us = std::max(all.gpu_us, lane_times_[d].gpu_us);
  }
  double cpu_work_us = 0, deferred_us = 0;
  int num_cpu = 0;
  for (size_t i = 0; i < problem_.size(); ++i) {
    if (lane_[i] != problem_.cpu()) continue;
    if (problem_.item(i).load->deferrable) {
      deferred_us += problem_.item(i).cpu_us;
      continue;
    }
    cpu_work_us += problem_.item(i).cpu_us;
    ++num_cpu;
  }
  const auto copying_us = std::span<const double>(copying).first(problem_.num_devices());
  all.cpu_us = problem_.cost().cpu_from_sums(num_cpu, cpu_work_us, copying_us, all.dma_busy);
  all.layer_us = std::max(all.gpu_us, all.cpu_us) + problem_.cost().home().profile().join_us;
  if (problem_.states().cpu_backlog_us > 0 || deferred_us > 0)
    problem_.cost().add_deferred(all, num_cpu, problem_.states().cpu_backlog_us, deferred_us, copying_us);
  return all;
}

// Deferred experts that do not end in the gap delay the next layer.
Score Assignment::score_of(const LayerTimes& all) const {
  Score score{all.layer_us + std::max(0.0, all.cpu_end_us - all.layer_us - problem_.states().gap_us),
              all.cpu_us};
  for (size_t d = 0; d < problem_.num_devices(); ++d) score.lanes_us += lane_times_[d].gpu_us;
  return score;
}

}  // namespace twofold
