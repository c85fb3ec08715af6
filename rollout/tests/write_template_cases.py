"""Writes a model directory and a conversation for chat templates of model families, with what transformers makes of them.

  python write_template_cases.py TEMPLATES OUT

TEMPLATES is a folder of .jinja files, such as `models/templates` of llama.cpp, or `goldens/templates` beside this file, whose
cases are recorded in `goldens/turns`. Every directory OUT/NAME has a tokenizer of
bytes with the family's markers as special tokens, its end of a turn as stop token, the template, and `cases.json`: for every
conversation its steps. A step has the messages that are appended and the token ids of `apply_chat_template` for everything so
far with an open turn of the assistant; the completion of the step follows, as text, and `end`, the token that ends it. `kept` says whether the ids of a step
begin with those of the step before, its completion and that token: the prefix property of the template.
"""
import json
import re
import sys
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

# What ends a turn where no token of its own does: the token of the next role.
NEXT_ROLE = {"user": "<|user|>", "tool": "<|observation|>"}
# Template, first token of a text, end of a turn.
FAMILIES = [
    ("chatml", None, "<|im_end|>"),
    ("llama3", "<|begin_of_text|>", "<|eot_id|>"),
    ("glm", None, NEXT_ROLE),
    ("GLM-4.6", None, NEXT_ROLE),
    ("Qwen-Qwen2.5-7B-Instruct", None, "<|im_end|>"),
    ("Qwen-Qwen3-0.6B", None, "<|im_end|>"),
    ("Qwen-QwQ-32B", None, "<|im_end|>"),
    ("Qwen3-Coder", None, "<|im_end|>"),
    ("NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use", "<|begin_of_text|>", "<|im_end|>"),
    ("NousResearch-Hermes-3-Llama-3.1-8B-tool_use", "<|begin_of_text|>", "<|im_end|>"),
    ("HuggingFaceTB-SmolLM3-3B", None, "<|im_end|>"),
    ("meta-llama-Llama-3.1-8B-Instruct", "<|begin_of_text|>", "<|eot_id|>"),
    ("meta-llama-Llama-3.2-3B-Instruct", "<|begin_of_text|>", "<|eot_id|>"),
    ("meta-llama-Llama-3.3-70B-Instruct", "<|begin_of_text|>", "<|eot_id|>"),
    ("mistralai-Mistral-Nemo-Instruct-2407", "<s>", "</s>"),
    ("Mistral-Small-3.2-24B-Instruct-2506", "<s>", "</s>"),
    ("deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
]
MARKERS = re.compile(r"\[gMASK\]|<sop>|<\|[A-Za-z_]+\|>|<\uff5c[^>]+\uff5c>|\[/?[A-Z_]{3,}\]|</?s>|</?tool_call>|</?think>")
SYSTEM = {"role": "system", "content": "Be brief."}
TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Computes.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "2+2"}}\n</tool_call>'
CONVERSATIONS = {
    "three turns": [
        ([{"role": "user", "content": "What is 2+2?"}], "It is 4."),
        ([{"role": "user", "content": "And 3+3?"}], "It is 6."),
        ([{"role": "user", "content": "Thank you."}], "Good bye."),
    ],
    "thoughts": [
        ([SYSTEM, {"role": "user", "content": "What is 2+2?"}], "<think>\ntwo and two\n</think>\n\nIt is 4."),
        ([{"role": "user", "content": "And 3+3?"}], "<think>\nthree\n</think>\n\nIt is 6."),
        ([{"role": "user", "content": "Thank you."}], "Good bye."),
    ],
    "tools": [
        ([SYSTEM, {"role": "user", "content": "What is 2+2?"}], CALL),
        ([{"role": "tool", "content": "4"}], "It is 4."),
        ([{"role": "user", "content": "Thank you."}], "Good bye."),
    ],
}


def ends(end):
    """All tokens that end a turn."""
    return [end] if isinstance(end, str) else list(end.values())


def tokenizer(template, first, end):
    """A token for every byte, and one for every marker of the template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = Tokenizer(models.BPE(vocab={byte: n for n, byte in enumerate(alphabet)}, merges=[]))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    markers = sorted({*MARKERS.findall(template), *ends(end), *([first] if first else [])})
    plain.add_special_tokens([AddedToken(marker, special=True, normalized=False) for marker in markers])
    return PreTrainedTokenizerFast(tokenizer_object=plain, bos_token=first, eos_token=ends(end)[0], chat_template=template)


def ids(tok, messages, tools):
    text = tok.apply_chat_template(messages, tools=tools or None, add_generation_prompt=True, tokenize=False)
    return tok(text, add_special_tokens=False)["input_ids"]


def cases(tok, end):
    for name, turns in CONVERSATIONS.items():
        messages, steps, before, kept = [], [], None, []
        tools = [TOOL] if name == "tools" else []
        try:
            for n, (appended, completion) in enumerate(turns):
                following = turns[n + 1][0][0]["role"] if n + 1 < len(turns) else "user"
                stop = tok.convert_tokens_to_ids(end if isinstance(end, str) else end[following])
                messages += appended
                now = ids(tok, messages, tools)
                kept += [] if before is None else [now[: len(before)] == before]
                steps.append({"messages": appended, "ids": now, "completion": completion, "end": stop})
                before = now + tok(completion, add_special_tokens=False)["input_ids"] + [stop]
                messages.append({"role": "assistant", "content": completion})
        except Exception as error:  # a template refuses what it does not know, such as a system message
            print(f"{name}: {error}", file=sys.stderr)
            continue
        yield {"name": name, "steps": steps, "kept": all(kept), "tools": tools}


def main():
    templates, out = Path(sys.argv[1]), Path(sys.argv[2])
    present = [family for family in FAMILIES if (templates / f"{family[0]}.jinja").exists()]
    for name, first, end in present:
        template = (templates / f"{name}.jinja").read_text()
        tok, folder = tokenizer(template, first, end), out / name
        tok.save_pretrained(folder)
        (folder / "chat_template.jinja").write_text(template)
        config = {
            "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": len(tok), "hidden_size": 8,
            "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1,
            "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "hidden_act": "silu",
            "tie_word_embeddings": True, "bos_token_id": tok.bos_token_id, "eos_token_id": [tok.convert_tokens_to_ids(token) for token in ends(end)],
        }
        (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
        (folder / "cases.json").write_text(json.dumps(list(cases(tok, end))))


if __name__ == "__main__":
    main()
