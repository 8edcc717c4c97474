// The cgroups whose limits hold for this process.
#pragma once
#include <string>
#include <vector>

namespace twofold {

// Folders of the process's group and of the groups above it, in version 2 and in the hierarchy of `controller`
// ("cpu", "memory") in version 1. A container without a cgroup namespace sees its own group as the top folder:
// groups that do not exist there are left out. `root` is put before /sys and /proc, for tests.
std::vector<std::string> cgroup_folders(const std::string& controller, const std::string& root = "");

}  // namespace twofold
