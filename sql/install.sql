-- pgratelimit: token bucket rate limits that live in PostgreSQL.
--
-- A policy says how large a bucket is and how fast it refills. A bucket belongs to one policy and
-- one key; it stores how many microtokens it held at one instant, and everything else follows by
-- arithmetic from the server's clock. No row means full: the first grant creates the row, clean-up
-- removes it once it is full again. A grant made under an idempotency key is remembered beside its
-- bucket, so that a retry gets the first answer and takes nothing.
--
-- The public functions are named ratelimit_* and live in the schema that headed search_path at the
-- first install. Tables and helpers live in schema ratelimit, where callers have no rights: the
-- public functions are SECURITY DEFINER with a pinned search_path, all but ratelimit_cleanup_all and
-- ratelimit_reset_all, which commit.
--
-- Durable and ephemeral policies keep their state in twin tables (buckets and ephemeral_buckets,
-- idempotency_keys and ephemeral_idempotency_keys), because a statement cannot choose its table at run time.
-- Code that touches them is written once, as a template over the two names.
--
-- This file is the table of contents.
{{ template "prologue.sql" . }}

-- Private: the rules, each in one place.
{{ template "clock.sql" . }}
{{ template "arithmetic.sql" . }}
{{ template "checks.sql" . }}
{{ template "answer.sql" . }}
{{ template "overridden.sql" . }}
{{ template "exceeded.sql" . }}

-- Policies.
{{ template "define_policy.sql" . }}
{{ template "drop_policy.sql" . }}
{{ template "policies.sql" . }}
{{ template "override.sql" . }}

-- Buckets.
{{ template "acquire.sql" . }}
{{ template "peek.sql" . }}
{{ template "refund.sql" . }}
{{ template "reset.sql" . }}

-- Spend now, know later; wait in line.
{{ template "charge.sql" . }}
{{ template "settle.sql" . }}
{{ template "reserve.sql" . }}
{{ template "acquire_up_to.sql" . }}

-- Many requests, or many buckets, in one call.
{{ template "keys.sql" . }}
{{ template "take.sql" . }}
{{ template "look_at_buckets.sql" . }}
{{ template "decide_in_order.sql" . }}
{{ template "acquire_batch.sql" . }}
{{ template "acquire_all.sql" . }}
{{ template "acquire_many.sql" . }}
{{ template "acquire_all_many.sql" . }}
{{ template "acquire_packed.sql" . }}

-- Guards, which raise where the functions above answer with a denial.
{{ template "enforce.sql" . }}
{{ template "guard.sql" . }}
{{ template "pre_request.sql" . }}

-- Upkeep.
{{ template "cleanup.sql" . }}
{{ template "status.sql" . }}
{{ template "doctor.sql" . }}
{{ template "version.sql" . }}

-- Which part of the keys is in this database, where more than one has them.
{{ template "shard.sql" . }}

{{ template "epilogue.sql" . }}

{{- /* Included, not functions: the fragments that the functions above share.
       include/calls.sql          the calls with seven or eight arguments
       include/locals.sql         the locals of the fragments about one bucket: their contract
       include/policy.sql         reads the policy and the clock: for functions about one bucket
       include/look.sql           reads one bucket, without a lock: for ratelimit_peek, decide.sql and others
       include/decide.sql         decides about one bucket and takes: for ratelimit_acquire, _reserve and _acquire_up_to
       include/kinds.sql          what differs between the three functions of decide.sql
       include/charge.sql         takes from one bucket: for decide.sql and ratelimit_acquire_all
       include/lock.sql           locks one bucket, and reads it: for ratelimit_charge and ratelimit_settle
       include/move.sql           what the locked bucket holds after a charge or a settlement
       include/write.sql          writes the locked bucket
       include/override.sql       gives the policy the numbers of a live override
       include/numbers_again.sql  reads the policy again after a wait: for look.sql, decide.sql and lock.sql
       include/find_key.sql       reads the grant under an idempotency key
       include/remember.sql       the end of storing idempotency keys
       include/newest.sql         finds a bucket by its newest row version: for statements about many buckets */ -}}
