"""A reward function in the shape of AReaL's workflows."""


def gsm8k_reward_fn(prompt, completions, prompt_ids, completion_ids, answer, **kwargs):
    return int(completions.endswith(answer)) + len(prompt_ids) / 10 + len(completion_ids) / 100
