#!/usr/bin/env bash
# What `make run` and `make test` do first: a full build if this checkout has none that fits, else an incremental one that is
# quiet unless it fails. Usage: scripts/ensure_built.sh run|dev
set -euo pipefail
# shellcheck source=scripts/build_steps.sh
source "$(dirname "${BASH_SOURCE[0]}")/build_steps.sh"

check_prerequisites
if is_installed "$1"; then
  mkdir -p "$LOG_DIR"
  if ! build_native >"$LOG_DIR/quick-build.log" 2>&1; then
    printf 'FAILED: compiling what changed; the last lines of %s:\n' "$LOG_DIR/quick-build.log" >&2
    tail -n 40 "$LOG_DIR/quick-build.log" >&2
    exit 1
  fi
else
  "$REPOSITORY_ROOT/scripts/initial_build.sh" "$1"
fi
