"""A reward function in the shape of verl's batch reward manager."""


def compute_score(data_sources, solution_strs, ground_truths, extra_infos, **kwargs):
    return [
        {"score": 1 if solution == truth else 0, "of": len(solution_strs)}
        for solution, truth in zip(solution_strs, ground_truths)
    ]
