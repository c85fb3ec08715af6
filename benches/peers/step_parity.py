"""One supervised step of rlrun against transformers: the loss and the gradient of every weight.

  python step_parity.py --model $DATA/smollm2 --rlrun rlrun [--device cuda --dtype bf16] [--rows 8 --words 300]
The gradient is read from the first moments of AdamW after one step without clipping. transformers computes in f32.
"""
import argparse, json, math, os, random, subprocess, tempfile
os.environ["HF_HUB_OFFLINE"] = "1"
from pathlib import Path
from common import emit, setup_torch
torch = setup_torch()
import torch.nn.functional as F
from safetensors.torch import load_file

RECIPE = """
[model]
path = "{model}"
dtype = "{dtype}"
[data]
train = "train.jsonl"
max_prompt_length = 64
[supervised]
kind = "sft"
batch = {rows}
[rollout]
max_completion_length = 4000
[trainer]
steps = 1
learning_rate = 1e-6
max_grad_norm = 1e9
adam_beta2 = 0.95
microbatch_tokens = {tokens}
[checkpoint]
interval = 1
[placement]
device = "{device}"
"""


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--model", required=True), ap.add_argument("--rlrun", default="rlrun")
    ap.add_argument("--device", default="cpu"), ap.add_argument("--dtype", default="f32")
    ap.add_argument("--rows", type=int, default=8), ap.add_argument("--words", type=int, default=300)
    ap.add_argument("--microbatch", type=int, default=16384)
    a = ap.parse_args()
    from transformers import AutoModelForCausalLM, AutoTokenizer
    tok, rng = AutoTokenizer.from_pretrained(a.model), random.Random(0)
    words = [w for w in ("alpha beta gamma delta one two three four five six tree house river stone light dark".split())]
    text = lambda n: " ".join(rng.choice(words) for _ in range(n))
    rows = [{"prompt": text(5), "completion": " " + text(rng.randint(a.words // 2, a.words))} for _ in range(a.rows)]
    with tempfile.TemporaryDirectory() as d:
        d = Path(d)
        (d / "train.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        (d / "step.toml").write_text(RECIPE.format(model=Path(a.model).resolve(), dtype=a.dtype, rows=a.rows, tokens=a.microbatch, device=a.device))
        done = subprocess.run([a.rlrun, "step.toml", "--run-dir", "run", "--quiet"], cwd=d, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        ours = json.loads((d / "run/metrics.jsonl").read_text().splitlines()[0])
        found = load_file(next((d / "run/checkpoints").glob("step_*1")) / "optimizer.safetensors")
    on = "cuda" if a.device.startswith("cuda") else "cpu"
    model = AutoModelForCausalLM.from_pretrained(a.model, dtype=torch.float32).to(on)
    encode = lambda s: tok(s, add_special_tokens=False)["input_ids"]
    pairs = [(encode(r["prompt"]), encode(r["completion"]) + [tok.eos_token_id]) for r in rows]
    total, loss = sum(len(c) for _, c in pairs), 0.0
    for p, c in pairs:
        ids = torch.tensor([p + c], device=on)
        logits = model(input_ids=ids, use_cache=False).logits[0, len(p) - 1:-1]
        part = F.cross_entropy(logits.float(), ids[0, len(p):], reduction="sum") / total
        part.backward()
        loss += part.item()
    norm = math.sqrt(sum(p.grad.double().square().sum().item() for p in model.parameters()))
    worst, off2, all2 = (0.0, ""), 0.0, 0.0
    for name, p in model.named_parameters():
        moment = found.get("m." + name)
        if moment is None:
            raise SystemExit(f"{name} has no moment")
        g, m = p.grad.double().cpu(), moment.double().reshape(p.shape) / 0.1
        off = (m - g).norm().item()
        off2, all2 = off2 + off ** 2, all2 + g.norm().item() ** 2
        worst = max(worst, (off / max(g.norm().item(), 1e-12), name))
    emit("step_parity", "gradient_off", math.sqrt(off2 / all2), "of its norm", model=Path(a.model).name, device=a.device, dtype=a.dtype, tokens=total,
         worst=worst[1], worst_off=round(worst[0], 6), grad_norm=ours["optim/grad_norm"], grad_norm_transformers=norm, loss=ours.get("loss/mean"), loss_transformers=loss)


if __name__ == "__main__":
    main()
