#!/usr/bin/env bash
# Train a diffusion adapter with a larger budget on one GPU, and measure `ar` against `speculative`.
#
#   benchmarks/on_a_gpu.sh            all stages: prompts, answers, train, bench
#   benchmarks/on_a_gpu.sh bench      one of them
#   MODEL=my-model benchmarks/on_a_gpu.sh
#
# It stops by itself after SECONDS_PER_RUN with exit code 75: run the same command again, and it goes
# on where it was. Only what is made in one go begins again, a PIECE of the prompts or one line of the
# benchmark: if it never fits, lower PIECE or BENCH_LIMIT. What is worth keeping is copied to OUT.
# Without a network, HYBRID_CACHE_DIR has to hold the model already. docs/training.md explains the
# settings.
set -euo pipefail

MODEL=${MODEL:-default}
DEVICE=${DEVICE:-auto}
WORK=${WORK:-build/on_a_gpu}            # data, checkpoints
OUT=${OUT:-$WORK/out}                   # results.jsonl, the adapter, its curves
SECONDS_PER_RUN=${SECONDS_PER_RUN:-540}
PYTHON=${PYTHON:-python3}

ANSWERS=${ANSWERS:-}                    # the model's own, if you have them: no prompts are needed
PROMPTS=${PROMPTS:-}                    # if you have them; else the model writes NUM_PROMPTS itself
NUM_PROMPTS=${NUM_PROMPTS:-2000}
PIECE=${PIECE:-250}                     # prompts sampled in one go
MAX_NEW_TOKENS=${MAX_NEW_TOKENS:-192}
BATCH=${BATCH:-128}                     # rows decoded together

SLOTS=${SLOTS:-16}                      # trained; rows are nearly free on a GPU
VOCABULARY=${VOCABULARY:-10240}
STEPS=${STEPS:-10000}
RATE=${RATE:-1.4e-3}
SEQUENCES=${SEQUENCES:-1}               # per step: step often
ANCHORS=${ANCHORS:-192}                 # per sequence: as many as an answer has
KEEP=${KEEP:-true}                      # what the target computed, on the GPU: 12 KiB a token
EVAL_EVERY=${EVAL_EVERY:-500}           # also how often a checkpoint is written
NUM_EVAL=${NUM_EVAL:-64}

BENCH_PROMPTS=${BENCH_PROMPTS:-benchmarks/prompts-heldout.jsonl}
BENCH_LIMIT=${BENCH_LIMIT:-20}
BENCH_TOKENS=${BENCH_TOKENS:-128}
BENCH_SLOTS=${BENCH_SLOTS:-8 12 16}     # drafted tokens, each at most SLOTS
DTYPES=${DTYPES:-bfloat16 float32}      # float32: are all answers equal?

hybrid() {  # what it has not done when the time is up is left for the next run
    local left=$((SECONDS_PER_RUN - SECONDS)) status=0
    if ((left > 0)); then
        timeout --foreground --signal=INT --kill-after=20 "$left" "$PYTHON" -m hybrid "$@" || status=$?
        if ((status != 124 && status != 137)); then return "$status"; fi
    fi
    echo "Not finished: run the same command again." >&2
    exit 75
}

prompts() {
    if [[ -n $ANSWERS$PROMPTS || -s $WORK/prompts.jsonl ]]; then return; fi
    local first part parts=()
    for ((first = 0; first < NUM_PROMPTS; first += PIECE)); do
        part=$WORK/prompts-$first-of-$NUM_PROMPTS-by-$PIECE.jsonl
        parts+=("$part")
        if [[ -s $part ]]; then continue; fi
        rm -f "$WORK/prompts.part"
        hybrid data prompts --model "$MODEL" --device "$DEVICE" --seed "$first" --batch "$BATCH" \
            --number $((PIECE < NUM_PROMPTS - first ? PIECE : NUM_PROMPTS - first)) \
            --output "$WORK/prompts.part" \
            --start "" --start "Write" --start "Explain" --start "Summarise" --start "List" \
            --start "Why" --start "How" --start "Calculate"
        mv "$WORK/prompts.part" "$part"
    done
    cat "${parts[@]}" > "$WORK/prompts.part"  # one that two pieces have is answered once
    mv "$WORK/prompts.part" "$WORK/prompts.jsonl"
}

answers() {
    if [[ -n $ANSWERS ]]; then return; fi
    hybrid data generate "${PROMPTS:-$WORK/prompts.jsonl}" --model "$MODEL" --device "$DEVICE" \
        --max-new-tokens "$MAX_NEW_TOKENS" --batch "$BATCH" --output "$WORK/answers.jsonl"
    hybrid data inspect "$WORK/answers.jsonl" --show 0
}

train() {
    if [[ -e $WORK/run/done ]]; then return; fi
    hybrid train self-diffusion --model "$MODEL" --data "${ANSWERS:-$WORK/answers.jsonl}" \
        --output "$WORK/run" --steps "$STEPS" --learning-rate "$RATE" --set device="$DEVICE" \
        --set num_draft_tokens="$SLOTS" --set draft_vocab_size="$VOCABULARY" \
        --set sequences_per_step="$SEQUENCES" --set anchors_per_sequence="$ANCHORS" \
        --set keep_contexts="$KEEP" --set eval_every="$EVAL_EVERY" \
        --set num_eval_sequences="$NUM_EVAL"
    cp -r "$WORK/run/adapter" "$WORK/run/metrics.jsonl" "$OUT/"
    touch "$WORK/run/done"
}

bench() {
    local dtype slots done_file
    for dtype in $DTYPES; do
        for slots in $BENCH_SLOTS; do
            done_file=$WORK/bench-$dtype-$slots.jsonl
            if [[ ! -s $done_file ]]; then
                hybrid bench --model "$MODEL" --device "$DEVICE" --dtype "$dtype" \
                    --adapter "$WORK/run/adapter" --num-draft-tokens "$slots" \
                    --strategies ar,speculative --no-transformers --prompts "$BENCH_PROMPTS" \
                    --limit "$BENCH_LIMIT" --max-new-tokens "$BENCH_TOKENS" --out "$done_file"
            fi
        done
    done
    cat "$WORK"/bench-*.jsonl > "$OUT/results.jsonl"
}

mkdir -p "$WORK" "$OUT"
(($#)) || set -- prompts answers train bench
for stage; do
    case $stage in
        prompts | answers | train | bench) "$stage" ;;
        *) echo "Unknown stage $stage: expected prompts, answers, train or bench." >&2; exit 2 ;;
    esac
done
