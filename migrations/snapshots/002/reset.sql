-- Makes one bucket full again by removing its row. Its idempotency keys stay.
--
-- Locks:  the bucket row, until the caller's transaction ends.
-- Writes: the bucket.
create or replace function ratelimit_reset(policy text, key text)
  returns void
  language plpgsql
  volatile
  security definer
  set search_path = ratelimit, pg_temp
  set enable_seqscan = off  -- as in ratelimit_acquire
as $$
declare
  v_key    text collate "C" := ratelimit_reset.key;
  v_policy policies;
begin
  perform check_name('policy', policy);
  perform check_name('key', v_key);
  v_policy := policy_named(policy);
  if v_policy.durable then
    delete from buckets as b where b.policy_id = v_policy.id and b.key = v_key;
  else
    delete from ephemeral_buckets as b where b.policy_id = v_policy.id and b.key = v_key;
  end if;
end;
$$;
comment on function ratelimit_reset(text, text) is
  'Make one bucket full again.';
