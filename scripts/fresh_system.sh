#!/usr/bin/env bash
# The README's first commands in a fresh Debian or Ubuntu, by a user without privileges: prints minutes and megabytes, then
# the same for a second `make run`. Needs root, debootstrap, 5 GB in FOLDER (15 GB where PyTorch has no CPU build), and ends
# within an hour.
# Usage: scripts/fresh_system.sh bookworm|trixie|noble FOLDER [pip.conf [DIRECTORY THAT pip.conf NAMES]]
# PORT and DASHBOARD_PORT choose the ports; TWOFOLD_LEVELS=avx2 compiles what a CPU without AVX-512 would get.
set -euo pipefail
cd "$(dirname "$0")/.."
suite="$1" root="$2" pip_configuration="${3:-}" pip_folder="${4:-}"
export PORT="${PORT-10002}" DASHBOARD_PORT="${DASHBOARD_PORT-8501}" TWOFOLD_LEVELS="${TWOFOLD_LEVELS:-native}"
unset CMAKE_CXX_COMPILER_LAUNCHER
packages="$(sed -n 's/^sudo apt-get install -y //p' README.md)"

unmount() {
  local folder
  for folder in "$root/proc" "$root/dev" ${pip_folder:+"$root$pip_folder"}; do
    # Lazily where a program of the system has not ended yet.
    if mountpoint -q "$folder"; then umount "$folder" 2>/dev/null || umount --lazy "$folder"; fi
  done
}
trap unmount EXIT

# An older debootstrap has no script for a newer Ubuntu; gutsy's is the one that it gives to all of them. An installed
# Ubuntu has "universe" too, where python3-venv is.
components=main source=()
if [ "$suite" = noble ]; then components=main,universe source=(http://archive.ubuntu.com/ubuntu gutsy); fi
[ -x "$root/bin/bash" ] ||
  debootstrap --variant=minbase "--components=$components" "$suite" "$root" ${source[@]+"${source[@]}"} >/dev/null
mount --bind /proc "$root/proc"
mount --bind /dev "$root/dev"
cp /etc/resolv.conf "$root/etc/resolv.conf"
# shellcheck disable=SC2016,SC2086 # the shell inside expands; one word per package
chroot "$root" env DEBIAN_FRONTEND=noninteractive bash -c 'apt-get update -qq && apt-get install -y -qq "$@" >/dev/null' - $packages
# After the packages: one of them rewrites this file.
install -D -m 644 /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/ca-certificates.crt"
chroot "$root" bash -c 'id reader >/dev/null 2>&1 || useradd --create-home reader; rm -rf /home/reader/twofold'
if [ -n "$pip_configuration" ]; then install -D -m 644 "$pip_configuration" "$root/home/reader/.config/pip/pip.conf"; fi
if [ -n "$pip_folder" ]; then
  mkdir -p "$root$pip_folder"
  mount --bind -o ro "$pip_folder" "$root$pip_folder"
fi
git bundle create -q "$root/home/reader/twofold.bundle" HEAD

as_reader=(chroot "--userspec=reader" "$root" env HOME=/home/reader USER=reader bash -c)

# Runs `make run` until the server answers, says after how many seconds, and stops it.
make_run() {
  local began=$SECONDS log="$root/home/reader/run.log"
  "${as_reader[@]}" "cd ~/twofold && exec timeout 50m make run" >"$log" 2>&1 &
  local run=$!
  until python3 -c "import urllib.request as r; r.urlopen('http://127.0.0.1:$PORT/health', timeout=1)" 2>/dev/null; do
    if ! kill -0 "$run" 2>/dev/null; then
      tail -n 40 "$log" >&2
      exit 1
    fi
    sleep 0.2
  done
  echo "$1: $((SECONDS - began)) s until the server answers"
  grep -E 'done in|^==> (Compile|Install|Built)' "$log" || true
  kill "$run" # timeout passes it on
  wait "$run" || true
}

"${as_reader[@]}" "cd && git -c advice.detachedHead=false clone -q twofold.bundle twofold"
make_run "first make run ($suite, $(chroot "$root" python3 --version), $(chroot "$root" g++ -dumpfullversion))"
"${as_reader[@]}" "cd && du -sm twofold/.venv twofold/build twofold/.git"
make_run "second make run"
