"""Two functions that could both be the reward."""


def first(solution_str, **kwargs):
    return 1.0


def second(completions, **kwargs):
    return [1.0] * len(completions)


def both(completions, answers, **kwargs):
    return [1.0] * len(completions)


def neither(text):
    return 1.0
