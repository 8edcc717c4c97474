# shellcheck shell=bash
# Building blocks of initial_build.sh, quick_build.sh and ensure_built.sh; sourced, never run.
#
# A step is a named command whose output goes to the terminal and to a log of its own. A failed step prints its name,
# command, time and last log lines. (Bash ignores `set -e` inside a step, so the functions below join with &&.)

REPOSITORY_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV_DIR="${TWOFOLD_VENV:-$REPOSITORY_ROOT/.venv}"
# Host and container that share a checkout use different directories, so that neither overwrites the other's build.
# twofold/__init__.py and the tests use the same setting.
BUILD_DIR="${TWOFOLD_BUILD_DIR:-$REPOSITORY_ROOT/build}"
NATIVE_BUILD_DIR="$BUILD_DIR/dev"
LOG_DIR="$BUILD_DIR/logs"
MIN_PYTHON_MINOR=11
NEEDED_GB=3 # for `make run` without CUDA; docs/guides/build.md has the measured sizes

step_number=0

# follow "what it does" LOG "options of follow_step.py" command…
follow() {
  local title="$1" log="$2" options="$3"
  shift 3
  # shellcheck disable=SC2086 # several options in one word
  {
    local status=0
    "$@" 2>&1 || status=$?
    printf '\x1eexit status %d\n' "$status"
  } |
    "${BASE_PYTHON:-python3}" "$REPOSITORY_ROOT/scripts/follow_step.py" --title "$title" --log "$log" --command "$*" $options
}

# run_step "what it does" command…
run_step() {
  local title="$1" options="" name="${1,,}"
  shift
  step_number=$((step_number + 1))
  if [ "$1" = build_native ]; then options=--compile; fi
  printf '==> %s\n' "$title"
  follow "$title" "$LOG_DIR/$(printf '%02d' "$step_number")-${name//[^a-z0-9]/-}.log" "$options" "$@" || exit 1
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

# Reads the source from a pipe: a full disk must not look like a missing compiler.
compiles_cxx20() {
  printf '#include <bit>\n#include <span>\nint main() { return std::popcount(0u); }\n' |
    "${CXX:-g++}" -std=c++20 -fsyntax-only -x c++ - >/dev/null 2>&1
}

# Prints everything that is missing at once, with one command to install it, here and in a log. Sets BASE_PYTHON.
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
    local message
    message="$(printf 'Twofold needs what this machine lacks:\n'
      printf '  - %s\n' "${missing[@]}"
      printf 'On Debian or Ubuntu: sudo apt-get update && sudo apt-get install -y %s' "${packages[*]}")"
    printf '%s\n' "$message" >&2
    if { mkdir -p "$LOG_DIR" && printf '%s\n' "$message" >"$LOG_DIR/prerequisites.log"; } 2>/dev/null; then
      printf 'log: %s\n' "$LOG_DIR/prerequisites.log" >&2
    fi
    return 2
  fi
  check_folders
}

# Makes the folders of the virtual environment and the build. Fails if one cannot be written, or if there is no room for a
# new installation.
check_folders() {
  local folder free_mb
  for folder in "$VENV_DIR" "$BUILD_DIR"; do
    if ! mkdir -p "$folder" 2>/dev/null || [ ! -w "$folder" ]; then
      printf 'Twofold cannot write to %s\nName folders that can be written, then run the same command again:\n' "$folder" >&2
      printf '  export TWOFOLD_VENV=~/twofold/venv TWOFOLD_BUILD_DIR=~/twofold/build' >&2
      printf ' TWOFOLD_TELEMETRY_URL=sqlite:///%s/twofold/twofold.db\n' "$HOME" >&2
      return 2
    fi
  done
  if [ ! -x "$VENV_DIR/bin/python" ]; then
    free_mb="$(df -Pk "$VENV_DIR" | awk 'NR == 2 { print int($4 / 1024) }')"
    if [ "$free_mb" -lt $((NEEDED_GB * 1000)) ]; then
      printf 'Twofold needs about %s GB; %s MB are free in %s\n' "$NEEDED_GB" "$free_mb" "$VENV_DIR" >&2
      printf 'Make room, or name folders on another disk: TWOFOLD_VENV, TWOFOLD_BUILD_DIR\n' >&2
      return 2
    fi
  fi
}

