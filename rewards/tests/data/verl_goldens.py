"""Writes verl_goldens.jsonl: verdicts of verl's string graders (verl 0.9.1, Apache-2.0; `pip download verl --no-deps`).

    python3 verl_goldens.py path/to/verl/utils/reward_score > verl_goldens.jsonl
"""
import contextlib
import io
import json
import sys

sys.path.insert(0, sys.argv[1])
import math_dapo  # noqa: E402
import math_reward  # noqa: E402

ANSWERS = [
    "34", "1,234", "1234", "12 square units", "\\frac12", "\\frac{1}{2}", "\\frac1{72}", "\\sqrt3", "\\sqrt{3}", "x=5", "k = 7",
    "0.5", ".5", "\\$5", "5\\%", "5\\text{ cm}", "5\\text{cm}^2", "90^\\circ", "90^{\\circ}", "1/2", "-3/4", "a/b", "03/4", "\\text{Evelyn}",
    "\\textbf{(A)}", "1 and 2", "6\\text{ and }8", "(1, 2)", "\\left(1,2\\right)", "\\dfrac{a}{b}", "\\tfrac 1 2", "10{,}000", "10,\\!000",
    "\\frac", "\\sqrt", "\\frac1", "\\text{ a}\\text{ b}", "", " ", "an apple", "3 dollars", "\\overline{AB}", "$34$", "the answer $x$ is",
    "\\mbox{two}", "2x = 4", "\\boxed{3}", "12\\text{m}", "\\ldots", "7.", "{.5}", "\u00e9 \u00b2", "100 students", "4\\pi",
]
TEMPLATES = [
    "So.\nAnswer: %s", "Answer: 1\nANSWER:%s\n", "\\boxed{%s}", "so \\boxed{%s}.", "\\boxed %s$ and", "\\fbox{%s}", "answer : %s$", "%s",
    "Answer:\n%s", "\\boxed{1} then \\boxed{%s", "Answer: %s." + " " * 250, "\\boxed{%s}" + "." * 90, "Answer: $%s$ or so",
]
GOLDS = ["34", "\\frac{1}{2}", "5", "\\sqrt{3}", "1234", "", "\\frac{a}{b}"]
for at, answer in enumerate(ANSWERS):
    for which, template in enumerate(TEMPLATES):
        text = template.replace("%s", answer)
        for gold in sorted({answer, GOLDS[(at + which) % len(GOLDS)]}):
            with contextlib.redirect_stdout(io.StringIO()):
                dapo = math_dapo.compute_score(text, gold)
                boxed = math_dapo.compute_score(text, gold, strict_box_verify=True)
                hendrycks = math_reward.compute_score(text, gold)
            row = {"text": text, "gold": gold, "dapo": dapo, "strict_box": boxed, "hendrycks": hendrycks}
            print(json.dumps(row))
