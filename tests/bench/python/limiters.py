"""Limiters of the Python client, as processes of the benchmark (see ../elsewhere.go). A line of JSON orders a run, and a line answers.

python3 limiters.py LIMITER SOCKET_DIRECTORY DATABASE CONNECTIONS
"""
import asyncio
import json
import random
import sys

import asyncpg
from pgratelimit import AsyncLimiter, Combiner

KEYS = {"uniform": lambda: f"user:{random.randint(1, 100_000)}", "hot": lambda: "hot"}


async def run(limiter, task):
    """Returns what ../elsewhere.go calls a tale."""
    count, counting, ended, key = 0, False, False, KEYS[task["Keys"]]

    async def caller():
        nonlocal count
        while not ended:
            if not await limiter.acquire("durable", key()):
                raise RuntimeError("denied, though the bucket was not to run dry")
            count += counting

    async with asyncio.TaskGroup() as group:
        for _ in range(task["Callers"]):
            group.create_task(caller())
        await asyncio.sleep(task["Warm"])
        counting = True
        await asyncio.sleep(task["Window"])
        counting, ended = False, True
    return {"Count": count}


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
