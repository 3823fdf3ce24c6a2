#!/bin/sh
# Mixtures of experts on one GPU, one name a call:
#
#     sh benchmarks/experts.sh NAME [OUT]
#     sh benchmarks/experts.sh all [OUT]
#
# OUT is the folder of the output files, build/bench unless it is given: JSON, and text of tests. PYTHON
# is the interpreter. `all` runs the parts without whole models, and continues after one that fails. The
# seconds are those that one H200 is expected to take, start and compiling included; those of products
# and olmoe were measured, where the GPU tests had compiled kernels before.
set -eu
out=${2:-build/bench}
python=${PYTHON:-python3}
shape=${SHAPE:-qwen3-30b-a3b}
mkdir -p "$out"

bench() { # FILE NAME OPTIONS...: jetrl bench NAME
    file=$1
    shift
    "$python" -m jetrl bench "$@" --out "$out/$file.json"
}

tests() { # FILE TESTS...: their output, and their status
    file=$1
    shift
    "$python" -m pytest -q -m gpu "$@" > "$out/$file.txt" 2>&1 || { tail -40 "$out/$file.txt"; exit 1; }
    tail -1 "$out/$file.txt"
}

gradients="int8 grad_output=int8"

case ${1:-} in
# Kernels next to their references and to dense layers, and graphs; 60 s.
tests)
    tests experts_kernels tests/gpu/test_grouped_*.py ;;
# Small models: sampler and trainer agree, `integer` has the bits of a CPU; 60 s.
models)
    tests experts_models tests/gpu/test_experts.py ;;
# Products and layers of the default plan, of `integer` and of `bf16`: training at 16,384 tokens (1,024
# rows per expert), prefill at 2,048, decode at 256 and 8 sequences; 45 s.
products)
    bench experts experts --plan int8 --plan "$gradients" --plan integer --plan bf16 ;;
# Other tiles of FProp and DGrad, at the rows of training and of decode; 120 s.
tiles)
    bench experts_tiles experts --plan int8 --plan bf16 --tiles --tokens 16384 256 8 ;;
# The shape of OLMoE-1B-7B; 28 s.
olmoe)
    bench experts_olmoe experts --shape olmoe-1b-7b --plan int8 --tokens 16384 256 8 ;;
# All of the above.
all)
    failed=
    for part in tests models products tiles olmoe; do
        sh "$0" "$part" "$out" || failed="$failed $part"
    done
    [ -z "$failed" ] || { echo "failed:$failed"; exit 1; } ;;
# All tokens of a model of 12 layers compared between sampler and
# trainer, after two updates; 200 s.
bits)
    bench experts_bits parity --shape "$shape" --layers 12 --updates 2 --plan int8 \
        --plan "$gradients" --plan integer --load 256x200x2048 --load 8x100x16000 ;;
# The same with adapters of rank 16 on all linear layers, also those of experts, of two layers, whose A
# and B are random; 200 s.
adapters-bits)
    bench experts_adapters_bits parity --shape "$shape" --layers 2 --adapter-rank 16 --updates 2 \
        --plan int8 --plan "$gradients" --load 256x200x2048 --load 8x100x16000 ;;
# Decode of the whole model at 8 and 256 sequences; 60 s.
decode)
    bench experts_decode rollout --shape "$shape" --plan int8 --case 8x128x256 --case 256x128x256 ;;
# A step of a model of 12 layers, of which all parameters are trained; 200 s.
step)
    bench experts_step step --shape "$shape" --layers 12 --plan int8 --plan integer --prompts 64 \
        --samples 8 --prompt-length 256 --response-length 2048 ;;
# A step of the whole model with adapters of rank 32 on attention and experts, one GPU; 400 s.
lora-step)
    bench experts_lora_step step --shape "$shape" --plan int8 --adapter-rank 32 --prompts 64 \
        --samples 8 --prompt-length 256 --response-length 2048 ;;
# A step of OLMoE-1B-7B's shape, all parameters, next to BF16; 300 s.
olmoe-step)
    bench experts_olmoe_step step --shape olmoe-1b-7b --plan bf16 --plan int8 --prompts 64 \
        --samples 8 --prompt-length 256 --response-length 1024 ;;
# Without a GPU: these commands with tiny shapes.
try)
    shape=tiny-experts
    bench experts_try experts --shape tiny --device cpu --plan int8 --plan "$gradients" \
        --plan integer --plan bf16 --tokens 256 8 3
    bench experts_bits_try parity --shape "$shape" --device cpu --updates 1 --plan int8 \
        --plan integer --load 3x4x20
    bench experts_adapters_bits_try parity --shape "$shape" --device cpu --updates 1 \
        --adapter-rank 4 --plan int8 --load 3x4x20
    bench experts_step_try step --shape "$shape" --device cpu --plan int8 --prompts 2 --samples 2 \
        --prompt-length 8 --response-length 8 --tokens-per-micro-batch 48 ;;
*)
    sed -n 's/^\([a-z0-9.|-]*\))$/\1/p' "$0" | tr '|' '\n'
    exit 2 ;;
esac
