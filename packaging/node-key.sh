#!/bin/sh
# The key of the nodes, one for the whole fleet. install.sh runs it.
#
#   packaging/node-key.sh gateway /etc/cortex   # makes neuron.key, and puts it into cortex.env for the gateway
#   packaging/node-key.sh neuron /etc/cortex    # lets the service read the neuron.key that was copied here
#
# A key that exists is kept.
set -eu

directory=$2 key=$2/neuron.key environment=$2/cortex.env
umask 077
mkdir -p "$directory"

case $1 in
  gateway)
    grep -qs '^CORTEX_NODE_KEY=' "$environment" && exit
    [ -e "$key" ] || ${NEURON:-/opt/cortex/bin/neuron} key > "$key"
    echo "CORTEX_NODE_KEY=$(cat "$key")" >> "$environment"
    echo "The key of the nodes is in $key: copy it to $directory of every node."
    ;;
  neuron)
    if [ -e "$key" ]; then
      [ "$(id -u)" -ne 0 ] || chgrp neuron "$key"
      chmod 440 "$key"
    else
      echo "There is no $key yet: copy it from the gateway's host, or, without a gateway, make one:" >&2
      echo "  ${NEURON:-/opt/cortex/bin/neuron} key > $key. Then run this script again." >&2
    fi
    ;;
esac
