"""Tiny random reward models as transformers writes them, with the scores that PyTorch computes.

  pip install torch transformers safetensors        (made with torch 2.15.0, transformers 5.23.0, CPU)
  python make_scorers.py                            writes ./scorer_NAME/ for each

Per directory: config.json, model.safetensors, tokenizer.json (characters), and scores.json: prompt, completion, the
tokens that the tokenizer makes of them, and the score.
"""
import json
import os
import shutil

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import (DebertaV2Config, DebertaV2ForSequenceClassification, Qwen2Config,
                          Qwen2ForSequenceClassification, XLMRobertaConfig, XLMRobertaForSequenceClassification)

HERE = os.path.dirname(os.path.abspath(__file__))
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
VOCABULARY = {token: i for i, token in enumerate(SPECIAL + [chr(c) for c in range(32, 127)])}
SIZES = dict(vocab_size=len(VOCABULARY), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
             num_attention_heads=4, max_position_embeddings=64, num_labels=1, pad_token_id=1, bos_token_id=0,
             eos_token_id=2)
MODELS = {
    "deberta": (DebertaV2ForSequenceClassification, DebertaV2Config(
        **SIZES, type_vocab_size=0, relative_attention=True, position_buckets=16, norm_rel_ebd="layer_norm",
        share_att_key=True, pos_att_type=["p2c", "c2p"], position_biased_input=False, pooler_hidden_size=32,
        pooler_dropout=0.0, pooler_hidden_act="gelu", max_relative_positions=-1)),
    "xlm_roberta": (XLMRobertaForSequenceClassification, XLMRobertaConfig(**SIZES, type_vocab_size=1)),
    "qwen2": (Qwen2ForSequenceClassification, Qwen2Config(**SIZES, num_key_value_heads=2, tie_word_embeddings=False)),
}
CASES = [("2+2=", "4"), ("What is the capital of France?", "Paris, I think."), ("x", ""), ("37+48=", "7+8=15 so 85")]


def tokenizer(decoder):
    made = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.add_special_tokens(SPECIAL)
    if not decoder:
        made.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)])
    return made


def main():
    for number, (name, (model_class, config)) in enumerate(MODELS.items()):
        torch.manual_seed(number)
        out = os.path.join(HERE, f"scorer_{name}")
        shutil.rmtree(out, ignore_errors=True)
        model = model_class(config).eval()
        for parameter_name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape)
            norm = "norm" in parameter_name.lower() and parameter_name.endswith("weight")
            parameter.data = 1.0 + 0.2 * noise if norm else 0.2 * noise
        model.save_pretrained(out)
        tokens = tokenizer(name == "qwen2")
        tokens.save(os.path.join(out, "tokenizer.json"))
        scores = []
        for prompt, completion in CASES:
            if name == "qwen2":
                ids = tokens.encode(prompt).ids + tokens.encode(completion).ids + [2]
            else:
                ids = tokens.encode(prompt, completion).ids
            with torch.no_grad():
                score = model(input_ids=torch.tensor([ids])).logits.item()
            scores.append({"prompt": prompt, "completion": completion, "tokens": ids, "score": score})
        with open(os.path.join(out, "scores.json"), "w") as file:
            json.dump(scores, file, indent=1)
        print(name, [round(case["score"], 4) for case in scores])


if __name__ == "__main__":
    main()
