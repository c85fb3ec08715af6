"""Tiny random models as transformers writes them, with the logits and gradients that PyTorch computes.

  pip install torch transformers safetensors        (made with torch 2.15.0, transformers 5.23.0 or 5.24.0, CPU)
  python make_goldens.py [NAME ...]                 writes ./NAME/ for each, and ./chat.json

Per model directory: config.json, generation_config.json, weights as save_pretrained writes them, and
golden.safetensors (all computed in f32 from the weights as stored):
  tokens            [T] i64, sequences behind each other
  offsets           [S + 1] i64, where each sequence starts
  temperature       [1] f32
  coefficients      [T] f32, c_t of position t; 0 at the last position of a sequence, which predicts nothing
  inv_freq          [pairs] f32, radians per position of each rotary pair
  logits.<s>        [len, vocab] f32 of sequence s, before the temperature
  loss              [1] f32 = sum_t c_t * log_softmax(logits_t / temperature)[token_{t+1}]
  grad.<hf name>    f32 gradient of the loss by each parameter (a tied head's is in the embedding's)
  param.<hf name>   f32 values of a few parameters as loaded
"""
import json
import os
import shutil
import sys

import jinja2
import torch
from safetensors.torch import save_file
from transformers import (Gemma3ForCausalLM, Gemma3TextConfig, Glm4MoeConfig, Glm4MoeForCausalLM, GptOssConfig, GptOssForCausalLM,
                          GraniteConfig, GraniteForCausalLM,
                          LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM,
                          Olmo2Config, Olmo2ForCausalLM, Olmo3Config, Olmo3ForCausalLM, OlmoeConfig, OlmoeForCausalLM,
                          Phi3Config, Phi3ForCausalLM, PreTrainedTokenizerFast,
                          Qwen2Config, Qwen2ForCausalLM, Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig,
                          Qwen3_5TextConfig, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM, Qwen3NextConfig,
                          Qwen3NextForCausalLM,
                          SmolLM3Config, SmolLM3ForCausalLM)

HERE = os.path.dirname(os.path.abspath(__file__))
COMMON = dict(vocab_size=100, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
              num_key_value_heads=2, max_position_embeddings=128, bos_token_id=1, eos_token_id=2, pad_token_id=0)
LLAMA3 = dict(rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=16)
YARN = dict(rope_type="yarn", rope_theta=500000.0, factor=8.0, original_max_position_embeddings=16, beta_fast=32.0,
            beta_slow=1.0, attention_factor=1.2079441541679836)
# A recurrence in the first layer, attention in the second.
RECURRENT = dict(tie_word_embeddings=True, head_dim=8, intermediate_size=32, num_key_value_heads=1, layer_types=["linear_attention", "full_attention"],
                 linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=6,
                 rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5))
