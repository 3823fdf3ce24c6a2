#!/bin/sh
# The plan `integer` on one GPU: equal bits, digests and steps, one name a call:
#
#     sh benchmarks/integer.sh NAME [OUT]
#
# OUT is the folder of the JSON files, build/bench unless it is given. PYTHON is the interpreter. The
# seconds are those that one H200 is expected to take, start and compiling included; they were not
# measured. Every call is below ten minutes, and needs no other one, except that step-8b-integer
# continues the file of step-8b if it is there. BACKENDS are the values of run.backend to run, "hopper
# triton" unless they are given ("triton" on other GPUs than an H100 or H200).
set -eu
out=${2:-build/bench}
python=${PYTHON:-python3}
backends=${BACKENDS:-hopper triton}
mkdir -p "$out"

bench() { # FILE NAME OPTIONS...: jetrl bench NAME
    file=$1
    shift
    "$python" -m jetrl bench "$@" --out "$out/$file.json"
}

# 54,500 tokens a backend, of 1 to 256 sequences and contexts of up to 16,100, after two updates: the
# five shapes together have 272,500. None may differ between sampler and trainer.
bits() { # SHAPE OPTIONS...
    shape=$1
    shift
    for backend in $backends; do set -- "$@" --plan "integer backend=$backend"; done
    bench "integer_bits_$shape" parity --shape "$shape" --updates 2 "$@"
}
loads="--load 256x200x2048 --load 32x100x16000 --load 1x100x16000"

# Drafts of which 60% are right: tokens and log-probs must be those of the calls without drafts.
drafts() { # SHAPE OPTIONS...
    shape=$1
    shift
    for backend in $backends; do
        bench "integer_drafts_${shape}_$backend" speculation --shape "$shape" \
            --plan "integer backend=$backend" --right 0.6 "$@"
    done
}

# A run's digest on the GPU, next to the one that a CPU had.
digest() { # FILE RUN OPTIONS...
    file=$1
    name=$2
    shift 2
    for backend in $backends; do
        "$python" -m benchmarks.digest "$name" "$@" run.backend="$backend" \
            --against "benchmarks/results/cpu/digest_$name.json" \
            --out "$out/digest_${file}_$backend.json"
    done
}

# KL and gradients next to FP32, by the rule of benchmarks/plan_error.py.
error() { # DIRECTORY FILE
    "$python" -m benchmarks.plan_error "$1" --length 256 --tokens 20480 --gradients 40 \
        --text data/gsm8k/train.jsonl --text docs/precision.md --row "int8 grad_output=int8" \
        --row integer --row bf16 --out "$out/$2.json"
}

# A step of the plans that are named, and of `integer` on each backend.
step() { # FILE OPTIONS...
    file=$1
    shift
    for backend in $backends; do set -- "$@" --plan "integer backend=$backend"; done
    bench "$file" step "$@"
}
load="--samples 8 --prompt-length 256 --response-length 2048"

case ${1:-} in
# 60 to 120 s.
bits-smollm2-135m|bits-qwen2.5-0.5b|bits-qwen3-0.6b|bits-qwen3-1.7b|bits-qwen3-8b)
    bits "${1#bits-}" $loads ;;
# 90 s.
drafts-smollm2-135m|drafts-qwen2.5-0.5b|drafts-qwen3-0.6b|drafts-qwen3-1.7b|drafts-qwen3-8b)
    drafts "${1#drafts-}" --case 8x8x128x256 ;;
# The error of `integer` next to that of `int8` on build/smollm2 and build/qwen2.5-0.5b; 120 and 240 s.
error-smollm2)
    error build/smollm2 plan_error_integer_smollm2 ;;
error-qwen2.5)
    error build/qwen2.5-0.5b plan_error_integer_qwen2.5 ;;
# Three steps of SmolLM2, made as docs/smollm2.md says; 60 s a backend.
digest-smollm2)
    digest smollm2 smollm2 --leg cuda ;;
# The demo of 50 steps; 120 s a backend.
digest-demo)
    digest demo demo --leg cuda ;;
# Ten steps, killed on the GPU, resumed on the CPU for a step, and back; 90 s a backend.
digest-resume)
    digest steps steps --leg cuda:4 --leg cpu:5 --leg cuda ;;
# The demo on two GPUs; 120 s a backend.
digest-ranks)
    digest demo_ranks demo --leg 'cuda*2' ;;
# A step of 1.7B, 64 prompts x 8; 300 s.
step-1.7b)
    step integer_step_1.7b --shape qwen3-1.7b --prompts 64 $load --plan bf16 --plan int8 ;;
# A step of 8B, 32 prompts x 8, of the plans to compare with; 450 s.
step-8b)
    bench integer_step_8b step --shape qwen3-8b --prompts 32 $load --plan bf16 --plan int8 ;;
# The same under `integer`; 500 s.
step-8b-integer)
    first=$out/integer_step_8b.json
    [ ! -f "$first" ] || load="$load --beside $first"
    step integer_step_8b_plans --shape qwen3-8b --prompts 32 $load ;;
# The portable kernels next to Hopper's at 8B: attention, INT8 products, decode of 64 sequences; 230 s.
portable)
    bench attention_portable attention --kv int8 integer --parts decode packed torch
    bench products_integer products --shape qwen3-8b --plan integer \
        --plan "integer backend=triton" --tokens 16384 --decode 64 4096
    bench rollout_integer_8b rollout --shape qwen3-8b --plan int8 --plan "int8 backend=triton" \
        --plan "integer backend=triton" --plan integer --case 64x128x256 ;;
# Without a GPU: these commands with a tiny model.
try)
    backends=auto
    tiny="--layers 1 --device cpu"
    bits tiny $tiny --load 5x6x70
    drafts tiny $tiny --case 1x2x8x16
    "$python" -m benchmarks.digest steps --leg cpu:1 --leg cpu --out "$out/digest_try.json" \
        sft.steps=2 loop.steps=2 rollout.prompts_per_step=4 rollout.samples_per_prompt=4
    step integer_step_try --shape tiny $tiny --prompts 4 --samples 2 --prompt-length 8 \
        --response-length 16 --tokens-per-micro-batch 48 --plan int8 ;;
*)
    sed -n 's/^\([a-z0-9.|-]*\))$/\1/p' "$0" | tr '|' '\n'
    exit 2 ;;
esac
