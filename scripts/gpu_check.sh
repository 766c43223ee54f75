#!/usr/bin/env bash
# What a GPU can tell, in one command: the tests on CUDA, the kernels' tests, each kernel's bandwidth, then whole models.
#
#     bash scripts/gpu_check.sh [--smoke] [OUT]      # OUT: a folder for the result files (scripts/results)
#
# --smoke runs all of it on CPU, on tiny models. Needs torch, transformers, peft, pytest and rich; PYTHON names another
# interpreter.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
smoke=()
if [ "${1:-}" = --smoke ]; then smoke=(--smoke); shift; fi
out=${1:-scripts/results}
mkdir -p "$out"
failed=0

echo "== tests on $("$python" -c 'import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU")')"
if [ ${#smoke[@]} -gt 0 ]; then
  "$python" -m pytest -q --one-case tests/tape/test_functions.py || failed=1
else
  "$python" -m pytest -q -x --maxfail=20 tests/tape tests/ops tests/attacks tests/patching || failed=1
  (cd hf_memsave/_vendor/memsave_kernels && "$python" -m pytest -q -m "not long") || failed=1
fi

echo "== kernels"
interpret=()
if [ ${#smoke[@]} -gt 0 ]; then interpret=(env TRITON_INTERPRET=1); fi
PYTHONPATH=.:tests:scripts:scripts/bench ${interpret[@]+"${interpret[@]}"} "$python" scripts/bench/ops.py ${smoke[@]+"${smoke[@]}"} --out "$out" || failed=1

echo "== models"
PYTHONPATH=.:tests:scripts:scripts/bench "$python" scripts/bench/models.py ${smoke[@]+"${smoke[@]}"} --out "$out" || failed=1
exit $failed
