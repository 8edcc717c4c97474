// Says what this build's panels are, so that panels in a file are read by no build that packs others.
#pragma once
#include <string>

namespace twofold {

// The same text wherever the same rows become the same panels: a hash of small matrices of every format, packed.
// Whoever changes how panels are packed changes it without thinking of it.
std::string panel_layout();

}  // namespace twofold
