"""Loads a LoRA adapter with PEFT on its base, and holds it against the model that rlrun has merged.

  python check_adapter.py BASE ADAPTER MERGED AGAIN ID [ID ...]

The logits after every id and the merged weights have to agree to f32 rounding, and the adapter has to change something.
Then PEFT writes the adapter to AGAIN, for rlrun to read.
"""
import sys
import warnings

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

# Relative to the largest number; f32 sums in another order.
TOLERANCE = 1e-5


def load(directory):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


def difference(a, b):
    return ((a - b).abs().max() / b.abs().max()).item()


def main():
    base_dir, adapter_dir, merged_dir, again = sys.argv[1:5]
    ids = torch.tensor([[int(x) for x in sys.argv[5:]]])
    # A key that does not fit is a warning in PEFT.
    warnings.filterwarnings("error", message=".*missing adapter keys.*")
    with torch.no_grad():
        base = load(base_dir)(input_ids=ids).logits
        merged_model = load(merged_dir)
        merged = merged_model(input_ids=ids).logits
        adapted_model = PeftModel.from_pretrained(load(base_dir), adapter_dir)
        adapted = adapted_model(input_ids=ids).logits
        adapted_model.save_pretrained(again)
        moved, wrong = difference(merged, base), difference(adapted, merged)
        ours = merged_model.state_dict()
        weights = max(difference(w, ours[name]) for name, w in adapted_model.merge_and_unload().state_dict().items())
    print(f"adapter moves logits by {moved:.2e}; PEFT and rlrun differ by {wrong:.2e}, merged weights by {weights:.2e}")
    if wrong > TOLERANCE or weights > TOLERANCE or moved < 100 * TOLERANCE:
        sys.exit("PEFT computes something else than rlrun, or the adapter changes nothing")


if __name__ == "__main__":
    main()
