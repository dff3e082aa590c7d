import json
import random
import unittest

from pgratelimit import Charge, Error, Overloaded, calls
from pgratelimit.queue import MAX_BATCH, Queue, Request


def request(key="k", idempotency_key=None, charges=None):
    return Request([Charge("p", key)] if charges is None else charges, charges is not None, idempotency_key, None)


def kind(r):
    return r.is_joint, r.idempotency_key is not None


def filled(queue, *requests):
    for r in requests:
        queue.add(r)
    return queue


class PackedTest(unittest.TestCase):
    def test_an_answer_whose_arrays_do_not_fit_is_an_error(self):
        right = [[2, 1], [9, 8], [0, 0], [1, 2], [10, 10], None, None, None, None, None, None, None, None, None, None, None, None]
        requests = [request("a"), request("b")]
        self.assertEqual([8, 9], [d.remaining for d in calls.acquire_packed(requests).decode([json.dumps(right)])])
        for wrong in ([[1], *right[1:]], [[1, 1], *right[1:]], [[2, 3], *right[1:]], [*right[:7], [2], *right[8:]], right[:5]):
            with self.assertRaisesRegex(Error, "another shape"):
                calls.acquire_packed(requests).read([json.dumps(wrong)])


class QueueTest(unittest.TestCase):
    def test_a_joint_request_owns_one_bucket_named_after_all_of_its_own(self):
        both = [Charge("p", "a"), Charge("p", "b")]
        queue = filled(Queue(4, 100), request(charges=both))
        queue.take()
        filled(queue, request("a"), request(charges=both))
        self.assertEqual([False], [r.is_joint for r in queue.take(hurry=True).requests])
        self.assertIsNone(queue.take(hurry=True), "the same buckets in the same order")
        filled(queue, request(charges=both[::-1]))
        self.assertIsNotNone(queue.take(hurry=True))

    def test_at_most_256_elements_but_the_whole_of_a_joint_request(self):
        queue = filled(Queue(1, 1000), *(request() for _ in range(300)))
        batch = queue.take()
        self.assertEqual(MAX_BATCH, len(batch.requests))
        queue.finish(batch)
        self.assertEqual(44, len(queue.take().requests))
        charges = [Charge("p", str(i)) for i in range(200)]
        queue = filled(Queue(1, 1000), *(request(charges=[*charges, Charge("q", str(i))]) for i in range(3)))
        self.assertEqual(2, len(queue.take().requests))

    def test_what_waits_is_split_over_the_free_slots_but_at_least_32_a_call(self):
        for waiting, first, second in ((128, 64, 64), (40, 32, None), (64, 32, 32)):
            queue = filled(Queue(2, 1000), *(request(str(i)) for i in range(waiting)))
            self.assertEqual(first, len(queue.take().requests))
            batch = queue.take()
            self.assertEqual(second, batch and len(batch.requests), waiting)

    def test_what_is_too_long_for_any_bucket_shares_no_call(self):
        for r, can in (
            (request("x" * 512), True), (request("x" * 513), False), (request("é" * 257), False), (request("k", "x" * 513), False),
            (request(charges=[Charge("p", "k")] * 1000), True), (request(charges=[Charge("p", "k")] * 1001), False),
            (request(charges=[]), False), (request(charges=[Charge("x" * 513, "k")]), False),
        ):
            self.assertIs(can, r.can_share())

    def test_invariants(self):
        """Random steps, judged by what a caller can see."""
        for seed in range(200):
            chance = random.Random(seed)
            limit, max_waiting = chance.randint(1, 3), chance.randint(1, 50)
            queue, open_batches, given_up, order, sent = Queue(limit, max_waiting), [], [], {}, {}
            for step in range(300):
                owned = {bucket for batch in open_batches + given_up for bucket in batch.buckets}
                oldest = next((r for r in queue.waiting if r.bucket not in owned), None)
                match chance.randrange(8):
                    case 0 | 1 | 2:
                        key, name = str(chance.randrange(8)), chance.choice([None, None, "once"])
                        r = request(key, name, chance.choice([None, None, [Charge("p", key)]]))
                        if len(queue.waiting) == max_waiting:
                            self.assertRaises(Overloaded, queue.add, r)
                            continue
                        queue.add(r)
                        order.setdefault((r.bucket, *kind(r)), []).append(r)
                    case 3 if queue.waiting:
                        gone = chance.choice(list(queue.waiting))
                        queue.leave(gone)
                        self.assertNotIn(gone, queue.waiting)
                        order[gone.bucket, *kind(gone)].remove(gone)
                    case 4 if open_batches:
                        queue.finish(open_batches.pop(chance.randrange(len(open_batches))))
                    case 5 if open_batches:
                        given_up.append(open_batches.pop())
                        queue.give_up(given_up[-1])
                    case 6 if given_up:
                        queue.finish(given_up.pop(0))
                    case 7:
                        hurry = chance.random() < 0.5
                        if (batch := queue.take(hurry)) is None:
                            waits = oldest is not None and len(open_batches) < limit
                            self.assertIs(waits, queue.is_lingering, seed)
                            self.assertFalse(waits and (hurry or not open_batches), seed)
                            continue
                        self.assertIs(oldest, batch.requests[0], seed)
                        self.assertFalse(batch.buckets & owned, seed)
                        open_batches.append(batch)
                        self.assertLessEqual(len(open_batches), limit, seed)
                        for r in batch.requests:
                            self.assertEqual(kind(batch.requests[0]), kind(r), seed)
                            sent.setdefault((r.bucket, *kind(r)), []).append(r)
            for at, requests in sent.items():
                self.assertEqual(order[at][: len(requests)], requests, seed)
