#!/usr/bin/env bash
# Measure the engine on one GPU, in under 8 minutes and without a network, from a plain checkout.
#
#   benchmarks/gpu/run.sh                                 all parts; OUT (build/gpu) gets gpu.json, gpu.md, gpu.log
#   PARTS=ceilings,kernels LIMIT_S=180 benchmarks/gpu/run.sh
#   DEVICE=cpu benchmarks/gpu/run.sh                      does every part run? tiny shapes, interpreted: no number says a thing
#   python3 -m benchmarks.gpu.report build/gpu/gpu.json docs/results.md    put the tables on that page
#
# The exit code is the number of parts that did not finish; what they had measured is written all the same.
# It needs torch, triton, pydantic, safetensors and filelock; the tests pytest and transformers too. With pytest-xdist they
# run in a process per core; in one process fewer are reached in time. What the machine lacks can travel as wheels:
# `pip download --only-binary=:all: -d wheels pydantic pytest-xdist` elsewhere, here WHEELS=wheels.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
PYTHON=${PYTHON:-python3}
OUT=$(realpath -m "${OUT:-$root/build/gpu}")

if [[ -n ${WHEELS:-} ]]; then
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    "$PYTHON" -m pip install --quiet --no-index --no-deps --target "$site" "$WHEELS"/*.whl
    export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
fi
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
cd "$root"
"$PYTHON" -m benchmarks.gpu.run --device "${DEVICE:-cuda}" --parts "${PARTS:-all}" \
    --limit "${LIMIT_S:-450}" --out "$OUT"
