"""The same agent, written with the agent framework Pydantic AI, which keeps the history of the conversation itself."""

from guessing import Game
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


async def play(base_url, api_key, model, seed, max=9, cost=0.1, turns=9):  # noqa: A002 (names of the recipe)
    agent = Agent(OpenAIChatModel(model, provider=OpenAIProvider(base_url=base_url, api_key=api_key)))
    game, history = Game(seed, max, cost), None
    said = game.rules()
    for _ in range(turns):
        result = await agent.run(said, message_history=history)
        history, said = result.all_messages(), game.answer(result.output)
        if game.done:
            break
    return game.reward
