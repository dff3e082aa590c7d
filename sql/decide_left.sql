-- Decides the elements of a batch that the fast path has not granted: places are their numbers. First the plain denials, which lock
-- nothing, and then what is left of them, by decide_in_order. requests is parallel to all elements, null: each is one; joint
-- and taken are for decide_in_order.
--
-- Locks and writes: as decide_in_order, for the elements that are left to it.
create or replace function ratelimit.decide_left(
    policies text[], keys text[], costs bigint[], requests bigint[], idempotency_keys text[], places bigint[], joint boolean, taken boolean)
  returns ratelimit.packed language plpgsql volatile
as $$
declare
  v_denied ratelimit.packed;
  v_rest   bigint[] := places;
begin
  if not joint and idempotency_keys is null then
    v_denied := denied(policies, keys, costs, places, clock());
    if cardinality(v_denied.elements) = cardinality(places) then
      return v_denied;
    elsif v_denied.elements is not null then
      v_rest := array(select unnest(places) except select unnest(v_denied.elements) order by 1);
    end if;
  end if;
  requests := coalesce(requests, array(select generate_series(1, cardinality(policies))));
  if cardinality(v_rest) < cardinality(policies) then
    policies := array(select decide_left.policies[u.n] from unnest(v_rest) as u (n));
    keys     := array(select decide_left.keys[u.n] from unnest(v_rest) as u (n));
    costs    := array(select decide_left.costs[u.n] from unnest(v_rest) as u (n));
    requests := array(select decide_left.requests[u.n] from unnest(v_rest) as u (n));
    if idempotency_keys is not null then
      idempotency_keys := array(select decide_left.idempotency_keys[u.n] from unnest(v_rest) as u (n));
    end if;
  end if;
  return concatenated(v_denied, decide_in_order(policies, keys, costs, requests, idempotency_keys, v_rest, joint, taken));
end;
$$;
comment on function ratelimit.decide_left(text[], text[], bigint[], bigint[], text[], bigint[], boolean, boolean) is
  'Decides the elements of a batch that were not granted at first sight.';

-- The denials of all policies, as of one snapshot, because the function is STABLE: a policy could be redefined between two reads. A
-- shadow policy denies nothing, and a quota is left to decide_in_order.
create or replace function ratelimit.denied(policies text[], keys text[], costs bigint[], places bigint[], now timestamptz)
  returns ratelimit.packed language plpgsql stable
as $$
declare
  v_names  text[] := policies[1:1];
  v_name   text;
  v_policy ratelimit.policies;
  v_part   ratelimit.packed;
  v_all    ratelimit.packed;
begin
  if (policies[1] collate "C" = all (policies)) is not true then
    v_names := array(select distinct denied.policies[u.place] collate "C" from unnest(places) as u (place));
  end if;
  foreach v_name in array v_names loop
    v_policy := p from policies as p where p.name = v_name collate "C" and not p.shadow and p.kind <> 'quota';
    continue when v_policy.id is null;
    if v_policy.durable then
      v_part := denied_in_buckets(v_policy, policies, keys, costs, places, now);
    else
      if pg_is_in_recovery() then perform refuse_ephemeral(v_policy); end if;  -- raises 0A000
      v_part := denied_in_ephemeral_buckets(v_policy, policies, keys, costs, places, now);
    end if;
    if v_all.elements is null then
      v_all := v_part;
    else
      v_all := concatenated(v_all, v_part);
    end if;
  end loop;
  return v_all;
end;
$$;
comment on function ratelimit.denied(text[], text[], bigint[], bigint[], timestamptz) is
  'The single requests of a batch that are plainly denied.';

-- Two parts of an answer as one. Only b may have requests of several elements, or errors: those columns of a are not read.
create or replace function ratelimit.concatenated(a ratelimit.packed, b ratelimit.packed)
  returns ratelimit.packed language plpgsql immutable
as $$
begin
  if a.elements is null then
    return b;
  end if;
  b.replayed       := case when b.replayed is not null then array_fill(false, array[cardinality(a.elements)]) || b.replayed end;
  b.shadowed       := case when b.shadowed is not null then array_fill(false, array[cardinality(a.elements)]) || b.shadowed end;
  b.elements       := a.elements || b.elements;
  b.remaining      := a.remaining || b.remaining;
  b.retry_after_us := a.retry_after_us || b.retry_after_us;
  b.reset_after_us := a.reset_after_us || b.reset_after_us;
  b.capacity       := a.capacity || b.capacity;
  return b;
end;
$$;
comment on function ratelimit.concatenated(ratelimit.packed, ratelimit.packed) is
  'The answers to grants or denials that are neither replayed nor shadowed, and to other requests.';
