#!/usr/bin/env bash
# What `make run`, `make test` and others do first: a full build if this checkout has none that fits, else an incremental one that
# says nothing unless it compiles or fails. Usage: scripts/ensure_built.sh run|dev
set -euo pipefail
# shellcheck source=scripts/build_steps.sh
source "$(dirname "${BASH_SOURCE[0]}")/build_steps.sh"

check_prerequisites
if is_installed "$1"; then
  follow "Compile what changed" "$LOG_DIR/quick-build.log" "--compile --quiet" build_native "$1"
else
  "$REPOSITORY_ROOT/scripts/initial_build.sh" "$1"
fi
