"""Prints the golden values of stream.rs, arithmetic.rs and questions.rs, from ChaCha8 and Lemire's bounded draw written anew.

    python3 golden.py
"""

import struct

MASK = 0xFFFFFFFF


def rotate(x, n):
    return ((x << n) | (x >> (32 - n))) & MASK


def quarter(s, a, b, c, d):
    for left, right, turned, by in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
        s[left] = (s[left] + s[right]) & MASK
        s[turned] = rotate(s[turned] ^ s[left], by)


def words(key):
    counter = 0
    while True:
        start = [*struct.unpack("<4I", b"expand 32-byte k"), *struct.unpack("<8I", key), counter, 0, 0, 0]
        s = start[:]
        for _ in range(4):
            for i in range(4):
                quarter(s, i, 4 + i, 8 + i, 12 + i)
            for i in range(4):
                quarter(s, i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4)
        yield from ((a + b) & MASK for a, b in zip(s, start))
        counter += 1


class Stream:
    def __init__(self, seed, name, number):
        self.words = words(struct.pack("<QQ8s8x", seed, number, name))

    def below(self, bound):
        while True:
            low, high = next(self.words), next(self.words)
            product = (low | high << 32) * bound
            if product % 2**64 >= (2**64 - bound) % bound:
                return product >> 64

    def shuffle(self, items):
        for last in range(len(items) - 1, 0, -1):
            chosen = self.below(last + 1)
            items[last], items[chosen] = items[chosen], items[last]


def epoch(seed, number, tasks):
    order = list(range(tasks))
    Stream(seed, b"tasks...", number).shuffle(order)
    return order


def arithmetic(seed, max_operand, wanted):
    side = max_operand + 1
    stream, order = Stream(seed, b"arithmet", 0), []
    for newest in range(side * side - wanted, side * side):
        drawn = stream.below(newest + 1)
        order.append(newest if drawn in order else drawn)
    stream.shuffle(order)
    return [f"{pair // side}+{pair % side}=" for pair in order]


def questions(seed, max_operand, kinds):
    stream, asked = Stream(seed, b"question", 0), []
    for kind in kinds:
        bound = max(max_operand >> stream.below(3), 4)
        if kind == "sum":
            a, b = 1 + stream.below(bound), 1 + stream.below(bound)
            texts = [f"What is {a} + {b}?", f"What is {a} plus {b}?", f"Add {a} and {b}."]
        else:
            most = max(bound // 4, 3)
            a, b = 2 + stream.below(most - 1), 2 + stream.below(most - 1)
            texts = [f"What is {a} x {b}?", f"What is {a} times {b}?", f"Multiply {a} by {b}."]
        for names in (8, 8, 7):  # drawn for every kind
            stream.below(names)
        asked.append(texts[stream.below(3)])
    return asked


print("stream.rs, seed 42, epoch 3, 8 tasks:", epoch(42, 3, 8))
print("arithmetic.rs, seed 42, operands to 99, 4 tasks:", arithmetic(42, 99, 4))
print("questions.rs, seed 42, operands to 48, 4 tasks:", questions(42, 48, ["sum", "product"] * 2))
