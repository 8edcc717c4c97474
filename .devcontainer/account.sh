#!/usr/bin/env bash
# Makes the account that the container works as, with uid and gid 1000: the usual owner of a checkout, so that the workspace
# mounted into the container is writable. Where the base has a user or group with that number (Ubuntu's images: ubuntu), that one
# is renamed; with another number beside it, the tools' updateRemoteUserUID would refuse a host's 1000, which is taken.
# Usage: account.sh NAME [OPTION…]      options go to useradd, usermod and groupmod, e.g. --prefix DIR
set -euo pipefail

name="$1"
shift
number=1000

prefix=""
if [ "${1:-}" = --prefix ]; then prefix="$2"; fi
# account_with passwd|group NUMBER: its name, if there is one.
account_with() {
  awk -F: -v number="$2" '$3 == number { print $1; exit }' "$prefix/etc/$1"
}

group="$(account_with group "$number")"
if [ -z "$group" ]; then
  groupadd "$@" --gid "$number" "$name"
elif [ "$group" != "$name" ]; then
  groupmod "$@" --new-name "$name" "$group"
fi

user="$(account_with passwd "$number")"
if [ -z "$user" ]; then
  useradd "$@" --uid "$number" --gid "$number" --no-create-home --home-dir "/home/$name" --shell /bin/bash "$name"
elif [ "$user" != "$name" ]; then
  usermod "$@" --login "$name" --gid "$number" --home "/home/$name" --shell /bin/bash "$user"
fi
# Not by --move-home: a directory of a lower layer of an image cannot be renamed.
if [ ! -d "$prefix/home/$name" ]; then
  mkdir -p "$prefix/home/$name"
  if [ -d "$prefix/etc/skel" ]; then cp -r "$prefix/etc/skel/." "$prefix/home/$name"; fi
fi
chown -R "$number:$number" "$prefix/home/$name"
