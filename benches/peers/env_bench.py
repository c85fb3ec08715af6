"""Turns per second of the same environment in others: Gymnasium's subprocess vector environment, and envpool.

  python env_bench.py --environments 16 --turns 20000 [--engine gymnasium|envpool]

The environment is FrozenLake-v1, whose episodes the action 0 (left) rarely ends early; every turn is answered by all
environments in step. `lake` is what `rlrun-bench episodes --path env_bench.py:lake` plays.
"""
import argparse
import time


def lake():
    import gymnasium
    return gymnasium.make("FrozenLake-v1")


def turns_per_second(vector, environments, turns):
    import numpy
    actions = numpy.zeros(environments, dtype=numpy.int64)
    vector.reset()
    steps = max(turns // environments, 1)
    for _ in range(20):
        vector.step(actions)
    start = time.perf_counter()
    for _ in range(steps):
        vector.step(actions)
    return steps * environments / (time.perf_counter() - start)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environments", type=int, default=16), parser.add_argument("--turns", type=int, default=20000)
    parser.add_argument("--engine", choices=["gymnasium", "envpool"], default="gymnasium")
    args = parser.parse_args()
    if args.engine == "gymnasium":
        import gymnasium
        vector = gymnasium.vector.AsyncVectorEnv([lake] * args.environments)
    else:
        import envpool
        vector = envpool.make("FrozenLake-v1", env_type="gymnasium", num_envs=args.environments)
    rate = turns_per_second(vector, args.environments, args.turns)
    print(f"{args.engine}: {rate:.0f} turns/s of {args.environments} environments")
    vector.close()


if __name__ == "__main__":
    main()
