"""Throughput of `rlrun serve policy` and `vllm serve` on this machine: the same model, the same requests, in turns.

    benches/endpoint.py --rlrun target/release/rlrun --model DIR [--vllm VENV/bin/vllm] [--clients 1 8 64]

Every client sends completions of token ids one after the other (`/v1/completions`, `ignore_eos`). Each contest prints one JSON
line: tokens per second over all clients, and the median time of a request. Servers listen on loopback and are ended.
"""

import argparse
import http.client
import json
import os
import random
import signal
import statistics
import subprocess
import threading
import time

# Longest time for a server to be ready, seconds.
READY = 300


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rlrun", required=True)
    parser.add_argument("--vllm")
    parser.add_argument("--model", required=True, help="model directory in the layout of Hugging Face")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--requests", type=int, default=128, help="requests of a contest, over all clients")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a completion")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-context", type=int, default=512)
    parser.add_argument("--port", type=int, default=8931)
    return parser.parse_args()


def start_rlrun(args):
    command = [args.rlrun, "serve", "policy", args.model, "--name", "model", "--listen", f"127.0.0.1:{args.port}",
               "--max-context", str(args.max_context)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def start_vllm(args):
    command = [args.vllm, "serve", args.model, "--served-model-name", "model", "--host", "127.0.0.1", "--port",
               str(args.port), "--dtype", "float32", "--max-model-len", str(args.max_context),
               "--logprobs-mode", "processed_logprobs"]
    env = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
           "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(os.cpu_count())}
    return subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def wait_until_ready(port, server):
    end = time.monotonic() + READY
    while time.monotonic() < end and server.poll() is None:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except OSError:
            time.sleep(0.1)
    raise SystemExit(f"the server is not ready: status {server.poll()}")


def prompts(args, vocabulary=300):
    # No two prompts begin equally, so that no prefix cache has an effect.
    draw = random.Random(7)
    return [[draw.randrange(4, vocabulary) for _ in range(args.prompt)] for _ in range(args.requests)]


def contest(args, clients, vocabulary):
    """Tokens per second, and the median seconds of a request."""
    work, lock, times, failed = prompts(args, vocabulary), threading.Lock(), [], []

    def client():
        connection = http.client.HTTPConnection("127.0.0.1", args.port, timeout=600)
        while True:
            with lock:
                if not work or failed:
                    return
                prompt = work.pop()
            body = {"model": "model", "prompt": prompt, "max_tokens": args.tokens, "ignore_eos": True, "logprobs": 0}
            begun = time.monotonic()
            connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
            answer = connection.getresponse()
            answered = json.loads(answer.read())
            if answer.status != 200 or answered["usage"]["completion_tokens"] != args.tokens:
                failed.append(answered)
            times.append(time.monotonic() - begun)

    threads = [threading.Thread(target=client) for _ in range(clients)]
    begun = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise SystemExit(f"a request failed: {failed[0]}")
    return args.requests * args.tokens / (time.monotonic() - begun), statistics.median(times)


def main():
    args = arguments()
    with open(os.path.join(args.model, "config.json")) as file:
        vocabulary = json.load(file)["vocab_size"]
    servers = {"rlrun": start_rlrun} | ({"vllm": start_vllm} if args.vllm else {})
    figures = {}
    for _ in range(args.rounds):
        for name, start in servers.items():
            server = start(args)
            try:
                wait_until_ready(args.port, server)
                contest(args, min(args.clients), vocabulary)  # warms up
                for clients in args.clients:
                    figures.setdefault((name, clients), []).append(contest(args, clients, vocabulary))
            finally:
                server.send_signal(signal.SIGINT)
                server.wait(timeout=60)
    for (name, clients), found in figures.items():
        speeds = [speed for speed, _ in found]
        print(json.dumps({
            "server": name, "clients": clients, "tokens_per_s": round(statistics.median(speeds), 1),
            "lowest": round(min(speeds), 1), "highest": round(max(speeds), 1),
            "request_s": round(statistics.median(seconds for _, seconds in found), 4),
        }), flush=True)


main()
