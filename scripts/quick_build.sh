#!/usr/bin/env bash
# After an edit: compiles changed C++ and, only if pyproject.toml or constraints.txt changed, installs again.
# Edits to Python need neither. Usage: scripts/quick_build.sh
set -euo pipefail
# shellcheck source=scripts/build_steps.sh
source "$(dirname "${BASH_SOURCE[0]}")/build_steps.sh"

check_prerequisites
if is_installed dev; then
  run_step "Compile what changed" build_native dev
elif is_installed run; then
  run_step "Compile what changed" build_native run
else
  exec "$REPOSITORY_ROOT/scripts/initial_build.sh" dev
fi
