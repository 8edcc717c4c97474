// The process's affinity mask, one logical CPU per physical core, limited to the cgroup's CPU quota, and the
// memory nodes of these cores.
#include "host/pool_plan.h"

#include <sched.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <set>
#include <stdexcept>
#include <thread>

#include "host/cgroup.h"

namespace twofold {
namespace {

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// The siblings file names the hardware threads of a core ("0,64" or "0-1"): equal text, same core.
std::string core_of(int cpu, const std::string& root) {
  const std::string siblings = first_line(root + "/sys/devices/system/cpu/cpu" + std::to_string(cpu) +
                                          "/topology/thread_siblings_list");
  return siblings.empty() ? "cpu" + std::to_string(cpu) : siblings;
}

// CPUs' worth of time that the process may use, by the tightest of its cgroups; 0 without a limit. Version 2:
// "max 100000" or "<quota> <period>"; version 1: two files, quota -1 for none.
double quota_cores(const std::string& root) {
  double least = 0;
  for (const std::string& folder : cgroup_folders("cpu", root)) {
    std::ifstream v2(folder + "/cpu.max"), v1_quota(folder + "/cpu.cfs_quota_us"),
        v1_period(folder + "/cpu.cfs_period_us");
    double quota = 0, period = 0;
    const bool limited = (v2 >> quota >> period) || ((v1_quota >> quota) && (v1_period >> period));
    if (!limited || quota <= 0 || period <= 0) continue;
    least = least > 0 ? std::min(least, quota / period) : quota / period;
  }
  return least;
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

// "0-3,8,10-11" as numbers; empty if it is no such list.
std::vector<int> parse_list(const std::string& text) {
  constexpr int kMost = 1 << 20;
  std::vector<int> numbers;
  const char* at = text.data();
  const char* const end = at + text.size();
  while (at < end) {
    int low = 0;
    auto parsed = std::from_chars(at, end, low);
    if (parsed.ec != std::errc() || low < 0) return {};
    int high = low;
    at = parsed.ptr;
    if (at < end && *at == '-') {
      parsed = std::from_chars(at + 1, end, high);
      if (parsed.ec != std::errc() || high < low || high > kMost) return {};
      at = parsed.ptr;
    }
    for (int number = low; number <= high; ++number) numbers.push_back(number);
    if (at < end && *at != ',') return {};
    if (at < end && ++at == end) return {};
  }
  return numbers;
}

struct Node {
  int id;
  std::vector<int> cores;  // usable ones, one logical CPU each
  std::vector<int> cpus;   // all logical CPUs of the node
};

// The nodes with usable cores; a single node with all cores if the system describes none.
std::vector<Node> nodes_of(const std::vector<int>& cores, const std::string& root) {
  std::vector<Node> nodes;
  const std::string folder = root + "/sys/devices/system/node/";
  for (const int id : parse_list(first_line(folder + "online"))) {
    Node node{id, {}, parse_list(first_line(folder + "node" + std::to_string(id) + "/cpulist"))};
    std::copy_if(cores.begin(), cores.end(), std::back_inserter(node.cores), [&](int core) {
      return std::find(node.cpus.begin(), node.cpus.end(), core) != node.cpus.end();
    });
    if (!node.cores.empty()) nodes.push_back(std::move(node));
  }
  if (nodes.empty()) nodes.push_back({0, cores, cores});
  return nodes;
}

std::vector<Node> chosen_nodes(const std::string& numa, const std::vector<int>& cores,
                               const std::string& root) {
  std::vector<Node> nodes = nodes_of(cores, root);
  if (numa == "auto") return nodes;
  const std::vector<int> wanted = parse_list(numa);
  std::string there;
  for (const Node& node : nodes) there.append(there.empty() ? "" : ",").append(std::to_string(node.id));
  if (wanted.empty()) {
    throw std::invalid_argument("numa is \"" + numa + "\"; expected off, auto, or nodes such as " + there);
  }
  std::vector<Node> chosen;
  for (const int id : std::set<int>(wanted.begin(), wanted.end())) {
    const auto found = std::find_if(nodes.begin(), nodes.end(), [id](const Node& n) { return n.id == id; });
    if (found == nodes.end()) {
      throw std::invalid_argument("numa names node " + std::to_string(id) +
                                  "; the nodes with cores this process may use are " + there);
    }
    chosen.push_back(std::move(*found));
  }
  return chosen;
}

std::string count_of(size_t n, const char* what) {
  return std::to_string(n).append(" ").append(what).append(n == 1 ? "" : "s");
}

}  // namespace

std::vector<int> usable_cores(const std::string& root) {
  std::set<std::string> seen;
  std::vector<int> cores;
  for (const int cpu : allowed_cpus()) {
    if (seen.insert(core_of(cpu, root)).second) cores.push_back(cpu);
  }
  if (const double quota = quota_cores(root); quota > 0) {
    // Rounded down: one thread too many is stopped for the rest of every period, and the others wait for it.
    const size_t paid = std::max<size_t>(1, static_cast<size_t>(quota));
    cores.resize(std::min(cores.size(), paid));
  }
  if (cores.size() > static_cast<size_t>(kMaxPoolThreads)) cores.resize(kMaxPoolThreads);
  return cores;
}

PoolPlan plan_pool(int num_threads, const std::string& numa, const std::string& root) {
  if (num_threads < 0 || num_threads > kMaxPoolThreads) {
    throw std::invalid_argument("ThreadPool: num_threads is " + std::to_string(num_threads) +
                                "; expected 0 (one per physical core) to " + std::to_string(kMaxPoolThreads));
  }
  PoolPlan plan;
  if (numa == "off" && num_threads > 0) {
    plan.threads.assign(static_cast<size_t>(num_threads), {-1, 0, {}});
    plan.reason = count_of(plan.threads.size(), "thread") + ", bound to nothing";
    return plan;
  }
  const std::vector<int> cores = usable_cores(root);
  if (numa == "off") {
    plan.threads.assign(cores.size(), {-1, 0, {}});
    plan.reason = count_of(cores.size(), "thread") + ", one per usable core, bound to nothing";
    return plan;
  }
  const std::vector<Node> nodes = chosen_nodes(numa, cores, root);
  size_t total_cores = 0;
  for (const Node& node : nodes) total_cores += node.cores.size();
  const size_t count = num_threads == 0 ? total_cores : static_cast<size_t>(num_threads);
  const bool fills = count == total_cores && total_cores == cores.size();
  // A node's share of the threads is its share of the cores; with fewer threads than nodes, some nodes get
  // none.
  size_t cores_before = 0;
  for (const Node& node : nodes) {
    const size_t first = count * cores_before / total_cores;
    cores_before += node.cores.size();
    const size_t own = count * cores_before / total_cores - first;
    for (size_t i = 0; i < own; ++i) {
      const int core = fills ? node.cores[i] : -1;
      const bool bind_to_node = !fills && (nodes.size() > 1 || numa != "auto");
      plan.threads.push_back({core, plan.num_nodes - 1,
                              fills          ? std::vector<int>{core}
                              : bind_to_node ? node.cpus
                                             : std::vector<int>{}});
    }
    if (own > 0) ++plan.num_nodes;
  }
  --plan.num_nodes;
  plan.reason = count_of(count, "thread") + " on " +
                count_of(static_cast<size_t>(plan.num_nodes), "memory node") +
                (fills                                ? ", each bound to its core"
                 : plan.threads.front().bound.empty() ? ", bound to nothing"
                                                      : ", bound to its node");
  return plan;
}

}  // namespace twofold
