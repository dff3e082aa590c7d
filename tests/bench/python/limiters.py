"""Limiters of the Python client, as processes of the benchmark (see ../elsewhere.go). A line of JSON orders a run, and a line answers.

python3 limiters.py LIMITER SOCKET_DIRECTORY DATABASE CONNECTIONS
"""
import asyncio
import json
import random
import resource
import sys
import time

import asyncpg
from pgratelimit import AsyncLimiter, Combiner

KEYS = {"uniform": lambda: f"user:{random.randint(1, 100_000)}", "hot": lambda: "hot"}


def cpu():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def run(limiter, task):
    """Returns what ../elsewhere.go calls a tale."""
    latencies, counting, ended, key = [], False, False, KEYS[task["Keys"]]

    async def caller():
        while not ended:
            begin = time.perf_counter()
            if not await limiter.acquire("durable", key()):
                raise RuntimeError("denied, though the bucket was not to run dry")
            if counting:
                latencies.append((time.perf_counter() - begin) * 1e6)

    async with asyncio.TaskGroup() as group:
        for _ in range(task["Callers"]):
            group.create_task(caller())
        await asyncio.sleep(task["Warm"])
        counting, used = True, cpu()
        await asyncio.sleep(task["Window"])
        counting, used, ended = False, cpu() - used, True
    latencies.sort()
    told = min(len(latencies), 1000)
    return {
        "Count": len(latencies),
        "Latencies": [latencies[int((i + 0.5) / told * len(latencies))] for i in range(told)],
        "CPU": used * 1e6,
    }


async def main(name, host, database, connections):
    settings = {"synchronous_commit": "off"}
    async with asyncpg.create_pool(host=host, database=database, user="postgres", max_size=int(connections), server_settings=settings) as pool:
        limiter = {"plain": AsyncLimiter, "combined": Combiner}[name](pool)
        print("ready", flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            try:
                tale = await run(limiter, json.loads(line))
            except Exception as error:
                tale = {"Error": f"{name}: {error!r}"}
            print(json.dumps(tale), flush=True)


asyncio.run(main(*sys.argv[1:]))
