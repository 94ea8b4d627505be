#!/usr/bin/env bash
# Container trial without Docker: the Dockerfile's steps in a fresh Debian root, then `toque demo`.
#
#   sudo tools/try_container.sh FOLDER [NAME=VALUE ...]
#
# FOLDER is made and is left for looking at; NAME=VALUE are build arguments, e.g. DEVICE=cpu. Needs
# debootstrap, chroot and about 6 GB. From the environment:
#   MIRROR   of Debian, where debootstrap's own is not wanted
#   BRING    files and folders of this machine that the steps may read, by their own paths, such as
#            a folder of wheels or certificates
# pip's own variables (PIP_...) and proxies are passed on.
set -euo pipefail

usage() { sed -n '2,12s/^# \{0,1\}//p' "$0"; exit 2; }
[ $# -ge 1 ] || usage
[ "$(id -u)" = 0 ] || { echo "chroot needs root: sudo $0 $*" >&2; exit 2; }
command -v debootstrap >/dev/null || { echo "debootstrap is not installed: apt install debootstrap" >&2; exit 2; }

source=$(cd "$(dirname "$0")/.." && pwd)
root=$1
shift
[ ! -e "$root" ] || { echo "$root exists; name a folder that does not." >&2; exit 2; }
suite=$(sed -n 's/^FROM debian:\([a-z]*\).*/\1/p' "$source/Dockerfile")

inside=(PATH=/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8)
while IFS= read -r line; do inside+=("$line"); done \
  < <(env | grep -E '^(PIP_|https?_proxy=|HTTPS?_PROXY=|no_proxy=|NO_PROXY=|SSL_CERT_FILE=)' || true)
user=root
folder=/

in_root() { # in_root USER COMMAND: with a shell, as RUN does
  env -i "${inside[@]}" chroot --userspec="$1" "$root" /bin/sh -c "cd $folder && $2" < /dev/null
}

mounted=()
unmount() {
  for ((i = ${#mounted[@]} - 1; i >= 0; i--)); do umount "${mounted[i]}" || true; done
}
trap unmount EXIT
bind() {
  if [ -d "$1" ]; then mkdir -p "$root$1"; else mkdir -p "$root$(dirname "$1")" && touch "$root$1"; fi
  mount --bind "$1" "$root$1"
  mounted+=("$root$1")
}

echo "== debootstrap $suite"
debootstrap --variant=minbase "$suite" "$root" ${MIRROR:+"$MIRROR"}
bind /proc
bind /dev
for path in ${BRING:-}; do bind "$path"; done
cp -L /etc/resolv.conf "$root/etc/resolv.conf"

# One instruction a line; ARG without a value is what the command line or nothing says.
instructions=$(grep -v '^ *#' "$source/Dockerfile" | sed -e ':a' -e '/\\$/{N;s/\\\n */ /;ba' -e '}')
while IFS= read -r line; do
  word=${line%% *}
  rest=${line#* }
  case $word in
    ARG)
      name=${rest%%=*}
      given=""
      for argument in "$@"; do [ "${argument%%=*}" != "$name" ] || given=$argument; done
      if [ -n "$given" ]; then inside+=("$given"); elif [ "$rest" != "$name" ]; then inside+=("$rest"); fi
      ;;
    ENV) inside+=("$rest") ;;
    USER) user=$rest ;;
    WORKDIR) folder=$rest ;;
    COPY)
      to=${rest##* }
      from=${rest% *}
      mkdir -p "$root${to%/*}"
      echo "== COPY $rest"
      # shellcheck disable=SC2086  # several names
      (cd "$source" && cp -r $from "$root$to")
      ;;
    RUN)
      echo "== RUN $rest"
      in_root "$user" "$rest"
      ;;
  esac
done <<< "$instructions"

uid=$(in_root root "id -u $user")
echo "== toque demo, as $user ($uid)"
[ "$uid" != 0 ] || { echo "The image would run as root." >&2; exit 1; }
inside+=("HOME=/home/$user")
in_root "$uid:$uid" "python /opt/toque/container_health.py && toque demo"
echo "== done: every step, and the demo, in $root"
