"""Adapters of tiny models with the logits that PEFT computes, and the gradients of factors.

  pip install torch transformers peft safetensors      (made with torch 2.15.0, transformers 5.24.0, peft 0.21.2, CPU)
  python adapter.py                                    writes ./adapter/, ./adapter_experts/ and ./adapter_qwen3_*/

Bases are those of ../../../model/tests/goldens. ./adapter/ is of llama, whose embedding and head are two tensors, has factors of
every layer, and is as PEFT writes it. ./adapter_experts/ is of qwen3_moe: a query projection and the layers of every expert, each
under its own name, as before transformers stacked experts and as rlrun writes them. ./adapter_qwen3_5/ and ./adapter_qwen3_next/ are of
the projections of recurrences, as PEFT writes them. golden.safetensors has
  tokens      [T] i64, one sequence
  logits      [T, vocab] f32 with the adapter, which is not merged
  grad.<name> gradient of sum_t c_t * log_softmax(logits_t)[token_{t+1}] with c_t = 1 - t / 10 by each factor, of all but experts
"""
import json
import os
import shutil
import warnings

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

HERE = os.path.dirname(os.path.abspath(__file__))
BASES = os.path.join(HERE, "../../../model/tests/goldens")
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "embed_tokens", "lm_head"]
RECURRENCES = {
    "qwen3_5": ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"],
    "qwen3_next": ["in_proj_qkvz", "in_proj_ba", "out_proj"],
}


def opened(name):
    path = os.path.join(BASES, name)
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


def emptied(name):
    to = os.path.join(HERE, name)
    shutil.rmtree(to, ignore_errors=True)
    os.makedirs(to)
    return to


def with_gradients(to, base, layers):
    config = LoraConfig(r=2, lora_alpha=3, target_modules=layers, task_type="CAUSAL_LM")
    model = get_peft_model(opened(base), config).eval()
    for name, p in model.named_parameters():
        if "lora_" in name:
            p.data = 0.3 * torch.randn(p.shape)
    tokens = torch.randint(4, 100, (11,))
    logits = model(input_ids=tokens[None]).logits[0]
    coefficients = 1 - torch.arange(10) / 10
    logprobs = torch.log_softmax(logits[:-1], -1)[torch.arange(10), tokens[1:]]
    (coefficients * logprobs).sum().backward()
    golden = {"tokens": tokens, "logits": logits.detach()}
    for name, p in model.named_parameters():
        if "lora_" in name:
            golden["grad." + name.replace(".default", "")] = p.grad
    to = emptied(to)
    model.peft_config["default"].base_model_name_or_path = base
    model.save_pretrained(to)
    os.remove(os.path.join(to, "README.md"))
    save_file(golden, os.path.join(to, "golden.safetensors"))


def experts():
    layers = ["q_proj", "gate_proj", "up_proj", "down_proj"]
    factors = {}
    for name, w in load_file(os.path.join(BASES, "qwen3_moe", "model.safetensors")).items():
        module = name.removesuffix(".weight")
        if module.rsplit(".", 1)[-1] in layers:
            factors[f"base_model.model.{module}.lora_A.weight"] = 0.3 * torch.randn(2, w.shape[1])
            factors[f"base_model.model.{module}.lora_B.weight"] = 0.3 * torch.randn(w.shape[0], 2)
    to = emptied("adapter_experts")
    save_file(factors, os.path.join(to, "adapter_model.safetensors"), metadata={"format": "pt"})
    config = dict(peft_type="LORA", task_type="CAUSAL_LM", base_model_name_or_path="qwen3_moe", r=2, lora_alpha=3,
                  target_modules=layers)
    with open(os.path.join(to, "adapter_config.json"), "w") as file:
        json.dump(config, file, indent=2)
    tokens = torch.randint(4, 100, (11,))
    with torch.no_grad():
        logits = PeftModel.from_pretrained(opened("qwen3_moe"), to)(input_ids=tokens[None]).logits[0]
    save_file({"tokens": tokens, "logits": logits}, os.path.join(to, "golden.safetensors"))


def main():
    torch.manual_seed(7)
    warnings.simplefilter("ignore")
    with_gradients("adapter", "llama", LAYERS)
    experts()
    for name, layers in RECURRENCES.items():
        with_gradients(f"adapter_{name}", name, layers)


if __name__ == "__main__":
    main()
