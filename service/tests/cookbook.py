"""tinker's cookbook, its files unmodified, at a training service: `cookbook.py URL MODEL_NAME MODEL_DIR WORK_DIR`.

`cookbook.py make MODEL_DIR OUT_DIR` makes a model for it: random weights with a head of its own, which adapters can train, and the
tokenizer of MODEL_DIR.

Runs the recipes `sl_loop` and `rl_loop` of tinker-cookbook 0.6.1 as programs, and checks that the loss falls and that
the reward rises. MODEL_NAME is the name that the service gives the model; the cookbook chooses the form of its prompts
by it. With `Qwen/Qwen3-8B-Base` prompts are plain text, which any tokenizer has. MODEL_DIR is the directory of that
model, whose context has 512 tokens or more. WORK_DIR is made: data sets and the tokenizer are in it, under the names
that the recipes load. Besides the cookbook, installed with `--no-deps`, the interpreter has its dependencies but
tml-renderers, which other models need, and those of its extra math-rl: pylatexenc, sympy, math-verify.
"""

import base64
import hashlib
import importlib.metadata
import json
import os
import random
import shutil
import subprocess
import sys

SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."
SPELLED = (
    "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r 9) r 10) y. "
    "We have r's at positions 3, 8, and 9. \\boxed{3}"
)
ANSWERS = ("2", "5", "7")
WANTED = "7"
SL_STEPS, SL_BATCH, SL_RATE = 50, 8, 0.005
RL_STEPS, RL_BATCH, RL_RATE = 12, 4, 0.003


def check_files():
    """The recipes are the files of the wheel, byte for byte."""
    recorded = {str(file): file for file in importlib.metadata.files("tinker_cookbook")}
    for name in ("sl_loop", "rl_loop"):
        file = recorded[f"tinker_cookbook/recipes/{name}.py"]
        digest = hashlib.new(file.hash.mode, file.locate().read_bytes()).digest()
        assert base64.urlsafe_b64encode(digest).rstrip(b"=").decode() == file.hash.value, f"{name}.py is modified"


def write_rows(directory, config, rows):
    """A data set of the hub as a local directory: a split `train` of the configuration `config`."""
    os.makedirs(directory)
    with open(os.path.join(directory, "README.md"), "w") as card:
        files = "  data_files:\n  - split: train\n    path: train.jsonl\n"
        card.write(f"---\nconfigs:\n- config_name: {config}\n{files}---\n")
    with open(os.path.join(directory, "train.jsonl"), "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def prepare(work, model_name, model_dir):
    os.makedirs(work)
    tokenizer = os.path.join(work, model_name)
    os.makedirs(tokenizer)
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(os.path.join(model_dir, name), tokenizer)
    draw = random.Random(0)
    questions = [f"Which digit is it, {n}?" for n in range(SL_STEPS * SL_BATCH)]
    # Conversations begin as those that rl_loop makes, so that it finds a policy that sometimes is right.
    begin = [
        {"role": "user", "content": "How many r's are in strawberry?" + SUFFIX},
        {"role": "assistant", "content": SPELLED},
    ]
    conversations = [
        {
            "messages": [
                *begin,
                {"role": "user", "content": question + SUFFIX},
                {"role": "assistant", "content": f"\\boxed{{{draw.choice(ANSWERS)}}}"},
            ]
        }
        for question in questions
    ]
    write_rows(os.path.join(work, "HuggingFaceH4", "no_robots"), "default", conversations)
    problems = [{"question": q, "answer": f"It is {WANTED}.\n#### {WANTED}"} for q in questions[: RL_STEPS * RL_BATCH]]
    write_rows(os.path.join(work, "openai", "gsm8k"), "main", problems)


def run(work, url, recipe, **options):
    """Runs a recipe as its users do. Returns the lines of its `metrics.jsonl`."""
    environment = {
        **os.environ,
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": os.path.join(work, "cache"),
        "HF_HUB_OFFLINE": "1",
        "TINKER_API_KEY": os.environ.get("TINKER_API_KEY", "tml-local"),
        "TINKER_TELEMETRY": "0",
    }
    command = [sys.executable, "-m", f"tinker_cookbook.recipes.{recipe}", f"base_url={url}"]
    command += [f"{key}={value}" for key, value in options.items()]
    with open(os.path.join(work, f"{recipe}.log"), "w") as log:
        status = subprocess.run(command, cwd=work, env=environment, stdout=log, stderr=log, timeout=600).returncode
    if status != 0:
        with open(log.name) as log:
            sys.exit(f"{recipe} ended with status {status}:\n{log.read()[-4000:]}")
    with open(os.path.join(options["log_path"], "metrics.jsonl")) as file:
        return [json.loads(line) for line in file]


def mean(values):
    return sum(values) / len(values)


def make(model_dir, out_dir):
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(model_dir)
    config.tie_word_embeddings, config.initializer_range = False, 0.1
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(out_dir)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(os.path.join(model_dir, name), out_dir)


def main():
    if sys.argv[1] == "make":
        return make(*sys.argv[2:])
    url, model_name, model_dir, work = sys.argv[1:5]
    work = os.path.abspath(work)
    check_files()
    prepare(work, model_name, model_dir)

    log = os.path.join(work, "sl")
    options = {"model_name": model_name, "lora_rank": 32, "save_every": 0}
    part = {"batch_size": SL_BATCH, "learning_rate": SL_RATE, "train_on_what": "last_assistant_message"}
    rows = run(work, url, "sl_loop", log_path=log, **part, **options)
    losses = [row["train_mean_nll"] for row in rows if "train_mean_nll" in row]
    assert len(losses) == SL_STEPS, losses
    assert mean(losses[-3:]) < 0.5 * losses[0], losses
    print(f"ok sl_loop: mean nll {losses[0]:.3f} to {mean(losses[-3:]):.3f} nats")

    # rl_loop resumes what is in its log directory: here the model that sl_loop has saved.
    with open(os.path.join(log, "checkpoints.jsonl")) as file:
        saved = json.loads(file.readlines()[-1])
    log = os.path.join(work, "rl")
    os.makedirs(log)
    with open(os.path.join(log, "checkpoints.jsonl"), "w") as file:
        file.write(json.dumps({"name": "start", "batch": 0, "state_path": saved["state_path"]}) + "\n")
    part = {"batch_size": RL_BATCH, "learning_rate": RL_RATE, "group_size": 16, "max_tokens": 12}
    rows = run(work, url, "rl_loop", log_path=log, loss_fn="importance_sampling", **part, **options)
    rewards = [row["reward/total"] for row in rows if "reward/total" in row]
    assert len(rewards) == RL_STEPS, rewards
    assert mean(rewards[-3:]) > mean(rewards[:2]) + 0.2, rewards
    print(f"ok rl_loop: reward {mean(rewards[:2]):.2f} to {mean(rewards[-3:]):.2f}")


if __name__ == "__main__":
    main()
