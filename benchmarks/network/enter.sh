#!/bin/sh
# enter.sh ADDRESS COMMAND: run a shell command on a node of the shaped network, as ssh would on a host.
#
# The network's name is in QCOMP_NETWORK, and node i has the address 10.77.0.<i + 1>. The command gets a host name
# and System V objects of its own, so that no library takes two nodes for one machine. Options before the address,
# which mpiexec gives to ssh, are skipped.
set -eu
while [ "${1#-}" != "$1" ]; do shift; done
node=$((${1##*.} - 1))
shift
exec nsenter --net="/run/netns/$QCOMP_NETWORK-$node" unshare --uts --ipc \
    sh -c 'hostname "$0" && exec "$@"' "node$node" sh -c "exec $*"
