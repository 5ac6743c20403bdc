#!/bin/sh
# Installs cortex as a systemd service from this checkout. Run it as root; run it again to upgrade.
#
#   packaging/install.sh gateway     # cortex.service, cortex.socket
#   packaging/install.sh neuron      # neuron.service
#
# Dependencies have the versions and hashes of packaging/requirements-*.lock. On a host without a GPU,
# TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu, the index of torch's CPU builds, saves gigabytes.
# Configuration that exists is kept. The service is not started: see the end.
set -eu

usage() { echo "usage: $0 gateway|neuron" >&2; exit 2; }
[ $# -eq 1 ] || usage
case $1 in
  gateway) unit=cortex units='cortex.service cortex.socket' lock=gateway examples='cortex.toml models.toml' ;;
  neuron) unit=neuron units=neuron.service lock=neuron${TORCH_INDEX_URL:+-cpu} examples='neuron.toml' ;;
  *) usage ;;
esac
# DESTDIR, for packagers, receives the files; the environment and the users are made by the package there.
root=${DESTDIR:-}
python=${PYTHON:-python3}
cd "$(dirname "$0")/.."

if [ -z "$root" ]; then
  [ "$(id -u)" -eq 0 ] || { echo "$0: needs root; run it with sudo" >&2; exit 1; }
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    { echo "$0: needs Python 3.11 or newer; name one: PYTHON=/path/to/python3.11 $0 $1" >&2; exit 1; }
  [ -x /opt/cortex/bin/python ] || "$python" -m venv /opt/cortex
  pip() { /opt/cortex/bin/python -m pip --disable-pip-version-check install "$@"; }
  pip --require-hashes -r packaging/requirements-build.lock -r "packaging/requirements-$lock.lock"
  if [ "$lock" = neuron-cpu ]; then
    pip --no-deps --index-url "$TORCH_INDEX_URL" "$(grep -o '^torch==[0-9.]*' packaging/requirements-neuron.lock)"
  fi
  pip --no-deps --no-build-isolation .
fi

for file in $units; do
  install -Dm644 "packaging/systemd/$file" "$root/etc/systemd/system/$file"
done
install -Dm644 packaging/systemd/cortex.sysusers "$root/usr/lib/sysusers.d/cortex.conf"
install -Dm644 docs/operations.md "$root/opt/cortex/docs/operations.md"
for example in $examples; do
  [ -e "$root/etc/cortex/$example" ] || install -Dm644 "examples/$example" "$root/etc/cortex/$example"
done

if [ -z "$root" ]; then
  systemd-sysusers
  packaging/node-key.sh "$1" /etc/cortex
  [ ! -d /run/systemd/system ] || systemctl daemon-reload  # absent while an image is made
  [ "$1" = neuron ] || echo "Make the first key: /opt/cortex/bin/cortex keys add NAME --config /etc/cortex/cortex.toml"
  echo "Edit /etc/cortex/${examples%% *}, then: systemctl enable --now $units"
fi
