"""An API that asks the database itself, with psycopg 3.

pip install 'psycopg[binary]'    # or Debian's python3-psycopg
PGHOST=localhost PGUSER=app PGPASSWORD=… PGDATABASE=app python3 sql_api.py
curl -i -H 'X-User: 42' localhost:3000/
"""
import os
from http.server import BaseHTTPRequestHandler, HTTPServer

import psycopg

ACQUIRE = """
select allowed,
       least(remaining, 2147483647)::integer as remaining,
       least(ceil(extract(epoch from retry_after)), 2147483647)::integer as retry_after_seconds,
       retry_after is null as never
  from ratelimit_acquire(%s::text, %s::text, %s::bigint)"""


def connect():  # without autocommit the tokens go back
    return psycopg.connect(autocommit=True, connect_timeout=2, options="-c lock_timeout=500")


conn = connect()  # this server has one thread; a program of many has a psycopg_pool.ConnectionPool


def acquire(key, cost):
    global conn
    if conn.closed:
        conn = connect()
    return conn.execute(ACQUIRE, ("api", key, cost)).fetchone()


# What each path costs, in tokens.
COSTS = {"/": 1, "/export": 10}


class API(BaseHTTPRequestHandler):
    def do_GET(self):
        cost = COSTS.get(self.path)
        user = self.headers.get("X-User")  # an API of yours knows whom it has authenticated
        if not cost or not user:
            return self.answer(401 if cost else 404)
        try:
            allowed, remaining, retry_after, never = acquire(f"user:{user}", cost)
        except psycopg.Error as error:
            self.log_error("no decision: %s", error)
            return self.answer(503)  # or go on without a limit: that is for you to decide
        if not allowed:
            return self.answer(429, "too many requests", {} if never else {"Retry-After": retry_after})
        self.answer(200, f"hello, {user}: {remaining} tokens left")

    def answer(self, status, text="", headers={}):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text.encode() + b"\n")


HTTPServer(("127.0.0.1", int(os.environ.get("PORT", 3000))), API).serve_forever()