SHARED = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, shared_expert_intermediate_size=8)
# name: (config class, model class, changes, stored type, largest shard)
MODELS = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, dict(tie_word_embeddings=True), torch.float32, "1GB"),
    "qwen2_sharded": (Qwen2Config, Qwen2ForCausalLM, dict(tie_word_embeddings=False, rope_parameters=dict(
        rope_type="linear", rope_theta=10000.0, factor=2.0)), torch.bfloat16, "20KB"),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, dict(tie_word_embeddings=True, head_dim=16, num_key_value_heads=1),
              torch.float32, "1GB"),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM, dict(
        tie_word_embeddings=False, head_dim=16, num_key_value_heads=1, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=16, norm_topk_prob=True), torch.float32, "1GB"),
    "olmoe": (OlmoeConfig, OlmoeForCausalLM, dict(tie_word_embeddings=False, intermediate_size=20, num_experts=4,
                                                  num_experts_per_tok=3), torch.bfloat16, "1GB"),
    "llama": (LlamaConfig, LlamaForCausalLM, dict(tie_word_embeddings=False, rope_parameters=LLAMA3),
              torch.float32, "1GB"),
    "mistral": (MistralConfig, MistralForCausalLM, dict(tie_word_embeddings=False, sliding_window=64),
                torch.float16, "1GB"),
    "glm4_moe": (Glm4MoeConfig, Glm4MoeForCausalLM, dict(
        tie_word_embeddings=False, head_dim=16, num_key_value_heads=1, attention_bias=True, use_qk_norm=True,
        rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5), first_k_dense_replace=1,
        n_routed_experts=6, num_experts_per_tok=3, moe_intermediate_size=12, n_shared_experts=1, n_group=3, topk_group=2,
        routed_scaling_factor=1.5), torch.bfloat16, "1GB"),
    "gpt_oss": (GptOssConfig, GptOssForCausalLM, dict(
        tie_word_embeddings=False, head_dim=16, num_key_value_heads=1, intermediate_size=12, num_local_experts=4,
        num_experts_per_tok=2, sliding_window=8, swiglu_limit=0.8, rope_parameters=dict(
            rope_type="yarn", rope_theta=10000.0, factor=8.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
            original_max_position_embeddings=16)), torch.bfloat16, "1GB"),
    "phi3": (Phi3Config, Phi3ForCausalLM, dict(tie_word_embeddings=False, intermediate_size=36, sliding_window=8,
                                                rope_parameters=dict(
        rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5)), torch.bfloat16, "1GB"),
    "smollm3": (SmolLM3Config, SmolLM3ForCausalLM, dict(
        tie_word_embeddings=True, no_rope_layers=[0, 1], use_sliding_window=True, sliding_window=8), torch.bfloat16, "1GB"),
    "olmo2": (Olmo2Config, Olmo2ForCausalLM, dict(tie_word_embeddings=False, intermediate_size=36), torch.bfloat16, "1GB"),
    "olmo3": (Olmo3Config, Olmo3ForCausalLM, dict(
        tie_word_embeddings=False, intermediate_size=36, sliding_window=8, layer_types=["full_attention", "sliding_attention"],
        rope_parameters=dict(full_attention=YARN, sliding_attention=dict(rope_type="default", rope_theta=500000.0))),
        torch.bfloat16, "1GB"),
    "granite": (GraniteConfig, GraniteForCausalLM, dict(
        tie_word_embeddings=True, attention_bias=True, embedding_multiplier=3.0, attention_multiplier=0.2,
        residual_multiplier=0.4, logits_scaling=2.0), torch.bfloat16, "1GB"),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM, dict(
        tie_word_embeddings=True, intermediate_size=32, head_dim=16, num_key_value_heads=1, query_pre_attn_scalar=24, sliding_window=8,
        layer_types=["sliding_attention", "full_attention"]), torch.bfloat16, "1GB"),
    "qwen3_next": (Qwen3NextConfig, Qwen3NextForCausalLM, dict(**RECURRENT, **SHARED, norm_topk_prob=False), torch.bfloat16, "1GB"),
    "qwen3_5": (Qwen3_5TextConfig, Qwen3_5ForCausalLM, dict(**RECURRENT), torch.bfloat16, "1GB"),
    "qwen3_5_moe": (Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM, dict(**RECURRENT, **SHARED), torch.bfloat16, "1GB"),
}
# The seed of a model; with those of glm4_moe, gpt_oss, qwen3_next and qwen3_5_moe every expert has tokens of every sequence, and few are nearly as good as
# another.
SEEDS = {
    "llama": 0, "mistral": 1, "olmoe": 2, "qwen2": 3, "qwen2_sharded": 4, "qwen3": 5, "qwen3_moe": 6, "phi3": 7, "smollm3": 8,
    "olmo2": 9, "olmo3": 10, "granite": 11, "gemma3": 12, "glm4_moe": 11, "gpt_oss": 23,
    "qwen3_next": 17, "qwen3_5": 17, "qwen3_5_moe": 17,
}
LENGTHS = [7, 1, 23, 12]
TEMPERATURE = 0.7


