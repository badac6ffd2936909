#!/usr/bin/env bash
# Installs what the tests of the generated apps need, and nothing when all of it is there:
#
#   Debian packages   a C++ compiler, CMake, cJSON, OpenSSL, Chromium (only as root, by apt-get)
#   build/tools/      the C headers of onnxruntime (Debian 13's, by apt with folders of its own), and the libraries of
#                     older releases (from their wheels), which tests hold the apps against
#   node_modules      beside this file, by npm: of the PATH when Node there is 20 or newer, else of the environment,
#                     which has a Node because the type checker needs one
#
#   install.sh PYTHON     PYTHON is the environment's interpreter
#
# What cannot be had is said, and the tests that need it skip with the same reason. With TFX_APPS=required, as in CI,
# it is an error.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
tools=$root/build/tools
python=${1:?install.sh PYTHON}
missing=()

have() { command -v "$1" >/dev/null 2>&1; }
header() { printf '#include <%s>\n' "$1" | cc -E -x c - >/dev/null 2>&1; }

# Prints the Debian packages whose command or header is not there.
wanted_packages() {
  have g++ || echo g++
  have cmake || echo cmake
  have pkg-config || echo pkg-config
  header cjson/cJSON.h || echo libcjson-dev
  header openssl/evp.h || echo libssl-dev
  have chromium || have chromium-browser || have google-chrome || printf 'chromium fonts-liberation '
}

install_packages() {
  local packages
  # shellcheck disable=SC2207 # names without spaces
  packages=($(wanted_packages))
  [ ${#packages[@]} -gt 0 ] || return 0
  if [ "$(id -u)" -eq 0 ] && have apt-get; then
    echo "installing ${packages[*]}" >&2
    # Lists that are missing or out of date are fetched only after an install has failed without.
    export DEBIAN_FRONTEND=noninteractive
    apt-get install -qq --yes --no-install-recommends "${packages[@]}" >"$tools/apt.log" 2>&1 ||
      { apt-get update -qq >>"$tools/apt.log" 2>&1 &&
        apt-get install -qq --yes --no-install-recommends "${packages[@]}" >>"$tools/apt.log" 2>&1; } ||
      tail -n 5 "$tools/apt.log" >&2
    # shellcheck disable=SC2207
    packages=($(wanted_packages))
  fi
  [ ${#packages[@]} -eq 0 ] || missing+=("${packages[*]}: install as root: apt-get install ${packages[*]}")
}

# An old keyring does not have the keys of a later Debian; its update does.
fetch_headers() {
  local work=$1
  shift
  (cd "$work" && "$@" update && "$@" download libonnxruntime-dev) >"$tools/headers.log" 2>&1
}

update_keyring() {
  grep -q NO_PUBKEY "$tools/headers.log" && [ "$(id -u)" -eq 0 ] &&
    apt-get update -qq >>"$tools/apt.log" 2>&1 &&
    apt-get install -qq --yes --only-upgrade debian-archive-keyring >>"$tools/apt.log" 2>&1
}

# Unpacks the headers of Debian 13's libonnxruntime-dev, which Debian 12 does not have. apt checks signatures as for any
# other package; its lists and its cache are folders of their own, so that the system's sources stay as they are.
install_headers() {
  local folder=$tools/onnxruntime-headers work=$tools/apt.new
  [ -f "$folder/onnxruntime_c_api.h" ] && return 0
  if ! have apt-get || ! have dpkg-deb; then
    missing+=("onnxruntime's C headers: put those of any release from 1.20 on into $folder")
    return 0
  fi
  echo "fetching onnxruntime's C headers" >&2
  rm -rf "$work" && mkdir -p "$work/state/lists/partial" "$work/cache/archives/partial" "$work/none"
  local keys=/usr/share/keyrings/debian-archive-keyring.gpg mirror
  mirror=$(grep -rhoE '(https?|file|copy):[^ ]+/debian/?( |$)' /etc/apt/sources.list /etc/apt/sources.list.d 2>/dev/null |
    head -n 1) || true
  echo "deb [signed-by=$keys] ${mirror% } trixie main" >"$work/sources.list"
  local apt=(apt-get -qq -o "Dir::State=$work/state" -o "Dir::Cache=$work/cache" -o "Dir::Etc::sourcelist=$work/sources.list"
    -o "Dir::Etc::sourceparts=$work/none" -o "Dir::Etc::preferencesparts=$work/none" -o APT::Sandbox::User=
    -o Acquire::Languages=none -o APT::Update::Error-Mode=any)
  if { fetch_headers "$work" "${apt[@]}" || { update_keyring && fetch_headers "$work" "${apt[@]}"; }; } &&
    dpkg-deb -x "$work"/libonnxruntime-dev_*.deb "$work/unpacked"; then
    rm -rf "$folder"
    mv "$work/unpacked/usr/include/onnxruntime" "$folder"
  else
    tail -n 5 "$tools/headers.log" >&2
    missing+=("onnxruntime's C headers: Debian 13's libonnxruntime-dev cannot be fetched (see $tools/headers.log)")
  fi
  rm -rf "$work"
}

# Keeps the library of an older release: any interpreter's wheel holds the same one.
install_library() {
  local version=$1 folder=$tools/onnxruntime-$1 work=$tools/wheel.new
  [ -f "$folder/libonnxruntime.so" ] && return 0
  echo "fetching onnxruntime $version" >&2
  rm -rf "$work" && mkdir -p "$work" "$folder"
  if [ "$(uname -s)" = Linux ] &&
    "$python" -m pip download --quiet --disable-pip-version-check --no-deps --dest "$work" --only-binary :all: \
      --python-version 3.11 --platform "manylinux_2_28_$(uname -m)" --platform "manylinux_2_27_$(uname -m)" \
      "onnxruntime==$version" 2>"$tools/wheel.log" &&
    "$python" -m zipfile -e "$work"/onnxruntime-*.whl "$work"; then
    mv "$work"/onnxruntime/capi/libonnxruntime.so.* "$folder/libonnxruntime.so"
  else
    missing+=("onnxruntime $version: no wheel could be fetched for $(uname -sm)")
  fi
  rm -rf "$work"
}

# The newer Node of the two goes first in the PATH that npm runs with.
install_node_modules() {
  local stamp=$here/node_modules/.installed bin
  if ! cmp -s "$here/package-lock.json" "$stamp"; then
    bin=$("$python" "$here/toolchain.py" node) || { missing+=("Node 20 or newer, with npm: see https://nodejs.org"); return 0; }
    echo "installing the packages of $here/package.json" >&2
    # onnxruntime-node's install script would download a GPU library from elsewhere.
    if (cd "$here" && PATH="$bin:$PATH" npm ci --ignore-scripts --no-audit --no-fund --loglevel=error) >"$tools/npm.log" 2>&1; then
      cp "$here/package-lock.json" "$stamp"
    else
      tail -n 5 "$tools/npm.log" >&2
      missing+=("the packages of $here/package.json: npm ci failed (see $tools/npm.log)")
    fi
  fi
}

mkdir -p "$tools"
install_packages
install_headers
install_library 1.19.2
install_library 1.20.1
install_node_modules

for each in "${missing[@]+"${missing[@]}"}"; do echo "missing: $each" >&2; done
if [ ${#missing[@]} -gt 0 ] && [ "${TFX_APPS:-}" = required ]; then
  echo "error: TFX_APPS=required wants all of it" >&2
  exit 1
fi
