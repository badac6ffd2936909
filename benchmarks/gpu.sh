#!/usr/bin/env bash
# The whole comparison on one GPU in under 8 minutes: torch (eager, compiled), onnxruntime, tfx. Writes JSON.
#
#   benchmarks/gpu.sh [OUT.json]            PYTHON=.venv/bin/python by default
#
# Needs tfx, torch with CUDA, and onnxruntime-gpu with its libraries: pip install "onnxruntime-gpu[cuda,cudnn]".
# What it is made of runs without a GPU as well: python benchmarks/gpu.py --device cpu --quick --out cpu.json
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
out=${1:-gpu.json}
command -v nvidia-smi >/dev/null || { echo "gpu.sh: found no nvidia-smi, wanted a machine with an NVIDIA GPU" >&2; exit 3; }
nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm --format=csv,noheader >&2
exec timeout 480 "$python" benchmarks/gpu.py --device cuda --seconds 420 --out "$out"
