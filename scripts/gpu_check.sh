#!/usr/bin/env bash
# What a GPU can tell, in stages of less than nine minutes each on an H100 with 16 cores.
#
#     bash scripts/gpu_check.sh [--smoke] correctness|speed|models|all [OUT]
#
# correctness: steps beside stock's, to the bit; the kernels' tests; the tests of what is claimed on CPU, on CUDA.
# speed: each kernel's bandwidth beside a copy's, and the host's time with profiles.
# models: whole models, stock, patched and by other methods.
# all: these, and the largest batch of every model (20 minutes more).
#
# Results go to OUT, or $OUT, or scripts/results, after every row, what was printed to gpu-check-<step>.txt there. The
# exit status is 1 if a step failed or was cut short. --smoke runs every step on tiny models, on CPU too. Needs torch,
# transformers, accelerate, numpy, pytest and pytest-xdist; PYTHON names another interpreter than python3.
set -uo pipefail
smoke=
if [ "${1:-}" = --smoke ]; then smoke=--smoke; shift; fi
stage=${1:-}
case $stage in
  correctness | speed | models | all) ;;
  *) echo "expected a stage, got '$stage'. Give one: gpu_check.sh [--smoke] correctness|speed|models|all [OUT]" >&2
     exit 2 ;;
esac
root=$(cd "$(dirname "$0")/.." && pwd)
out=${2:-${OUT:-$root/scripts/results}}
mkdir -p "$out" && out=$(cd "$out" && pwd) && cd "$root" || exit 2
python=${PYTHON:-python3}
bench=scripts/bench
export PYTHONPATH=$root:$root/tests:$root/scripts:$root/scripts/bench${PYTHONPATH:+:$PYTHONPATH}
summary=()
failed=0

step() { # NAME SECONDS COMMAND...
  local name=$1 begun=$SECONDS status what
  echo "== $name"
  timeout -s INT -k 20 $(($2 * slow)) "${@:3}" 2>&1 | tee "$out/gpu-check-$name.txt"
  status=${PIPESTATUS[0]}
  case $status in 0) what=passed ;; 124 | 137) what="cut short" ;; *) what="failed, exit status $status" ;; esac
  if [ "$status" != 0 ]; then failed=1; fi
  summary+=("$name: $what, $((SECONDS - begun)) s")
}

tests=(-m pytest -q -n 12)
kernels=(-m "not long" -k "not test_installs") # pip may lack its network
spread=(--dist worksteal)
claims=(tests/end_to_end/test_bits.py tests/tape)
launch=()
slow=1
if [ -n "$smoke" ]; then
  launch=(env TRITON_INTERPRET=1)
  tests=(-m pytest -q -n 2)
  kernels=(tests/test_numbers.py -k test_no_rows)
  slow=3
  claims=(tests/end_to_end/test_bits.py tests/tape/test_functions.py)
  spread+=(--one-case --of-a-file 1)
fi

if [ "$stage" = correctness ] || [ "$stage" = all ]; then
  step bits 300 "${launch[@]}" "$python" $bench/gpu_bits.py $smoke --minutes 4 --out "$out"
  step kernels 110 env -C hf_memsave/_vendor/memsave_kernels OMP_NUM_THREADS=1 "$python" "${tests[@]}" "${kernels[@]}"
  step claims 90 env CUBLAS_WORKSPACE_CONFIG=:4096:8 CLAIM_ON_GPU="equality to the bit" \
    "$python" "${tests[@]}" "${spread[@]}" "${claims[@]}"
  step kept 30 env CLAIM_ON_GPU="this count of bytes" \
    "$python" "${tests[@]}" "${spread[@]}" tests/end_to_end/test_kept.py
fi
if [ "$stage" = speed ] || [ "$stage" = all ]; then
  step ops 340 "${launch[@]}" "$python" $bench/ops.py $smoke --out "$out"
  step host 180 "$python" $bench/models.py $smoke --profile --minutes 2 --models bert-base llama-3.2-1b \
    --methods stock memsave "memsave, Triton" --out "$out"
  (cd "$out" && tail -n +1 host-*-*.txt > host-profiles.txt && rm host-*-*.txt) # few files come back from some machines
fi
if [ "$stage" = models ] || [ "$stage" = all ]; then
  methods=(stock memsave "memsave, Triton" checkpointing "torch.compile, budget 1")
  models=(llama-3.2-1b "llama-3-8b, LoRA, dropout .05" bert-large)
  step models 530 "$python" $bench/models.py $smoke --minutes 7 --models "${models[@]}" \
    --methods "${methods[@]}" --out "$out"
  if [ -n "$smoke" ]; then methods=(stock memsave); fi
  if [ "$stage" = all ]; then
    step largest 1260 "$python" $bench/models.py $smoke --minutes 18 --largest --models "${models[@]}" \
      --methods "${methods[@]}" --out "$out"
  fi
fi

echo "== $stage"
printf '%s\n' "${summary[@]}"
exit $failed
