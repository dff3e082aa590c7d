"""An API that asks pgratelimit's server over JSON, with nothing but Python.

python3 json_api.py
curl -i -H 'X-User: 42' localhost:3000/
"""
import json
import math
import os
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SERVER = os.environ.get("RATELIMIT_URL", "http://localhost:8080")
TOKEN = os.environ.get("RATELIMIT_TOKEN")  # one of the server's TOKENS, if it has any


def acquire(key, cost):
    body = json.dumps({"policy": "api", "key": key, "cost": cost}).encode()
    headers = {"Content-Type": "application/json"}
    if TOKEN:
        headers["Authorization"] = f"Bearer {TOKEN}"
    request = urllib.request.Request(f"{SERVER}/v1/acquire", body, headers)
    with urllib.request.urlopen(request, timeout=1) as response:  # any status but 2xx is an HTTPError
        return json.load(response)


# What each path costs, in tokens.
COSTS = {"/": 1, "/export": 10}


class API(BaseHTTPRequestHandler):
    def do_GET(self):
        cost = COSTS.get(self.path)
        user = self.headers.get("X-User")  # an API of yours knows whom it has authenticated
        if not cost or not user:
            return self.answer(401 if cost else 404)
        try:
            d = acquire(f"user:{user}", cost)
        except (OSError, ValueError) as error:  # urllib's errors are OSErrors
            self.log_error("no decision: %s", error)
            return self.answer(503)  # or go on without a limit: that is for you to decide
        if not d["allowed"]:
            # None means that no wait helps: the cost exceeds the capacity, or nothing refills the bucket.
            wait = d["retry_after"]
            return self.answer(429, "too many requests", {} if wait is None else {"Retry-After": math.ceil(wait)})
        self.answer(200, f"hello, {user}: {d['remaining']} tokens left")

    def answer(self, status, text="", headers={}):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text.encode() + b"\n")


ThreadingHTTPServer(("127.0.0.1", int(os.environ.get("PORT", 3000))), API).serve_forever()
