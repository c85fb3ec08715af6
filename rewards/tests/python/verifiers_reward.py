"""A rubric in the shape of verifiers' environments; the class stands in for theirs."""


class Rubric:
    def __init__(self, funcs, weights):
        self.funcs, self.weights = funcs, weights


def exact(completion, answer):
    return 1.0 if completion[-1]["content"] == answer else 0.0


async def brief(completion, state, info):
    assert state["info"] == info
    return 1.0 if len(completion[-1]["content"]) <= info["limit"] else 0.0


def relative(completions, answers):
    longest = max(len(completion[-1]["content"]) for completion in completions)
    return [len(completion[-1]["content"]) / longest for completion in completions]


rubric = Rubric(funcs=[exact, brief], weights=[1.0, 0.5])
