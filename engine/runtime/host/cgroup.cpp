#include "host/cgroup.h"

#include <filesystem>
#include <fstream>
#include <sstream>

namespace twofold {
namespace {

// Whether `name` is one of the names in `list`, which commas separate.
bool is_listed(const std::string& name, const std::string& list) {
  std::istringstream names(list);
  for (std::string one; std::getline(names, one, ',');) {
    if (one == name) return true;
  }
  return false;
}

}  // namespace

std::vector<std::string> cgroup_folders(const std::string& controller, const std::string& root) {
  std::vector<std::string> folders;
  std::ifstream groups(root + "/proc/self/cgroup");
  // A line is "id:controllers:path"; version 2 has no controllers.
  for (std::string line; std::getline(groups, line);) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    std::string top = root + "/sys/fs/cgroup";
    if (second > first + 1) {
      if (!is_listed(controller, line.substr(first + 1, second - first - 1))) continue;
      top.append("/").append(controller);
    }
    std::string path = line.substr(second + 1);
    while (true) {
      while (!path.empty() && path.back() == '/') path.pop_back();
      std::error_code ignored;
      if (std::filesystem::is_directory(top + path, ignored)) folders.push_back(top + path);
      if (path.empty()) break;
      path.resize(path.find_last_of('/') == std::string::npos ? 0 : path.find_last_of('/'));
    }
  }
  return folders;
}

}  // namespace twofold
