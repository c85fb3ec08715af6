# The servers of the program and their clients, and its pages, documents and packages. `tests/run` reads this file.

# Serves a buffer from `$scratch/NAME` on a free port until `stop_serving`; `$served` is its address.
serve_buffer() {
    local log="$scratch/$1.log" line
    mkfifo "$log"
    "$rlrun" serve buffer --dir "$scratch/$1" --listen 127.0.0.1:0 --quiet "${@:2}" >"$log" &
    server=$!
    # It hangs up if it fails, so that this comes back.
    read -r line <"$log"
    served="${line#listening on }"
}

# A small model with a long context at `$scratch/trained-model`.
trained_model() {
    local run="$scratch/trained-run"
    if [ ! -d "$scratch/trained-model" ]; then
        "$rlrun" recipes/grpo_math.toml --run-dir "$run" --quiet --set warmup.steps=20 --set trainer.steps=1 \
            --set data.max_prompt_length=1000 --set data.arithmetic.eval_tasks=8
        "$rlrun" export "$run" --out "$scratch/trained-model"
    fi
}

# Serves training of the model in $2 as $1 on a free port until `stop_serving`; `$served` is its address.
serve_training() {
    local log="$scratch/training.log" line
    rm -f "$log" && mkfifo "$log"
    "$rlrun" serve training --model "$1=$2" --dir "$scratch/service" --listen 127.0.0.1:0 >"$log" &
    server=$!
    read -r line <"$log"
    served="${line#listening on }"
}

stop_serving() {
    kill "$server"
    wait "$server"
    server=""
}

# The live page and a report show what the files of a run have, in every view, without an error in the console of the browser.
live_page() {
    local run="$scratch/viewed" other="$scratch/viewed-other"
    "$rlrun" recipes/grpo_math.toml --run-dir "$run" --quiet --set warmup.steps=20 --set trainer.steps=5 \
        --set data.arithmetic.eval_tasks=8
    "$rlrun" recipes/guess_number.toml --run-dir "$other" --quiet --set warmup.steps=20 --set trainer.steps=2 \
        --set data.seeds.eval_tasks=8
    "$scratch/venv/bin/python" dashboard/tests/walk.py "$rlrun" "$scratch/screenshots" "$run" "$other"
    "$rlrun" report "$run" "$other" --output "$scratch/report.html" --png "$scratch/screenshots/curves.png"
    "$scratch/venv/bin/python" dashboard/tests/walk.py report "$scratch/report.html" "$scratch/screenshots" "$run" "$other"
}

# The official clients of OpenAI and Anthropic use a served policy unmodified: the small model with a chat template.
clients_of_the_endpoint() {
    local log="$scratch/policy.log" line
    trained_model
    cp -r "$scratch/trained-model" "$scratch/policy-model"
    cp endpoint/tests/chat_template.jinja "$scratch/policy-model/"
    mkfifo "$log"
    "$rlrun" serve policy "$scratch/policy-model" --name tiny --listen 127.0.0.1:0 >"$log" &
    server=$!
    read -r line <"$log"
    "$scratch/venv/bin/python" endpoint/tests/clients.py "${line#listening on }" tiny
    if has_package venv openenv && has_package venv fastmcp; then
        "$scratch/venv/bin/python" endpoint/tests/openenv_capture.py "${line#listening on }" tiny
    else
        skip "the capture proxy of OpenEnv" "$python cannot install openenv $openenv"
    fi
    stop_serving
}

# tinker's SDK, unmodified, and the client of the wheel train, sample, save and load.
clients_of_tinker() {
    trained_model
    serve_training tiny "$scratch/trained-model"
    "$python" service/tests/package.py "$served" tiny
    "$scratch/tinker/bin/python" -W ignore service/tests/sdk.py "$served" tiny
    "$scratch/tinker-json/bin/python" -W ignore service/tests/sdk.py "$served" tiny
    stop_serving
}

# Clients in other languages behave as their comments document.
examples_of_clients() {
    serve_buffer examples --batch-groups 1
    examples/buffer/append_lease_ack.sh "$served" | tee "$scratch/examples.out"
    "$python" examples/buffer/append_lease_ack.py "$served" | tee -a "$scratch/examples.out"
    stop_serving
    # Each stores one group, is told so twice, and acknowledges what it leased.
    test "$(grep -c accepted "$scratch/examples.out")" = 2
    test "$(grep -c duplicate "$scratch/examples.out")" = 2
}

# Requests generated from the OpenAPI description: no response is a server error, and all match the description.
requests_from_the_description() {
    local tool="$scratch/venv/bin/schemathesis"
    serve_buffer described
    # One worker: with several, Python 3.11 can trip over itself while it compiles ("AST constructor recursion depth
    # mismatch"), which says nothing of the server.
    # It leaves what it remembers where it runs.
    (cd "$scratch" && "$tool" run "$served/openapi.json" --max-examples 20 --max-time 25 --seed 1 --workers 1 \
        --request-timeout 40 --exclude-path /v1/events --suppress-health-check all \
        --checks not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance)
    stop_serving
}

# Phases of the program's servers, pages, documents and packages.
phases_of_servers() {
    trap end_server EXIT

    phase "the live page in Chromium"
    if ! command -v chromium >/dev/null; then
        skip "the live page in Chromium" "there is no chromium, and it cannot be installed"
    elif has_package venv playwright; then
        live_page
    else
        skip "the live page in Chromium" "$python cannot install playwright $playwright"
    fi

    phase "clients of the endpoint"
    if has_package venv openai && has_package venv anthropic; then
        clients_of_the_endpoint
    else
        skip "clients of the endpoint" "$python cannot install openai $openai and anthropic $anthropic"
    fi

    phase "clients of tinker"
    if has_package tinker tinker && has_package tinker-json tinker; then
        clients_of_tinker
    else
        skip "clients of tinker" "$python cannot install tinker $tinker and $tinker_json"
    fi

    phase "examples of clients"
    if command -v "$python" >/dev/null && command -v curl >/dev/null; then
        examples_of_clients
    else
        skip "examples of clients" "there is no $python or no curl"
    fi

    phase "requests generated from the OpenAPI description"
    if has_package venv schemathesis; then
        requests_from_the_description
    else
        skip "requests generated from the OpenAPI description" "$python cannot install schemathesis $schemathesis"
    fi

    phase "goldens of plain Python"
    if command -v "$python" >/dev/null; then
        goldens_of_plain_python
    else
        skip "goldens of plain Python" "there is no $python"
    fi

    phase "the book"
    if command -v "$python" >/dev/null; then
        book
    else
        skip "the book" "there is no $python"
    fi

    phase "the wheel"
    if has_package maturin maturin; then
        wheel_of_the_tests
    else
        skip "the wheel" "$python cannot install maturin $maturin"
    fi
}
