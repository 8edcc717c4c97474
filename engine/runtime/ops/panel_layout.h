// Identifies this build's panel layout, so that panels in a file are never read by a build that packs
// differently.
#pragma once
#include <string>

namespace twofold {

// A hash of small matrices of every format, packed: equal wherever equal rows become equal panels. Any change
// to the packing changes it automatically.
std::string panel_layout();

}  // namespace twofold
