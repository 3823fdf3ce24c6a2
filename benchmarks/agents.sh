#!/bin/sh
# The endpoint, distillation, replay, and reference and reward models on one GPU, one name a call:
#
#     sh benchmarks/agents.sh NAME [OUT]
#
# OUT is the folder of the JSON files, build/bench unless it is given. PYTHON is the interpreter, MODEL
# the directory of SmolLM2-135M-Instruct (build/smollm2). The seconds are those that one H200 is
# expected to take, start and compiling included; they were not measured.
set -eu
out=${2:-build/bench}
python=${PYTHON:-python3}
model=${MODEL:-build/smollm2}
mkdir -p "$out"

bench() { # FILE NAME OPTIONS...: jetrl bench NAME
    file=$1
    shift
    "$python" -m jetrl bench "$@" --out "$out/$file.json"
}

teachers="--teacher none --teacher token --teacher vocabulary"

case ${1:-} in
# The server next to `generate` at the shape of an 8B model, 64 and 256 clients; 240 s, 40 GiB.
serve)
    bench serve serve --shape qwen3-8b ;;
# The same load on vLLM's server, which is installed in addition: BF16, and FP8; 400 s.
serve-vllm)
    "$python" -m benchmarks.vllm_serve --shape qwen3-8b --quantization none --quantization fp8 \
        --out "$out/serve_vllm.json" ;;
# The same with SmolLM2, whose steps are short and whose tokens become text; 120 s.
serve-small)
    bench serve_smollm2 serve --model "$model" ;;
# Updates of an 8B student without a teacher and with one of 8B, by both kinds of KL; 200 s, 130 GiB.
opd)
    bench train_opd train --shape qwen3-8b --plan int8 $teachers --prompts 4 --samples 8 \
        --prompt-length 256 --response-length 2048 ;;
# The same for a model of nine layers: a rehearsal; 60 s.
opd-9-layers)
    bench train_opd_9_layers train --shape qwen3-8b --layers 9 --plan int8 $teachers --prompts 4 \
        --samples 8 --prompt-length 256 --response-length 2048 ;;
# Ten minutes of the runs of replay.toml, which take 1,000 to 1,300 s in all: again until it exits with
# 0. Exit code 75: runs are left.
replay)
    [ -d build/letters ] || "$python" -m benchmarks.letter_counts build/letters --steps 4 6
    JOBS=${JOBS:-10} sh benchmarks/one_gpu.sh study benchmarks/study/replay.toml 9 ;;
# The pass of a reference of 8B in BF16 and in eight bits, and the change of the KL term: 64 samples of
# 1,024 tokens; 200 s, 40 GiB.
frozen)
    bench frozen frozen --shape qwen3-8b --plan bf16 --plan int8 --plan unified ;;
# Pair accuracy of a reward model of SmolLM2 in BF16 and in eight bits, five seeds, by the rule in
# benchmarks/reward_model.py; 450 s. The JSON is written after each seed.
reward-model)
    "$python" -m benchmarks.reward_model "$model" --out "$out/reward_model.json" ;;
# Without a GPU: these commands with a tiny model.
try)
    tiny="--shape tiny --layers 1 --device cpu --plan int8"
    bench try-serve serve $tiny --clients 3 --each 2 --rounds 1 --prompt-length 8 \
        --response-length 8
    bench try-frozen frozen --shape tiny --layers 1 --device cpu --plan bf16 --plan int8 \
        --plan unified --prompts 2 --samples 2 --prompt-length 8 --response-length 8 --rounds 1
    bench try-opd train $tiny $teachers --prompts 2 --samples 2 --prompt-length 8 \
        --response-length 16 --tokens-per-micro-batch 48 ;;
*)
    sed -n 's/^\([a-z0-9.|-]*\))$/\1/p' "$0" | tr '|' '\n'
    exit 2 ;;
esac
