"""An API that asks the database itself, with the Python client and psycopg 3.

pip install pgratelimit 'psycopg[binary,pool]'    # or Debian's python3-psycopg-pool, and PYTHONPATH=client/python
PGHOST=localhost PGUSER=app PGPASSWORD=… PGDATABASE=app python3 sql_api.py
curl -i -H 'X-User: 42' localhost:3000/
"""
import os
from wsgiref.simple_server import make_server

import pgratelimit
import psycopg_pool
from pgratelimit.wsgi import RateLimit, named

pool = psycopg_pool.ConnectionPool("connect_timeout=2 options='-c lock_timeout=500'", max_size=4, timeout=2, open=True)

# What each path costs, in tokens.
COSTS = {"/": 1, "/export": 10}


def api(environ, start_response):
    user, known = environ.get("HTTP_X_USER"), environ["PATH_INFO"] in COSTS  # an API of yours knows whom it has authenticated
    status = "404 Not Found" if not known else "200 OK" if user else "401 Unauthorized"
    start_response(status, [("Content-Type", "text/plain")])
    return [f"hello, {user}\n".encode() if status == "200 OK" else b""]


def charges(environ):
    user, cost = environ.get("HTTP_X_USER"), COSTS.get(environ["PATH_INFO"])
    return [("api", named("user", user), cost)] if user and cost else []


limited = RateLimit(api, pgratelimit.Limiter(pool), charges, failure="closed")  # or open: that is for you to decide
make_server("127.0.0.1", int(os.environ.get("PORT", 3000)), limited).serve_forever()
