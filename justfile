# The commands of the repository; `just` alone lists them. CONTRIBUTING.md says when to use which.

_default:
    @just --list

# Run the tests as CI does, with `--all` the long suites too; PYTHON names an interpreter with torch and transformers
test *flags:
    tests/run {{flags}}

# Refuse warnings of the compiler, clippy and rustdoc
lint:
    cargo clippy --workspace --all-targets -- -D warnings
    RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --document-private-items

# Format all sources
fmt:
    cargo fmt --all

# Check licences, advisories and banned crates (needs cargo-deny)
deny:
    cargo deny check

# Train as a recipe says, with the flags of `rlrun run`
run recipe="recipes/grpo_math.toml" *flags:
    cargo run --release -- {{recipe}} {{flags}}

# Write the book into target/book from the release build; pages need mdbook
book:
    docs/book.py links
    docs/book.py build

# Make the golden numbers anew (python needs torch and transformers); a change of theirs has to be explained
goldens python="python3":
    {{python}} model/tests/goldens/make_goldens.py
    {{python}} model/tests/goldens/make_scorers.py
    {{python}} trainer/tests/goldens/algorithms.py
    {{python}} rollout/src/tasks/golden.py
    git status --short -- '*goldens*'
