"""The game that the agents of this directory play with the policy: it guesses a number, and reads whether that is higher or lower."""

import re


class Game:
    """One game; `reward` is what it was worth so far."""

    def __init__(self, seed, largest, cost):
        self.largest, self.cost = largest, cost
        self.number = 1 + mixed(seed) % largest
        self.low, self.high = 1, largest
        self.reward, self.done = 0.0, False

    def rules(self):
        return f"Guess a number from 1 to {self.largest}."

    def answer(self, text):
        """What the policy reads after its guess `text`."""
        found = re.findall(r"\d+", text or "")
        guess = int(found[-1]) if found else None
        if guess == self.number:
            self.reward, self.done = self.reward + 1.0, True
            return "right"
        self.reward -= self.cost
        if guess is None or not 1 <= guess <= self.largest:
            return f"not a number from 1 to {self.largest}"
        if guess < self.number:
            self.low = max(self.low, guess + 1)
            return f"higher: {self.low} to {self.high}"
        self.high = min(self.high, guess - 1)
        return f"lower: {self.low} to {self.high}"


def mixed(seed):
    """A number that looks random, and is the same for the same seed (SplitMix64)."""
    x = (seed + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)
