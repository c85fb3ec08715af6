"""A reward function in the shape of verl's custom_reward_function."""

from helper_beside import normalised


def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    if data_source == "plain":
        return normalised(solution_str) == ground_truth
    found = normalised(solution_str) == ground_truth
    return {"score": found + bonus, "acc": found, "turns": extra_info["num_turns"], "index": extra_info.get("index"), "pred": solution_str}
