#!/usr/bin/env bash
# From a fresh clone to a working installation: checks the machine, makes .venv, installs, compiles, imports the result.
# Safe to run again. Usage: scripts/initial_build.sh [run|dev]     run: what serving needs; dev (default): tests and linters too
set -euo pipefail
# shellcheck source=scripts/build_steps.sh
source "$(dirname "${BASH_SOURCE[0]}")/build_steps.sh"

profile="${1:-dev}"
case "$profile" in
  run | dev) ;;
  *)
    echo "initial_build.sh was given '$profile'; it takes run or dev" >&2
    exit 2
    ;;
esac

started=$SECONDS
check_prerequisites
run_step "Make the virtual environment" create_venv
run_step "Install build tools" install_build_tools
run_step "Install PyTorch" install_torch
if wants_cuda; then run_step "Find a CUDA compiler" ready_cuda_compiler; fi
run_step "Install Twofold and what it needs ($profile)" install_package "$profile"
run_step "Compile the native modules" build_native "$profile"
run_step "Import it" smoke_test
printf '==> Built in %d s. Logs: %s/\n' "$((SECONDS - started))" "$LOG_DIR"
