#!/usr/bin/env bash
# Checks that this machine, container or not, builds and runs Twofold: tools, build, a short generation and a few tests.
# Continues after a failure and lists failures at the end. Exit code 1: a failure. Usage: scripts/verify_devcontainer.sh
set -uo pipefail
# shellcheck source=scripts/build_steps.sh
source "$(dirname "${BASH_SOURCE[0]}")/build_steps.sh"
cd "$REPOSITORY_ROOT" || exit 1

failed=()
log="$(mktemp)"
trap 'rm -f "$log"' EXIT

# check "what" command…: runs it; on failure shows its output and continues.
check() {
  local title="$1"
  shift
  if "$@" >"$log" 2>&1; then
    printf 'ok      %-28s %s\n' "$title" "$(tail -n 1 "$log" | cut -c 1-90)"
  else
    printf 'FAILED  %s\n' "$title"
    tail -n 15 "$log" | sed 's/^/        | /'
    failed+=("$title")
  fi
}

# note "what" command…: for optional components.
note() {
  local title="$1"
  shift
  if "$@" >"$log" 2>&1; then
    printf 'there   %-28s %s\n' "$title" "$(head -n 1 "$log" | cut -c 1-90)"
  else
    printf 'absent  %-28s (not needed)\n' "$title"
  fi
}

short_generation() {
  "$VENV_DIR/bin/twofold" generate --accelerator none --max-tokens 8 --seed 0 --json --prompt "Once upon a time" |
    "$VENV_DIR/bin/python" -c 'import json, sys
answer = json.load(sys.stdin)
assert answer["usage"]["completion_tokens"] == 8 or answer["text"], answer
print(repr(answer["text"]))'
}

models_mount_usable() {
  [ -r /models ] && [ -w /models ] && echo /models
}

check "system packages and compiler" check_prerequisites
check "git" git --version
check "curl" bash -c "curl --version | head -n 1"
note "nvcc" nvcc --version
note "NVIDIA GPU" nvidia-smi -L
note "models mount" models_mount_usable
if [ "$(id -u)" -eq 0 ]; then
  printf 'note    running as root; the devcontainer does not\n'
fi
check "build" "$REPOSITORY_ROOT/scripts/ensure_built.sh" dev
check "native module" smoke_test
check "twofold version" "$VENV_DIR/bin/twofold" version
check "short generation" short_generation
check "tests" "$VENV_DIR/bin/python" -m pytest -q -m "not slow" tests/api tests/core tests/weights tests/rules

if [ "${#failed[@]}" -gt 0 ]; then
  printf '\n%d of the checks failed:' "${#failed[@]}"
  printf ' [%s]' "${failed[@]}"
  printf '\n'
  exit 1
fi
printf '\nEverything works.\n'
