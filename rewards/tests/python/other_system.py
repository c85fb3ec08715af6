"""Makes its process believe that it runs on another system than Linux, whose address space cannot be limited."""

import sys

sys.platform = "freebsd"


def compute_score(solution_str, ground_truth, **kwargs):
    if solution_str == "grow":
        blocks = []
        for _ in range(2048):
            blocks.append(b"x" * (1 << 20))
    return float(len(solution_str))
