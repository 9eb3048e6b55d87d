#!/usr/bin/env bash
# Checks and times the GPU kernels in under five minutes and writes a JSON file named after the device.
# Usage: hub_kernels/tools/bench_gpu.sh [--dry-run] [--output FILE] [--seconds N] [--token-rounding]
set -euo pipefail
cd "$(dirname "$0")/../.."
python=.venv/bin/python
[ -x "$python" ] || python=python3
exec timeout 300 "$python" hub_kernels/tools/bench_gpu.py "$@"
