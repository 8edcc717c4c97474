#!/usr/bin/env bash
# Installs the system packages that Twofold needs on Debian 12, Ubuntu 24.04 and newer; in the container image and on a bare
# machine alike, as root or with sudo. Safe to run again: what is there is left alone. Python packages, CMake and ninja come
# later, into a virtual environment (scripts/initial_build.sh). Usage: install.sh [MORE_PACKAGES…]
set -euo pipefail

packages=(
  ca-certificates # TLS for pip
  curl            # the README's examples
  g++             # C++20
  git
  make
  procps # ps, for the scripts' users
  python3
  python3-dev  # Python.h for the native module
  python3-venv # .venv
  "$@"         # for instance sudo
)

if ! command -v apt-get >/dev/null; then
  echo "install.sh knows Debian and Ubuntu only (no apt-get here); install by hand: ${packages[*]}" >&2
  exit 2
fi

missing=()
for package in "${packages[@]}"; do
  if [ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true)" != installed ]; then
    missing+=("$package")
  fi
done

if [ "${#missing[@]}" -eq 0 ]; then
  echo "all ${#packages[@]} packages are there"
else
  as_root=()
  if [ "$(id -u)" -ne 0 ]; then
    if ! command -v sudo >/dev/null; then
      echo "install.sh needs root or sudo to install: ${missing[*]}" >&2
      exit 2
    fi
    as_root=(sudo)
  fi
  echo "installing: ${missing[*]}"
  # "${as_root[@]+…}": an empty array is no error under set -u in old Bash either.
  "${as_root[@]+"${as_root[@]}"}" apt-get update
  "${as_root[@]+"${as_root[@]}"}" env DEBIAN_FRONTEND=noninteractive \
    apt-get install -y --no-install-recommends "${missing[@]}"
fi

if ! python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
  echo "this system's $(python3 --version) is too old, Twofold needs 3.11; use Debian 12, Ubuntu 24.04 or newer" >&2
  exit 2
fi
echo "ready: $(python3 --version), $(g++ --version | head -n 1)"
