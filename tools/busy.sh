#!/bin/sh
# Run a command beside busy loops: what depends on how busy the machine is shows.
#
#     tools/busy.sh LOOPS COMMAND...
#
# It ends with the command's exit code. The loops end with it, also where it is killed.
loops=$1
shift
pids=
trap 'kill $pids 2>/dev/null' EXIT
trap 'exit 130' INT TERM
loop='while kill -0 "$0" 2>/dev/null; do i=0; while [ $i -lt 100000 ]; do i=$((i + 1)); done; done'
for _ in $(seq "$loops"); do
  sh -c "$loop" $$ &
  pids="$pids $!"
done
"$@"
exit $?
