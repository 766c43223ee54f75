#!/usr/bin/env bash
# What a GPU tells of hf_memsave, of CUDA or ROCm, in one command; docs/gpu.md says what to do with it.
#
#     bash scripts/gpu_check.sh [--smoke] first [OUT]          # at most nine minutes, what tells most first
#     bash scripts/gpu_check.sh [--smoke] second [OUT] [FIRST] # at most four: what FIRST has not, or has wrong
#     bash scripts/gpu_check.sh [--smoke] correctness|speed|models|all [OUT]
#
# first: steps beside stock's, to the bit; README's models, their memory beside its estimate, and time; the kernels'
# tests, and their bandwidth beside a copy's; the tests of what is claimed on CPU. FIRST is a gpu-check.tgz.
# correctness: every row of these bits, and the tests. speed: every shape of the kernels, and the host's time.
# models: other models. all: these three, and the largest batches (20 minutes more).
#
# OUT (else $OUT, else build/gpu-check) gets tables, after every row, and gpu-check.tgz with these and all that was
# printed. The exit status is 1 if something is wrong, or was cut short. --smoke runs every step on tiny models, on CPU
# too. Needs torch, transformers, accelerate, peft, numpy, pytest and pytest-xdist; PYTHON names another interpreter
# than python3, and COMMIT the commit where there is no repository.
set -uo pipefail
smoke=
if [ "${1:-}" = --smoke ]; then smoke=--smoke; shift; fi
stage=${1:-}
#: At most so many seconds: the machine, bits, models, kernels' tests, compiled models, kernels' bandwidth, Liger; all.
case $stage in
  first) limits=(30 105 160 80 65 40 25) all=520 ;;
  second) limits=(20 45 60 35 30 20 20) all=235 ;;
  correctness | speed | models | all) limits=(30) all=9999 ;;
  *) echo "expected a stage, got '$stage'. Give one: gpu_check.sh [--smoke] first|second|correctness|speed|models|all [OUT]" >&2
     exit 2 ;;
esac
root=$(cd "$(dirname "$0")/.." && pwd)
out=${2:-${OUT:-$root/build/gpu-check}}
mkdir -p "$out" && out=$(cd "$out" && pwd) && raw=$(mktemp -d) || exit 2
first=${3:-$out/gpu-check.tgz}
if [ "$stage" = second ] && ! tar xzf "$first" -C "$raw" 2> /dev/null; then
  echo "expected the gpu-check.tgz of a first run, got '$first'. Name it: gpu_check.sh second OUT FIRST" >&2
  exit 2
fi
rm -f "$raw/summary.txt"
cd "$root" || exit 2
python=$("${PYTHON:-python3}" -c "import sys; print(sys.executable)") && bench=scripts/bench || exit 2
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 HF_MEMSAVE_VERBOSITY=error TOKENIZERS_PARALLELISM=false
export PYTHONPATH=$root:$root/tests:$root/scripts:$root/scripts/bench${PYTHONPATH:+:$PYTHONPATH}

pack() { # what there is until now
  tar czf "$out/packing" -C "$raw" . # 1 where a file grows meanwhile
  if [ $? -le 1 ]; then mv "$out/packing" "$out/gpu-check.tgz"; fi
  cp "$raw"/gpu-bits.md "$raw"/gpu-models.md "$raw"/gpu-ops.md "$out" 2>/dev/null
}
(while sleep 10; do pack; done) > /dev/null 2>&1 & packer=$!
trap 'kill $packer; wait $packer; pack; rm -r "$raw"' EXIT 2>/dev/null

step() { # NAME SECONDS COMMAND...
  local name=$1 seconds=$(($2 * slow)) begun=$SECONDS status what
  if [ $((all * slow - SECONDS)) -lt $seconds ]; then seconds=$((all * slow - SECONDS)); fi
  if [ $seconds -lt 5 ]; then echo "$name: not begun, no time is left" | tee -a "$raw/summary.txt"; return; fi
  echo "== $name, after $begun s"
  # beside another step bash has it ignore the signal with which pytest notes what has failed until then
  timeout -s INT -k 10 $seconds env --default-signal=INT "${@:3}" > "$raw/$name.txt" 2>&1
  status=$?
  echo $status > "$raw/$name.status"
  tail -n 25 "$raw/$name.txt" | cut -c1-200
  case $status in 0 | 5) what=passed ;; 124 | 137) what="cut short" ;; *) what="failed, exit status $status" ;; esac
  echo "$name: $what, $((SECONDS - begun)) s" | tee -a "$raw/summary.txt"
}

