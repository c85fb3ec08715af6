"""Loads an exported model directory with transformers and prints what it computes, as one JSON line.

  python check_export.py DIR ID [ID ...]

{"model": class name, "logits": [T][vocab] f32 after each prompt id, "text": the ids decoded}
"""
import json
import os
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main():
    directory, ids = sys.argv[1], [int(x) for x in sys.argv[2:]]
    if not ids:
        sys.exit("usage: check_export.py DIR ID [ID ...]")
    model, loading = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    wrong = {key: sorted(map(str, names)) for key, names in loading.items() if names}
    if wrong:
        sys.exit(f"{directory} does not load cleanly: {wrong}")
    with torch.no_grad():
        logits = model.eval()(input_ids=torch.tensor([ids])).logits[0].tolist()
    text = None
    if os.path.exists(os.path.join(directory, "tokenizer.json")):
        text = AutoTokenizer.from_pretrained(directory).decode(ids, skip_special_tokens=True)
    print(json.dumps({"model": type(model).__name__, "logits": logits, "text": text}))


if __name__ == "__main__":
    main()
