"""Compares rlrun with transformers on a GGUF file of a chat model: weights, tokenizer, chat template and greedy answers.

  python check_gguf.py RLRUN FILE.gguf EXPORT

EXPORT is the directory that `RLRUN export FILE.gguf --out EXPORT` has written. Answers are compared token for token until the
two highest logits of transformers, in f32, differ by less than 1e-3: from there on rounding decides.
"""
import json
import math
import os
import subprocess
import sys

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPTS = [
    "What is 139 + 37?",
    "Name three colors.",
    "Write a short poem about the sea.",
    "Explain in one sentence why the sky is blue.",
    "def fib(n):\n    # completes the function\n",
    "Qu'est-ce que la photosynth\u00e8se?",
]
TEXTS = PROMPTS + [
    "  1234567 \t\n\n 12  x  ", "<|im_start|>user\nHi<|im_end|>\n", "\u65e5\u672c\u8a9e \U0001f600 e\u0301", "we'LL don't I'm"]
MAX_TOKENS = 48
MARGIN = 1e-3
# What stands for the last character if its bytes are not all there.
INCOMPLETE = "\ufffd"


def check_export(path, export):
    """The export loads cleanly, and its weights are those that transformers dequantises."""
    model, loading = AutoModelForCausalLM.from_pretrained(
        export, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    wrong = {key: sorted(map(str, names)) for key, names in loading.items() if names}
    if wrong:
        sys.exit(f"{export} does not load cleanly: {wrong}")
    theirs = AutoModelForCausalLM.from_pretrained(
        os.path.dirname(path), gguf_file=os.path.basename(path), dtype=torch.float32, attn_implementation="eager").eval()
    ours = model.state_dict()
    for name, expected in theirs.state_dict().items():
        difference = (ours[name] - expected).abs().max().item()
        if ours[name].shape != expected.shape or difference > 1e-6 * expected.abs().max().item():
            sys.exit(f"{name} differs by {difference}")
    for key in ["vocab_size", "hidden_size", "num_hidden_layers", "num_key_value_heads", "rms_norm_eps", "eos_token_id"]:
        ours, expected = getattr(model.config, key), getattr(theirs.config, key)
        # A number of the metadata is an f32: 9.999999747378752e-06 for 1e-05.
        if not math.isclose(ours, expected, rel_tol=1e-6):
            sys.exit(f"{key} is {ours}, and transformers reads {expected}")
    return theirs


def check_tokenizer(export):
    """transformers tokenizes as tokenizer.json says, and has the special tokens and the template."""
    tokenizer = AutoTokenizer.from_pretrained(export)
    file = Tokenizer.from_file(os.path.join(export, "tokenizer.json"))
    for text in TEXTS:
        if tokenizer.encode(text) != file.encode(text).ids:
            sys.exit(f"{text!r} gives {tokenizer.encode(text)}, and {file.encode(text).ids} by tokenizer.json")
    with open(os.path.join(export, "special_tokens_map.json")) as special:
        for name, token in json.load(special).items():
            if getattr(tokenizer, name) != token:
                sys.exit(f"{name} is {getattr(tokenizer, name)}, expected {token}")
    if not tokenizer.chat_template:
        sys.exit(f"{export} has no chat template")
    return tokenizer


def greedy(model, tokenizer, prompt):
    """The tokens that are certain: until the model ends its turn, or the two highest logits are close."""
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False)
    ids, answer, cache = tokenizer.encode(rendered, add_special_tokens=False), [], None
    ended = False
    while len(answer) < MAX_TOKENS and not ended:
        new = torch.tensor([ids if cache is None else answer[-1:]])
        with torch.no_grad():
            out = model(input_ids=new, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        values, tokens = out.logits[0, -1].topk(2)
        if (values[0] - values[1]).item() < MARGIN:
            return answer, False
        ended = tokens[0].item() == tokenizer.eos_token_id
        answer.append(tokens[0].item())
    return answer, True


def main():
    rlrun, path, export = sys.argv[1], os.path.abspath(sys.argv[2]), sys.argv[3]
    model, tokenizer = check_export(path, export), check_tokenizer(export)
    compared = 0
    for prompt in PROMPTS:
        answer, whole = greedy(model, tokenizer, prompt)
        expected = tokenizer.decode(answer, skip_special_tokens=True).rstrip(INCOMPLETE)
        command = [rlrun, "generate", path, prompt, "--temperature", "0", "--max-tokens", str(MAX_TOKENS)]
        found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        found = found.removesuffix("\n").rstrip(INCOMPLETE)
        if not found.startswith(expected) or (whole and found != expected):
            sys.exit(f"{prompt!r} is answered by\n{found!r}\nand by transformers\n{expected!r}")
        compared += len(answer)
    if compared < MAX_TOKENS:
        sys.exit(f"only {compared} tokens were compared")
    print(f"ok {os.path.basename(path)}: equal weights, tokenizer and {compared} tokens of {len(PROMPTS)} answers")


if __name__ == "__main__":
    main()
