// Which cores a team may count on: the process's affinity mask, one logical CPU per physical core, and no
// more than the cgroup's CPU quota pays for.
#include <sched.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <set>
#include <string>
#include <thread>

#include "thread_team.h"

namespace twofold {
namespace {

// The siblings file names the hardware threads of a core ("0,64" or "0-1"): equal text, same core.
std::string core_of(int cpu) {
  std::ifstream file("/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/thread_siblings_list");
  std::string siblings;
  return std::getline(file, siblings) ? siblings : "cpu" + std::to_string(cpu);
}

// cgroup v2: "max 100000" or "<quota> <period>"; v1: two files, quota -1 for none. 0 when there is no limit.
double quota_cores() {
  std::ifstream v2("/sys/fs/cgroup/cpu.max");
  std::string quota;
  double period = 0;
  if (v2 >> quota >> period) {
    if (quota == "max" || period <= 0) return 0;
    return std::strtod(quota.c_str(), nullptr) / period;
  }
  std::ifstream v1_quota("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"),
      v1_period("/sys/fs/cgroup/cpu/cpu.cfs_period_us");
  double value = 0;
  return (v1_quota >> value) && (v1_period >> period) && value > 0 && period > 0 ? value / period : 0;
}

std::vector<int> allowed_cpus() {
  std::vector<int> cpus;
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0) {
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
      if (CPU_ISSET(static_cast<size_t>(cpu), &set)) cpus.push_back(cpu);
    }
  }
  if (cpus.empty()) {  // more than CPU_SETSIZE processors, or a sandbox that forbids the question
    const int count = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
    for (int cpu = 0; cpu < count; ++cpu) cpus.push_back(cpu);
  }
  return cpus;
}

}  // namespace

std::vector<int> usable_cores() {
  std::set<std::string> seen;
  std::vector<int> cores;
  for (const int cpu : allowed_cpus()) {
    if (seen.insert(core_of(cpu)).second) cores.push_back(cpu);
  }
  if (const double quota = quota_cores(); quota > 0) {
    const size_t paid = std::max<size_t>(1, static_cast<size_t>(std::ceil(quota)));
    cores.resize(std::min(cores.size(), paid));
  }
  if (cores.size() > static_cast<size_t>(ThreadTeam::kMaxThreads)) cores.resize(ThreadTeam::kMaxThreads);
  return cores;
}

}  // namespace twofold
