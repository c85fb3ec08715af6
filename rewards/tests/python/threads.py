"""Starts a thread when it is imported, so that forking it would be unsafe."""

import threading

threading.Thread(target=threading.Event().wait, name="ticker", daemon=True).start()


def compute_score(solution_str, ground_truth, **kwargs):
    return float(threading.active_count())
