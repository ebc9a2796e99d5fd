#!/usr/bin/env bash
# What is measured and compared on one H200, section by section, each under a time limit of its own:
#
#     OUT=results bash scripts/gpu_round.sh admit overhead grpo
#
# Results and logs go to $OUT, packed into $OUT/round.tar.gz at the end; runs lie under $RUNS (/tmp/vime-runs) and go on
# where they stopped when the section is called again. PEER_PYTHON (python3) has vLLM for "peers"; "sums" needs
# models/smollm2-135m. Exit code: the number of sections that failed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${OUT:?a folder for results} runs=${RUNS:-/tmp/vime-runs}
mkdir -p "$out" "$runs"
small=pipelines/qwen3-1.7b-shape-h200.yaml large=pipelines/qwen3-8b-shape-h200.yaml sums=pipelines/smollm2-sums-h200.yaml
vime=(python3 -m vime)

# limited SECONDS NAME COMMAND...: its output to $out/NAME.log; SIGINT at the limit, so that a run stops resumably
limited() {
    local seconds=$1 name=$2
    shift 2
    echo "== $name: $*"
    local start=$SECONDS
    timeout --signal=INT --kill-after=30 "$seconds" "$@" >"$out/$name.log" 2>&1
    local code=$?
    echo "   $name: exit code $code after $((SECONDS - start)) s: $(tail -n 1 "$out/$name.log" | cut -c 1-300)"
    return "$code"
}

# run_or_resume SECONDS NAME PIPELINE: exit code 3 (stopped, resumable) is no failure
run_or_resume() {
    local folder=$runs/$2 code=0
    if [ -e "$folder" ]; then
        limited "$1" "$2" "${vime[@]}" resume "$folder" || code=$?
    else
        limited "$1" "$2" "${vime[@]}" run "$3" --set "run_directory=$folder" || code=$?
    fi
    "${vime[@]}" report "$folder" --json >"$out/$2.jsonl" 2>/dev/null
    cp "$folder/evidence.json" "$out/$2.evidence.json" 2>/dev/null
    [ "$code" = 0 ] || [ "$code" = 3 ]
}

# side_by_side NAME SECONDS PARTS COMMAND...: a process a part, its name put for every @ of the command
side_by_side() {
    local name=$1 seconds=$2 parts=$3 part code=0 processes=()
    shift 3
    for part in $parts; do
        limited "$seconds" "$name-$part" "${@//@/$part}" &
        processes+=($!)
    done
    for part in "${processes[@]}"; do wait "$part" || code=1; done
    return "$code"
}

section() {
    case $1 in
    admit) limited 300 admit "${vime[@]}" admit --all --device cuda --pipeline "$small" ;;
    admit-large) limited 300 admit-large "${vime[@]}" admit --all --device cuda --pipeline "$large" ;;
    overhead) limited 300 overhead python3 -m benchmarks.gpu.overhead --steps 8 --skip 3 --out "$out/overhead.json" ;;
    overhead-large)
        limited 500 overhead-large python3 -m benchmarks.gpu.overhead --pipeline "$large" --steps 6 --skip 3 \
            --out "$out/overhead-large.json"
        ;;
    grpo) run_or_resume 540 grpo "$small" ;;
    large) run_or_resume 540 large "$large" ;;
    sums) run_or_resume 540 sums "$sums" ;;
    peers)
        limited 500 peers python3 -m benchmarks.gpu.decode_peers --peer-python "${PEER_PYTHON:-python3}" \
            --arms vime vllm vllm-logprobs vllm-batch-invariant --out "$out/peers.json"
        ;;
    vectors) side_by_side vectors 540 "$(regions)" "${vime[@]}" verify device --on gpu --json --region @ ;;
    bits-attention)
        side_by_side bits-attention 540 "$(attention_sections)" \
            python3 -m benchmarks.gpu.attention_bits --only @ --out "$out/bits-attention-@.json"
        ;;
    bits-gemm) limited 500 bits-gemm python3 -m benchmarks.gpu.gemm_bits --out "$out/bits-gemm.json" ;;
    bits-head) limited 500 bits-head python3 -m benchmarks.gpu.head_bits --out "$out/bits-head.json" ;;
    bits-rows) limited 500 bits-rows python3 -m benchmarks.gpu.rows_bits --out "$out/bits-rows.json" ;;
    bits-bulk)
        side_by_side bits-bulk 540 "$(bulk_sections)" \
            python3 -m benchmarks.gpu.bulk_bits --compile-seconds 0 --only @ --out "$out/bits-bulk-@.json"
        ;;
    speed-step) limited 400 speed-step python3 -m benchmarks.gpu.model_step --out "$out/speed-step.json" ;;
    speed-head) limited 300 speed-head python3 -m benchmarks.gpu.head --out "$out/speed-head.json" ;;
    speed-gemm) limited 300 speed-gemm python3 -m benchmarks.gpu.gemm --out "$out/speed-gemm.json" ;;
    speed-attention) limited 300 speed-attention python3 -m benchmarks.gpu.attention --out "$out/speed-attention.json" ;;
    speed-sync) limited 200 speed-sync python3 -m benchmarks.gpu.weight_sync --out "$out/speed-sync.json" ;;
    tests) limited 500 tests python3 -m pytest -q -n 0 tests/gpu ;;
    *)
        echo "there is no section '$1'; see section() in $0"
        return 2
        ;;
    esac
}

regions() {
    python3 -c "from rlkernel.verify.vectors.files import read_vectors
print(*sorted({vector.region for vector in read_vectors('hopper', 'bfloat16').vectors}))"
}

attention_sections() {
    python3 -c "from benchmarks.gpu.attention_bits import SECTIONS
print(*(section.__name__ for section in SECTIONS))"
}

bulk_sections() {
    python3 -c "from benchmarks.gpu.bulk_bits import SECTIONS
print(*(section.__name__ for section in SECTIONS))"
}

failed=0
for name in "$@"; do section "$name" || failed=$((failed + 1)); done
packed=$(mktemp)
tar -C "$out" --exclude=./round.tar.gz -czf "$packed" . && mv "$packed" "$out/round.tar.gz"
exit "$failed"
