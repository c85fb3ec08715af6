"""Compares greedy answers of rlrun with transformers, token by token.

  rlrun eval MODEL --recipe RECIPE --tasks 100 --answers ANSWERS
  python check_greedy.py MODEL ANSWERS [--gap 1e-3]

MODEL is a model directory or a .gguf file. Prompts must have the token ids that transformers' tokenizer and chat template give
them. One forward pass over prompt and answer gives transformers' logits at every position: as long as rlrun's tokens are the
most likely ones, they are transformers' greedy answer. At the first that is not, its logit must be less than `--gap` below the
largest; what follows is another text and is not compared. Prints one line for every such place and one for the whole, and
fails on a larger difference.
"""
import argparse
import json
import os
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def load(path):
    folder, file = (os.path.dirname(path) or ".", os.path.basename(path)) if path.endswith(".gguf") else (path, None)
    more = {"gguf_file": file} if file else {}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **more)
    return model.eval(), AutoTokenizer.from_pretrained(folder, **more)


def prompt_ids(tokenizer, prompt):
    text = prompt.get("text")
    if "messages" in prompt:
        text = tokenizer.apply_chat_template(prompt["messages"], add_generation_prompt=True, tokenize=False)
    return tokenizer(text, add_special_tokens="text" in prompt)["input_ids"]


@torch.no_grad()
def first_difference(model, answer):
    """(place in the answer, transformers' token, distance of rlrun's token from the largest logit), or None"""
    prompt, completion = answer["prompt_ids"], answer["completion_ids"]
    if not completion:
        return None
    logits = model(input_ids=torch.tensor([prompt + completion[:-1]]), use_cache=False).logits[0, len(prompt) - 1:]
    best, chosen = logits.max(dim=-1), torch.tensor(completion)
    differs = (best.indices != chosen).nonzero()
    if not len(differs):
        return None
    place = differs[0].item()
    return place, best.indices[place].item(), (best.values[place] - logits[place, chosen[place]]).item()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model"), parser.add_argument("answers"), parser.add_argument("--gap", type=float, default=1e-3)
    args = parser.parse_args()
    model, tokenizer = load(args.model)
    answers = [json.loads(line) for line in open(args.answers)]
    if not any(answer["completion_ids"] for answer in answers):
        sys.exit(f"{args.answers} has no answer with a token")
    equal, near, wrong, compared = 0, 0, [], 0
    for answer in answers:
        if (ids := prompt_ids(tokenizer, answer["prompt"])) != answer["prompt_ids"]:
            wrong.append(f"task {answer['task']}: the prompt has ids {answer['prompt_ids']}, in transformers {ids}")
            continue
        found = first_difference(model, answer)
        compared += len(answer["completion_ids"]) if found is None else found[0]
        if found is None:
            equal += 1
            continue
        place, token, gap = found
        line = f"task {answer['task']}: token {place} is {answer['completion_ids'][place]}, in transformers {token}, " \
               f"whose logit is larger by {gap:.2e}"
        print(line)
        near += gap < args.gap
        wrong += [] if gap < args.gap else [line]
    print(f"{equal} of {len(answers)} answers equal, {near} up to a difference of logits below {args.gap:g}; {compared} equal tokens")
    if wrong:
        sys.exit("\n".join(["these differ:", *wrong]))


if __name__ == "__main__":
    main()
