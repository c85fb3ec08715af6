"""A reward of your own: rlrun calls the last function of this file with all completions of a task.

Columns of the data are arguments of the same name; take those that you need. The score may be any number.
"""


def places(completions, completion_ids, answer, **columns):
    """The share of places that hold the right character: partial credit, so that the policy learns before it is ever right.

    A completion that does not end after its answer has more tokens, and a smaller share.
    """
    scores = []
    for text, tokens, right in zip(completions, completion_ids, answer):
        hits = sum(given == expected for given, expected in zip(text, right))
        scores.append(hits / max(len(tokens) - 1, len(right)))
    return scores
