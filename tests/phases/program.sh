# The program as it is installed: what it is built from, its documents, its wheel. `tests/run` reads this file.

# Budgets of the program, so that a first build stays quick: packages that `rlrun` is built from, and bytes of the binary.
# What exceeds them becomes a feature that is off by default. Nine packages are the certificate authority of a run (rcgen) and the
# names of network interfaces: without them every run on several machines would need certificates of its own, or none. The simulator is
# a package of the workspace, and simulates without the rest of the program. The service of training is one too, and reads the messages of
# tinker's clients with prost, which brings three packages; it has 2.2 MB of code.
most_packages=340
most_bytes=57000000

# The program is built from no more packages than its budget.
packages_of_the_program() {
    local packages
    packages="$(cargo tree --locked --package rlrun --edges normal,build --prefix none --no-dedupe \
        | awk '{ print $1, $2 }' | sort -u | wc -l)"
    echo "rlrun is built from $packages packages; the budget is $most_packages"
    if [ "$packages" -gt "$most_packages" ]; then
        echo "error: put the new dependency behind a feature, or raise the budget with a reason" >&2
        return 1
    fi
}

# The first run of the README with the release build, which is no larger than its budget.
first_run() {
    local release="${CARGO_TARGET_DIR:-target}/release/rlrun" bytes
    cargo build --release --locked
    bytes="$(wc -c <"$release")"
    echo "the release build has $bytes bytes; the budget is $most_bytes"
    if [ "$bytes" -gt "$most_bytes" ]; then
        echo "error: find what grew with cargo bloat, or raise the budget with a reason" >&2
        return 1
    fi
    "$release" recipes/grpo_math.toml --run-dir "$scratch/first"
}

# The wheel in $1 installs where there is no repository, and its program trains the default recipe, changed by the arguments in $3
# and after, to an accuracy of at least $2.
wheel_works() {
    local wheels="$1" accuracy="$2"
    local bin="$wheels/venv/bin"
    "$python" -m venv "$wheels/venv"
    "$bin/pip" install --quiet --no-index "$wheels"/*.whl
    mkdir "$wheels/elsewhere"
    (cd "$wheels/elsewhere" && "$bin/rlrun" --version && "$bin/rlrun-bench" --version && "$bin/python" -m rlrun init \
        && "$bin/python" -m rlrun grpo_math.toml --quiet "${@:3}")
    "$bin/rlrun" runs "$wheels/elsewhere" --json | "$python" -c '
import json, sys
[run] = json.load(sys.stdin)["runs"]
assert run["state"] == "done" and run["accuracy"] >= float(sys.argv[1]), run
print("ok the wheel: accuracy", run["accuracy"])' "$accuracy"
}

# The wheel of the programs of these tests. maturin asks `cargo rustc` for a program; a stand-in answers with the one that the tests
# have built, so that nothing is built twice.
wheel_of_the_tests() {
    local stand_in="$scratch/stand-in" debug="${CARGO_TARGET_DIR:-target}/debug"
    mkdir "$stand_in"
    cat >"$stand_in/cargo" <<END
#!/usr/bin/env bash
if [ "\$1" != rustc ]; then exec "$(command -v cargo)" "\$@"; fi
set -o pipefail
$(command -v cargo) ${tests[*]:1} --no-run --test tests --message-format json-render-diagnostics | grep -vF '"kind":["test"]'
END
    chmod +x "$stand_in/cargo"
    benchmarks_beside "$debug/rlrun-bench"
    PATH="$stand_in:$PATH" "$scratch/maturin/bin/maturin" build --profile dev --locked --auditwheel skip --compatibility linux \
        --out "$scratch/wheels"
    rm -rf rlrun.data
    # That the recipe learns is a test of the workspace.
    wheel_works "$scratch/wheels" 0 --set warmup.steps=20 --set trainer.steps=2 --set data.arithmetic.eval_tasks=8
}

# The wheel of the release build.
wheel_of_the_release() {
    cargo build --release --locked --package rlrun-bench
    benchmarks_beside "${CARGO_TARGET_DIR:-target}/release/rlrun-bench"
    "$scratch/maturin/bin/maturin" build --release --locked --out "$scratch/release"
    rm -rf rlrun.data
    wheel_works "$scratch/release" 0.9
}

# Puts the second program where maturin takes it into the wheel: it packs the programs of one crate.
benchmarks_beside() {
    rm -rf rlrun.data
    mkdir -p rlrun.data/scripts
    cp "$1" rlrun.data/scripts/rlrun-bench
}

# The documents have no broken link, their blocks of code run, and the program writes the chapters of the book.
book() {
    "$python" docs/book.py links
    local steps=()
    if "$all"; then steps=(--full); fi
    "$python" docs/book.py blocks --rlrun "$rlrun" "${steps[@]}"
    "$python" docs/book.py build --rlrun "$rlrun" --out "$scratch/book"
}

# `rlrun explain` knows every metric that the runs of this script wrote.
metrics_are_explained() {
    "$python" -c '
import json, sys
names = {name for path in sys.argv[1:] for line in open(path) for name in json.loads(line)}
print("\n".join(sorted(names)))' "$scratch"/*/metrics.jsonl >"$scratch/metrics"
    xargs -d '\n' "$rlrun" explain <"$scratch/metrics" >/dev/null
    echo "ok $(wc -l <"$scratch/metrics") metrics of $(ls "$scratch"/*/metrics.jsonl | wc -l) runs are explained"
}
