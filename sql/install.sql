-- pgratelimit: token bucket rate limits that live in PostgreSQL.
--
-- A policy says how large a bucket is and how fast it refills. A bucket belongs to one policy and one key; it stores how many microtokens
-- it held at one instant, and everything else follows by arithmetic from the server's clock. No row means full: the first grant creates
-- the row, clean-up removes it once it is full again. A grant made under an idempotency key is remembered beside its bucket, so that a
-- retry gets the first answer and takes nothing.
--
-- The public functions are named ratelimit_* and live in the schema that headed search_path at the first install. Tables and helpers live
-- in schema ratelimit, where callers have no rights: the public functions are SECURITY DEFINER with a pinned search_path, all but
-- ratelimit_cleanup_all and ratelimit_reset_all, which commit.
--
-- A policy with a lease lends slots in place of tokens: what is held of a key is the sum of its leases that have not ended. Their rows,
-- and one row of each key, which is the lock of its leases, are in leases and slots.
--
-- An ephemeral policy writes no WAL: a crash makes its buckets full. Durable and ephemeral policies keep their state in twin tables
-- (buckets and ephemeral_buckets, idempotency_keys and ephemeral_idempotency_keys, slots and leases likewise), because a statement cannot
-- choose its table at run time. Longer code that touches them is written for the durable ones; twins.sql makes it for the others. Short
-- statements are written twice. The tables and types are made by migrations/include/001_tables.sql.
--
-- This file is the table of contents. psql has the same list: migrations/psql/install.sql.
{{ template "prologue.sql" . }}

-- The rules, each in one place.
{{ template "clock.sql" . }}
{{ template "arithmetic.sql" . }}
{{ template "checks.sql" . }}
{{ template "answer.sql" . }}
{{ template "calendar.sql" . }}
{{ template "expiring_numbers.sql" . }}
{{ template "exceeded.sql" . }}

-- Policies.
{{ template "define_policy.sql" . }}
{{ template "drop_policy.sql" . }}
{{ template "policies.sql" . }}
{{ template "override.sql" . }}

-- Buckets.
{{ template "usage.sql" . }}
{{ template "quota.sql" . }}
{{ template "acquire.sql" . }}
{{ template "peek.sql" . }}
{{ template "refund.sql" . }}
{{ template "reset.sql" . }}
{{ template "pause.sql" . }}
{{ template "http_fields.sql" . }}

-- Slots.
{{ template "slots.sql" . }}
{{ template "hold.sql" . }}
{{ template "renew.sql" . }}
{{ template "release.sql" . }}
{{ template "holders.sql" . }}

-- Spend, reserve and settle.
{{ template "charge.sql" . }}
{{ template "settle.sql" . }}
{{ template "grants.sql" . }}
{{ template "reserve.sql" . }}
{{ template "acquire_up_to.sql" . }}

-- Many requests or buckets in one call.
{{ template "batch_form.sql" . }}
{{ template "demand.sql" . }}
{{ template "take.sql" . }}
{{ template "denials.sql" . }}
{{ template "remember.sql" . }}
{{ template "rows.sql" . }}
{{ template "number_buckets.sql" . }}
{{ template "look_at_buckets.sql" . }}
{{ template "decide.sql" . }}
{{ template "decide_in_order.sql" . }}
{{ template "decide_left.sql" . }}
{{ template "acquire_batch.sql" . }}
{{ template "acquire_all.sql" . }}
{{ template "acquire_many.sql" . }}
{{ template "acquire_packed.sql" . }}
{{ template "settle_all.sql" . }}

-- Guards, which raise in place of a denial.
{{ template "enforce.sql" . }}
{{ template "guard.sql" . }}
{{ template "pre_request.sql" . }}

-- Upkeep.
{{ template "cleanup_rows.sql" . }}
{{ template "cleanup_slots.sql" . }}
{{ template "cleanup_batch.sql" . }}
{{ template "cleanup.sql" . }}
{{ template "status.sql" . }}
{{ template "doctor.sql" . }}
{{ template "version.sql" . }}

-- Shards.
{{ template "shard.sql" . }}

-- The same text for the other tables, and for the guards.
{{ template "twins.sql" . }}

{{ template "epilogue.sql" . }}