def randomise(model):
    """Weights large enough that logits differ, norms around 1, biases around 0, routers that choose every expert."""
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape)
        scale = 0.15 if name.endswith(("mlp.gate.weight", "mlp.router.weight")) else 0.3
        # Some store the weights of norms without it.
        without = model.config.model_type in ("gemma3_text", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
        one = 0.0 if without and not name.endswith("linear_attn.norm.weight") else 1.0
        p.data = one + 0.2 * noise if name.endswith("norm.weight") else scale * noise
    for name, correction in corrections(model):
        correction.data = 0.1 * torch.randn(correction.shape)


def corrections(model):
    """What routers add to the scores that choose experts: buffers, which have no gradient."""
    return [(name, b) for name, b in model.named_buffers() if name.endswith("e_score_correction_bias")]


def frequencies(model):
    """Of the first layer with a rotary embedding."""
    rotary = model.model.rotary_emb
    return rotary.inv_freq if hasattr(rotary, "inv_freq") else getattr(rotary, f"{model.config.layer_types[0]}_inv_freq")


def apart(name, values, config):
    """One tensor [out, in] per projection: transformers keeps those of all experts, and fused ones, in one; gpt-oss those of experts
    [in, out] with gate and up in turns."""
    width = config.hidden_size // config.num_attention_heads
    queries, keys = config.num_attention_heads * width, config.num_key_value_heads * width
    if name.endswith("self_attn.qkv_proj.weight"):
        for module, part in zip(["q_proj", "k_proj", "v_proj"], values.split([queries, keys, keys])):
            yield name.replace("qkv_proj", module), part.clone()
        return
    if name.endswith("mlp.gate_up_proj.weight"):
        for module, part in zip(["gate_proj", "up_proj"], values.chunk(2)):
            yield name.replace("gate_up_proj", module), part.clone()
        return
    if ".in_proj_qkv" in name or name.endswith(".in_proj_ba.weight"):
        yield from projections(name, values, config)
        return
    in_turns = config.model_type == "gpt_oss"
    path, _, last = name.rpartition("experts.")
    of_each = values if last in ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias") else []
    for expert, part in enumerate(of_each):
        kind = "bias" if last.endswith("_bias") else "weight"
        part = part.t() if in_turns and kind == "weight" else part
        if last.startswith("gate_up_proj"):
            for module, half in zip(["gate_proj", "up_proj"], (part[0::2], part[1::2]) if in_turns else part.chunk(2)):
                yield f"{path}experts.{expert}.{module}.{kind}", half.clone()
        else:
            yield f"{path}experts.{expert}.down_proj.{kind}", part.clone()
    if not len(of_each):
        yield name, values.clone()


def projections(name, values, config):
    """Those of a recurrence: one after the other, or one after the other for each key head."""
    heads, group = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads
    key, value = config.linear_key_head_dim, config.linear_value_head_dim
    path, _, last = name.rpartition(".in_proj_")
    sizes = dict(q=key, k=key, v=group * value, z=group * value, b=group, a=group)
    parts = last.removesuffix(".weight")
    if parts == "qkv":
        for part, of in zip(parts, values.split([heads * sizes[part] for part in parts])):
            yield f"{path}.in_proj_{part}.weight", of.clone()
        return
    for part, of in zip(parts, values.reshape(heads, -1, values.shape[-1]).split([sizes[part] for part in parts], 1)):
        yield f"{path}.in_proj_{part}.weight", of.reshape(-1, values.shape[-1]).clone()


def golden(model, seed):
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0)
    tokens = torch.randint(4, 100, (int(offsets[-1]),), generator=generator)
    coefficients = torch.randn(len(tokens), generator=generator)
    coefficients[offsets[1:] - 1] = 0.0
    out, loss = {}, torch.zeros(())
    for s, length in enumerate(LENGTHS):
        a, b = int(offsets[s]), int(offsets[s + 1])
        logits = model(input_ids=tokens[a:b][None]).logits[0]
        chosen = torch.log_softmax(logits[:-1] / TEMPERATURE, -1).gather(-1, tokens[a + 1:b, None])[:, 0]
        loss = loss + (coefficients[a:b - 1] * chosen).sum()
        out[f"logits.{s}"] = logits.detach().clone()
    loss.backward()
    out.update(tokens=tokens, offsets=offsets, coefficients=coefficients, temperature=torch.tensor([TEMPERATURE]),
               loss=loss.detach().reshape(1), inv_freq=frequencies(model).clone())
    parameters = dict(corrections(model))
    for name, p in model.named_parameters():
        parameters.update(apart(name, p.detach(), model.config))
        out.update((f"grad.{part}", values) for part, values in apart(name, p.grad, model.config))
    for name in ["model.norm.weight", "model.layers.1.self_attn.k_proj.weight", "model.layers.0.mlp.down_proj.weight",
                 "model.layers.0.mlp.experts.3.up_proj.weight", "model.layers.1.mlp.experts.2.down_proj.weight",
                 "model.layers.1.mlp.experts.2.up_proj.bias", "model.layers.1.mlp.gate.e_score_correction_bias",
                 "model.layers.1.mlp.shared_experts.up_proj.weight", "model.layers.1.self_attn.sinks",
                 "model.layers.0.linear_attn.in_proj_v.weight", "model.layers.0.linear_attn.in_proj_a.weight",
                 "model.layers.0.linear_attn.conv1d.weight", "model.layers.1.mlp.shared_expert.up_proj.weight"]:
        if name in parameters:
            out[f"param.{name}"] = parameters[name]
    return out


