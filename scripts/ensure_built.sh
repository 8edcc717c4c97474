#!/usr/bin/env bash
# Called first by `make run`, `make test` and others: a full build if this checkout has no matching one, else an
# incremental build that is silent unless it compiles or fails. Usage: scripts/ensure_built.sh run|dev
set -euo pipefail
# shellcheck source=scripts/build_steps.sh
source "$(dirname "${BASH_SOURCE[0]}")/build_steps.sh"

check_prerequisites
if is_installed "$1"; then
  follow "Compile what changed" "$LOG_DIR/quick-build.log" "--compile --quiet" build_native "$1"
else
  "$REPOSITORY_ROOT/scripts/initial_build.sh" "$1"
fi
