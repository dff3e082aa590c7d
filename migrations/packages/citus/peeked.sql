-- Citus: each bucket is peeked on the node that has the shard of its key.
create or replace function ratelimit.peeked_in_buckets(policy ratelimit.policies, keys text[], costs bigint[], places bigint[], now timestamptz)
  returns ratelimit.packed language plpgsql stable
as $$
declare
  v_place bigint;
  v_one   ratelimit.decision;
  v_seen  ratelimit.packed;
begin
  foreach v_place in array places loop
    continue when not acceptable(keys[v_place], costs[v_place]);
    v_one                 := peek(policy.name, keys[v_place], costs[v_place]);
    v_seen.elements       := v_seen.elements || v_place;
    v_seen.remaining      := v_seen.remaining || v_one.remaining;
    v_seen.retry_after_us := v_seen.retry_after_us || microseconds(v_one.retry_after)::bigint;
    v_seen.reset_after_us := v_seen.reset_after_us || microseconds(v_one.reset_after)::bigint;
    v_seen.capacity       := v_seen.capacity || v_one.capacity;
  end loop;
  return v_seen;
end;
$$;
comment on function ratelimit.peeked_in_buckets(ratelimit.policies, text[], bigint[], bigint[], timestamptz) is
  'What buckets of one policy hold, and whether they cover the costs of requests.';
