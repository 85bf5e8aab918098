# What follows is the same in every script; the settings stand above.
set -uo pipefail

LOGS=$RUN_DIR/slurm/$SLURM_JOB_ID
STORE_FILE=$RUN_DIR/slurm/store
mkdir -p "$LOGS"

# What a rank prints is in its log at once, not when a buffer is full.
export PYTHONUNBUFFERED=1
# A crash in native code leaves a traceback.
export PYTHONFAULTHANDLER=1
# NCCL says why it failed; silence otherwise.
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
# On a time-out each rank writes down its last collectives, so that the one who missed is known.
export TORCH_NCCL_DUMP_ON_TIMEOUT=1 TORCH_NCCL_TRACE_BUFFER_SIZE=2000
# Segments that grow leave fewer unusable gaps in a GPU's memory.
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
# Ranks share the processor's cores.
export OMP_NUM_THREADS=$THREADS

log() { printf '%s %s\n' "$(date -u +%FT%TZ)" "$*"; }

finished() {
    [[ -f $RUN_DIR/checkpoints/latest ]] &&
        [[ $(<"$RUN_DIR/checkpoints/latest") == "$LAST_CHECKPOINT" ]]
}

# `launch stop` was used: nobody wants the run to go on.
asked_to_stop() { [[ -e $RUN_DIR/stop || -e $RUN_DIR/stopped ]]; }

# Put the first $NODES nodes that pass the health check into `chosen`.
choose_nodes() {
    chosen=()
    local node sick=()
    for node in "${nodes[@]}"; do
        ((${#chosen[@]} == NODES)) && break
        if srun --nodes=1 --ntasks=1 --nodelist="$node" --overlap \
            timeout 300 "$PYTHON" -m launch doctor --node >"$LOGS/health-$node.log" 2>&1; then
            chosen+=("$node")
        else
            sick+=("$node")
            log "node $node fails its health check and is left out: $(tail -n 1 "$LOGS/health-$node.log")"
        fi
    done
    ((${#chosen[@]} == NODES)) && return
    log "only ${#chosen[@]} of $NODES nodes are healthy"
    scontrol update "JobId=$SLURM_JOB_ID" "ExcNodeList=$(IFS=,; echo "${sick[*]}")"
    requeue
}

# Go back to the queue, to resume from the last checkpoint.
requeue() {
    if ((${SLURM_RESTART_COUNT:-0} >= REQUEUES)); then
        log "queued again $REQUEUES times already; giving up"
        exit 1
    fi
    log "queued again, to go on from the last checkpoint"
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
}

# Where the replicas' jobs meet: replica 0 hosts the store anew for each attempt.
meet() {
    export FIRST_REPLICA
    if [[ -n $STORE ]]; then
        export REPLICAS_STORE=$STORE
    elif ((FIRST_REPLICA == 0)); then
        export REPLICAS_STORE=$MASTER_ADDR:$((MASTER_PORT + 1))
        echo "$REPLICAS_STORE" >"$STORE_FILE.new" && mv "$STORE_FILE.new" "$STORE_FILE"
    else
        local waited=0
        until [[ -f $STORE_FILE ]]; do
            if ((waited >= WAIT_SECONDS)); then
                log "replica 0 did not say within $WAIT_SECONDS s where to meet, in $STORE_FILE"
                return 1
            fi
            sleep "$WATCH_SECONDS"
            waited=$((waited + WATCH_SECONDS))
        done
        REPLICAS_STORE=$(<"$STORE_FILE")
        export REPLICAS_STORE
    fi
    log "replica $FIRST_REPLICA meets the others at $REPLICAS_STORE"
}

# Kill the ranks when no step has been recorded for too long. A rank that waits for another gives
# up by itself; this is for what they all wait for, such as a file system.
watch() {
    local step=$1 newest now started
    started=$(date +%s)
    while kill -0 "$step" 2>/dev/null; do
        sleep "$WATCH_SECONDS"
        newest=$(stat -c %Y "$RUN_DIR/metrics.jsonl" 2>/dev/null || echo 0)
        ((newest < started)) && newest=$started
        now=$(date +%s)
        if ((now - newest > STALL_SECONDS)); then
            log "no step was recorded for $STALL_SECONDS s: ending this attempt"
            scancel --signal=KILL "$SLURM_JOB_ID"
            return
        fi
    done
}

run_once() {
    mkdir -p "$LOGS/attempt-$attempt"
    MASTER_ADDR=${chosen[0]}
    MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000 * 2 + attempt % 10 * 2000))
    export MASTER_ADDR MASTER_PORT
    if [[ -n $FIRST_REPLICA ]]; then
        meet || return
    fi
    # shellcheck disable=SC2016 # each rank expands these, not this script
    local as_rank='RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS exec "$@"'
    srun --nodes="$NODES" --ntasks-per-node="$RANKS_PER_NODE" \
        --nodelist="$(IFS=,; echo "${chosen[*]}")" --kill-on-bad-exit=1 \
        --output="$LOGS/attempt-$attempt/rank-%t.log" \
        bash -c "$as_rank" rank "$PYTHON" -m pretrain "${TRAIN[@]}" &
    local step=$! watcher code
    watch "$step" &
    watcher=$!
    wait "$step"
    code=$?
    kill "$watcher" 2>/dev/null
    wait "$watcher" 2>/dev/null
    [[ $FIRST_REPLICA == 0 ]] && rm -f "$STORE_FILE"
    return "$code"
}

# The reasons that ranks gave, the most frequent first.
reasons() { grep -hs '^error: ' "$LOGS/attempt-$attempt"/rank-*.log | sort | uniq -c | sort -rn | head -n 3; }

# A request to the job before this one; whoever submits another wants the run to go on.
((${SLURM_RESTART_COUNT:-0} == 0)) && rm -f "$RUN_DIR/stop" "$RUN_DIR/stopped"

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
for ((attempt = 0; attempt <= RESTARTS; attempt++)); do
    choose_nodes
    log "attempt $attempt on ${chosen[*]}; logs in $LOGS/attempt-$attempt"
    run_once
    code=$?
    if finished; then
        log "finished: $LAST_CHECKPOINT"
        exit 0
    fi
    if asked_to_stop; then
        log "stopped on request, with exit code $code"
        exit "$code"
    fi
    ((code == 0)) && requeue
    log "attempt $attempt ended with exit code $code: $(reasons)"
    if ((code == 2 || code == 3)); then
        log "a wrong configuration or bad data does not get better by trying again"
        exit "$code"
    fi
done
log "gave up after $RESTARTS restarts"
exit 1
