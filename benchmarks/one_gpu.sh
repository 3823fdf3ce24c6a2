#!/bin/sh
# Measurements on one GPU that take minutes each, one name a call:
#
#     sh benchmarks/one_gpu.sh NAME [OUT]
#     sh benchmarks/one_gpu.sh study STUDY.toml MINUTES [--only ...]
#
# OUT is the folder of the JSON files, build/bench unless it is given. PYTHON is the interpreter. The
# seconds are those that one H200 is expected to take, start included. `study` makes the runs of a
# study or queue file, which share the GPU under NVIDIA's multi-process service (docs/studies.md): JOBS
# runs at a time, each on PERCENT of the SMs (unset: all). BESIDE is a command to run at the same time.
set -eu
out=build/bench
[ "${1:-}" = study ] || out=${2:-$out}
python=${PYTHON:-python3}
mkdir -p "$out"

bench() { # FILE NAME OPTIONS...: jetrl bench NAME
    file=$1
    shift
    "$python" -m jetrl bench "$@" --out "$out/$file.json"
}

step="step --plan unified --prompt-length 256"
eight="--shape qwen3-8b --plan unified"
decode="--case 8x128x256 --case 16x128x256 --case 32x128x256 --case 64x128x256"

rows="--adapter-rank 32 --prompts 8 --samples 8 --prompt-length 256 --leave-free 78.75"
tail="--adapter-rank 32 --prompts 64 --samples 8 --response-length 8192 --mean-length 1500"

case ${1:-} in
# 32B on one card: 64 prompts x 8 with a long tail, adapters of rank 32 on a frozen base; 450 s on a
# machine where 32b-compile has run, 560 s on another. The JSON is written after each phase, so that
# a run that is cut off leaves its rollout.
32b-adapters)
    bench step_32b_tail $step --shape qwen3-32b $tail ;;
# The same with two of its 64 layers: a rehearsal that fills the caches of compiled kernels; 150 s on
# a fresh machine.
32b-compile)
    bench step_32b_two_layers $step --shape qwen3-32b --layers 2 $tail ;;
# 8B with adapters in a card of 80 GB, 64 sequences of 8,192 tokens; 190 s.
8b-adapters-80gb)
    bench step_8b_adapter_80gb $step --shape qwen3-8b --adapter-rank 32 --prompts 8 --samples 8 \
        --response-length 7936 --leave-free 78.75 ;;
# Sampler and trainer with adapters whose A and B are random, after two updates; 120 s a shape.
adapters-bits)
    for shape in qwen3-1.7b qwen3-8b; do
        bench "adapters_bits_$shape" parity --shape "$shape" --adapter-rank 32 --updates 2 \
            --plan int8 --load 256x200x2048 --load 32x100x16000 --load 1x100x16000
    done ;;
# QeRL's rows: a step with adapters of rank 32 on a base in BF16, FP8 and NVFP4 in a card of 80 GB, 64
# sequences of up to 2,304 tokens at 14B and 1,280 at 32B; rollout, update and GiB; 450 s each. A base of
# 32B in BF16 has 61 GiB and may not fit: in a call of its own.
14b-adapters-80gb)
    bench step_14b_adapters_80gb step --shape qwen3-14b $rows --response-length 2048 --plan bf16 \
        --plan unified --plan "unified base=nvfp4" ;;
32b-adapters-80gb)
    bench step_32b_adapters_80gb step --shape qwen3-32b $rows --response-length 1024 \
        --plan unified --plan "unified base=nvfp4" ;;
32b-bf16-80gb)
    bench step_32b_bf16_80gb step --shape qwen3-32b $rows --response-length 1024 --plan bf16 ;;
# Decode of these models at 8 to 64 sequences; a base of 32B in BF16 last; 240 and 400 s.
14b-decode|32b-decode)
    bench "rollout_${1%-decode}_adapters" rollout --shape "qwen3-${1%-decode}" --adapter-rank 32 \
        --plan "unified base=nvfp4" --plan unified --plan bf16 $decode ;;
# Ten minutes of the 30 runs of adapters_letters.toml, which take about as long: again until it exits
# with 0. Exit code 75: runs are left. Needs build/qwen2.5-0.5b (benchmarks/qwen25.py).
adapters-letters)
    [ -d build/letters ] || "$python" -m benchmarks.letter_counts build/letters --steps 4 6
    JOBS=${JOBS:-12} sh "$0" study benchmarks/study/adapters_letters.toml 9 ;;
# What `precision.saved = int8` gains: bytes and milliseconds of a layer, 60 s; then an 8B step with as
# many tokens per micro-batch as fit in 108 GiB, and in all of an H200, 150 s each.
saved)
    bench layer_saved layer --shape qwen3-8b --row bf16 --row int8 --row "int8, saved codes"
    load="--prompts 8 --samples 8 --prompt-length 512 --response-length 512"
    for memory in "--leave-free 108" ""; do
        bench "step_saved${memory:+_108}" step --shape qwen3-8b --plan int8 --plan "int8 saved=int8" \
            $load $memory
    done ;;
