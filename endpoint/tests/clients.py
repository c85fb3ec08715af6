"""The official clients of OpenAI and Anthropic, unmodified, against `rlrun serve policy`: clients.py ADDRESS MODEL."""

import sys

import anthropic
import openai

address, model = sys.argv[1], sys.argv[2]
client = openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0)
claude = anthropic.Anthropic(base_url=address, api_key="any", max_retries=0)
messages = [{"role": "user", "content": "2+3="}]
schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
function = {"name": "add", "description": "adds", "parameters": schema}


def refused(call, error, status):
    """Checks that `call` raises `error` with `status`."""
    try:
        call()
    except error as raised:
        assert raised.status_code == status, raised
        return raised
    raise AssertionError(f"{error} was not raised")


def chat():
    extra = {"return_token_ids": True, "min_tokens": 4}
    whole = client.chat.completions.create(
        model=model, messages=messages, max_tokens=12, n=2, seed=5, logprobs=True, top_logprobs=3, extra_body=extra,
        tools=[{"type": "function", "function": function}],
    )
    assert len(whole.choices) == 2 and whole.prompt_token_ids, whole
    for choice in whole.choices:
        assert choice.message.role == "assistant" and choice.finish_reason in ("stop", "length", "tool_calls")
        assert len(choice.token_ids) == len(choice.logprobs.content) >= 4
        assert all(len(entry.top_logprobs) == 3 and entry.logprob <= 0 for entry in choice.logprobs.content)
        assert choice.weight_versions[-1]["end"] == len(choice.token_ids)
    assert whole.usage.total_tokens == len(whole.prompt_token_ids) + sum(len(c.token_ids) for c in whole.choices)

    stream = client.chat.completions.create(
        model=model, messages=messages, max_tokens=12, n=2, seed=5, logprobs=True, stream=True, extra_body=extra,
        stream_options={"include_usage": True}, tools=[{"type": "function", "function": function}],
    )
    ids, texts, usage = {0: [], 1: []}, {0: "", 1: ""}, None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            ids[choice.index] += getattr(choice, "token_ids", None) or []
            texts[choice.index] += choice.delta.content or ""
    for choice in whole.choices:
        assert ids[choice.index] == choice.token_ids, "a seed gives the same tokens"
        assert texts[choice.index] == (choice.message.content or "")
    assert usage.completion_tokens == whole.usage.completion_tokens

    history = messages + [
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 5}'}}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "5"},
    ]
    assert client.chat.completions.create(model=model, messages=history, max_tokens=4).choices


def completions():
    ids = client.post("/../tokenize", cast_to=object, body={"model": model, "prompt": "2+3="})["tokens"]
    extra = {"return_token_ids": True}
    text = client.completions.create(model=model, prompt="2+3=", max_tokens=6, logprobs=0, seed=1, extra_body=extra)
    given = client.completions.create(model=model, prompt=ids, max_tokens=6, logprobs=0, seed=1, extra_body=extra)
    assert text.choices[0].prompt_token_ids == given.choices[0].prompt_token_ids == ids
    assert text.choices[0].token_ids == given.choices[0].token_ids
    assert text.choices[0].logprobs.token_logprobs == given.choices[0].logprobs.token_logprobs
    stream = client.completions.create(model=model, prompt=ids, max_tokens=6, seed=1, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == given.choices[0].text


def responses():
    whole = client.responses.create(
        model=model, input="2+3=", max_output_tokens=8, instructions="be brief", tools=[{"type": "function", **function}])
    assert whole.status in ("completed", "incomplete") and whole.usage.output_tokens > 0, whole
    events = list(client.responses.create(model=model, input="2+3=", max_output_tokens=8, stream=True))
    final = events[-1].response
    assert events[-1].type == f"response.{final.status}" and final.status in ("completed", "incomplete"), final
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(texts) == final.output_text and final.usage.output_tokens > 0, final


def anthropic_messages():
    tools = [{"name": "add", "description": "adds", "input_schema": schema}]
    whole = claude.messages.create(model=model, max_tokens=8, messages=messages, system="be brief", tools=tools)
    assert whole.type == "message" and whole.stop_reason in ("end_turn", "max_tokens", "tool_use"), whole
    counted = claude.messages.count_tokens(model=model, messages=messages, system="be brief", tools=tools)
    assert counted.input_tokens == whole.usage.input_tokens
    with claude.messages.stream(model=model, max_tokens=8, messages=messages) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == "".join(block.text for block in final.content if block.type == "text")
    assert final.usage.output_tokens > 0
    results = [{"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 5}}]},
               {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "5"}]}]
    assert claude.messages.create(model=model, max_tokens=4, messages=messages + results, tools=tools).content is not None


def errors():
    create = client.chat.completions.create
    unknown = refused(lambda: create(model="other", messages=messages), openai.NotFoundError, 404)
    assert unknown.body["param"] == "model", unknown.body
    refused(lambda: create(model=model, messages=messages, max_tokens=10**6), openai.BadRequestError, 400)
    penalty = lambda: create(model=model, messages=messages, frequency_penalty=1)
    assert refused(penalty, openai.BadRequestError, 400).body["param"] == "frequency_penalty"
    refused(lambda: client.completions.create(model=model, prompt=[10**6]), openai.BadRequestError, 400)
    long = [{"role": "user", "content": "x" * 5000}]
    refused(lambda: claude.messages.create(model=model, max_tokens=4, messages=long), anthropic.BadRequestError, 400)
    refused(lambda: claude.messages.create(model="x", max_tokens=4, messages=messages), anthropic.NotFoundError, 404)


def listed():
    found = client.models.list().data
    assert [entry.id for entry in found] == [model] and found[0].max_model_len > 0


def sessions():
    """A session whose agent speaks four protocols, one after the other; a call in another protocol continues the conversation."""
    key = client.post("/../sessions", cast_to=object, body={"purpose": "train"})["session_id"]
    agent = openai.OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0)
    claude_agent = anthropic.Anthropic(base_url=address, api_key=key, max_retries=0)
    said = agent.chat.completions.create(model=model, messages=messages, max_tokens=6).choices[0].message.content or ""
    second = messages + [{"role": "assistant", "content": said}, {"role": "user", "content": "more"}]
    answer = claude_agent.messages.create(model=model, max_tokens=6, messages=second)
    said = "".join(block.text for block in answer.content if block.type == "text")
    third = second + [{"role": "assistant", "content": said}, {"role": "user", "content": "again"}]
    assert agent.responses.create(model=model, input=third, max_output_tokens=6).status in ("completed", "incomplete")
    routes = openai.OpenAI(base_url=f"{address}/sessions/{key}", api_key="any", max_retries=0)
    ids = routes.post("/tokenize", cast_to=object, body={"prompt": "2+3="})["tokens"]
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 6}, "return_logprob": True}
    sampled = routes.post("/generate", cast_to=object, body=body)
    assert [token for _, token, _ in sampled["meta_info"]["output_token_logprobs"]] == sampled["output_ids"]
    rollout = client.get(f"/../sessions/{key}/rollout", cast_to=object)
    assert len(rollout["turns"]) == 4, rollout["turns"]
    assert [turn["continues"] for turn in rollout["turns"]][:3] == [None, 0, 1], rollout["turns"]
    for row in rollout["sequences"]:
        assert len(row["input_ids"]) == len(row["loss_mask"]) == len(row["logprobs"])
    client.delete(f"/../sessions/{key}", cast_to=object)


for check in (listed, chat, completions, responses, anthropic_messages, errors, sessions):
    check()
    print(f"ok {check.__name__}: openai {openai.__version__}, anthropic {anthropic.__version__}")
