"""What verl_reward.py imports from its own directory."""


def normalised(text):
    return text.strip().replace(",", "")