# The inputs of an installation, as one line; if the line changes, install again: also when a GPU was added.
installation_fingerprint() {
  {
    cat "$REPOSITORY_ROOT/pyproject.toml" "$REPOSITORY_ROOT/constraints.txt"
    "$BASE_PYTHON" --version
    printf '%s\n' "$VENV_DIR"
    if wants_cuda; then echo CUDA; fi
  } | sha256sum | cut -d' ' -f1
}

# is_installed PROFILE: is the virtual environment up to date for "run" or "dev"? One for dev also serves run.
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
  pip_install cmake ninja scikit-build-core pybind11 setuptools-scm
}

# Does this machine use CUDA? Chooses the PyTorch build, and whether a CUDA compiler is needed.
wants_cuda() {
  case "${TWOFOLD_CUDA:-AUTO}" in
    ON) return 0 ;;
    OFF) return 1 ;;
    *) nvidia-smi -L >/dev/null 2>&1 ;;
  esac
}

# PyTorch is installed first and by itself, because it is most of the download. Without CUDA, its CPU build: from pip's
# own index if available; else from the index in TWOFOLD_TORCH_INDEX (a local version such as +cpu precedes the plain
# one); else by uv, which knows PyTorch's index. Otherwise the CUDA build is used. Sizes are printed before downloads.
# A CPU build that was installed before this machine had a GPU is replaced.
install_torch() {
  local torch status=0 source=() no_cuda=() replace=()
  torch="$(sed -n "s/^dependencies = \\[\"\\(torch[^\"]*\\)\".*/\\1/p" "$REPOSITORY_ROOT/pyproject.toml")"
  if ! wants_cuda; then
    no_cuda=(--no-cuda)
    source=(${TWOFOLD_TORCH_INDEX:+--extra-index-url "$TWOFOLD_TORCH_INDEX"})
  elif has_torch_without_cuda; then
    replace=(--force-reinstall)
  fi
  "$VENV_DIR/bin/python" "$REPOSITORY_ROOT/scripts/torch_sizes.py" ${no_cuda[@]+"${no_cuda[@]}"} \
    -c "$REPOSITORY_ROOT/constraints.txt" ${source[@]+"${source[@]}"} ${replace[@]+"${replace[@]}"} "$torch" || status=$?
  if [ "$status" -eq 3 ]; then
    if pip_install uv && "$VENV_DIR/bin/uv" pip install --python "$VENV_DIR/bin/python" --torch-backend cpu \
      -c "$REPOSITORY_ROOT/constraints.txt" "$torch"; then
      return 0
    fi
    echo "PyTorch's CPU build could not be had; going on with the build that has CUDA. To stop: Ctrl-C"
  elif [ "$status" -ne 0 ]; then
    return "$status"
  fi
  pip_install ${source[@]+"${source[@]}"} ${replace[@]+"${replace[@]}"} "$torch"
}

has_torch_without_cuda() {
  compgen -G "$VENV_DIR/lib/python*/site-packages/torch/version.py" >/dev/null &&
    ! grep -q "^cuda\b.*= '" "$VENV_DIR"/lib/python*/site-packages/torch/version.py
}

# An nvcc that fits this machine and PyTorch: one that is here, else one from pip's index, in .venv/cuda. Only TWOFOLD_CUDA=ON
# fails without.
ready_cuda_compiler() {
  "$VENV_DIR/bin/python" "$REPOSITORY_ROOT/scripts/cuda_compiler.py" ready "$VENV_DIR/cuda" && return
  if [ "${TWOFOLD_CUDA:-AUTO}" = ON ]; then
    echo "TWOFOLD_CUDA=ON: there is no CUDA compiler, and none could be fetched; TWOFOLD_CUDA=AUTO builds for the CPU"
    return 1
  fi
  echo "going on without CUDA"
}

