# shellcheck shell=bash
# Building blocks of initial_build.sh, quick_build.sh and ensure_built.sh; sourced, never run.
#
# A step is a named command whose output goes to the terminal and to a log of its own; a step that fails says its name, its
# command, its time and the last lines of its log. (Bash ignores `set -e` inside a step, so the functions below join with &&.)

REPOSITORY_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV_DIR="${TWOFOLD_VENV:-$REPOSITORY_ROOT/.venv}"
NATIVE_BUILD_DIR="$REPOSITORY_ROOT/build/dev"
LOG_DIR="$REPOSITORY_ROOT/build/logs"
MIN_PYTHON_MINOR=11

step_number=0

# run_step "what it does" command…
run_step() {
  local title="$1"
  shift
  step_number=$((step_number + 1))
  local log status=0 started=$SECONDS
  log="$LOG_DIR/$(printf '%02d' "$step_number")-$(tr -cs 'a-z0-9\n' '-' <<<"${title,,}").log"
  mkdir -p "$LOG_DIR"
  printf '==> %s\n' "$title"
  "$@" 2>&1 | tee "$log" || status=${PIPESTATUS[0]}
  if [ "$status" -ne 0 ]; then
    {
      printf '\nFAILED after %d s: %s\n' "$((SECONDS - started))" "$title"
      printf '  command: %s\n  log:     %s\n  its last lines:\n' "$*" "$log"
      tail -n 20 "$log" | sed 's/^/  | /'
    } >&2
    exit 1
  fi
  printf '    done in %d s\n' "$((SECONDS - started))"
}

# Prints the first interpreter that is new enough: $PYTHON if given, else python3, python3.14 … python3.11.
find_python() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3 python3.14 python3.13 python3.12 python3.11; do
    if "$candidate" -c "import sys; sys.exit(sys.version_info < (3, $MIN_PYTHON_MINOR))" 2>/dev/null; then
      printf '%s\n' "$candidate"
      return 0
    fi
  done
  return 1
}

compiles_cxx20() {
  local probe status=0
  probe="$(mktemp -d)"
  printf '#include <bit>\n#include <span>\nint main() { return std::popcount(0u); }\n' >"$probe/probe.cpp"
  "${CXX:-g++}" -std=c++20 -fsyntax-only "$probe/probe.cpp" >/dev/null 2>&1 || status=1
  rm -rf "$probe"
  return "$status"
}

# Says everything that is missing at once, with the one command that brings it. Sets BASE_PYTHON.
check_prerequisites() {
  local missing=() packages=()
  if BASE_PYTHON="$(find_python)"; then
    local version
    version="$("$BASE_PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
    if ! "$BASE_PYTHON" -c 'import venv, ensurepip' 2>/dev/null; then
      missing+=("the venv module of Python $version")
      packages+=("python$version-venv")
    fi
    if ! "$BASE_PYTHON" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))'; then
      missing+=("the C headers of Python $version")
      packages+=("python$version-dev")
    fi
  else
    missing+=("Python 3.$MIN_PYTHON_MINOR or newer (found: $(python3 --version 2>&1 || echo none))")
    packages+=(python3 python3-venv python3-dev)
  fi
  if ! compiles_cxx20; then
    missing+=("a C++ compiler that knows C++20 (${CXX:-g++}; GCC 11 or newer)")
    packages+=(g++)
  fi
  if ! command -v make >/dev/null; then
    missing+=(make)
    packages+=(make)
  fi
  if [ "${#missing[@]}" -gt 0 ]; then
    {
      printf 'Twofold needs what this machine lacks:\n'
      printf '  - %s\n' "${missing[@]}"
      printf 'On Debian or Ubuntu: sudo apt-get update && sudo apt-get install -y %s\n' "${packages[*]}"
    } >&2
    return 2
  fi
}

# What an installation depends on, as one line; a changed line means: install again.
installation_fingerprint() {
  {
    cat "$REPOSITORY_ROOT/pyproject.toml" "$REPOSITORY_ROOT/constraints.txt"
    "$BASE_PYTHON" --version
    printf '%s\n' "$VENV_DIR"
  } | sha256sum | cut -d' ' -f1
}

# is_installed PROFILE: is the virtual environment up to date for "run" or "dev"? What serves dev serves run.
is_installed() {
  local fingerprint stamp
  fingerprint="$(installation_fingerprint)"
  for stamp in "$VENV_DIR/.installed-$1" "$VENV_DIR/.installed-dev"; do
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$fingerprint" ]; then
      return 0
    fi
  done
  return 1
}

create_venv() {
  if [ -x "$VENV_DIR/bin/python" ] && "$VENV_DIR/bin/python" -m pip --version >/dev/null 2>&1; then
    echo "$VENV_DIR is there: $("$VENV_DIR/bin/python" --version)"
  else
    "$BASE_PYTHON" -m venv --clear "$VENV_DIR"
  fi
}

pip_install() {
  "$VENV_DIR/bin/python" -m pip install --disable-pip-version-check -c "$REPOSITORY_ROOT/constraints.txt" "$@"
}

install_build_tools() {
  pip_install cmake ninja scikit-build-core pybind11
}

# The Python half, editable: a .pth file points at engine/, so an edited module needs no new install. The native half is not
# built here (build_native puts it beside the sources), and nothing is fetched for a build environment of its own.
install_package() {
  local extras
  case "$1" in
    run) extras="server,telemetry,dashboard" ;;
    dev) extras="dev" ;;
  esac
  pip_install --no-build-isolation --config-settings wheel.cmake=false \
    --config-settings editable.mode=inplace -e "${REPOSITORY_ROOT}[$extras]" &&
    installation_fingerprint >"$VENV_DIR/.installed-$1"
}

# Incremental: configures (a second when nothing changed), compiles what changed, puts the module into engine/twofold.
build_native() {
  local cache="$NATIVE_BUILD_DIR/CMakeCache.txt"
  if [ -f "$cache" ] && ! grep -qxF "CMAKE_HOME_DIRECTORY:INTERNAL=$REPOSITORY_ROOT" "$cache"; then
    echo "the build directory was made for another checkout; starting it afresh"
    rm -rf "$NATIVE_BUILD_DIR"
  fi
  # Options are always given, never left to the cache of an earlier call.
  PATH="$VENV_DIR/bin:$PATH" cmake -S "$REPOSITORY_ROOT" -B "$NATIVE_BUILD_DIR" -G Ninja \
    -DCMAKE_BUILD_TYPE="${TWOFOLD_BUILD_TYPE:-Release}" -DTWOFOLD_INPLACE=ON -DTWOFOLD_CUDA="${TWOFOLD_CUDA:-AUTO}" \
    -DPython_EXECUTABLE="$VENV_DIR/bin/python" -Wno-dev &&
    PATH="$VENV_DIR/bin:$PATH" cmake --build "$NATIVE_BUILD_DIR" -j "$(nproc)"
}

smoke_test() {
  (cd / && "$VENV_DIR/bin/python" -c 'import twofold, twofold._core
print("twofold", twofold.__version__, "with native module", twofold._core.__file__)')
}