# What speculation costs where drafts are seldom right: it must not lose; 150 s.
wrong-drafts)
    bench speculation_wrong speculation $eight --load 256 --load tail --right 0.1 --right 0.2 ;;
# Decode with adapters on a base in FP8 and in NVFP4; 75 s.
nvfp4-decode)
    bench rollout_nvfp4 rollout --shape qwen3-8b --adapter-rank 32 --plan bf16 --plan unified \
        --plan "unified base=nvfp4" $decode ;;
# Runs of a study: no process is killed, since that may leave the service unusable.
study)
    study=${2:?STUDY.toml is missing} minutes=${3:?MINUTES are missing}
    shift 3
    CUDA_MPS_PIPE_DIRECTORY=$(mktemp -d)
    CUDA_MPS_LOG_DIRECTORY=$CUDA_MPS_PIPE_DIRECTORY
    export CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY OMP_NUM_THREADS=1
    [ -z "${PERCENT:-}" ] || export CUDA_MPS_ACTIVE_THREAD_PERCENTAGE="$PERCENT"
    # A service that sees some GPUs numbers them anew, so it sees all; its clients choose.
    env -u CUDA_VISIBLE_DEVICES nvidia-cuda-mps-control -d
    trap 'echo quit | nvidia-cuda-mps-control' EXIT
    if [ -n "${BESIDE:-}" ]; then sh -c "$BESIDE" & fi
    code=0
    "$python" -m jetrl study --jobs "${JOBS:-15}" --minutes "$minutes" --no-report "$study" "$@" ||
        code=$?
    wait
    exit $code ;;
# A step of Qwen2.5-VL-3B, 32 prompts x 8, each prompt with an image of 448 x 448 pixels (256 tokens);
# the tower's forwards are part of the rollout, and all tokens are compared under int8; 200 s, 80 GiB.
images)
    bench step_images step --shape qwen2.5-vl-3b --plan bf16 --plan int8 --image-side 448 \
        --prompts 32 --samples 8 --prompt-length 512 --response-length 1024 ;;
# A start that sees drawn shapes, the 20 runs of shapes.toml from it, and answers with swapped images of a
# run that is made again; about 900 s, not timed. MINUTES is for the runs of this call: 9 unless it is
# given, less in the first call, which trains the start (a guess: 240 s). Exit code 75: runs are left,
# again until it exits with 0. Needs build/smollm2 (docs/smollm2.md).
shapes)
    start=build/shapes-start run=grpo-s1
    [ -f $start/start.json ] || "$python" -m benchmarks.shapes_start build/smollm2 $start
    JOBS=${JOBS:-10} sh "$0" study benchmarks/study/shapes.toml "${MINUTES:-9}"
    "$python" -m jetrl train studies/shapes/recipes/$run.toml run.dir=runs run.name=shapes
    "$python" -m benchmarks.swapped_images $start runs/shapes/model --run runs/shapes \
        --out "$out/swapped_images.json" ;;
# Without a GPU: most of these commands with a tiny model.
try)
    tiny="--shape tiny --layers 1 --device cpu --plan unified"
    short="--prompts 2 --samples 2 --prompt-length 8 --response-length 16"
    size="--tokens-per-micro-batch 48"
    bench try-adapters-bits parity --shape tiny --layers 1 --device cpu --adapter-rank 4 \
        --plan int8 --load 5x6x70
    bench try-adapters step $tiny $short $size --adapter-rank 4 --mean-length 8
    bench try-nvfp4 step --shape tiny --device cpu $short $size --adapter-rank 4 --plan bf16 \
        --plan "unified base=nvfp4"
    bench try-saved step --shape tiny --device cpu --plan int8 --plan "int8 saved=int8" $short
    bench try-saved-layer layer --shape tiny --device cpu --row int8 --row "int8, saved codes" \
        --tokens 32 --length 32
    bench try-images step --shape tiny-vl --device cpu --plan int8 $size --image-side 32 \
        --prompts 2 --samples 2 --prompt-length 24 --response-length 16
    "$python" -m benchmarks.shapes_start tiny "$out/try-shapes" --device cpu --sees 0.01 --until 1
    "$python" -m benchmarks.swapped_images "$out/try-shapes" --out "$out/try-swapped.json"
    bench try-wrong-drafts speculation $tiny --case 1x2x8x16 --right 0.1 ;;
*)
    sed -n 's/^\([a-z0-9|-]*\))$/\1/p' "$0" | tr '|' '\n'
    exit 2 ;;
esac