# The Python half, editable: a .pth file points at engine/, so an edited module needs no new install. The native half is
# built by build_native, next to the sources, and no isolated build environment is downloaded.
install_package() {
  local extras
  case "$1" in
    run) extras="server,telemetry,dashboard,loadtest" ;;
    dev) extras="dev" ;;
  esac
  pip_install --no-build-isolation --config-settings wheel.cmake=false \
    --config-settings editable.mode=inplace -e "${REPOSITORY_ROOT}[$extras]" &&
    installation_fingerprint >"$VENV_DIR/.installed-$1"
}

# Inputs of a build directory: with another checkout, interpreter, compiler or C library it is rebuilt from scratch.
toolchain() {
  printf '%s | %s | %s | %s%s\n' "$REPOSITORY_ROOT" "$("$VENV_DIR/bin/python" -VV)" \
    "$("${CXX:-g++}" --version | head -n 1)" "$(getconf GNU_LIBC_VERSION 2>/dev/null || echo 'another C library')" \
    "$(compgen -G "$VENV_DIR/cuda/nvidia/*/bin/nvcc")"
}

# build_native run|dev: incremental; configures (a second without changes; this finds new files, so that ninja need
# not check the sources' globs, which would hide the rest of its plan), then compiles changes. "run" builds what serving
# needs, "dev" also the tests' modules and programs. One configuration serves both once the tests' packages are there.
build_native() {
  local cache="$NATIVE_BUILD_DIR/CMakeCache.txt" stamp="$NATIVE_BUILD_DIR/.toolchain" target=all tests=ON
  if [ "$1" = run ]; then
    target=twofold_modules
    [ -f "$VENV_DIR/.installed-dev" ] || tests=OFF
  fi
  if [ -f "$cache" ] && [ "$(cat "$stamp" 2>/dev/null)" != "$(toolchain)" ]; then
    if ! grep -qx 'CMAKE_PROJECT_NAME:STATIC=twofold' "$cache"; then
      echo "$NATIVE_BUILD_DIR holds the build of something else; set TWOFOLD_BUILD_DIR to a directory of Twofold's own"
      return 1
    fi
    echo "$NATIVE_BUILD_DIR was made by another compiler, Python or system; rebuilding it from scratch (TWOFOLD_BUILD_DIR keeps two apart)"
    rm -rf "$NATIVE_BUILD_DIR"
  fi
  # Options are always passed explicitly, never taken from the cache of an earlier call.
  mkdir -p "$NATIVE_BUILD_DIR" && toolchain >"$stamp" &&
    PATH="$VENV_DIR/bin:$PATH" cmake -S "$REPOSITORY_ROOT" -B "$NATIVE_BUILD_DIR" -G Ninja \
      -DCMAKE_BUILD_TYPE="${TWOFOLD_BUILD_TYPE:-Release}" -DTWOFOLD_INPLACE=ON -DTWOFOLD_TESTS="$tests" \
      -DTWOFOLD_CUDA="${TWOFOLD_CUDA:-AUTO}" -DTWOFOLD_LEVELS="${TWOFOLD_LEVELS:-native}" \
      -DCMAKE_COMPILE_WARNING_AS_ERROR="${TWOFOLD_WERROR:-OFF}" \
      -DPython_EXECUTABLE="$VENV_DIR/bin/python" &&
    { PATH="$VENV_DIR/bin:$PATH" cmake --build "$NATIVE_BUILD_DIR" --target "$target" -- -n | sed 's/^/plan: /'; } &&
    PATH="$VENV_DIR/bin:$PATH" cmake --build "$NATIVE_BUILD_DIR" --target "$target" -j "${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}"
}

smoke_test() {
  (cd / && "$VENV_DIR/bin/python" -c 'import twofold, twofold._core
print("twofold", twofold.__version__, "with native module", twofold._core.__file__)')
}