rows() { # NAME SECONDS SCRIPT...: begins no row in the last third, or 25 seconds
  local how=("${launch[@]}")
  if [ "$3" = models ]; then how=(); fi # whose kernels the interpreter would run for minutes
  step "$1" "$2" "${how[@]}" "$python" "$bench/$3.py" $smoke --seconds $((($2 - ($2 < 75 ? $2 / 3 : 25)) * slow)) --out "$raw" "${@:4}"
}

tests() { # NAME SECONDS FOLDER ARGUMENTS...: of what FIRST has finished, the failures
  local again=()
  case $(cat "$raw/$1.status" 2>/dev/null) in
    0 | 5) return ;;
    1) again=(--last-failed --last-failed-no-failures none) ;;
    124) again=(--failed-first) ;;
  esac
  step "$1" "$2" env -C "$3" OMP_NUM_THREADS=1 "$python" -m pytest -v --tb=short -n $workers -o cache_dir="$raw/cache-$1" \
    "${again[@]}" "${@:4}"
}

slow=1 workers=12 kernels=(-m "not long" -k "not test_installs") # pip may lack its network
claims=(tests/measure/test_check.py tests/measure/test_step.py tests/ops/sampled/test_waits.py tests/ops/fused
  tests/commands/test_verify.py::test_verify_of_a_config_is_equal tests/end_to_end/test_bits.py tests/tape)
why_not='' launch=()
if [ -n "$smoke" ]; then
  slow=3 workers=2 kernels=(tests/test_numbers.py -k test_no_rows)
  claims=(tests/measure/test_check.py tests/ops/sampled/test_waits.py tests/end_to_end/test_bits.py
    tests/tape/test_functions.py --one-case --of-a-file 1)
  launch=(env TRITON_INTERPRET=1)
  try='import torch; from hf_memsave.ops.fused.kernels import kernels; kernels().row_norms(torch.ones(8, 8))'
  if ! "${launch[@]}" "$python" -c "$try" > /dev/null 2>&1; then
    launch=()
    why_not="left out: Triton's interpreter does not run here; that of 3.6 needs NumPy below 2.4"
  fi
fi

run_ops() { # NAME SECONDS ARGUMENTS...
  if [ -n "$why_not" ]; then echo "$1: $why_not" | tee -a "$raw/summary.txt"; return; fi
  step "$1" "$2" "${launch[@]}" "$python" $bench/ops.py $smoke --out "$raw" "${@:3}"
}

run_kernels() { # SECONDS
  if [ -n "$why_not" ]; then echo "kernels: $why_not" | tee -a "$raw/summary.txt"; return; fi
  tests kernels "$1" hf_memsave/_vendor/memsave_kernels "${kernels[@]}"
}

run_claims() { # SECONDS
  CUBLAS_WORKSPACE_CONFIG=:4096:8 CLAIM_ON_GPU="equality to the bit" tests claims "$1" . --dist worksteal "${claims[@]}"
}

{ command -v nvidia-smi && nvidia-smi; "$python" -m pip list; } > "$raw/environment.txt" 2>&1
timeout 60 "$python" -c "import torch, transformers, triton" > /dev/null 2>&1 # from a cold disk, in no step's time
step machine "${limits[0]}" "$python" $bench/ops.py $smoke --shapes machine --out "$raw"
if [ "$stage" = first ] || [ "$stage" = second ]; then
  shapes=(8192x4096 16384x768 1024x128256 4096x14336)
  run_ops compile-ops "${limits[1]}" --repeats 0 --shapes "${shapes[@]}" & # compiles beside, and leaves it in a cache
  rows bits "${limits[1]}" gpu_bits
  wait $!
  rows models "${limits[2]}" models --plan first
  run_kernels "${limits[3]}" & # beside, what torch.compile and Triton compile is left in caches
  rows compile-models "${limits[3]}" models --plan compiled --warm
  wait $!
  rows compiled "${limits[4]}" models --plan compiled
  run_ops ops "${limits[5]}" --shapes "${shapes[@]}"
  rows liger "${limits[6]}" models --plan liger
  run_claims $all
fi
if [ "$stage" = correctness ] || [ "$stage" = all ]; then
  rows bits 300 gpu_bits
  run_kernels 110
  run_claims 120
fi
if [ "$stage" = speed ] || [ "$stage" = all ]; then
  run_ops ops 340
  rows host 180 models --plan host
fi
if [ "$stage" = models ] || [ "$stage" = all ]; then rows models 530 models --plan models; fi
if [ "$stage" = all ]; then rows largest 1260 models --plan models --largest; fi

echo "== $stage, $SECONDS s"
cat "$raw/summary.txt"
! grep -q "failed\|cut short\|not begun" "$raw/summary.txt"
