{{ if false }}
\reset
\set ON_ERROR_STOP on
do $$
begin
  raise exception 'this file is a migration for tern, and psql would run its way back too'
    using hint = 'Run migrations/psql/install.sql instead.';
end;
$$;
{{ end -}}
-- Several limits in one request, overrides, shadow policies, policies that do not refill, debt and reservations, shards.

-- Acquires wait behind this migration, so it does not wait for long. It fails with 55P03 when a transaction that took
-- tokens stays open, and can be run again.
set local lock_timeout = '3s';

-- Calls that begin from here on wait at the policy. They were resolved to the old functions, and go on with what those
-- call: the functions at the end of this file and the old helpers, which the next migration drops.
lock table ratelimit.policies in access exclusive mode;

-- The functions whose arguments or columns change. Both ways drop them, and grant again what was granted on them.
set local ratelimit.changed =
  'ratelimit_define_policy ratelimit_policies ratelimit_acquire ratelimit_acquire_many ratelimit_peek ratelimit_refund';
{{ template "include/002_drop_changed.sql" }}
{{ template "include/002_tables.sql" }}
{{ install_snapshot "002" }}

-- Retired: calls that began under schema version 1 may still call these.
create or replace function ratelimit.granted(level bigint, reset_us bigint, capacity bigint)
  returns ratelimit.retired_decision language sql immutable parallel safe
as $$
  select (true, level / 1000000, interval '0', ratelimit.duration(reset_us), capacity, false)::ratelimit.retired_decision
$$;
create or replace function ratelimit.answer(level bigint, retry_us bigint, reset_us bigint, capacity bigint)
  returns ratelimit.retired_decision language sql immutable parallel safe
as $$
  select (coalesce(retry_us = 0, false), ratelimit.whole_tokens(level), ratelimit.duration(retry_us),
          ratelimit.duration(reset_us), capacity, false)::ratelimit.retired_decision
$$;
create or replace function ratelimit.replay(granted ratelimit.idempotency_keys, cost bigint)
  returns ratelimit.retired_decision language plpgsql immutable
as $$
begin
  if granted.cost <> cost then
    perform ratelimit.refuse_repeat(granted, cost);
  end if;
  return (true, granted.remaining, interval '0', granted.reset_after, granted.capacity, true)::ratelimit.retired_decision;
end;
$$;

{{ template "include/002_grant_changed.sql" }}
---- create above / drop below ----

set local lock_timeout = '3s';
lock table ratelimit.policies in access exclusive mode;
{{- if not .uninstall }}
-- Without quotas, what is used of one, in the period that runs, is missing in its bucket.
update ratelimit.buckets as b
   set level = ratelimit.level_now(b.level, b.refilled_at, now(), ratelimit.with_turns(p, now()))
  from ratelimit.policies as p
 where p.id = b.policy_id
   and (p.calendar).period is not null;
update ratelimit.ephemeral_buckets as b
   set level = ratelimit.level_now(b.level, b.refilled_at, now(), ratelimit.with_turns(p, now()))
  from ratelimit.policies as p
 where p.id = b.policy_id
   and (p.calendar).period is not null;
{{- end }}

-- All functions that version 1 lacks, or has with other arguments or columns.
set local ratelimit.changed =
  'ratelimit_define_policy ratelimit_policies ratelimit_acquire ratelimit_acquire_many ratelimit_peek ratelimit_refund '
  'ratelimit_acquire_packed ratelimit_acquire_all ratelimit_acquire_all_many ratelimit_override ratelimit_remove_override '
  'ratelimit_overrides ratelimit_charge ratelimit_settle ratelimit_reserve ratelimit_acquire_up_to '
  'ratelimit_acquire_up_to_many ratelimit_enforce ratelimit_guard ratelimit_pre_request ratelimit_status ratelimit_doctor '
  'ratelimit_shard ratelimit_define_shard ratelimit_reset_all ratelimit_hold ratelimit_renew ratelimit_release '
  'ratelimit_holders ratelimit_peek_many ratelimit_pause';
{{ template "include/002_drop_changed.sql" }}
{{ template "include/002_back.sql" }}

{{- if not .uninstall }}{{/* which goes on to the way back of 001, and that drops these */}}
{{ install_snapshot "001" }}
{{ template "include/002_grant_changed.sql" }}
{{- end }}
