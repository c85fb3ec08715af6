from typing import *
import bisect, collections, copy, functools, heapq, itertools, math, operator, random, re, string, sys
from bisect import bisect_left, bisect_right, insort
from collections import Counter, OrderedDict, defaultdict, deque
from functools import cmp_to_key, lru_cache, reduce
from heapq import heapify, heappop, heappush, heappushpop, heapreplace, nlargest, nsmallest
from itertools import accumulate, chain, combinations, count, cycle, groupby, permutations, product, zip_longest
from math import ceil, comb, factorial, floor, gcd, inf, log, log2, sqrt
try:
    from functools import cache
    from itertools import pairwise
    from math import lcm
except ImportError:
    pass
sys.setrecursionlimit(50000)
