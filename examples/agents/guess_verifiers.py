"""An environment written for `verifiers`, played with the policy as its client: a multi-turn environment and a rubric, unchanged."""

import verifiers as vf
from datasets import Dataset
from guessing import Game
from openai import AsyncOpenAI


class Guessing(vf.MultiTurnEnv):
    async def setup_state(self, state, **kwargs):
        state["game"] = Game(**state["info"])
        return await super().setup_state(state, **kwargs)

    async def env_response(self, messages, state, **kwargs):
        said = state["game"].answer(text_of(messages[-1]))
        if state["game"].done:
            state["final_env_response"] = [vf.UserMessage(content=said)]
        return [vf.UserMessage(content=said)]


def text_of(message):
    return message["content"] if isinstance(message, dict) else message.content


def earned(state, **kwargs):
    return state["game"].reward


async def play(base_url, api_key, model, seed, max=9, cost=0.1, turns=9):  # noqa: A002 (names of the recipe)
    row = {"prompt": [{"role": "user", "content": f"Guess a number from 1 to {max}."}], "answer": "", "example_id": 0}
    row |= {"info": {"seed": seed, "largest": max, "cost": cost}}
    environment = Guessing(dataset=Dataset.from_list([row]), rubric=vf.Rubric(funcs=[earned]), max_turns=turns)
    client = vf.OpenAIChatCompletionsClient(AsyncOpenAI(base_url=base_url, api_key=api_key))
    played = await environment.run_rollout(row, client, model, {"max_tokens": 8})
    return played["reward"]
