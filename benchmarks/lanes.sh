#!/bin/bash
# Lanes of measurements side by side, which go on when the shell that began them ends:
#
#     bash benchmarks/lanes.sh start OUT LANE...
#     bash benchmarks/lanes.sh wait OUT SECONDS
#
# A lane is stages that run one after the other, such as "tests integer:portable one_gpu:images". `tests` is
# `make test-gpu`; SCRIPT:NAME is `benchmarks/SCRIPT.sh NAME OUT`; with words of its own, divided by commas, as in
# "one_gpu:study,benchmarks/study/gsm8k.toml,9", it gets these in place of OUT. A lane that begins with gpu=N sees only
# GPU N, as in "gpu=1 one_gpu:study,benchmarks/study/gsm8k.toml,9". A stage leaves a log in OUT, and a line in
# OUT/times: exit status, begin and end in seconds. `wait` ends after SECONDS, or when all lanes have ended, and prints
# OUT/times. Stages that are timed belong in one lane, with no other one next to it.
set -eu
command=${1:-} out=${2:-}

stage() { # NAME: run a stage
    local began=$SECONDS status=0 script=${1%%:*} words=${1#*:} log=${1%%,*}
    log=${log/:/-}
    case $words in *,*) words=${words//,/ } ;; *) words="$words $out" ;; esac
    case $1 in
    tests) make test-gpu ;;
    *:*) bash "benchmarks/$script.sh" $words ;;
    *) echo "no stage $1"; false ;;
    esac > "$out/$log.log" 2>&1 || status=$?
    echo "$1 status $status, $began to $SECONDS s" >> "$out/times"
}

case $command in
start)
    shift 2
    [ $# -gt 0 ] || { echo "name at least one lane" >&2; exit 2; }
    mkdir -p "$out"
    for lane in "$@"; do
        echo "$lane" >> "$out/lanes"
        setsid bash "$0" lane "$out" $lane > /dev/null 2>&1 < /dev/null &
    done ;;
lane)
    shift 2
    case $1 in gpu=*) export CUDA_VISIBLE_DEVICES="${1#gpu=}"; shift ;; esac
    for name in "$@"; do stage "$name"; done
    echo "$*" >> "$out/ended" ;;
wait)
    end=$((SECONDS + ${3:?SECONDS are missing}))
    while [ "$(cat "$out/ended" 2>/dev/null | wc -l)" -lt "$(wc -l < "$out/lanes")" ] && [ $SECONDS -lt $end ]; do
        sleep 1
    done
    cat "$out/times" ;;
*)
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0"
    exit 2 ;;
esac
