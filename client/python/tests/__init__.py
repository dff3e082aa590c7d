"""Tests on a real PostgreSQL: see kit.py. A test that hangs ends them all, and shows where."""

import faulthandler
import os

faulthandler.dump_traceback_later(300 + 120 * float(os.environ.get("RATELIMIT_TORTURE_MINUTES", 0)), exit=True)
