import datetime
import email.message
import json
import unittest
from pathlib import Path
from unittest import mock

from pgratelimit.outgoing import retry_after


class RetryAfterTest(unittest.TestCase):
    def test_an_answer_names_the_wait_of_the_shared_table(self):
        table = json.loads((Path(__file__).parents[2] / "testdata" / "upstream.json").read_text())
        self.assertGreater(len(table["answers"]), 100)
        with mock.patch("time.time", datetime.datetime.fromisoformat(table["clock"]).timestamp):
            for answer in table["answers"]:
                headers = email.message.Message()  # as urllib's: a field can have several lines
                for field in answer["fields"]:
                    name, _, value = field.partition(": ")
                    headers.add_header(name, value)
                with self.subTest(answer["source"]):
                    self.assertAlmostEqual(retry_after(answer["status"], headers), answer["seconds"], delta=0.001)