def make(name, seed):
    config_class, model_class, changes, dtype, shard = MODELS[name]
    torch.manual_seed(seed)
    directory = os.path.join(HERE, name)
    shutil.rmtree(directory, ignore_errors=True)
    model = model_class(config_class(**{**COMMON, **changes}))
    randomise(model)
    model.to(dtype).save_pretrained(directory, max_shard_size=shard)
    model = model_class.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    save_file({k: v.contiguous() for k, v in golden(model, seed).items()}, os.path.join(directory, "golden.safetensors"))
    for file in os.listdir(directory):
        os.chmod(os.path.join(directory, file), 0o644)
    size = sum(os.path.getsize(os.path.join(directory, f)) for f in os.listdir(directory))
    print(name, size, "bytes")


QWEN = """{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are a careful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or message.role == "assistant" %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
LLAMA_3 = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
MISTRAL = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages %}
    {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
        {{- raise_exception("conversation roles must alternate user/assistant") }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- else %}
        {{- " " + message["content"].strip() + eos_token }}
    {%- endif %}
{%- endfor %}
"""


def chat():
    """Templates of the three common kinds with conversations and what apply_chat_template makes of them."""
    def say(*turns):
        return [{"role": r, "content": c} for r, c in turns]

    conversations = [
        say(("user", "What is 2 < 3 & 'x'?")),
        say(("system", "  Be brief.\n"), ("user", "Hi "), ("assistant", " Hello. \n"), ("user", "\u00e9\n\n<eos> {{ 1 }}")),
        say(("user", "a"), ("user", "b")),
    ]
    base = tokenizer()
    rows = []
    for name, template in [("qwen", QWEN), ("llama3", LLAMA_3), ("mistral", MISTRAL)]:
        base.chat_template = template
        for messages in conversations:
            for generation in (False, True):
                try:
                    text = base.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation)
                except jinja2.exceptions.TemplateError:
                    text = None  # the template refused
                rows.append(dict(template=name, messages=messages, add_generation_prompt=generation, text=text))
    templates = dict(qwen=QWEN, llama3=LLAMA_3, mistral=MISTRAL)
    with open(os.path.join(HERE, "chat.json"), "w") as f:
        json.dump(dict(bos_token="<bos>", eos_token="<eos>", templates=templates, rows=rows), f, indent=1)
        f.write("\n")


def tokenizer():
    from tokenizers import Tokenizer, models
    vocab = {t: i for i, t in enumerate(["<pad>", "<bos>", "<eos>", "<unk>"])}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocab=vocab, merges=[])), pad_token="<pad>",
                                   bos_token="<bos>", eos_token="<eos>", unk_token="<unk>")


def main():
    torch.set_num_threads(1)
    for name in sys.argv[1:] or MODELS:
        make(name, seed=SEEDS[name])
    chat()


if __name__ == "__main__":
    main()
