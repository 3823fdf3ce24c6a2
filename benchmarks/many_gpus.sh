#!/bin/sh
# The measurements of docs/many-gpus.md, one name a call:
#
#     sh benchmarks/many_gpus.sh NAME [OUT]
#
# OUT is the folder of the JSON files, build/bench unless it is given. PYTHON is the interpreter.
# Steps print their peaks of memory beside the memory plan, by phase (peak_of_plan). Every call takes
# minutes on H200s of one host; kernels are compiled in the first one.
set -eu
out=${2:-build/bench}
python=${PYTHON:-python3}
mkdir -p "$out"

step() { # COUNT FILE OPTIONS...: jetrl bench step on COUNT GPUs; on one without torchrun
    count=$1 file=$2
    shift 2
    launch="$python -m torch.distributed.run --standalone --nproc-per-node $count -m"
    [ "$count" = 1 ] && launch="$python -m"
    $launch jetrl bench step --out "$out/$file.json" "$@"
}

# Qwen3-8B. The load of step_2048.json for each GPU, and its long tail.
equal="--prompts 32 --samples 8 --prompt-length 256 --response-length 2048"
tail="--load 64x8x256x8192x1500"
# The same load on any number of GPUs, so that the weights after it can be compared.
same="--prompts 16 --samples 8 --prompt-length 256 --response-length 1024 --warm-micro-batches 8"
size="--tokens-per-micro-batch 11520"

case ${1:-} in
# Equal digests of codes, master weights and moments on 1, 2 and 4 GPUs.
same-1|same-2|same-4)
    step "${1#same-}" "$1" --shape qwen3-8b --plan int8 $same $size --digest ;;
# As much work for each GPU: how a step grows with the number of GPUs.
weak-1|weak-2|weak-4)
    step "${1#weak-}" "$1" --shape qwen3-8b --plan int8 $equal $tail $size \
        --batch-per-rank --exchange ;;
# Two cards of 80 GB: so much memory is left on each, and the plan sizes the micro-batches.
8b-2-80gb)
    step 2 "$1" --shape qwen3-8b --plan int8 --prompts 16 --samples 8 --prompt-length 256 \
        --response-length 1024 --batch-per-rank --leave-free 78.75 ;;
# How ranks end that are killed or fail, on two GPUs with NCCL.
faults-2)
    "$python" tests/reliability/fail_ranks.py --device cuda --out "$out/fail_ranks.json" ;;
# FP8 beside BF16 on the same GPUs, each with the largest micro-batch that the plan has room for.
plans-2|plans-4)
    step "${1#plans-}" "$1" --shape qwen3-8b --plan bf16 --plan int8 $equal --batch-per-rank ;;
# Models that need several GPUs.
14b-2)
    step 2 "$1" --shape qwen3-14b --plan int8 --prompts 16 --samples 8 --prompt-length 256 \
        --response-length 2048 --exchange ;;
32b-4)
    step 4 "$1" --shape qwen3-32b --plan int8 --prompts 16 --samples 8 --prompt-length 256 \
        --response-length 2048 --train activation_checkpointing=true --exchange ;;
32b-4-rollouts)
    step 4 "$1" --shape qwen3-32b --plan bf16 --plan int8 --prompts 16 --samples 8 \
        --prompt-length 256 --response-length 2048 --rollout-only ;;
# Without a GPU, to try the commands out on two processes, or on four: the digests are equal.
try|try-4)
    ranks=4
    [ "$1" = try ] && ranks=2
    tiny="--shape tiny --layers 1 --device cpu --plan int8 --prompts 4 --samples 2"
    tiny="$tiny --prompt-length 8 --response-length 16 --tokens-per-micro-batch 48"
    step 1 try-1 $tiny --warm-micro-batches 4 --digest
    step "$ranks" "$1-same" $tiny --warm-micro-batches 4 --digest --exchange
    step "$ranks" "$1-tail" $tiny --load 2x2x8x24x8 --batch-per-rank
    step "$ranks" "$1-rollouts" $tiny --plan bf16 --rollout-only
    "$python" tests/reliability/fail_ranks.py --out "$out/fail_ranks.json" ;;
*)
    sed -n 's/^\([a-z0-9|-]*\))$/\1/p' "$0" | tr '|' '\n'
    exit 2 ;;
esac
