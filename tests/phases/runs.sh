# Runs beside programs of others, and tests that need these; all end by themselves. `tests/run` reads this file.

# Runs with an archive in an object store, through a proxy with faults.
archives_in_s3() {
    PYTHON="$scratch/s3/bin/python" "${tests[@]}" --test tests -- --ignored archive_s3::
}

# A run with its buffer in a database and its checkpoints in an S3 server loses its machine, as often as the arguments say.
lost_hosts() { "$python" tests/durability/lost_host.py "$rlrun" "$scratch/lost" --moto "$scratch/s3/bin/moto_server" "$@"; }

# NVIDIA's compiler accepts the kernels that the emulator runs.
kernels_compile() {
    local library
    library="$(find "$scratch/venv" -name 'libnvrtc.so.*' | head -1)"
    LD_LIBRARY_PATH="$(dirname "$library")" "${tests[@]}" --test device -- --exact --ignored compiles::all_kernels_compile
}

# Ranks of a real mpirun compute the same bits as threads and processes, and name a rank that hangs.
ranks_of_mpirun() {
    local ranks test named="$scratch/named"
    # Only what depends on the feature is built anew.
    "${tests[@]}" --features mpi --test collective --no-run
    for ranks in 2 4; do
        local with="target.'cfg(all())'.runner='mpirun -np $ranks --oversubscribe --allow-run-as-root'"
        test=("${tests[@]}" --features mpi --test collective --config "$with" -- --ignored --exact)
        "${test[@]}" mpi::ranks_of_mpirun_conform
        # A rank that gives up ends without a word to MPI, so that mpirun ends the others and fails.
        if "${test[@]}" mpi::a_rank_of_mpirun_that_hangs_is_named >"$named" 2>&1; then
            echo "error: mpirun takes a rank that has given up for a success" >&2
            return 1
        fi
        grep "has named rank $((ranks - 1))" "$named" || { cat "$named" >&2; return 1; }
    done
}

# Processes that mpirun starts with one command are a run and its sampler.
run_by_rank() {
    local run="$scratch/by-rank" said="$scratch/by-rank.log"
    mpirun -np 2 --oversubscribe --allow-run-as-root "$rlrun" recipes/grpo_math.toml --by-rank --run-dir "$run" --quiet \
        --set buffer.listen=127.0.0.1:0 --set warmup.steps=20 --set trainer.steps=30 --set eval.interval=0 2>&1 | tee "$said"
    # Fewer steps would end before the other process joins.
    grep -q "sampling from" "$said"
    test "$(grep -c '"trainer/tokens_per_s"' "$run/metrics.jsonl")" = 30
}

# Agents written with the client of OpenAI, with an agent framework and for `verifiers` train unchanged, two steps each; the
# log-probabilities that their sessions recorded are the trainer's, to the bit.
agents_of_others() {
    local agent run
    for agent in guess_openai guess_pydantic_ai guess_verifiers; do
        run="$scratch/agent-$agent"
        "$rlrun" recipes/agent_openai.toml --run-dir "$run" --quiet --set environment.python="$scratch/agents/bin/python" \
            --set environment.path="examples/agents/$agent.py:play" --set environment.processes=4 --set warmup.steps=40 \
            --set trainer.steps=2 --set buffer.batch_groups=4 --set buffer.max_staleness=0 --set rollout.bitwise=true \
            --set data.seeds.eval_tasks=8
        "$python" - "$run/metrics.jsonl" "$agent" <<'END'
import json, sys
lines = [json.loads(line) for line in open(sys.argv[1])]
steps = [line for line in lines if line["step"] > 0]
failed, mismatch = (max(line[name] for line in steps) for name in ("environment/failed", "kl/mismatch"))
# Of 32 episodes a few may fail: frameworks refuse empty answers, which a policy after a short warm-up gives.
assert len(steps) == 2 and failed <= 8 and mismatch == 0, steps
turns = sum(line["environment/turns"] for line in steps) / len(steps)
print(f"ok {sys.argv[2]}: {turns:.1f} turns per episode, at most {failed:.0f} failures in a step, kl/mismatch 0")
END
    done
}

# TensorBoard, W&B and Trackio read what a run wrote for them, also of a run that repeated steps after a resume; a collector of
# OpenTelemetry takes its timeline.
logs_of_trackers() {
    local run="$scratch/tracked" recipe="$scratch/tracked.toml"
    # After a short warm-up about half of the answers end with an even digit, so that steps have updates.
    cat >"$recipe" <<END
extends = "$PWD/recipes/grpo_math.toml"
[data.arithmetic]
eval_tasks = 8
[warmup]
steps = 30
batch_tasks = 16
[[rewards]]
kind = "regex"
pattern = "[02468]\$"
[trainer]
steps = 4
[eval.correct]
reward = "regex"
END
    "$rlrun" "$recipe" --run-dir "$run" --quiet --set checkpoint.interval=2 --set log.wandb=offline
    "$rlrun" resume "$run" --from 2 --quiet --set trainer.steps=6
    "$rlrun" export-logs "$run" --trackio --dir "$scratch/trackio" --python "$scratch/trackers/bin/python"
    TRACKIO_DIR="$scratch/trackio" "$scratch/trackers/bin/python" rlrun/trackers/check.py "$run"
    "$scratch/trackers/bin/python" rlrun/trackers/collect.py "$rlrun" "$scratch/traced" "$recipe"
}

# Phases whose tests and runs end by themselves.
phases_of_runs() {
    phase "archives in an S3 server"
    if has_package s3 moto; then
        archives_in_s3
    else
        skip "archives in an S3 server" "$python cannot install moto $moto"
    fi

    phase "Python rewards with Math-Verify"
    if has_package venv math-verify; then
        python_rewards
    else
        skip "Python rewards with Math-Verify" "$python cannot install math-verify $math_verify"
    fi

    phase "kernels by NVIDIA's compiler"
    if has_package venv nvidia-cuda-nvrtc; then
        kernels_compile
    else
        skip "kernels by NVIDIA's compiler" "$python cannot install nvidia-cuda-nvrtc $nvrtc"
    fi

    phase "a run of mpirun"
    if has_open_mpi; then
        run_by_rank
    else
        skip "a run of mpirun" "there is no Open MPI, and it cannot be installed (openmpi-bin)"
    fi

    phase "runs whose machines are lost"
    if ! has_package s3 moto; then
        skip "runs whose machines are lost" "$python cannot install moto $moto"
    elif ! has_postgresql; then
        skip "runs whose machines are lost" "there is no initdb in /usr/lib/postgresql/*/bin (postgresql)"
    else
        lost_hosts --steps 24 --losses 1
    fi

    phase "agents with clients and frameworks of others"
    if has_package agents verifiers; then
        agents_of_others
    else
        skip "agents with clients and frameworks of others" "$python cannot install openai $openai and the others"
    fi

    phase "logs of TensorBoard and W&B"
    if has_package trackers opentelemetry-proto; then
        logs_of_trackers
    else
        skip "logs of TensorBoard and W&B" "$python cannot install tensorboard $tensorboard and wandb $wandb"
    fi

    phases_of_python
}
