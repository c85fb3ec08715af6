"""An agent with a loop of its own: it plays a game with the policy through the `openai` package, and returns what the game was worth.

`recipes/agent_openai.toml` trains with it. Nothing here knows rlrun: with the address and the key of any other server it plays
with another model.
"""

import functools

from guessing import Game
from openai import DefaultHttpxClient, OpenAI


@functools.cache
def connections():
    """One pool of connections for all games of this process."""
    return DefaultHttpxClient()


def play(base_url, api_key, model, seed, max=9, cost=0.1, turns=9):  # noqa: A002 (names of the recipe)
    client = OpenAI(base_url=base_url, api_key=api_key, http_client=connections())
    game = Game(seed, max, cost)
    messages = [{"role": "user", "content": game.rules()}]
    for _ in range(turns):
        answer = client.chat.completions.create(model=model, messages=messages).choices[0].message.content
        said = game.answer(answer)
        if game.done:
            break
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": said}]
    return game.reward
