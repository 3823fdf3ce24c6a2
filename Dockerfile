# jetrl for a machine with an H100 or H200: `docker build -t jetrl .` (or podman build), then
#   docker run --rm --gpus all jetrl                               jetrl doctor: what works here
#   docker run --rm jetrl jetrl train demo                         the demo, which needs no GPU
#   docker run --rm --gpus all --ipc host -v "$PWD/runs:/jetrl/runs" \
#       -v "$HOME/.cache/huggingface:/cache" jetrl jetrl train qwen3-1.7b-gsm8k
# The image has the nvcc of a CUDA 13 toolkit, with which DeepGEMM compiles its kernels when they are
# first used.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

RUN apt-get update \
    && apt-get install -y --no-install-recommends python3.12 python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/*

ENV VIRTUAL_ENV=/venv PATH=/venv/bin:$PATH CUDA_HOME=/usr/local/cuda
ENV HF_HOME=/cache PYTHONUNBUFFERED=1
RUN python3.12 -m venv /venv

# torch for CUDA 13 first: the rest takes the one that is there.
RUN pip install --no-cache-dir "torch==2.11.0" --index-url https://download.pytorch.org/whl/cu130

WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY recipes recipes
COPY data data
COPY src src
RUN pip install --no-cache-dir '.[deep-gemm,data,trackers]'

WORKDIR /jetrl
CMD ["jetrl", "doctor"]
