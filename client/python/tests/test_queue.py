import json
import random
import unittest

from pgratelimit import Charge, Error, Overloaded, packed
from pgratelimit.queue import MAX_BATCH, Queue, Request


def request(key="k", idempotency_key=None, charges=None):
    return Request([Charge("p", key)] if charges is None else charges, charges is not None, idempotency_key, None)


def filled(queue, *requests):
    for r in requests:
        queue.add(r)
    return queue


class PackedTest(unittest.TestCase):
    def test_an_answer_whose_arrays_do_not_fit_is_an_error(self):
        right = [[2, 1], [9, 8], [0, 0], [1, 2], [10, 10], None, None, None, None, None, None, None, None, None, None, None, None]
        requests = [request("a"), request("b")]
        self.assertEqual([8, 9], [d.remaining for d in packed.call(requests).decode([json.dumps(right)])])
        for wrong in ([[1], *right[1:]], [[1, 1], *right[1:]], [[2, 3], *right[1:]], [*right[:7], [2], *right[8:]], right[:5]):
            with self.assertRaisesRegex(Error, "do not fit"):
                packed.call(requests).decode([json.dumps(wrong)])


class QueueTest(unittest.TestCase):
    def test_a_bucket_is_in_one_open_call_at_most_and_others_go_on(self):
        a, again, b = request("a"), request("a"), request("b")
        queue = filled(Queue(2, 100), a)
        first = queue.take()
        filled(queue, again, b)
        self.assertEqual([b], queue.take(hurry=True).requests)
        self.assertIsNone(queue.take(hurry=True))
        queue.finish(first)
        self.assertEqual([again], queue.take(hurry=True).requests)

    def test_a_joint_request_owns_one_bucket_named_after_all_of_its_own(self):
        both = [Charge("p", "a"), Charge("p", "b")]
        queue = filled(Queue(4, 100), request(charges=both))
        queue.take()
        filled(queue, request("a"), request(charges=both))
        self.assertEqual([False], [r.is_joint for r in queue.take(hurry=True).requests])
        self.assertIsNone(queue.take(hurry=True), "the same buckets in the same order")
        filled(queue, request(charges=both[::-1]))
        self.assertIsNotNone(queue.take(hurry=True))

    def test_kinds_never_share_a_call(self):
        queue = filled(Queue(4, 100), request("a"), request("b", "once"), request("c"), request(charges=[Charge("p", "d")]))
        sizes = [len(queue.take(hurry=True).requests) for _ in range(3)]
        self.assertEqual([2, 1, 1], sizes)

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

    def test_few_requests_wait_for_company_beside_an_open_call_and_not_alone(self):
        queue = filled(Queue(2, 1000), *(request(str(i)) for i in range(32)))
        first = queue.take()
        filled(queue, request("more"))
        self.assertIsNone(queue.take())
        self.assertTrue(queue.is_held)
        queue.finish(first)
        self.assertIsNotNone(queue.take())
        self.assertFalse(queue.is_held)

    def test_a_request_for_a_bucket_of_an_open_call_is_not_held(self):
        queue = filled(Queue(2, 100), request("a"))
        queue.take()
        filled(queue, request("a"))
        self.assertIsNone(queue.take())
        self.assertFalse(queue.is_held, "no timer could send it")

    def test_what_is_too_long_for_any_bucket_shares_no_call(self):
        for r, can in (
            (request("x" * 512), True), (request("x" * 513), False), (request("é" * 257), False), (request("k", "x" * 513), False),
            (request(charges=[Charge("p", "k")] * 1000), True), (request(charges=[Charge("p", "k")] * 1001), False),
            (request(charges=[]), False), (request(charges=[Charge("x" * 513, "k")]), False),
        ):
            self.assertIs(can, r.can_share())

    def test_max_waiting(self):
        queue = filled(Queue(1, 2), request(), request("gone"))
        with self.assertRaises(Overloaded):
            queue.add(request())
        queue.leave(next(r for r in queue.waiting if r.charges[0].key == "gone"))
        queue.add(request())

    def test_a_call_that_is_given_up_frees_its_slot_and_keeps_its_buckets(self):
        queue = filled(Queue(1, 100), request("a"))
        stalled = queue.take()
        filled(queue, request("a"), request("b"))
        self.assertIsNone(queue.take())
        queue.give_up(stalled)
        other = queue.take()
        self.assertEqual("b", other.requests[0].charges[0].key)
        queue.finish(other)
        self.assertIsNone(queue.take())
        queue.finish(stalled)
        self.assertIsNotNone(queue.take())

    def test_invariants(self):
        """Random steps, judged by what a caller can see."""
        for seed in range(100):
            chance = random.Random(seed)
            queue, open_batches, order, sent = Queue(3, 50), [], {}, {}
            for step in range(300):
                r = request(str(chance.randrange(8)), chance.choice([None, None, "once"]))
                match chance.randrange(6):
                    case 0 | 1 | 2 if len(queue.waiting) < 50:
                        queue.add(r)
                        order.setdefault((r.bucket, r.kind), []).append(r)
                    case 3 if queue.waiting:
                        gone = chance.choice(list(queue.waiting))
                        queue.leave(gone)
                        order[gone.bucket, gone.kind].remove(gone)
                    case 4 if open_batches:
                        queue.finish(open_batches.pop(chance.randrange(len(open_batches))))
                    case 5:
                        oldest = next((r for r in queue.waiting if r.bucket not in queue.owners), None)
                        if (batch := queue.take(hurry=chance.random() < 0.5)) is not None:
                            self.assertIs(oldest, batch.requests[0], seed)
                            for other in open_batches:
                                self.assertFalse(batch.buckets & other.buckets, seed)
                            open_batches.append(batch)
                            for r in batch.requests:
                                self.assertEqual(batch.requests[0].kind, r.kind, seed)
                                sent.setdefault((r.bucket, r.kind), []).append(r)
                        elif len(open_batches) < 3:
                            self.assertTrue(oldest is None or queue.is_held, seed)
                self.assertLessEqual(len(open_batches), 3, seed)
                if open_batches:
                    continue
                while (batch := queue.take()) is not None:  # nothing is forgotten
                    open_batches.append(batch)
                    for r in batch.requests:
                        sent.setdefault((r.bucket, r.kind), []).append(r)
                self.assertFalse([r for r in queue.waiting if r.bucket not in queue.owners] and not queue.is_held and len(open_batches) < 3)
            for at, requests in sent.items():
                self.assertEqual(order[at][: len(requests)], requests, seed)


if __name__ == "__main__":
    unittest.main()
